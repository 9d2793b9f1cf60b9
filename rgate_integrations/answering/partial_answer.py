"""An answer that is being written: read from a stream, held back until it is judged, then released or cancelled."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.models.generated import find_answer
from rgate_integrations.runtime.flow import Call, Flow, Step, arun, run
from rgate_integrations.runtime.threads import ForkSafeLock

_log = logging.getLogger("rgate_integrations")

MOST_BUFFERED = 4_096
"""Chunks that are held back: an LLM that has written no text by then is retrieved for."""
END: Final = object()
"""What `TokenStream.next_chunk` gives after the last chunk."""


class TokenStream:
    """The chunks of one answer, for both worlds. The LLM is asked when the first one is wanted.

    Args:
        open: Returns the iterator.
        aopen: Returns the asynchronous iterator, or an awaitable of it.
    """

    def __init__(self, open: Callable[[], Iterator[Any]], aopen: Callable[[], Any]) -> None:
        self._open = open
        self._aopen = aopen
        self._iterator: Any = None

    def next_chunk(self) -> Step:
        """Return the step that waits for the next chunk; its result is `END` after the last."""
        return Call(self.pull, self.apull)

    def close(self) -> Step:
        """Return the step that ends the stream early, which also ends the request to the LLM."""
        return Call(self.shut, self.ashut)

    def pull(self) -> Any:
        """Return the next chunk."""
        if self._iterator is None:
            self._iterator = iter(self._open())
        return next(self._iterator, END)

    async def apull(self) -> Any:
        """Await the next chunk."""
        if self._iterator is None:
            opened = self._aopen()
            if hasattr(opened, "__await__"):
                opened = await opened
            self._iterator = aiter(opened)
        return await anext(self._iterator, END)

    def shut(self) -> None:
        """Close the iterator."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    async def ashut(self) -> None:
        """Close the asynchronous iterator."""
        if hasattr(self._iterator, "aclose"):
            await self._iterator.aclose()


@dataclass
class PartialAnswer:
    """What can be read of an answer so far.

    Attributes:
        pieces: The text of each chunk that had some.
        tokens: The text of each token, where the LLM gives log-probabilities.
        logprobs: Their natural log-probabilities.
        model: Name of the LLM; empty when unknown.
        prompt_tokens: Length of what the LLM has read, in tokens; 0 while it does not tell.
        response_id: Id of the response, if a local LLM keeps the states of what it writes.
        kept: What it keeps; held here until the answer is judged.
        has_end: Whether the LLM has said that its answer is whole; None where it is not known to say so.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model: str = ""
    prompt_tokens: int = 0
    response_id: str = ""
    kept: object | None = None
    has_end: bool | None = None

    def set_response(self, response_id: str | None) -> None:
        """Note the id of the response, and hold what a local LLM keeps of it."""
        if response_id and self.kept is None:
            self.kept = find_answer(response_id)
            self.response_id = response_id if self.kept is not None else ""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def count(self) -> int:
        """How many tokens there are; where the LLM does not tell, chunks or words, whichever are more."""
        return len(self.tokens) or max(len(self.pieces), len(self.text.split()))

    def draft(self, *, finished: bool) -> Draft:
        """Return it as the LLM's draft; its tokens are in it if the text is made of them."""
        text = self.text.strip()
        draft = Draft(
            text=text,
            finished=finished,
            source="llm",
            model=self.model,
            prompt_tokens=self.prompt_tokens,
        )
        if not self.tokens or not "".join(self.tokens).strip().startswith(text):
            return draft
        told: dict[str, Any] = {"tokens": tuple(self.tokens), "logprobs": tuple(self.logprobs)}
        return Draft(**{**dict(draft), **told, "response_id": self.response_id})


class BufferedAnswer(ABC):
    """One answer of the direct arm, held back until it is judged.

    Args:
        partial: Gets what can be read of the answer.
        stream: The answer.
        fallback: The same answer, asked for without log-probabilities; it is taken if the LLM says that it does not
            take the first form. None if nothing was asked for.

    Attributes:
        chunks: The chunks that came so far.
        ended: Whether the answer is whole.
        has_text: Whether there is text to judge; of a tool call or a parsed object the question decides.
        error: What the arm raised.
    """

    def __init__(
        self, partial: PartialAnswer, stream: TokenStream, fallback: TokenStream | None = None
    ) -> None:
        self.partial = partial
        self.source = stream
        self.fallback = fallback
        self.chunks: list[Any] = []
        self.ended = False
        self.has_text = True
        self.error: Exception | None = None

    @abstractmethod
    def read(self, chunk: Any) -> bool:
        """Note what a chunk says in ``partial``; returns False if it is something that cannot be judged."""

    def on_refusal(self) -> None:  # noqa: B027  # most have nothing to remember
        """Remember that the LLM does not give log-probabilities."""

    def flush_events(self) -> Flow[None]:
        """Tell listeners of the released answer what came since the last time; most have nobody to tell."""
        yield from ()

    def buffer(self, tokens: int) -> Flow[None]:
        """Hold the answer back until so many tokens are written, it ends, fails, or cannot be judged."""
        while not self.ended and self.has_text and self.error is None:
            if self.partial.count >= tokens or len(self.chunks) >= MOST_BUFFERED:
                return
            try:
                chunk = yield self.source.next_chunk()
            except Exception as error:
                if self.fallback is None or self.chunks or not says_unsupported(error):
                    self.error = error
                    return
                self.source, self.fallback = self.fallback, None
                self.on_refusal()
                continue
            if chunk is END:
                self.ended = True
                if self.partial.has_end is False:
                    self.error = ServerError(
                        "The LLM's stream broke off: it ended without a finish reason.",
                        hint="Look at the server's log, and at the time limits of what stands between.",
                    )
            else:
                self.chunks.append(chunk)
                self.has_text = self.read(chunk)

    def close(self) -> Flow[None]:
        """End the answer early, which ends the request to the LLM, too."""
        try:
            yield self.source.close()
        except Exception as error:  # nobody wants this answer any more
            _log.info("An answer that was stopped failed: %s: %s", type(error).__name__, error)

    def cancel(self) -> Flow[None]:
        """End the answer early since the gate says so."""
        yield from self.close()

    def next_chunk(self) -> Flow[Any]:
        """Return the next chunk of a released answer, or `END`."""
        chunk = END if self.ended else (yield self.source.next_chunk())
        self.ended = chunk is END
        yield from self.flush_events()
        return chunk

    def drain(self) -> Flow[list[Any]]:
        """Release the answer, and return all its chunks."""
        yield from self.flush_events()
        chunks = list(self.chunks)
        try:
            while (chunk := (yield from self.next_chunk())) is not END:
                chunks.append(chunk)
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then there is nobody to do another step
                yield from self.close()
            raise
        return chunks

    def stream(self) -> Iterator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            run(self.flush_events())
            yield from self.chunks
            while (chunk := run(self.next_chunk())) is not END:
                yield chunk
        finally:
            run(self.close())

    async def astream(self) -> AsyncGenerator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            await arun(self.flush_events())
            for chunk in self.chunks:
                yield chunk
            while (chunk := await arun(self.next_chunk())) is not END:
                yield chunk
        finally:
            await arun(self.close())

    def draft(self) -> Draft | None:
        """Return what has been written; None where there is no text to judge.

        Raises:
            Exception: What the arm raised.
            EvidenceError: It has written nothing.
        """
        if not self.has_text:
            return None
        if self.error is not None:
            raise self.error
        if not self.partial.text.strip():
            raise EvidenceError("The direct arm wrote nothing that could be judged.")
        return self.partial.draft(finished=self.ended)


_REFUSED = frozenset({400, 404, 405, 415, 422, 501})
_UNSUPPORTED = ("unsupported", "notsupported", "notimplemented", "badrequest", "unprocessable")
_WORDS = ("logprob", "max_tokens", "unsupported", "not supported", "unexpected keyword", "unknown parameter")


class DraftRequest:
    """The arguments of a drafting call: all at first, and fewer once the model has refused some.

    Safe for threads: callers that learn of a refusal at the same time agree on what is left.

    Args:
        tokens: Maximum number of tokens of a draft.
        options: Whether the model takes options at all; a plain function does not.
    """

    def __init__(self, tokens: int, *, options: bool = True) -> None:
        limited = {"max_tokens": tokens, "logprobs": True}
        self._forms: Sequence[Mapping[str, Any]] = (limited, {"max_tokens": tokens}, {}) if options else ({},)
        self._first = 0
        self._lock = ForkSafeLock()

    @property
    def forms(self) -> list[dict[str, Any]]:
        """The arguments to try, in order: each form asks for less than the one before it."""
        return [dict(form) for form in self._forms[self._first :]]

    def worked(self, form: Mapping[str, Any]) -> None:
        """Remember the first form that a model took after it had refused the ones before it."""
        with self._lock:
            self._first = max(self._first, list(self._forms).index(form))


def says_unsupported(error: BaseException) -> bool:
    """Return whether an error says that the model does not take what it was asked with.

    That is a status such as 400, a `TypeError` about an argument, a `NotImplementedError`, an error of a type that
    says so, or a `ValueError` that names what was asked for. Providers raise errors of their own classes, so they are
    told apart by what they carry.
    """
    status = _status(error)
    if status is not None:
        return status in _REFUSED
    text = str(error).lower()
    if isinstance(error, TypeError):
        return "argument" in text
    if isinstance(error, NotImplementedError):
        return True
    if any(word in type(error).__name__.lower() for word in _UNSUPPORTED):
        return True
    return isinstance(error, ValueError) and any(word in text for word in _WORDS)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, wherever its library keeps it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "http_status", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return int(value)
    return None
