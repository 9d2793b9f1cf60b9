"""The direct engine begins to answer; its chunks are texts, or one response that does not stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.llms import LLM
from llama_index.core.schema import QueryBundle

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.llama_index.decision_context import copy_bundle
from rgate_integrations.llama_index.watching import Notes, noting
from rgate_integrations.runtime.flow import Flow


class EngineAnswer(BufferedAnswer):
    """One answer of a direct engine. The engine is asked once, and again if its LLM refuses log-probabilities.

    Args:
        engine: The engine.
        bundle: The question.
        llm: The engine's LLM, if it is asked for log-probabilities; a copy of the user's, since one that refuses is
            asked without from then on.
    """

    def __init__(self, engine: BaseQueryEngine, bundle: QueryBundle, llm: LLM | None = None) -> None:
        self._llm = llm
        self._response: Any = None
        self._query = partial(engine.query, copy_bundle(bundle))
        self._aquery = partial(engine.aquery, copy_bundle(bundle))
        answer = PartialAnswer()
        streams = [_WatchedStream(self._open, self._aopen, answer)]
        if llm is not None and getattr(llm, "logprobs", None):
            streams.append(_WatchedStream(self._open, self._aopen, answer))
        super().__init__(answer, *streams)

    def on_refusal(self) -> None:
        """Ask the LLM for no log-probabilities from now on."""
        vars(self._llm)["logprobs"] = None

    def read(self, chunk: Any) -> bool:
        """Note the text of a chunk; returns False for a parsed object."""
        if isinstance(chunk, PydanticResponse):
            return False
        text = chunk if isinstance(chunk, str) else str(chunk.response or "")
        if text:
            self.partial.pieces.append(text)
        return True

    def response(self, *, streaming: bool) -> Flow[RESPONSE_TYPE]:
        """Release the answer as a response of the kind that the caller wants; a stream may be read to its end."""
        given = self._response
        if not isinstance(given, StreamingResponse | AsyncStreamingResponse):
            whole: RESPONSE_TYPE = given
            return whole
        if not streaming:
            chunks = yield from self.drain()
            return Response("".join(chunks), given.source_nodes, given.metadata)
        if isinstance(given, AsyncStreamingResponse):
            return AsyncStreamingResponse(self.astream(), given.source_nodes, given.metadata)  # type: ignore[arg-type]
        return StreamingResponse(self.stream(), given.source_nodes, given.metadata)  # type: ignore[arg-type]

    def _open(self) -> Iterator[Any]:
        self._response = self._query()
        if isinstance(self._response, StreamingResponse):
            return iter(self._response.response_gen)
        return iter([self._response])

    async def _aopen(self) -> AsyncIterator[Any]:
        self._response = await self._aquery()
        if isinstance(self._response, AsyncStreamingResponse):
            return aiter(self._response.response_gen)
        if isinstance(self._response, StreamingResponse):  # some engines stream in their own threads only
            return _in_threads(iter(self._response.response_gen))
        return _in_threads(iter([self._response]))


class _WatchedStream(TokenStream):
    """A stream of which is noted what the LLM tells beside the text."""

    def __init__(
        self, open: Callable[[], Iterator[Any]], aopen: Callable[[], Any], answer: PartialAnswer
    ) -> None:
        super().__init__(open, aopen)
        self._notes = Notes(answer)

    def pull(self) -> Any:
        with noting(self._notes):
            return super().pull()

    async def apull(self) -> Any:
        with noting(self._notes):
            return await super().apull()


async def _in_threads(chunks: Iterator[Any]) -> AsyncIterator[Any]:
    while (chunk := await asyncio.to_thread(next, chunks, END)) is not END:
        yield chunk
