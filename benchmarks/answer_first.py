"""Answer first on a real llama.cpp server: calls, tokens, time and accuracy of five ways to answer.

    python benchmarks/answer_first.py [--llm qwen2.5-coder-0.5b-instruct] [--data DIR] [--limit 100]

DIR holds recorded questions, ``adaptive_llama31_8b.*.dev.jsonl``, and passages, ``corpus.{hotpot_2wiki,slimplm}``.
The ways are: never retrieving, always, `RetrievalGate(llm=)`, which asks the LLM for a draft, answer first, and
answer first with the search running meanwhile. With one caller they take turns at each question; then each has 8
callers. The server counts the tokens. Each answer is kept in benchmarks/out/answer_first.jsonl, so that a run goes on
where it was stopped. The tables are printed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.answer_first import AnswerFirst
from rgate_integrations.files import read_jsonl
from rgate_integrations.index import read_passages
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.langchain.chains import format_documents
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.text import is_correct

sys.path.insert(0, str(Path(__file__).parent.parent / "cookbook"))
from llama_server import ServedChat, gguf, serving

OUT = Path(__file__).parent / "out" / "answer_first.jsonl"
CONSOLE = Console(width=150, highlight=False)
SETS = ("nq", "trivia", "squad", "hotpotqa", "musique", "2wikimultihopqa")
CORPORA = ("hotpot_2wiki", "slimplm")
HELD, CALLERS = 32, (1, 8)


@dataclass
class Answered:
    """One question, answered in one way. Times are in seconds."""

    llm: str
    way: str
    callers: int
    id: str
    retrieved: bool
    right: bool
    calls: int
    prompt: int
    written: int
    first_token: float
    held_token: float  # when the token came up to which others hold back; the end, if there were fewer
    total: float
    text: str


@dataclass(eq=False)
class Decided(BaseCallbackHandler):
    """Notes what a gate decides."""

    retrieve: list[bool] = field(default_factory=list)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Note a decision."""
        self.retrieve.append(data["retrieve"])


class Ways:
    """The ways to answer, with gates and an index that they share."""

    def __init__(self, data: Path) -> None:
        passages = [p for name in CORPORA for p in read_passages(data / f"corpus.{name}.jsonl.gz")]
        CONSOLE.print(f"{len(passages)} passages")
        self.retriever = IndexRetriever(index=BM25Index(passages), k=5)
        self.judge = load_gate("default-recorded")
        self.first_look = load_gate("default-question")

    def chains(self, chat: ServedChat) -> dict[str, Runnable[Any, Any]]:
        """Return every way to answer with a chat model."""
        never = RunnableLambda(closed_book) | chat | StrOutputParser()
        read = {"documents": self.retriever, "question": RunnablePassthrough()}
        always = read | RunnableLambda(with_passages) | chat | StrOutputParser()
        gate = RetrievalGate(self.judge)
        first = AnswerFirst(tokens=HELD, first_look=self.first_look)
        return {
            "never": never,
            "always": always,
            "a draft first (llm=)": RetrievalGate(self.judge, llm=chat, tokens=HELD).route(
                retrieve=always, direct=never
            ),
            "answer first": gate.route(retrieve=always, direct=never, answer_first=first),
            "answer first, speculative": gate.route(
                retrieve=always, direct=never, answer_first=first, speculative=True
            ),
        }


def closed_book(question: str) -> list[Any]:
    return [SystemMessage(ANSWER.system), HumanMessage(ANSWER.user.format(question=question))]


def with_passages(found: dict[str, Any]) -> list[Any]:
    user = ANSWER_WITH_PASSAGES.user.format(
        question=found["question"], passages=format_documents(found["documents"])
    )
    return [SystemMessage(ANSWER_WITH_PASSAGES.system), HumanMessage(user)]


def answer(
    ways: Ways, chat: ServedChat, way: str, record: dict[str, Any], callers: int, llm: str
) -> Answered:
    """Answer one question in one way, with a model of its own that counts its calls."""
    own = chat.model_copy(update={"calls": []})
    decided = Decided()
    chain = ways.chains(own)[way]
    start = time.perf_counter()
    pieces, times = [], []
    for piece in chain.stream(record["question"], {"callbacks": [decided]}):
        if piece:
            pieces.append(piece)
            times.append(time.perf_counter() - start)
    total = time.perf_counter() - start
    text = "".join(pieces)
    return Answered(
        llm=llm,
        way=way,
        callers=callers,
        id=record["id"],
        retrieved=decided.retrieve[0] if decided.retrieve else way == "always",
        right=is_correct(text, record["gold_answers"]),
        calls=len(own.calls),
        prompt=sum(call["prompt"] for call in own.calls),
        written=sum(call["written"] for call in own.calls),
        first_token=times[0] if times else total,
        held_token=times[HELD - 1] if len(times) >= HELD else total,
        total=total,
        text=text,
    )


def forget(url: str, slots: int) -> None:
    """Let the server forget what it has read: a prompt that another way sent is no help to this one."""
    for slot in range(slots):
        httpx.post(f"{url}/slots/{slot}?action=erase").raise_for_status()


def run(
    ways: Ways, questions: list[dict[str, Any]], llm: str, done: list[Answered], threads: int
) -> Iterator[Answered]:
    """Answer what has not been answered yet."""
    had = {(each.llm, each.way, each.callers, each.id) for each in done}
    names = list(ways.chains(ServedChat(url="")))
    for callers in CALLERS:
        with serving(gguf(llm), slots=callers, context=4096 * callers, threads=threads) as url:
            chat = ServedChat(url=url)
            answer(ways, chat, "answer first", questions[0], callers, llm)  # loads the models
            if callers == 1:
                for number, record in enumerate(questions):
                    turn = number % len(names)  # no way always comes after the same other one
                    for way in [*names[turn:], *names[:turn]]:
                        if (llm, way, callers, record["id"]) not in had:
                            forget(url, callers)
                            yield answer(ways, chat, way, record, callers, llm)
                continue
            for way in names:
                left = [record for record in questions if (llm, way, callers, record["id"]) not in had]
                forget(url, callers)
                with ThreadPoolExecutor(callers) as pool:
                    jobs = [pool.submit(answer, ways, chat, way, record, callers, llm) for record in left]
                    for job in jobs:
                        yield job.result()


def row(way: str, answers: list[Answered], never: dict[str, Answered]) -> list[str]:
    known = [each for each in answers if not each.retrieved and each.id in never]
    first, total = [a.first_token for a in answers], [a.total for a in answers]
    if known and way.startswith("answer first"):
        ours = float(np.median([a.first_token for a in known]))
        theirs = float(np.median([never[a.id].held_token for a in known]))
        against = f"{ours:.2f} / {theirs:.2f}"
    else:
        against = ""
    return [
        way,
        f"{np.mean([a.calls for a in answers]):.2f}",
        f"{np.mean([a.prompt for a in answers]):.0f}",
        f"{np.mean([a.written for a in answers]):.0f}",
        f"{np.percentile(first, 50):.2f} / {np.percentile(first, 95):.2f}",
        f"{np.percentile(total, 50):.2f} / {np.percentile(total, 95):.2f}",
        f"{np.mean([a.right for a in answers]):.0%}",
        f"{np.mean([a.retrieved for a in answers]):.0%}",
        against,
    ]


def show(done: list[Answered], llm: str) -> None:
    for callers in CALLERS:
        mine = [each for each in done if (each.llm, each.callers) == (llm, callers)]
        names = list(dict.fromkeys(each.way for each in mine))
        by_way = {way: [each for each in mine if each.way == way] for way in names}
        never = {each.id: each for each in by_way.get("never", [])}
        table = Table(
            title=f"{llm}, {len(never)} questions, {callers} at a time. Times in seconds, p50 / p95"
        )
        heads = ["way", "LLM calls", "tokens read", "tokens written", "first token", "whole answer", "right"]
        for head in [*heads, "retrieved", f"known: first token / token {HELD} of never"]:
            table.add_column(head, justify="left" if head == "way" else "right")
        for way in ("never", "always", *[n for n in names if n not in ("never", "always")]):
            if by_way.get(way):
                table.add_row(*row(way, by_way[way], never))
        CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0: one a core")
    arguments = parser.parse_args()
    files = [arguments.data / f"adaptive_llama31_8b.{name}.dev.jsonl" for name in SETS]
    records = [record for file in files for _, record in read_jsonl(file)]
    chosen = np.random.default_rng(0).permutation(len(records))[: arguments.limit]
    questions = [records[place] for place in chosen]
    OUT.parent.mkdir(exist_ok=True)
    done = [Answered(**record) for _, record in read_jsonl(OUT)] if OUT.exists() else []
    wanted = {record["id"] for record in questions}
    with OUT.open("a", encoding="utf-8") as kept:
        ways = Ways(arguments.data)
        for each in run(ways, questions, arguments.llm, done, arguments.threads):
            kept.write(json.dumps(asdict(each)) + "\n")
            kept.flush()
            done.append(each)
    show([each for each in done if each.id in wanted], arguments.llm)


if __name__ == "__main__":
    main()
