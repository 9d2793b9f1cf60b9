"""The adapters under load: every answer comes from the arm that its question's decision names."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
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
from tests.soak.gates import Unrecorded
from tests.soak.inputs import PLAIN
from tests.soak.scenario import Scenario, expect


class ArmError(Exception):
    """What an arm raises for a question with "BROKEN" in it, and the direct arm for one with "TORN" as it answers."""


def answer(arm: str, text: str) -> str:
    """Return what an arm answers."""
    if "BROKEN" in text or ("TORN" in text and arm == "direct"):
        raise ArmError(text)
    return f"{arm}: {text}"


def text_of(chance: random.Random) -> str:
    """Return a plain question, now and then one that an arm or the gate's model fails on."""
    text = chance.choice(PLAIN)
    roll = chance.random()
    if roll < 0.05:
        return f"BROKEN {text}"
    if roll < 0.1:
        return f"TORN {text}"
    return f"RAISE {text}" if roll < 0.15 else text


class Expected:
    """What must come for each question: by the same gate, asked alone."""

    def __init__(self) -> None:
        self.gate = load_gate("ik", proxy=Unrecorded())
        self.arms: dict[str, str] = {}

    def check(self, text: str, result: Any) -> None:
        """Compare an answer, or the exception that came instead."""
        if text not in self.arms:
            self.arms[text] = "retrieved" if self.gate.decide(text).retrieve else "direct"
        try:
            must = answer(self.arms[text], text)
        except ArmError:
            expect(isinstance(result, ArmError), text, repr(result))
        else:
            expect(str(result) == must, text, repr(result))


class Consistent:
    """What must come where a begun answer is judged: one of the two arms' whole answers, and always the same."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}

    def check(self, text: str, result: Any) -> None:
        """Compare an answer, or the exception that came instead."""
        if "BROKEN" in text:
            expect(isinstance(result, ArmError), text, repr(result))
            return
        if "TORN" in text:  # before its answer is judged, or after it was released
            retrieved = str(result) == answer("retrieved", text)
            expect(retrieved or isinstance(result, ArmError), text, repr(result))
            return
        expect(str(result) in (answer("retrieved", text), answer("direct", text)), text, repr(result))
        must = self.answers.setdefault(text, str(result))
        expect(str(result) == must, text, repr(result), "was", repr(must))


class Router(Scenario):
    """LangChain's router, plain, answering first, and searching meanwhile, in every way of calling."""

    name = "router"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        gate = RetrievalGate(load_gate("ik", proxy=Unrecorded()))
        search = RunnableLambda(lambda text: text)
        answering = RunnableLambda(lambda text: answer("retrieved", text))
        direct = RunnableGenerator(_streamed, _astreamed)
        decided, begun = Expected(), Consistent()
        first = AnswerFirst(tokens=3, question_gate=load_gate("prompt", proxy=Unrecorded()))
        ahead = replace(first, prefetch=True)
        self.routers: list[tuple[Runnable[str, str], Expected | Consistent]] = [
            (gate.route(retrieve=search | answering, direct=direct), decided),
            (gate.route(retrieve=search | answering, direct=direct, answer_first=first), begun),
            (gate.route(retrieve=search | answering, direct=direct, answer_first=ahead), begun),
        ]

    def step(self, chance: random.Random) -> None:
        router, expected = chance.choice(self.routers)
        texts = [text_of(chance) for _ in range(chance.randint(1, 8))]
        way = chance.choice([_invoked, _ainvoked, _batched, _abatched, _streaming, _astreaming])
        for text, result in zip(texts, way(router, texts), strict=True):
            self.counts["answers"] += 1
            if not isinstance(result, asyncio.CancelledError):
                expected.check(text, result)


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


def _or_error(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except ArmError as error:
        return error


def _invoked(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(lambda text: _or_error(router.invoke, text), texts))


def _streaming(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    return [_or_error(lambda text: "".join(router.stream(text)), text) for text in texts]


def _batched(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    return router.batch(texts, return_exceptions=True)


def _abatched(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    return asyncio.run(router.abatch(texts, return_exceptions=True))


def _ainvoked(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    """Every third caller leaves at once."""

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(router.ainvoke(text)) for text in texts]
        await asyncio.sleep(0)
        for task in tasks[2::3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(ask())


def _astreaming(router: Runnable[str, str], texts: list[str]) -> list[Any]:
    """Every third caller leaves after the first chunk."""

    async def ask(text: str, *, leaves: bool) -> str:
        chunks = []
        async with aclosing(router.astream(text)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                if leaves:
                    raise asyncio.CancelledError
        return "".join(chunks)

    async def ask_all() -> list[Any]:
        asking = [ask(text, leaves=place % 3 == 2) for place, text in enumerate(texts)]
        return await asyncio.gather(*asking, return_exceptions=True)

    return asyncio.run(ask_all())


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


class QueryEngine(Scenario):
    """LlamaIndex's query engine, from threads and on an event loop."""

    name = "query-engine"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = GatedQueryEngine(_Arm("retrieved"), _Arm("direct"), load_gate("ik", proxy=Unrecorded()))
        self.expected = Expected()

    def step(self, chance: random.Random) -> None:
        texts = [text_of(chance) for _ in range(chance.randint(1, 8))]
        results = self._awaited(texts) if chance.random() < 0.5 else self._in_threads(texts)
        for text, result in zip(texts, results, strict=True):
            self.counts["answers"] += 1
            if not isinstance(result, asyncio.CancelledError):
                self.expected.check(text, result)

    def _in_threads(self, texts: list[str]) -> list[Any]:
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(lambda text: _or_error(self.engine.query, text), texts))

    def _awaited(self, texts: list[str]) -> list[Any]:
        async def ask() -> list[Any]:
            tasks = [asyncio.create_task(self.engine.aquery(text)) for text in texts]
            await asyncio.sleep(0)
            for task in tasks[2::3]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(ask())
