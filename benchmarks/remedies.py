"""What would make a gate pay more: other thresholds, bands and looks, calculated from the record of an LLM.

    python benchmarks/remedies.py --data DIR --llm qwen2.5-coder-0.5b-instruct --speed 180 72

The record is that of `served`: the questions that are in it with and without passages. Nothing is asked. A setting is
chosen without the questions that it is shown on: on those of the training part, if enough of them are in the record,
and on the other four fifths of the test questions. Chosen is what reads the fewest tokens among the settings that are
at most a point less often right than always retrieving; the most often right if there is none.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from answer_tables import paired_interval
from end_to_end import markdown, show
from mixture import Question, read_corpus
from served import OUT, Record, Speed, questions

from rgate_integrations import Draft, load_gate
from rgate_integrations.artifacts.helps import read_helps
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.evidence.search import FoundPassage, search_features
from rgate_integrations.index import Passage
from rgate_integrations.runtime.text import is_correct

HELD = (8, 16, 32)
BAND, THRESHOLD = 0.15, 0.5
FOLDS, LEAST, LOSS = 5, 60, 0.01
TOKENS_AIM, TIME_AIM = 0.6, 0.75


@dataclass(frozen=True)
class Begun:
    """Answers that were begun, shape (n,) each.

    Attributes:
        p_known: What the judge says.
        judging: Seconds that it takes.
        written: Seconds until the tokens that are held back are written.
    """

    p_known: np.ndarray
    judging: np.ndarray
    written: np.ndarray


@dataclass(frozen=True)
class Facts:
    """What is recorded and measured of each question; every array has shape (n,).

    Attributes:
        questions: The questions.
        judged: Whether there is a gold answer.
        right: Whether the answer is right: without passages, and with them.
        prompt: Tokens that the LLM reads: without passages, and with them.
        seconds: From the question to the end of the answer: without passages, and with them, search included.
        p_known: P(known) by the question alone.
        gate: Seconds that it took.
        search: Seconds of a search.
        p_contains_answer: P(the passages hold the answer).
        begun: By the number of tokens that are held back.
    """

    questions: Sequence[str]
    judged: np.ndarray
    right: tuple[np.ndarray, np.ndarray]
    prompt: tuple[np.ndarray, np.ndarray]
    seconds: tuple[np.ndarray, np.ndarray]
    p_known: np.ndarray
    gate: np.ndarray
    search: float
    p_contains_answer: np.ndarray
    begun: dict[int, Begun]


@dataclass(frozen=True)
class Chosen:
    """For each question whether it is retrieved for, and what it costs beside its answer; shape (n,) each."""

    retrieve: np.ndarray
    prompt: np.ndarray
    seconds: np.ndarray


Decide = Callable[[Facts, Any], Chosen]


@dataclass(frozen=True)
class Remedy:
    """A way to decide.

    Attributes:
        name: Its name.
        decide: Decides by one setting.
        shipped: The setting that ships; None where another row has it.
        tried: Other settings to choose from; empty where nothing is chosen.
    """

    name: str
    decide: Decide
    shipped: Any
    tried: Sequence[Any] = ()


def everything(facts: Facts, retrieve: bool) -> Chosen:
    nothing = np.zeros(len(facts.judged))
    return Chosen(np.full(len(nothing), retrieve), nothing, nothing)


def by_question(facts: Facts, threshold: float) -> Chosen:
    """Decide by the question alone."""
    return Chosen(facts.p_known < threshold, np.zeros(len(facts.judged)), facts.gate)


def answering_first(facts: Facts, setting: tuple[int, float, float]) -> Chosen:
    """Decide by the begun answer, where the question alone is not below a band.

    Args:
        facts: The questions.
        setting: How many tokens are held back, the lower end of the band, and the threshold.
    """
    held, band, threshold = setting
    return _begun(facts, held, facts.p_known >= band, facts.begun[held].p_known < threshold)


def looking_first(facts: Facts, gain: float) -> Chosen:
    """Decide by what was found."""
    retrieve = _helps(facts, facts.p_known) - gain > facts.p_known
    # Those that are retrieved for have been searched for anyway.
    return Chosen(retrieve, np.zeros(len(retrieve)), facts.gate + np.where(retrieve, 0.0, facts.search))


def both_first(facts: Facts, setting: tuple[int, float]) -> Chosen:
    """Decide by what was found, and begin the answer where that speaks for answering alone.

    Args:
        facts: The questions.
        setting: How many tokens are held back, and by how much passages must help more.
    """
    held, gain = setting
    alone = ~looking_first(facts, gain).retrieve
    p_begun = facts.begun[held].p_known
    chosen = _begun(facts, held, alone, _helps(facts, p_begun) - gain > p_begun)
    return Chosen(
        chosen.retrieve, chosen.prompt, chosen.seconds + np.where(chosen.retrieve, 0.0, facts.search)
    )


def _begun(facts: Facts, held: int, begins: np.ndarray, stops: np.ndarray) -> Chosen:
    """Begin some answers, and stop some of these."""
    stopped = begins & stops
    begun = facts.begun[held]
    # What is released goes on where it was held back: only what is stopped was written for nothing.
    spent = facts.gate + np.where(begins, begun.judging, 0.0) + np.where(stopped, begun.written, 0.0)
    return Chosen(~begins | stopped, np.where(stopped, facts.prompt[0], 0), spent)


def _helps(facts: Facts, p_known: np.ndarray) -> np.ndarray:
    return read_helps().p_helps(facts.p_contains_answer, p_known)


def remedies(threshold: float) -> list[Remedy]:
    """Return all ways to decide, for the default gate's threshold."""
    thresholds = np.round(np.arange(0.05, 1.0, 0.05), 2)
    gains = np.round(np.arange(-0.2, 0.41, 0.05), 2)
    return [
        Remedy("never", everything, False),
        Remedy("always", everything, True),
        Remedy("gate, question alone", by_question, threshold, thresholds),
        *[Remedy(f"answer first, {n} tokens held", answering_first, (n, BAND, THRESHOLD)) for n in HELD],
        Remedy(
            "answer first, other threshold",
            answering_first,
            None,
            [(32, BAND, each) for each in thresholds],
        ),
        Remedy(
            "answer first, other band",
            answering_first,
            None,
            [(32, each, THRESHOLD) for each in thresholds],
        ),
        Remedy("look first", looking_first, 0.0, gains),
        Remedy("look first, then answer first", both_first, (32, 0.0), [(32, gain) for gain in gains]),
    ]


# --- choosing ----------------------------------------------------------------------------------------------------


def right(facts: Facts, chosen: Chosen) -> np.ndarray:
    """Return which answers are right, shape (n,)."""
    return np.where(chosen.retrieve, facts.right[1], facts.right[0])


def prompt(facts: Facts, chosen: Chosen) -> np.ndarray:
    """Return how many tokens the LLM reads, shape (n,)."""
    return np.where(chosen.retrieve, facts.prompt[1], facts.prompt[0]) + chosen.prompt


def seconds(facts: Facts, chosen: Chosen) -> np.ndarray:
    """Return how long each question takes, shape (n,)."""
    return np.where(chosen.retrieve, facts.seconds[1], facts.seconds[0]) + chosen.seconds


def fitted(remedy: Remedy, facts: Facts, rows: np.ndarray) -> Any:
    """Return the setting that some questions speak for; see the module."""
    judged = rows & facts.judged
    least = facts.right[1][judged].mean() - LOSS
    found = []
    for setting in remedy.tried:
        chosen = remedy.decide(facts, setting)
        share = right(facts, chosen)[judged].mean()
        is_enough = share >= least - 1e-9
        found.append((not is_enough, prompt(facts, chosen)[rows].mean() if is_enough else -share, setting))
    return min(found, key=lambda each: each[:2])[2]


def cross_fitted(remedy: Remedy, facts: Facts) -> tuple[Chosen, list[Any]]:
    """Decide about each fifth of the questions by the setting that the others speak for."""
    fold = np.array([crc32(question.encode()) % FOLDS for question in facts.questions])
    columns = {name: np.zeros(len(fold)) for name in ("retrieve", "prompt", "seconds")}
    settings = []
    for number in range(FOLDS):
        own = fold == number
        settings.append(fitted(remedy, facts, ~own))
        chosen = remedy.decide(facts, settings[-1])
        for name, column in columns.items():
            column[own] = getattr(chosen, name)[own]
    return Chosen(columns["retrieve"] > 0, columns["prompt"], columns["seconds"]), settings


def table(facts: Facts, training: Facts | None, threshold: float) -> list[dict[str, str]]:
    """Return a row for each way and each choice of its setting."""
    rows = []
    for remedy in remedies(threshold):
        if remedy.shipped is not None:
            rows.append(_row(facts, remedy.name, "shipped", remedy.decide(facts, remedy.shipped)))
        if not len(remedy.tried):
            continue
        if training is not None:
            setting = fitted(remedy, training, np.ones(len(training.judged), bool))
            chosen_on = f"training questions: {_told(setting)}"
            rows.append(_row(facts, remedy.name, chosen_on, remedy.decide(facts, setting)))
        chosen, settings = cross_fitted(remedy, facts)
        told = ", ".join(dict.fromkeys(_told(each) for each in settings))
        rows.append(_row(facts, remedy.name, f"other fifths: {told}", chosen))
    return rows


def _told(setting: Any) -> str:
    return " ".join(f"{each:g}" for each in (setting if isinstance(setting, tuple) else (setting,)))


def _row(facts: Facts, name: str, setting: str, chosen: Chosen) -> dict[str, str]:
    ours, theirs = right(facts, chosen)[facts.judged], facts.right[1][facts.judged]
    low, high = paired_interval(ours, theirs)
    points = 100 * (ours.mean() - theirs.mean())
    tokens = prompt(facts, chosen).mean() / facts.prompt[1].mean()
    median = np.median(seconds(facts, chosen)) / np.median(facts.seconds[1])
    mean = seconds(facts, chosen).mean() / facts.seconds[1].mean()
    reached = points >= -100 * LOSS and tokens <= TOKENS_AIM and median <= TIME_AIM
    return {
        "way": name,
        "setting": setting,
        "right, %": f"{100 * ours.mean():.1f}",
        "points against always [95 %]": f"{points:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        "retrieved, %": f"{100 * chosen.retrieve.mean():.0f}",
        "read, % of always": f"{100 * tokens:.0f}",
        "median time, % of always": f"{100 * median:.0f}",
        "mean time, % of always": f"{100 * mean:.0f}",
        "aim": "reached" if reached else "",
    }


# --- reading the record ----------------------------------------------------------------------------------------


def read_facts(
    record: Record, part: list[Question], texts: dict[str, Passage], options: argparse.Namespace
) -> Facts | None:
    """Return what the record and the gates say of the questions that it has in both arms; None if they are few."""
    arms: dict[str, dict[str, str]] = {"direct": {}, "passages": {}}
    for key, call in record.calls.items():
        if call["meta"].get("arm") in arms:
            arms[call["meta"]["arm"]][call["meta"]["id"]] = key
    asked = [
        question for question in part if question.id in arms["direct"] and question.id in arms["passages"]
    ]
    if len(asked) < LEAST:
        return None
    direct = [record.calls[arms["direct"][question.id]] for question in asked]
    read = [record.calls[arms["passages"][question.id]] for question in asked]
    speed = Speed(*options.speed) if options.speed else Speed.of(record.calls.values())
    p_known, gate = decided(load_gate(on_error="raise"), asked, None)
    judge = load_gate(DEFAULT_GATES["llm"], on_error="raise")
    begun = {}
    for held in HELD:
        drafts = [_draft(call).head(held) for call in direct]
        p_begun, judging = decided(judge, asked, drafts)
        written = [speed.seconds(c["prompt_tokens"], min(held, c["completion_tokens"])) for c in direct]
        begun[held] = Begun(p_begun, judging, np.array(written))
    found = [[texts[name] for name in call["meta"]["passages"]] for call in read]
    return Facts(
        questions=[question.question for question in asked],
        judged=np.array([bool(question.gold_answers) for question in asked]),
        right=(_right(asked, direct), _right(asked, read)),
        prompt=(_prompt(direct), _prompt(read)),
        seconds=(_seconds(direct, speed), _seconds(read, speed) + options.search),
        p_known=p_known,
        gate=gate,
        search=options.search,
        p_contains_answer=read_helps().p_contains_answer(
            np.array([_features(q, p) for q, p in zip(asked, found, strict=True)])
        ),
        begun=begun,
    )


def decided(gate: Any, asked: list[Question], drafts: list[Draft] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return P(known) and the seconds of each decision, one question at a time."""
    p_known, times = [], []
    gate.decide(asked[0].question, draft=drafts[0] if drafts else None)  # loads the model
    for place, question in enumerate(asked):
        start = time.process_time()
        p_known.append(gate.decide(question.question, draft=drafts[place] if drafts else None).p_known)
        times.append(time.process_time() - start)
    return np.array(p_known), np.array(times)


def _draft(call: dict[str, Any]) -> Draft:
    tokens = tuple(token["token"] for token in call["tokens"])
    logprobs = tuple(min(token["logprob"], 0.0) for token in call["tokens"])
    return Draft(text=call["text"].strip(), tokens=tokens, logprobs=logprobs, source="llm")


def _features(question: Question, passages: list[Passage]) -> Any:
    found = [FoundPassage(passage.text, passage.title) for passage in passages]
    return search_features(question.question, found)


def _right(asked: list[Question], calls: list[dict[str, Any]]) -> np.ndarray:
    pairs = zip(asked, calls, strict=True)
    return np.array([bool(q.gold_answers) and is_correct(c["text"], q.gold_answers) for q, c in pairs])


def _prompt(calls: list[dict[str, Any]]) -> np.ndarray:
    return np.array([call["prompt_tokens"] for call in calls])


def _seconds(calls: list[dict[str, Any]], speed: Speed) -> np.ndarray:
    return np.array([speed.seconds(call["prompt_tokens"], call["completion_tokens"]) for call in calls])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served", help="where the record is")
    parser.add_argument("--speed", type=float, nargs=2, help="tokens that the LLM reads and writes a second")
    parser.add_argument("--search", type=float, default=0.02, help="seconds of a search")
    parser.add_argument("--markdown", type=Path, help="write the table as Markdown")
    arguments = parser.parse_args()
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    texts = {passage.id: passage for passage in read_corpus(arguments.data)}
    facts: dict[str, Facts | None] = {}
    for part in ("test", "train"):
        facts[part] = read_facts(record, questions(arguments.out, arguments.data, part), texts, arguments)
    if facts["test"] is None:
        raise SystemExit(f"Fewer than {LEAST} questions are in the record with and without passages.")
    rows = table(facts["test"], facts["train"], load_gate().threshold)
    title = f"{arguments.llm}, {len(facts['test'].judged)} questions"
    show(title, rows)
    if arguments.markdown:
        arguments.markdown.write_text(f"**{title}**\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
