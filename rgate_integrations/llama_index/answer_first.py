"""The direct engine begins to answer; its chunks are texts, or one response that does not stream."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
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
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatInProgressEvent, LLMCompletionInProgressEvent
from llama_index.core.llms import LLM
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle
from llama_index_instrumentation import get_dispatcher

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.llama_index.decision_context import copy_bundle
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.logprobs import TokenLogprobs, read_logprobs


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


@dataclass
class Notes:
    """Who notes what an LLM tells.

    Attributes:
        partial: Gets it.
        kind: The kind of event that tells it: an LLM that chats by completing sends each response twice.
    """

    partial: PartialAnswer
    kind: type[BaseEvent] | None = None

    def take(self, event: LLMChatInProgressEvent | LLMCompletionInProgressEvent) -> None:
        """Note a response."""
        self.kind = self.kind or type(event)
        if type(event) is not self.kind or event.response is None:
            return
        self.partial.set_response(_of(event.response.raw, "id"))
        tokens, logprobs = _told(event.response)
        self.partial.tokens += tokens
        self.partial.logprobs += logprobs
        self.partial.prompt_tokens = max(self.partial.prompt_tokens, _read(event.response))
        choice = _choice(event.response.raw)
        if choice is not None and not self.partial.has_end:  # OpenAI's API ends with a finish reason
            self.partial.has_end = _of(choice, "finish_reason") is not None


_notes: ContextVar[Notes | None] = ContextVar("rgate_notes", default=None)
_lock = threading.Lock()


class _Listener(BaseEventHandler):
    """Hands events to whoever is noting where they are sent."""

    @classmethod
    def class_name(cls) -> str:
        return "RetrievalGateListener"

    def handle(self, event: BaseEvent, **options: Any) -> None:
        notes = _notes.get()
        if notes is not None and isinstance(event, LLMChatInProgressEvent | LLMCompletionInProgressEvent):
            notes.take(event)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Note what LLMs tell in this context. LlamaIndex's events get one listener, at the first use."""
    root = get_dispatcher()
    with _lock:
        if not any(isinstance(handler, _Listener) for handler in root.event_handlers):
            root.add_event_handler(_Listener())
    before = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(before)


def with_logprobs(llm: LLM) -> LLM | None:
    """Return a copy of an LLM that is asked for log-probabilities; None if it does not know them.

    It knows them if it has a field ``logprobs`` that nobody has set, as LlamaIndex's OpenAI LLMs have.
    """
    if "logprobs" not in type(llm).model_fields or getattr(llm, "logprobs", None) is not None:
        return None
    options: dict[str, Any] = {"logprobs": True}
    # llama.cpp's server, and the completions of any, give none where no likeliest token is asked for.
    if getattr(llm, "top_logprobs", None) == 0:
        options["top_logprobs"] = 1
    return llm.model_copy(update=options)


def _told(response: Any) -> TokenLogprobs:
    """Read the tokens of a streamed response, as LlamaIndex has them or else as the server gave them."""
    # Each position is a list: the token that was written first, then those that were likely too.
    entries: Any = [position[0] for position in response.logprobs or [] if position]
    if not entries:
        told = _of(_choice(response.raw), "logprobs")
        entries = _of(told, "content") or _of_completion(told)
    return read_logprobs(entries)


def _choice(raw: Any) -> Any:
    """Return the answer in a chunk of OpenAI's API; None in any other."""
    choices = _of(raw, "choices")
    return choices[0] if isinstance(choices, Sequence) and choices else None


def _of_completion(told: Any) -> list[dict[str, Any]]:
    """Return what a completion tells, in parallel lists, token by token as chats do."""
    tokens, logprobs = _of(told, "tokens"), _of(told, "token_logprobs")
    if not isinstance(tokens, Sequence) or not isinstance(logprobs, Sequence):
        return []
    return [{"token": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=False)]


def _read(response: Any) -> int:
    """Return how many tokens the LLM says that it has read; 0 if it does not say."""
    usage = _of(response.raw, "usage")
    told = [_of(usage, "prompt_tokens"), _of(usage, "input_tokens")]
    told.append(response.additional_kwargs.get("prompt_tokens"))
    return max((count for count in told if isinstance(count, int)), default=0)


def _of(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def streams(engine: BaseQueryEngine) -> bool:
    """Whether an engine's synthesizer streams; without one, that of an engine inside. False where there is none."""
    waiting: list[object] = [engine]
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, BaseQueryEngine):
            continue
        synthesizer = vars(part).get("_response_synthesizer")
        if isinstance(synthesizer, BaseSynthesizer):
            return bool(vars(synthesizer).get("_streaming", False))
        for value in vars(part).values():
            waiting += value if isinstance(value, list) else [value]
    return False
