"""An answer that is being written: read from a stream, held back until it is judged, then released or cancelled."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rgate_integrations.answering.drafting import says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.models.streamed_answer import find_answer
from rgate_integrations.runtime.flow import Call, Flow, Step, arun, run
from rgate_integrations.runtime.replies import split_thoughts

_log = logging.getLogger("rgate_integrations")

MOST_SILENT = 32
"""Chunks without text that are held back: an LLM that has written none by then thinks, and its client hides that."""
END: Final = object()
"""What a `ChunkStream` gives after the last chunk."""


class ChunkStream:
    """A lazily opened stream of chunks, sync or async: the LLM is asked when the first chunk is wanted.

    Args:
        open: Returns the iterator.
        aopen: Returns the asynchronous iterator, or an awaitable of it.
    """

    def __init__(self, open: Callable[[], Iterator[Any]], aopen: Callable[[], Any]) -> None:
        self._open = open
        self._aopen = aopen
        self._iterator: Any = None

    def next(self) -> Any:
        """Return the next chunk, or `END`."""
        if self._iterator is None:
            self._iterator = iter(self._open())
        return next(self._iterator, END)

    async def anext(self) -> Any:
        """Await the next chunk, or `END`."""
        if self._iterator is None:
            opened = self._aopen()
            if hasattr(opened, "__await__"):
                opened = await opened
            self._iterator = aiter(opened)
        return await anext(self._iterator, END)

    def close(self) -> None:
        """Close the iterator early, which also ends the request to the LLM."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    async def aclose(self) -> None:
        """Close the asynchronous iterator early, which also ends the request to the LLM."""
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
        has_thoughts: Whether the LLM sends thoughts beside its answer.
        has_end: True once a finish reason arrives, False while one is expected, None if the provider sends none.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model: str = ""
    prompt_tokens: int = 0
    response_id: str = ""
    kept: object | None = None
    has_thoughts: bool = False
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
    def thinks(self) -> bool:
        """Whether the LLM thinks before it answers: the first tokens of that say nothing of the answer."""
        return self.has_thoughts or bool(split_thoughts(self.text).thoughts)

    @property
    def count(self) -> int:
        """How many tokens there are; where the LLM does not tell, chunks or words, whichever are more."""
        return len(self.tokens) or max(len(self.pieces), len(self.text.split()))

    def draft(self, *, finished: bool) -> Draft:
        """Return it as the LLM's draft; its tokens are in it if the text is made of them."""
        text = self.text.strip()
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
    """One answer of the direct arm, held back until it is judged; then it is streamed, drained or cancelled.

    Args:
        partial: Gets what can be read of the answer.
        source: The answer.
        fallback: Makes the same answer, asked for without log-probabilities; it is called if the LLM says that it
            does not take the first form. None if nothing was asked for.

    Attributes:
        chunks: The chunks that are held.
        ended: Whether the answer is whole.
        has_text: Whether there is text to judge; of a tool call or a parsed object the question decides.
        error: What the arm raised.
    """

    def __init__(
        self, partial: PartialAnswer, source: ChunkStream, fallback: Callable[[], ChunkStream] | None = None
    ) -> None:
        self.partial = partial
        self.source = source
        self.fallback = fallback
        self._falls_back = False
        self.chunks: deque[Any] = deque()
        self.ended = False
        self.has_text = True
        self.error: Exception | None = None

    @abstractmethod
    def read(self, chunk: Any) -> bool:
        """Note what a chunk says in ``partial``; returns False if it is something that cannot be judged."""

    def remember(self, *, has_logprobs: bool) -> None:  # noqa: B027 - only what has a fallback has to
        """Note whether the LLM is to be asked for log-probabilities from now on; by default, nothing."""

    def flush_events(self) -> Flow[None]:
        """Tell listeners of the released answer what came since the last time; without listeners, nothing."""
        yield from ()

    def buffer(self, tokens: int) -> Flow[None]:
        """Hold the answer back until so many tokens are written, it ends, fails, or cannot be judged."""
        while not self.ended and self.has_text and self.error is None:
            if len(self.chunks) - len(self.partial.pieces) >= MOST_SILENT:
                self.partial.has_thoughts = True
            if self.partial.count >= tokens or self.partial.thinks:
                return
            try:
                chunk = yield Call(self.source.next, self.source.anext)
            except Exception as error:  # an answer that fails while it is held retrieves
                if self.fallback is None or self.chunks or not says_unsupported(error):
                    self.error = error
                    self._end_fallback(worked=False)
                else:
                    self.source = self.fallback()
                    self.fallback = None
                    self._falls_back = True
                continue
            self._end_fallback(worked=True)
            if chunk is not END:
                self.chunks.append(chunk)
                self.has_text = self.read(chunk)
                continue
            self.ended = True
            if self.partial.has_end is False:
                self.error = ServerError(
                    "The LLM's stream broke off: it ended without a finish reason.",
                    hint="Look at the server's log, and at the time limits of what stands between.",
                )

    def _end_fallback(self, *, worked: bool) -> None:
        """Remember what was refused: the log-probabilities, or the question, such as one that is too long."""
        if self._falls_back:
            self._falls_back = False
            self.remember(has_logprobs=not worked)

    def draft(self) -> Draft | None:
        """Return what has been written; None where there is no text to judge, or thoughts go before it.

        Raises:
            Exception: What the arm raised.
            EvidenceError: It has written nothing.
        """
        if not self.has_text:
            return None
        if self.error is not None:
            raise self.error
        if self.partial.thinks:
            return None
        if not self.partial.text.strip():
            raise EvidenceError("The direct arm wrote nothing that could be judged.")
        return self.partial.draft(finished=self.ended)

    def close(self) -> Flow[None]:
        """End the answer early, which ends the request to the LLM, too."""
        try:
            yield Call(self.source.close, self.source.aclose)
        except Exception as error:  # the answer is not needed any more
            # Without its message, which may quote the question.
            _log.info("An answer that was stopped failed: %s", type(error).__name__)

    def cancel(self) -> Flow[None]:
        """End the answer early since the gate says so."""
        yield from self.close()

    def stream(self) -> Generator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            while (chunk := run(self._next_chunk())) is not END:
                yield chunk
        finally:
            run(self.close())

    async def astream(self) -> AsyncGenerator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            while (chunk := await arun(self._next_chunk())) is not END:
                yield chunk
        finally:
            await arun(self.close())

    def drain(self) -> Step:
        """Release the answer: the step's result is a list of all its chunks."""
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
