"""Answer first on a real llama.cpp server: calls, tokens, time and accuracy of four ways to answer.

    python benchmarks/answer_first.py --data DIR [--llm qwen2.5-coder-0.5b-instruct] [--limit 100] [--callers 8]

DIR holds question sets and passages, ``corpus.{hotpot_2wiki,slimplm}``. The questions are those of ``mixture.py``
that have a gold answer: no shipped gate was trained on them. The ways take turns at each block of as many questions
as there are callers, so that what slows the machine slows all of them: where other things run beside, read the
ratios and not the seconds. The server counts the tokens.
"""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from base import argument_parser, print_table
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from mixture import CORPORA, Question, read_mixture
from served import closed_book, with_passages

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index import read_passages
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.runtime.text import is_correct

sys.path.insert(0, str(Path(__file__).parent.parent / "cookbook"))
from llama_server import ServedChat, gguf, serving

HELD, PASSAGES, WORDS = 32, 3, 100  # two cores read slowly: few passages, and only their beginnings
DRAFT = "a draft first (llm=)"


@dataclass
class Answered:
    """One question, answered in one way; times are in seconds."""

    retrieved: bool
    right: bool
    calls: int
    prompt: int
    written: int
    first_token: float
    total: float


class Decisions(BaseCallbackHandler):
    """Notes what a gate decides."""

    def __init__(self) -> None:
        self.retrieve: list[bool] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Note a decision."""
        self.retrieve.append(data["retrieve"])


class Ways:
    """The ways to answer, with gates and an index that they share."""

    def __init__(self, data: Path) -> None:
        passages = []
        for name in CORPORA:
            passages += read_passages(data / f"corpus.{name}.jsonl.gz")
        self.retriever = IndexRetriever(index=BM25Index(passages), k=PASSAGES)
        self.judge = load_gate(DEFAULT_GATES["llm"], on_error="raise")
        self.first_look = load_gate(on_error="raise")

    def chains(self, chat: ServedChat) -> dict[str, Runnable[Any, Any]]:
        """Return every way to answer with a chat model."""
        never = RunnableLambda(closed_book) | chat | StrOutputParser()
        read = {"documents": self.retriever, "question": RunnablePassthrough()}
        messages = RunnableLambda(lambda found: with_passages(found, words=WORDS))
        always = read | messages | chat | StrOutputParser()
        drafting = RetrievalGate(self.judge, llm=chat, tokens=HELD)
        options = AnswerFirst(tokens=HELD, question_gate=self.first_look)
        return {
            "never": never,
            "always": always,
            DRAFT: drafting.route(retrieve=always, direct=never),
            "answer first": RetrievalGate(self.judge).route(
                retrieve=always, direct=never, answer_first=options
            ),
        }

    def answer(self, way: str, chat: ServedChat, question: Question) -> Answered:
        """Answer one question in one way, with a model of its own that counts its calls."""
        own = chat.model_copy(update={"calls": []})
        decisions = Decisions()
        chain = self.chains(own)[way]
        start = time.perf_counter()
        first, text = None, ""
        for piece in chain.stream(question.question, {"callbacks": [decisions]}):
            if piece and first is None:
                first = time.perf_counter() - start
            text += piece
        total = time.perf_counter() - start
        return Answered(
            retrieved=decisions.retrieve[0] if decisions.retrieve else way == "always",
            right=is_correct(text, question.gold_answers),
            calls=len(own.calls),
            prompt=sum(call["prompt"] for call in own.calls),
            written=sum(call["written"] for call in own.calls),
            first_token=total if first is None else first,
            total=total,
        )


def forget(url: str) -> None:
    """Let the server forget what it has read: a prompt that another way sent is no help to this one."""
    for slot in httpx.get(f"{url}/slots").raise_for_status().json():
        httpx.post(f"{url}/slots/{slot['id']}?action=erase").raise_for_status()


def run(ways: Ways, questions: list[Question], url: str, callers: int) -> dict[str, list[Answered]]:
    """Answer every question in every way."""
    chat = ServedChat(url=url)
    names = list(ways.chains(chat))
    ways.answer("answer first", chat, questions[0])  # loads the models
    found: dict[str, list[Answered]] = {name: [] for name in names}
    with ThreadPoolExecutor(callers) as pool:
        for turn, start in enumerate(range(0, len(questions), callers)):
            block = questions[start : start + callers]
            first = turn % len(names)
            for way in [*names[first:], *names[:first]]:  # each comes first as often
                forget(url)
                jobs = [pool.submit(ways.answer, way, chat, question) for question in block]
                found[way] += [job.result() for job in jobs]
    return found


def show(found: dict[str, list[Answered]]) -> None:
    """Print a row for each way; times are median / 95th percentile, and all together by those of a draft first."""
    rows = []
    for way, answers in found.items():
        row = [way]
        for name, form in (("calls", ".2f"), ("prompt", ".0f"), ("written", ".0f"), ("right", ".0%")):
            row.append(format(np.mean([getattr(each, name) for each in answers]), form))
        row.append(f"{np.mean([each.retrieved for each in answers]):.0%}")
        for name in ("first_token", "total"):
            seconds = [getattr(each, name) for each in answers]
            drafted = [getattr(each, name) for each in found[DRAFT]]
            row.append(f"{np.percentile(seconds, 50):.2f} / {np.percentile(seconds, 95):.2f}")
            row.append(f"{sum(seconds) / sum(drafted):.2f}")
        rows.append(row)
    counts = ["LLM calls", "tokens read", "written", "right", "retrieved"]
    print_table(["way", *counts, "first token, s", "all together", "whole answer, s", "all together"], rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--callers", type=int, default=1, help="how many ask at a time")
    parser.add_argument(
        "--url",
        help="a llama.cpp server with a slot a caller and --slot-save-path, instead of one that is started",
    )
    arguments = parser.parse_args()
    questions = [question for question in read_mixture(arguments.data) if question.gold_answers]
    callers = arguments.callers
    server: Any = contextlib.nullcontext(arguments.url)
    if arguments.url is None:
        server = serving(gguf(arguments.llm), slots=callers, context=4096 * callers, threads=0)
    with server as url:
        show(run(Ways(arguments.data), questions[: arguments.limit], url, callers))


if __name__ == "__main__":
    main()
