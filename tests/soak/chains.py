"""The adapters under load: every answer comes from the arm that its question's decision names."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_core.runnables import Runnable, RunnableGenerator, RunnableLambda
from llama_index.core import QueryBundle
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import Response

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests.soak.callers import has_left, in_threads, on_a_loop
from tests.soak.gates import FAILS, Unrecorded
from tests.soak.inputs import PLAIN
from tests.soak.scenario import Scenario, expect

_ERROR = "an error"


class ArmError(Exception):
    """What an arm raises for a question with "BROKEN" in it, and the direct arm for one with "TORN" as it answers."""


def outcome(arm: str, text: str) -> str:
    """Return what comes of an arm."""
    fails = "BROKEN" in text or ("TORN" in text and arm == "direct")
    return _ERROR if fails else f"{arm}: {text}"


def answer(arm: str, text: str) -> str:
    """Return what an arm answers, or raise."""
    if outcome(arm, text) == _ERROR:
        raise ArmError(text)
    return outcome(arm, text)


def text_of(chance: random.Random) -> str:
    """Return a plain question, now and then one that an arm or the gate's model fails on."""
    fault = chance.choices(["", "BROKEN ", "TORN ", FAILS], weights=[17, 1, 1, 1])[0]
    return fault + chance.choice(PLAIN)


class Decided:
    """What must come for each question: the answer of the arm that the same gate names, asked alone."""

    def __init__(self) -> None:
        self.gate = load_gate("ik", proxy=Unrecorded())
        self.arms: dict[str, str] = {}

    def check(self, text: str, got: str) -> None:
        """Compare an answer."""
        if text not in self.arms:
            self.arms[text] = "retrieved" if self.gate.decide(text).retrieve else "direct"
        expect(got == outcome(self.arms[text], text), text, repr(got))


class Partial:
    """Expects one of the two arms' complete answers, always the same one, because a partial answer is judged.

    The direct arm may be torn before its answer is judged, or after it was released: then either may come.
    """

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def check(self, text: str, got: str) -> None:
        """Compare an answer."""
        expect(got in (outcome("retrieved", text), outcome("direct", text)), text, repr(got))
        if "TORN" not in text:
            expect(self.seen.setdefault(text, got) == got, text, repr(got), "was", self.seen[text])


class Answers(Scenario):
    """Compares the answers to a few questions with what must come."""

    def compare(self, expected: Decided | Partial, texts: list[str], results: list[Any]) -> None:
        """Take answers, or the exceptions that came instead; callers who left have none."""
        for text, result in zip(texts, results, strict=True):
            self.counts["answers"] += 1
            if not has_left(result):
                expected.check(text, _ERROR if isinstance(result, ArmError) else str(result))


class Router(Answers):
    """LangChain's router, plain, answering first, and searching meanwhile, in every way of calling."""

    name = "router"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        gate = RetrievalGate(load_gate("ik", proxy=Unrecorded()))
        arms: Any = {
            "retrieve": RunnableLambda(lambda text: text) | (lambda text: answer("retrieved", text)),
            "direct": RunnableGenerator(_streamed, _astreamed),
        }
        decided, partial = Decided(), Partial()
        first = AnswerFirst(tokens=3, question_gate=load_gate("prompt", proxy=Unrecorded()))
        self.routers: list[tuple[Runnable[str, str], Decided | Partial]] = [
            (gate.route(**arms), decided),
            (gate.route(**arms, answer_first=first), partial),
            (gate.route(**arms, answer_first=replace(first, prefetch=True)), partial),
        ]

    def step(self, chance: random.Random) -> None:
        router, expected = chance.choice(self.routers)
        texts = [text_of(chance) for _ in range(chance.randint(1, 8))]

        def stream(text: str) -> str:
            return "".join(router.stream(text))

        async def astream(text: str) -> str:
            return "".join([chunk async for chunk in router.astream(text)])

        ways: list[Callable[[], list[Any]]] = [
            lambda: in_threads(router.invoke, texts),
            lambda: in_threads(stream, texts),
            lambda: on_a_loop(router.ainvoke, texts, chance),
            lambda: on_a_loop(astream, texts, chance),
            lambda: router.batch(texts, return_exceptions=True),
            lambda: asyncio.run(router.abatch(texts, return_exceptions=True)),
        ]
        self.compare(expected, texts, chance.choice(ways)())


def _streamed(texts: Iterator[str]) -> Iterator[str]:
    text = "".join(texts)
    whole = f"direct: {text}" if "TORN" in text else answer("direct", text)
    for start in range(0, len(whole), 5):
        if "TORN" in text and start == 5 * (len(text) % 5):
            raise ArmError(text)
        yield whole[start : start + 5]


async def _astreamed(texts: AsyncIterator[str]) -> AsyncIterator[str]:
    whole = "".join([text async for text in texts])
    for chunk in _streamed(iter([whole])):
        yield chunk


class _Arm(BaseQueryEngine):
    """A query engine that answers at once."""

    def __init__(self, name: str) -> None:
        super().__init__(None)
        self.name = name

    def _query(self, query_bundle: QueryBundle) -> Response:
        return Response(answer(self.name, query_bundle.query_str))

    async def _aquery(self, query_bundle: QueryBundle) -> Response:
        return self._query(query_bundle)

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}


class QueryEngine(Answers):
    """LlamaIndex's query engine, from threads and on an event loop."""

    name = "query-engine"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = GatedQueryEngine(_Arm("retrieved"), _Arm("direct"), load_gate("ik", proxy=Unrecorded()))
        self.expected = Decided()

    def step(self, chance: random.Random) -> None:
        texts = [text_of(chance) for _ in range(chance.randint(1, 8))]
        if chance.random() < 0.5:
            self.compare(self.expected, texts, on_a_loop(self.engine.aquery, texts, chance))
        else:
            self.compare(self.expected, texts, in_threads(self.engine.query, texts))
