"""Looking first on corpora of other fields, which no gate and no model was trained on: is it as good as always?

    python benchmarks/other_fields.py --data DIR [--llm qwen2.5-coder-0.5b-instruct] [--limit 120]
    python benchmarks/other_fields.py --data DIR --recorded [--served benchmarks/out/served]
    python benchmarks/other_fields.py --data DIR --apart [--served benchmarks/out/served]

======================  ====================================================================  =====================
field                   questions                                                             passages
======================  ====================================================================  =====================
ten documents           40 about ``documents/*.md``, ten documents of a ferry company, and    31, their paragraphs
                        40 that need none of them, from ``requests.jsonl``
web snippets            RetrievalQA: news, people, popular facts; an LLM should not know      3,338
multi-hop               MuSiQue and 2WikiMultihopQA, SlimPLM's part                           4,172
======================  ====================================================================  =====================

The latter two are in DIR (its README names sources and licences); without ``--data`` only the ten documents are
asked about. Every way is a real chain, as in ``end_to_end.py``. Calls of the LLM are kept in benchmarks/out/fields:
a run that was stopped goes on, and one with ``--recorded`` asks nothing.

``--served`` is the record of ``served.py``. From the answers that the LLM gave there without passages, Platt scaling
sets P(known) right for the LLM. Questions that a field asks too are left out, and nothing is fitted to its corpus.

``--apart`` asks little of a slow LLM: where a way that looks first sends the prompt that always sends, it gets the
same answer. So the LLM is asked about the other questions only.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from answer_tables import by_kind, by_way, overview, paired_interval
from end_to_end import Answered, markdown, run, show, whole
from holds import read_corpus
from mixture import Question, read_mixture
from served import OUT, Clock, Forgetful, Record, RecordedChat, Speed, server
from ways import FITTED, Ways

from rgate_integrations import load_gate
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.gates.calibrated import CalibratedGate
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning.probability import fit_map

DOCUMENTS = Path(__file__).parent / "documents"
WAYS = ("gate, question alone", "answer first", "look first", FITTED, "look first, then answer first")
LOOKS = ("look first", FITTED)  # what these ways send to the LLM does not depend on what it says
COLUMNS = ("way", "right, %", "points against always [95 %]", "retrieved, %")
REQUESTS, SEED = 20, 0


@dataclass(frozen=True)
class Field:
    """A corpus and questions, of which some are about it.

    Attributes:
        name: Its name.
        passages: The corpus.
        questions: In their order: any beginning is a fair sample.
    """

    name: str
    passages: list[Passage]
    questions: list[Question]

    def index(self, home: Path) -> HybridIndex:
        """Return the index, built once."""
        home = home / self.name.replace(" ", "-")
        if not (home / "index.json").is_file():
            PassageIndex.build(self.passages).save(home)
        return HybridIndex(PassageIndex.load(home, Forgetful()))


def fields(data: Path | None) -> list[Field]:
    """Return all fields that there are."""
    found = [ten_documents()]
    if data is not None:
        records = [record for _, record in read_jsonl(data / "retrievalqa.jsonl")]
        asked = [_question("web", r["dataset"], r["id"], r) for r in records]
        found.append(Field("web snippets", read_corpus(data / "corpus.retrievalqa.jsonl.gz"), _mixed(asked)))
        asked = [q for q in read_mixture(data) if q.kind in ("musique", "2wiki")]
        found.append(Field("multi-hop", read_corpus(data / "corpus.slimplm.jsonl.gz"), asked))
    return found


def ten_documents() -> Field:
    """Return the ten documents, a passage for each paragraph, with as many questions that need none of them."""
    passages = []
    for path in sorted(DOCUMENTS.glob("*.md")):
        heading, *paragraphs = path.read_text(encoding="utf-8").strip().split("\n\n")
        title = heading.removeprefix("# ")
        passages += [
            Passage(f"{path.stem}-{number}", " ".join(text.split()), title)
            for number, text in enumerate(paragraphs)
        ]
    records = [record for _, record in read_jsonl(DOCUMENTS / "questions.jsonl")]
    asked = [_question("documents", "documents", str(number), r) for number, r in enumerate(records)]
    for kind in ("common", "task"):
        asked += [q for q in read_mixture(None) if q.kind == kind and q.gold_answers][:REQUESTS]
    return Field("ten documents", passages, _mixed(asked))


def _question(field: str, kind: str, name: str, record: dict[str, list[str]]) -> Question:
    return Question(
        f"{field}:{name}", kind, str(record["question"]), tuple(record["gold_answers"]), "test", field
    )


def _mixed(asked: list[Question]) -> list[Question]:
    return [asked[row] for row in np.random.default_rng(SEED).permutation(len(asked))]


def fitted_gate(served: Path, llm: str, field: Field) -> DecisionEngine:
    """Return the default gate with P(known) fitted to what an LLM knew of questions that a field does not ask."""
    questions = {q["id"]: q for _, q in read_jsonl(served / "questions.test.jsonl")}
    asked_here = {question.question for question in field.questions}
    gold = {name: q for name, q in questions.items() if q["gold_answers"] and q["question"] not in asked_here}
    calls = [call for _, call in read_jsonl(served / f"{llm}.jsonl")]
    calls = [call for call in calls if call["meta"].get("arm") == "direct" and call["meta"]["id"] in gold]
    asked = [gold[call["meta"]["id"]] for call in calls]
    known = [is_correct(call["text"], q["gold_answers"]) for call, q in zip(calls, asked, strict=True)]
    gate = load_gate(on_error="raise")
    scores = [decision.p_known for decision in gate.decide_batch([q["question"] for q in asked])]
    fitted = fit_map(np.array(scores), np.array(known))
    print(f"Fitted to {len(known)} questions: {np.mean(known):.0%} known, by the gate {np.mean(scores):.0%}.")
    return gate.with_gate(CalibratedGate(inner=gate.gate, probability=fitted, threshold=gate.threshold))


def rows(answers: list[Answered]) -> list[dict[str, str]]:
    """Return a row for each way: what is right, against always, and what is read."""
    ways = by_way(answers)
    tokens = np.mean([a.prompt for a in ways["always"].values()])
    seconds = np.median([a.total for a in ways["always"].values()])
    found = []
    for whole_row, own in zip(overview(answers, []), ways.values(), strict=True):
        row = {name: whole_row[name] for name in COLUMNS}
        row["tokens read, of always, %"] = f"{100 * np.mean([a.prompt for a in own.values()]) / tokens:.0f}"
        row["median time, of always, %"] = f"{100 * np.median([a.total for a in own.values()]) / seconds:.0f}"
        found.append(row)
    return found


class Noting(RecordedChat):
    """Notes what it is asked, and says nothing."""

    asked: list[Any] = []  # noqa: RUF012  pydantic copies it

    def call(self, messages: Any, tokens: int) -> dict[str, Any]:
        """Note a call."""
        self.asked.append(messages)
        return {"chunks": [(0.0, "", 0)], "tokens": [], "prompt_tokens": 0, "finish_reason": "stop"}


def apart(ways: Ways, chat: RecordedChat, asked: list[Question]) -> list[dict[str, str]]:
    """Return a row for each way that looks first, against always; the LLM is asked where their prompts differ."""
    noting = Noting(record=None)
    noted, answering = ways.chains(noting), ways.chains(chat)
    right: dict[str, list[tuple[str, bool, bool]]] = {name: [] for name in LOOKS if name in noted}
    for question in asked:
        prompts = {}
        for name in ("always", *right):
            noting.asked.clear()
            noted[name].invoke(question.question)
            (prompts[name],) = noting.asked
        answers: dict[str, bool] = {}
        for name in (name for name in right if prompts[name] != prompts["always"]):
            for each in ("always", name):
                if each not in answers:
                    chat.meta.update(
                        id=question.id, kind=question.kind, part=question.part, arm=each, passages=[]
                    )
                    text = answering[each].invoke(question.question)
                    answers[each] = is_correct(text, question.gold_answers)
            right[name].append((question.kind, answers[name], answers["always"]))
    return [_against_always(name, pairs, len(asked)) for name, pairs in right.items()]


def _against_always(name: str, pairs: list[tuple[str, bool, bool]], asked: int) -> dict[str, str]:
    """Return what a way loses and gains, from whether it and always are right where their prompts differ."""
    same = [("", False, False)] * (asked - len(pairs))  # right or wrong, both are alike
    kinds, ours, theirs = zip(*pairs, *same, strict=True)
    counts = Counter(kind for kind in kinds if kind)
    low, high = paired_interval(ours, theirs)
    return {
        "way": name,
        "asked apart": f"{len(pairs)} of {asked}",
        "of them": ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())),
        "right there": str(sum(ours)),
        "always is right there": str(sum(theirs)),
        "points against always [95 %]": f"{100 * (sum(ours) - sum(theirs)) / asked:+.1f} "
        f"[{100 * low:+.1f}, {100 * high:+.1f}]",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, help="folder with the question sets")
    parser.add_argument(
        "--out", type=Path, default=OUT / "fields", help="where the record is, and the indexes"
    )
    parser.add_argument("--limit", type=int, default=120, help="how many questions of each field")
    parser.add_argument("--url", help="an OpenAI-compatible server, instead of one that is started here")
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0: one a core")
    parser.add_argument(
        "--speed", type=float, nargs=2, help="tokens read and written a second, if they are known better"
    )
    parser.add_argument("--served", type=Path, help="record of served.py, to fit P(known) to the LLM")
    parser.add_argument("--recorded", action="store_true", help="ask the LLM nothing")
    parser.add_argument("--apart", action="store_true", help="ask only where looking first does not read all")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    with server(arguments.llm, arguments.url, arguments.threads, needed=not arguments.recorded) as url:
        chat = RecordedChat(record=record, url=url, clock=Clock())
        for field in fields(arguments.data):
            fitted = fitted_gate(arguments.served, arguments.llm, field) if arguments.served else None
            ways = Ways(field.index(arguments.out), None, only=WAYS, fitted=fitted)
            asked = field.questions[: arguments.limit]
            if arguments.apart:
                table = apart(ways, chat, asked)
                show(f"{field.name}: {len(field.passages)} passages, {len(asked)} questions", table)
                print(markdown(table), flush=True)
                continue
            if not arguments.recorded:  # the speed is known once everything is in the record
                list(run(ways, chat, asked, time.process_time))
            chat.speed = Speed(*arguments.speed) if arguments.speed else Speed.of(record.calls.values())
            answers = whole(list(run(ways, chat, asked, time.process_time)))
            title = f"{field.name}: {len(field.passages)} passages, {len({a.id for a in answers})} questions"
            for name, table in ((title, rows(answers)), ("Right, % (retrieved, %)", by_kind(answers))):
                show(name, table)
                print(markdown(table))


if __name__ == "__main__":
    main()
