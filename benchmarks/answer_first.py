"""Answer first on a real llama.cpp server: calls, tokens, time and accuracy of five ways to answer.

    python benchmarks/answer_first.py [--llm qwen2.5-coder-0.5b-instruct] [--data DIR] [--limit 100]
    python benchmarks/answer_first.py --show [--llm ...]
    python benchmarks/answer_first.py --data DIR --kinds common task --ways never "answer first" --callers 1

DIR holds question sets and passages, ``corpus.{hotpot_2wiki,slimplm}``. The questions are those of ``mixture.py``
that have a gold answer: no shipped gate was trained on them. The ways are: never retrieving, always,
`RetrievalGate(llm=)`, which asks the LLM for a draft, answer first, and answer first with the search running
meanwhile. They take turns at each question, one at a time, and then with 8 callers at each 8 questions, so that what
slows the machine slows all of them: where other things run beside, read the ratios and not the seconds. The server
counts the tokens.

Each answer is kept in benchmarks/out/answer_first.jsonl, or ``--out``, so that a run goes on where it was stopped;
``--show`` prints the tables of what there is.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from mixture import CORPORA, Question, read_mixture
from rich import box
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index import read_passages
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.langchain.chains import format_documents
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import is_correct

sys.path.insert(0, str(Path(__file__).parent.parent / "cookbook"))
from llama_server import ServedChat, gguf, serving

OUT = Path(__file__).parent / "out" / "answer_first.jsonl"
CONSOLE = Console(width=300, highlight=False)
HELD, CALLERS = 32, (1, 8)
PASSAGES, WORDS = 3, 100  # how many passages are read, and how much of each
DRAFT = "a draft first (llm=)"
WAYS = ("never", "always", DRAFT, "answer first")


@dataclass
class Answered:
    """One question, answered in one way. Times are in seconds."""

    llm: str
    way: str
    callers: int
    id: str
    kind: str
    retrieved: bool
    right: bool
    calls: int
    prompt: int
    written: int
    first_token: float
    held_token: float  # when the token came up to which others hold back; the end, if there were fewer
    held: int  # tokens that were held back
    total: float
    text: str
    looks: float = 0.0  # milliseconds of the first look and of the judging in the time to the first token


@dataclass(eq=False)
class Decided(BaseCallbackHandler):
    """Notes what a gate decides."""

    retrieve: list[bool] = field(default_factory=list)
    held: int = 0
    looks: float = 0.0

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Note a decision."""
        self.retrieve.append(data["retrieve"])
        partial_answer = data.get("partial_answer") or {}
        self.held = partial_answer.get("tokens_held", 0)
        self.looks = partial_answer.get("first_look", 0.0) + partial_answer.get("judging", 0.0)


class Ways:
    """The ways to answer, with gates and an index that they share."""

    def __init__(self, data: Path) -> None:
        passages = [p for name in CORPORA for p in read_passages(data / f"corpus.{name}.jsonl.gz")]
        CONSOLE.print(f"{len(passages)} passages")
        self.retriever = IndexRetriever(index=BM25Index(passages), k=PASSAGES)
        self.judge = load_gate(DEFAULT_GATES["llm"], on_error="raise")
        self.first_look = load_gate(on_error="raise")

    def chains(self, chat: ServedChat) -> dict[str, Runnable[Any, Any]]:
        """Return every way to answer with a chat model."""
        never = RunnableLambda(closed_book) | chat | StrOutputParser()
        read = {"documents": self.retriever, "question": RunnablePassthrough()}
        always = read | RunnableLambda(with_passages) | chat | StrOutputParser()
        gate = RetrievalGate(self.judge)
        first = AnswerFirst(tokens=HELD, question_gate=self.first_look)
        return {
            "never": never,
            "always": always,
            DRAFT: RetrievalGate(self.judge, llm=chat, tokens=HELD).route(retrieve=always, direct=never),
            "answer first": gate.route(retrieve=always, direct=never, answer_first=first),
        }


def closed_book(question: str) -> list[Any]:
    return [SystemMessage(ANSWER.system), HumanMessage(ANSWER.user.format(question=question))]


def with_passages(found: dict[str, Any]) -> list[Any]:
    user = ANSWER_WITH_PASSAGES.user.format(
        question=found["question"], passages=format_documents(shortened(found["documents"]))
    )
    return [SystemMessage(ANSWER_WITH_PASSAGES.system), HumanMessage(user)]


def shortened(documents: Sequence[Document]) -> list[Document]:
    """Return the beginnings of documents: two cores read slowly."""
    found = []
    for document in documents:
        words = document.page_content.split()[:WORDS]
        found.append(Document(page_content=" ".join(words), metadata=document.metadata))
    return found


def answer(ways: Ways, chat: ServedChat, way: str, question: Question, callers: int, llm: str) -> Answered:
    """Answer one question in one way, with a model of its own that counts its calls."""
    own = chat.model_copy(update={"calls": []})
    decided = Decided()
    chain = ways.chains(own)[way]
    start = time.perf_counter()
    pieces, times = [], []
    for piece in chain.stream(question.question, {"callbacks": [decided]}):
        if piece:
            pieces.append(piece)
            times.append(time.perf_counter() - start)
    total = time.perf_counter() - start
    text = "".join(pieces)
    return Answered(
        llm=llm,
        way=way,
        callers=callers,
        id=question.id,
        kind=question.kind,
        retrieved=decided.retrieve[0] if decided.retrieve else way == "always",
        right=is_correct(text, question.gold_answers),
        calls=len(own.calls),
        prompt=sum(call["prompt"] for call in own.calls),
        written=sum(call["written"] for call in own.calls),
        first_token=times[0] if times else total,
        held_token=times[HELD - 1] if len(times) >= HELD else total,
        held=decided.held,
        total=total,
        text=text,
        looks=decided.looks,
    )


def forget(url: str) -> None:
    """Let the server forget what it has read: a prompt that another way sent is no help to this one."""
    for slot in httpx.get(f"{url}/slots").raise_for_status().json():
        httpx.post(f"{url}/slots/{slot['id']}?action=erase").raise_for_status()


def run(
    ways: Ways,
    questions: list[Question],
    llm: str,
    done: list[Answered],
    threads: int,
    at_once: Sequence[int],
    url: str | None,
    chosen: Sequence[str],
) -> Iterator[Answered]:
    """Answer what has not been answered yet."""
    had = {(each.llm, each.way, each.callers, each.id) for each in done}
    names = [name for name in ways.chains(ServedChat(url="")) if name in chosen]
    most = max(at_once)
    with (
        started(llm, url, most, threads) as url,
        ThreadPoolExecutor(most) as pool,
    ):
        chat = ServedChat(url=url)
        answer(ways, chat, "answer first", questions[0], 1, llm)  # loads the models
        for block in blocks(questions, most):
            for callers in at_once:
                for turn, some in enumerate(blocks(block, callers)):
                    first = (turn + questions.index(block[0]) // most) % len(names)
                    for way in [*names[first:], *names[:first]]:  # each comes first as often
                        left = [q for q in some if (llm, way, callers, q.id) not in had]
                        if left:
                            forget(url)
                        jobs = [pool.submit(answer, ways, chat, way, q, callers, llm) for q in left]
                        for job in jobs:
                            yield job.result()


def started(llm: str, url: str | None, slots: int, threads: int) -> AbstractContextManager[str]:
    """Give the URL of a server: the one that is given, or one that is started."""
    return nullcontext(url) if url else serving(gguf(llm), slots=slots, context=4096 * slots, threads=threads)


def blocks(questions: list[Question], size: int) -> list[list[Question]]:
    return [questions[start : start + size] for start in range(0, len(questions), size)]


def costs(way: str, answers: list[Answered]) -> list[str]:
    return [
        way,
        f"{np.mean([a.calls for a in answers]):.2f}",
        f"{np.mean([a.prompt for a in answers]):.0f}",
        f"{np.mean([a.written for a in answers]):.0f}",
        f"{np.mean([a.right for a in answers]):.0%}",
        f"{np.mean([a.retrieved for a in answers]):.0%}",
    ]


def times(way: str, by_way: dict[str, dict[str, Answered]]) -> list[str]:
    answers = by_way[way]
    row = [way]
    for name in ("first_token", "total"):
        seconds = [getattr(a, name) for a in answers.values()]
        row.append(f"{np.percentile(seconds, 50):.2f} / {np.percentile(seconds, 95):.2f}")
        for other in ("never", "always", DRAFT):
            row.append(ratio(answers, by_way.get(other, {}), name, name))
        row.append(together(answers, by_way.get(DRAFT, {}), name))
    return row


def together(ours: dict[str, Answered], theirs: dict[str, Answered], name: str) -> str:
    """Return one way's time by another's, of all questions that both have together."""
    both = ours.keys() & theirs.keys()
    spent, other = (sum(getattr(answers[key], name) for key in both) for answers in (ours, theirs))
    return f"{spent / other:.2f}" if both else ""


def known(way: str, by_way: dict[str, dict[str, Answered]]) -> list[str]:
    """Return the ratios of a way that answers first, over the questions that it did not retrieve for."""
    answers = {key: answer for key, answer in by_way[way].items() if not answer.retrieved}
    held = {key: answer for key, answer in answers.items() if answer.held}
    at_once = {key: answer for key, answer in answers.items() if not answer.held}
    never, draft = by_way.get("never", {}), by_way.get(DRAFT, {})
    both = ratios(at_once, never, "first_token", "first_token")
    both += ratios(held, never, "first_token", "held_token")
    return [
        way,
        f"{len(answers)} ({len(answers) - len(held)})",
        f"{np.mean([a.calls for a in answers.values()]):.2f}" if answers else "",
        ratio(at_once, never, "first_token", "first_token"),
        ratio(held, never, "first_token", "held_token"),
        f"{np.median(both):.2f}" if both else "",
        milliseconds(at_once),
        milliseconds(held),
        ratio(answers, never, "total", "total"),
        ratio(answers, draft, "first_token", "first_token"),
        ratio(answers, draft, "total", "total"),
    ]


def milliseconds(answers: dict[str, Answered]) -> str:
    """Return how long the gate looks at a question and its begun answer, as a median."""
    return f"{np.median([answer.looks for answer in answers.values()]):.0f} ms" if answers else ""


def ratio(ours: dict[str, Answered], theirs: dict[str, Answered], name: str, other: str) -> str:
    """Return the median, over the questions that both have, of one way's time by another's."""
    found = ratios(ours, theirs, name, other)
    return f"{np.median(found):.2f}" if found else ""


def ratios(ours: dict[str, Answered], theirs: dict[str, Answered], name: str, other: str) -> list[float]:
    """Return one way's time by another's for each question that both have."""
    return [getattr(ours[key], name) / getattr(theirs[key], other) for key in ours.keys() & theirs.keys()]


def show(done: list[Answered], llm: str) -> None:
    """Print the tables of what has been answered in every way."""
    for callers in CALLERS:
        mine = [each for each in done if (each.llm, each.callers) == (llm, callers)]
        by_way: dict[str, dict[str, Answered]] = {}
        for each in mine:
            by_way.setdefault(each.way, {})[each.id] = each
        if not by_way:
            continue
        whole = set.intersection(*(set(answers) for answers in by_way.values()))
        by_way = {
            way: {key: answer for key, answer in answers.items() if key in whole}
            for way, answers in by_way.items()
        }
        if not whole:
            continue
        order = [way for way in WAYS if way in by_way]
        CONSOLE.print(f"\n{llm}, {len(whole)} questions, {callers} at a time\n")
        CONSOLE.print(
            table(
                ["way", "LLM calls", "tokens read", "tokens written", "right", "retrieved"],
                [costs(way, list(by_way[way].values())) for way in order],
            )
        )
        against = ["by never", "by always", "by a draft first", "together"]
        CONSOLE.print(
            table(
                [
                    "way",
                    "first token, s",
                    *against,
                    "whole answer, s",
                    *against,
                ],
                [times(way, by_way) for way in order],
            )
        )
        heads = [
            "known",
            "n (at once)",
            "LLM calls",
            "at once: first token by never",
            f"held back: first token by token {HELD} of never",
            "both",
            "looks, at once",
            "looks, held back",
            "whole answer by never",
            "first token by a draft first",
            "whole answer by a draft first",
        ]
        firsts = [way for way in order if way.startswith("answer first")]
        CONSOLE.print(table(heads, [known(way, by_way) for way in firsts]))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    found = Table(box=box.MARKDOWN)
    for place, head in enumerate(heads):
        found.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", help="questions of these kinds only, such as common and task")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="these ways only")
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS, help="how many ask at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="where the answers are kept")
    parser.add_argument(
        "--url",
        help="a llama.cpp server with a slot a caller and --slot-save-path, instead of one that is started",
    )
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0: one a core")
    parser.add_argument("--show", action="store_true", help="print the tables of what has been answered")
    arguments = parser.parse_args()
    out = arguments.out
    done = [Answered(**record) for _, record in read_jsonl(out)] if out.exists() else []
    if arguments.show:
        show(done, arguments.llm)
        return
    questions = [q for q in read_mixture(arguments.data) if q.gold_answers]
    kinds = arguments.kinds or {question.kind for question in questions}
    questions = [question for question in questions if question.kind in kinds][: arguments.limit]
    out.parent.mkdir(exist_ok=True)
    wanted = {question.id for question in questions}
    with out.open("a", encoding="utf-8") as kept:
        ways = Ways(arguments.data)
        for each in run(
            ways,
            questions,
            arguments.llm,
            done,
            arguments.threads,
            arguments.callers,
            arguments.url,
            arguments.ways,
        ):
            kept.write(json.dumps(asdict(each)) + "\n")
            kept.flush()
            done.append(each)
    show([each for each in done if each.id in wanted], arguments.llm)


if __name__ == "__main__":
    main()
