"""Answer first: reads the response of the direct engine chunk by chunk, with the metadata of its LLM.

LlamaIndex's engines stream nothing but text. Log-probabilities, thoughts and usage of their LLM come in
instrumentation events. So one `_Listener` per process passes each event to the `EngineStream` that is waiting for a
chunk in the event's context.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from types import AsyncGeneratorType, CellType, GeneratorType
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatInProgressEvent, LLMCompletionInProgressEvent
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms import LLM
from llama_index.core.schema import QueryBundle
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, ChunkStream
from rgate_integrations.llama_index.decider import copy_bundle
from rgate_integrations.runtime.flow import Flow, variable_set
from rgate_integrations.runtime.records import read_choice_logprobs, read_logprobs
from rgate_integrations.runtime.replies import get_field, read_reply

DIRECT_TAG = "rgate_direct"
"""Tag of the direct engine's events. If the next `RetrievalGateEvent` retrieves, they are of a stopped answer."""


class EngineAnswer(BufferedAnswer):
    """One answer of a direct engine. If its LLM refuses log-probabilities, the engine is asked again without them.

    Args:
        engine: The engine.
        bundle: The question.
        llm: The engine's LLM, if log-probabilities are requested; otherwise None. It must be a copy of the
            user's LLM, because its field ``logprobs`` is cleared if the LLM refuses them.
    """

    source: EngineStream

    def __init__(self, engine: BaseQueryEngine, bundle: QueryBundle, llm: LLM | None = None) -> None:
        fallback = EngineStream(engine, bundle, self) if getattr(llm, "logprobs", None) else None
        super().__init__(EngineStream(engine, bundle, self), fallback)
        self._llm = llm

    def read(self, chunk: Any) -> bool:
        """Add the text of a chunk; return False for a parsed object, which cannot be judged."""
        if isinstance(chunk, PydanticResponse):
            return False
        text = chunk if isinstance(chunk, str) else str(chunk.response or "")
        if text:
            self.partial.pieces.append(text)
        return True

    def response(self, *, streaming: bool) -> Flow[RESPONSE_TYPE]:
        """Release the answer, and return it as a response. Without ``streaming``, it is complete when returned.

        Raises:
            Exception: The engine failed. A response that streams raises later failures while it is read.
        """
        # If the answer was not judged, the engine has not run yet. Its first chunk shows the type of the response.
        yield from self.buffer(1)
        if self.error is not None:
            raise self.error
        response: RESPONSE_TYPE = self.source.response
        if not isinstance(response, StreamingResponse | AsyncStreamingResponse):
            return response
        if not streaming:
            return Response("".join((yield self.drain())), response.source_nodes, response.metadata)
        if isinstance(response, AsyncStreamingResponse):
            return replace(response, response_gen=self.astream())
        return replace(response, response_gen=self.stream())

    def set_logprobs(self, *, enabled: bool) -> None:
        """Set whether the engine's LLM is asked for log-probabilities from now on."""
        vars(self._llm)["logprobs"] = enabled or None


class EngineStream(ChunkStream):
    """The chunks of an engine's response: texts, or the response itself if it does not stream.

    Args:
        engine: The engine.
        bundle: The question.
        answer: The answer, whose `PartialAnswer` receives metadata from the LLM's events, such as log-probabilities.

    Attributes:
        response: The engine's response; None until the engine has run. A streaming one is kept without its stream.
    """

    def __init__(self, engine: BaseQueryEngine, bundle: QueryBundle, answer: EngineAnswer) -> None:
        super().__init__(self._ask, self._aask, self._tagged)
        self.response: Any = None
        self._engine = engine
        self._bundle = copy_bundle(bundle)
        self._answer = answer
        self._kind: type[BaseEvent] | None = None
        # On first use and not at import, which should have no effects.
        listen(_Listener)

    def close(self) -> None:
        """Close the response early, which also ends the request to the LLM."""
        streams = _find_streams(self._iterator)
        super().close()
        for stream in streams:
            stream.close()

    async def aclose(self) -> None:
        """Close the response early, which also ends the request to the LLM."""
        streams = _find_streams(self._iterator)
        await super().aclose()
        for stream in streams:
            closed = stream.close()
            if closed is not None:
                await closed

    def on_event(self, event: LLMChatInProgressEvent | LLMCompletionInProgressEvent) -> None:
        """Record the metadata that the LLM sends with a chunk."""
        # An LLM that implements chat by completion emits each response in two kinds of events: we only read the
        # kind that comes first.
        self._kind = self._kind or type(event)
        response: Any = event.response
        if type(event) is not self._kind or response is None:
            return
        answer = self._answer.partial
        raw = response.raw
        choices = get_field(raw, "choices")
        choice = choices[0] if isinstance(choices, Sequence) and choices else None
        for part in (get_field(response, "message"), get_field(choice, "delta")):
            answer.has_thoughts |= read_reply(part).thoughts is not None
        answer.set_response(get_field(raw, "id"))
        # Each position is a list: the generated token, then other likely ones.
        entries = [position[0] for position in response.logprobs or [] if position]
        answer.add_logprobs(read_logprobs(entries) if entries else read_choice_logprobs(choice))
        reported = get_field(get_field(raw, "usage"), "prompt_tokens")
        prompt_tokens = reported or response.additional_kwargs.get("prompt_tokens") or 0
        answer.prompt_tokens = max(answer.prompt_tokens, prompt_tokens)
        if choice is not None and not answer.has_end:  # responses in OpenAI's format end with a finish reason
            answer.has_end = get_field(choice, "finish_reason") is not None

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        """Pass the LLM's events in the ``with`` block to this stream, and give all events `DIRECT_TAG`."""
        tags = {**active_instrument_tags.get(), DIRECT_TAG: True}
        with variable_set(_active_stream, self), variable_set(active_instrument_tags, tags):
            yield

    def _ask(self) -> Iterator[Any]:
        response: Any = self._engine.query(self._bundle)
        self.response = response
        if not isinstance(response, StreamingResponse):
            return iter([response])
        # Without the stream, because a reference to it could keep the request to the LLM open after `close`.
        self.response = copy(response)
        self.response.response_gen = None
        return iter(response.response_gen)

    async def _aask(self) -> AsyncIterator[Any]:
        response: Any = await self._engine.aquery(self._bundle)
        self.response = response
        if not isinstance(response, StreamingResponse | AsyncStreamingResponse):
            return in_threads(iter([response]))
        self.response = AsyncStreamingResponse(None, response.source_nodes, response.metadata)  # type: ignore[arg-type]
        # Some engines stream only synchronously, even when awaited.
        if isinstance(response, StreamingResponse):
            return in_threads(iter(response.response_gen))
        return aiter(response.response_gen)


def _find_streams(generator: Any) -> list[Any]:
    """Return the streams that a suspended generator reads, perhaps through other generators, from an LLM's server.

    LlamaIndex leaves those of OpenAI's client open. They refer to themselves, so that only the garbage collector
    would close them, when the server has long written the whole answer.
    """
    found: list[Any] = []
    queue, seen = [generator], set[int]()
    while queue:
        for held in gc.get_referents(queue.pop()):
            if id(held) in seen:
                continue
            seen.add(id(held))
            if isinstance(held, GeneratorType | AsyncGeneratorType | CellType):
                queue.append(held)
            elif type(held).__name__ in ("Stream", "AsyncStream") and hasattr(held, "close"):
                found.append(held)
    return found


async def in_threads(chunks: Iterator[Any]) -> AsyncGenerator[Any]:
    """Yield the items of an iterator, each computed in a thread."""
    # `next` waits for the LLM, which would block the event loop. It gets a default, because futures cannot raise
    # StopIteration.
    while (chunk := await asyncio.to_thread(next, chunks, END)) is not END:
        yield chunk


_active_stream: ContextVar[EngineStream | None] = ContextVar("rgate_active_stream", default=None)
_lock = threading.Lock()


class _Listener(BaseEventHandler):
    """Passes each event with a piece of an answer to the `EngineStream` that waits in the event's context."""

    def handle(self, event: BaseEvent, **options: Any) -> None:
        stream = _active_stream.get()
        if stream is not None and isinstance(event, LLMChatInProgressEvent | LLMCompletionInProgressEvent):
            stream.on_event(event)


def listen(kind: type[BaseEventHandler | BaseSpanHandler[Any]]) -> None:
    """Add a listener of this class to LlamaIndex's events or spans, once per process."""
    root = get_dispatcher()
    handlers: list[Any] = root.span_handlers if issubclass(kind, BaseSpanHandler) else root.event_handlers
    with _lock:  # otherwise two threads could add it twice
        if not any(isinstance(handler, kind) for handler in handlers):
            handlers.append(kind())


def with_logprobs(llm: LLM) -> LLM | None:
    """Return a copy of an LLM that requests log-probabilities.

    None if the LLM has no field ``logprobs``, or if the user has set it.
    """
    if "logprobs" not in type(llm).model_fields or getattr(llm, "logprobs", None) is not None:
        return None
    options: dict[str, Any] = {"logprobs": True}
    # llama.cpp's server, and the completions route of any server, only send them along with top tokens.
    if getattr(llm, "top_logprobs", None) == 0:
        options["top_logprobs"] = 1
    return llm.model_copy(update=options)
