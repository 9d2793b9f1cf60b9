"""What an LLM tells while an engine streams its answer: tokens, log-probabilities, and how much it has read.

An engine hands on the text alone. LlamaIndex's own events have the LLM's responses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatInProgressEvent, LLMCompletionInProgressEvent
from llama_index.core.llms import LLM
from llama_index_instrumentation import get_dispatcher

from rgate_integrations.answering.partial_answer import PartialAnswer
from rgate_integrations.runtime.logprobs import TokenLogprobs, read_logprobs


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
