"""An answer in progress: read from a stream, held back until it is judged, then released or cancelled.

A framework wraps its stream in a `ChunkStream`, and its subclass of `BufferedAnswer` reads the text of each chunk
into a `PartialAnswer`, which becomes the draft that the gate judges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from rgate_integrations.answering.drafting import says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.models.streamed_answer import find_answer
from rgate_integrations.runtime.flow import Call, Flow, Step, arun, is_interrupt, run
from rgate_integrations.runtime.records import TokenLogprobs
from rgate_integrations.runtime.replies import split_thoughts
from rgate_integrations.runtime.segments import count_words
from rgate_integrations.runtime.text import logger

MAX_SILENT_CHUNKS = 32
"""After this many chunks without text, we assume that the LLM is thinking and its client hides the thoughts."""
END: Final = object()
"""What a `ChunkStream` returns after the last chunk."""


class ChunkStream:
    """A stream of chunks, sync or async, that is opened when the first chunk is requested.

    Args:
        open: Function that returns the iterator.
        aopen: Function that returns the asynchronous iterator, or an awaitable of it.
        context: Function that returns the context manager in which each chunk is requested.
    """

    def __init__(
        self,
        open: Callable[[], Iterator[Any]],
        aopen: Callable[[], Any],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._open = open
        self._aopen = aopen
        self._context = context
        self._iterator: Any = None

    def next(self) -> Any:
        """Return the next chunk, or `END`."""
        with self._context():
            if self._iterator is None:
                self._iterator = iter(self._open())
            return next(self._iterator, END)

    async def anext(self) -> Any:
        """Await the next chunk, or `END`."""
        with self._context():
            if self._iterator is None:
                opened = self._aopen()
                if hasattr(opened, "__await__"):  # such as LlamaIndex's aquery, whose result holds the stream
                    opened = await opened
                self._iterator = aiter(opened)
            return await anext(self._iterator, END)

    def close(self) -> None:
        """Close the iterator early, which also ends the request to the LLM."""
        # Not kept: since Python 3.13, a closed generator may hold the LLM's stream, open, until it is freed itself.
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()

    async def aclose(self) -> None:
        """Close the asynchronous iterator early, which also ends the request to the LLM."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "aclose"):
            await iterator.aclose()


@dataclass
class PartialAnswer:
    """What has been read of an answer so far.

    Attributes:
        pieces: The text of each chunk that has text.
        tokens: The text of each token, if the LLM sends log-probabilities.
        logprobs: Natural log-probabilities of the tokens.
        model: Name of the LLM; empty if unknown.
        prompt_tokens: Length of the prompt in tokens; 0 until the LLM reports it.
        response_id: Id of the response, if a local LLM keeps hidden states for it; otherwise empty.
        local_answer: The local LLM's answer, which holds its hidden states; kept here until it is judged. None for
            any other LLM.
        has_thoughts: Whether the LLM sends thoughts separately from its answer, or seems to hide them.
        has_end: True once a finish reason arrives, False while one is expected, None if the LLM may send none.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model: str = ""
    prompt_tokens: int = 0
    response_id: str = ""
    local_answer: object | None = None
    has_thoughts: bool = False
    has_end: bool | None = None

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Add tokens and their log-probabilities."""
        self.tokens += logprobs[0]
        self.logprobs += logprobs[1]

    def set_response(self, response_id: str | None) -> None:
        """Set `response_id` and `local_answer` if the id is that of a local LLM's answer; otherwise do nothing."""
        if response_id and self.local_answer is None:
            self.local_answer = find_answer(response_id)
            self.response_id = response_id if self.local_answer is not None else ""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def thinks(self) -> bool:
        """Whether the LLM thinks before it answers, so that its first tokens say nothing about the answer."""
        return self.has_thoughts or bool(split_thoughts(self.text).thoughts)

    @property
    def count(self) -> int:
        """Number of tokens; without log-probabilities, the number of text chunks or of words, whichever is larger."""
        return len(self.tokens) or max(len(self.pieces), count_words(self.text))

    def draft(self, *, finished: bool) -> Draft:
        """Return the answer so far as a draft, with its tokens if they agree with the text."""
        text = self.text.strip()
        # If a parser has changed the text, the tokens and their probabilities do not belong to it.
        token_fields: dict[str, Any] = {}
        if self.tokens and "".join(self.tokens).strip().startswith(text):
            token_fields = {
                "tokens": tuple(self.tokens),
                "logprobs": tuple(self.logprobs),
                "response_id": self.response_id,
            }
        return Draft(
            text=text,
            finished=finished,
            source="llm",
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            **token_fields,
        )


class BufferedAnswer(ABC):
    """An answer of the direct arm (the LLM without passages): held back until judged, then released or cancelled.

    Args:
        source: The stream of the answer.
        fallback: The same stream without log-probabilities, for an LLM that rejects them; None if ``source`` does
            not request them.

    Attributes:
        partial: What has been read of the answer.
        chunks: The chunks that are held back.
        ended: Whether the stream has ended.
        can_be_judged: False once the answer cannot be judged, for example because of a tool call or a parsed object.
        has_other_content: Whether a chunk had content other than text, which may or may not be part of the answer.
        error: The exception that the arm raised, or a `ServerError` for a stream that broke off; None if neither.
    """

    def __init__(self, source: ChunkStream, fallback: ChunkStream | None = None) -> None:
        self.partial = PartialAnswer()
        self.source = source
        self.fallback = fallback
        self._uses_fallback = False
        self.chunks: deque[Any] = deque()
        self.ended = False
        self.can_be_judged = True
        self.has_other_content = False
        self.error: Exception | None = None

    @property
    def silent_chunks(self) -> int:
        """Number of chunks without text; every chunk with text has added a piece."""
        return len(self.chunks) - len(self.partial.pieces)

    @abstractmethod
    def read(self, chunk: Any) -> bool:
        """Add the text of a chunk to `partial`; return False if the answer can no longer be judged."""

    def set_logprobs(self, *, enabled: bool) -> None:  # noqa: B027 - needed only with a fallback
        """Set whether later direct answers request log-probabilities; does nothing by default."""

    def flush_events(self) -> Flow[None]:
        """Pass the events of the chunks released so far to listeners; does nothing by default."""
        yield from ()

    def buffer(self, tokens: int) -> Flow[None]:
        """Hold the answer back until it has ``tokens`` tokens, ends, fails, shows thoughts, or cannot be judged."""
        while not self.ended and self.can_be_judged and self.error is None:
            if self.silent_chunks >= MAX_SILENT_CHUNKS:
                if self.has_other_content:
                    self.can_be_judged = False
                    return
                self.partial.has_thoughts = True
            if self.partial.count >= tokens or self.partial.thinks:
                return
            try:
                chunk = yield Call(self.source.next, self.source.anext)
            except Exception as error:  # if the answer fails before it is judged, the router retrieves
                if is_interrupt(error):
                    raise
                # Only before the first chunk: a rejection comes at once, and a later error has another cause.
                if self.fallback is not None and not self.chunks and says_unsupported(error):
                    self.set_logprobs(enabled=False)
                    self.source, self.fallback = self.fallback, None
                    self._uses_fallback = True
                    continue
                if self._uses_fallback and not self.chunks:
                    # The LLM rejected not the log-probabilities but the question, perhaps because it is too long.
                    self.set_logprobs(enabled=True)
                self.error = error
                return
            if chunk is not END:
                self.chunks.append(chunk)
                self.can_be_judged = self.read(chunk)
                continue
            self.ended = True
            if self.has_other_content and not self.partial.text.strip():
                self.can_be_judged = False
            if self.partial.has_end is False:
                self.error = ServerError(
                    "The LLM's stream broke off: it ended without a finish reason.",
                    hint="Check the server's log, and the timeouts of any proxy servers in between.",
                )

    def draft(self) -> Draft | None:
        """Return the answer so far; None if it cannot be judged, or if the LLM thinks first.

        Raises:
            Exception: The arm raised it, or the stream broke off.
            EvidenceError: The arm has written nothing, or only white space.
        """
        if not self.can_be_judged:
            return None
        if self.error is not None:
            raise self.error
        if self.partial.thinks:
            return None
        if not self.partial.text.strip():
            raise EvidenceError(
                "The direct arm (the LLM without passages) wrote no text.",
                hint="Send this question to the LLM alone, and check that it answers with text.",
            )
        return self.partial.draft(finished=self.ended)

    def close(self) -> Flow[None]:
        """End the answer early, which also ends the request to the LLM."""
        try:
            yield Call(self.source.close, self.source.aclose)
        except Exception as error:  # the answer is no longer needed
            # Log without the message, which may quote the question.
            logger.info("Closing a stopped answer failed: %s", type(error).__name__)

    def cancel(self) -> Flow[None]:
        """End the answer early because the gate retrieves."""
        yield from self.close()

    def stream(self) -> Generator[Any]:
        """Yield the chunks of the answer: those held back, then new ones; close the stream at the end."""
        try:
            while (chunk := run(self._next_chunk())) is not END:
                yield chunk
        finally:
            run(self.close())
            run(self.flush_events())

    async def astream(self) -> AsyncGenerator[Any]:
        """Yield the chunks of the answer: those held back, then new ones; close the stream at the end."""
        try:
            while (chunk := await arun(self._next_chunk())) is not END:
                yield chunk
        finally:
            await arun(self.close())
            await arun(self.flush_events())

    def drain(self) -> Step:
        """Return a step that reads the answer to its end; its result is the list of all chunks, held ones first."""
        return Call(lambda: list(self.stream()), self._adrain)

    async def _adrain(self) -> list[Any]:
        return [chunk async for chunk in self.astream()]

    def _next_chunk(self) -> Flow[Any]:
        if self.chunks:
            chunk = self.chunks.popleft()
        elif self.ended:
            chunk = END
        else:
            chunk = yield Call(self.source.next, self.source.anext)
            self.ended = chunk is END
        yield from self.flush_events()
        return chunk
