"""The direct arm begins to answer: until its answer is released, only tracers hear of its runs.

Tracers see such runs as they happen, and as *cancelled* if they are cut short. Everybody else, such as
``astream_events``, LangGraph's message stream or a handler that prints tokens, may show them to a user: they get the
events once the answer is released, and none of an answer that is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, ChunkStream, PartialAnswer
from rgate_integrations.langchain.arm_callbacks import BufferingHandler, GenerationCancelled
from rgate_integrations.langchain.chat_models import with_logprobs
from rgate_integrations.langchain.runnable import Run
from rgate_integrations.runtime.flow import Flow

STOPPED = "by the retrieval gate: the begun answer is not known to be right"
_TURNS = 1_000  # of the loop, to wait for generators that end; each takes a few


class DirectArm:
    """The arm for known questions, in two forms.

    Attributes:
        arm: The arm.
        with_logprobs: The arm, asked for log-probabilities; None where its LLM has none, or has refused them.
    """

    def __init__(self, arm: Runnable[Any, Any]) -> None:
        self.arm = arm
        self.with_logprobs = with_logprobs(arm)


class ArmAnswer(BufferedAnswer):
    """One answer of the direct arm, whose runs tell their listeners only what is released.

    Args:
        direct: The arm.
        single: The input and its run.
    """

    def __init__(self, direct: DirectArm, single: Run) -> None:
        config = single.child("direct")
        config["tags"] = [*config.get("tags", []), "direct"]
        self.direct = direct
        self.cancelled: dict[str, Any] = {}
        self.events = BufferingHandler(self, config["callbacks"], self.cancelled)
        self._call = (single.input, config, single.options, self.events)
        if direct.with_logprobs is None:
            super().__init__(PartialAnswer(), ArmStream(direct.arm, *self._call))
        else:
            super().__init__(
                PartialAnswer(), ArmStream(direct.with_logprobs, *self._call), self._without_logprobs
            )

    def read(self, chunk: Any) -> bool:
        """Note the text of a chunk; returns False for a tool call or a parsed object."""
        text = extract_text(chunk)
        if text:
            self.partial.pieces.append(text)
        return text is not None

    def flush_events(self) -> Flow[None]:
        """Tell listeners what the runs said since the last time."""
        yield from self.events.flush()

    def cancel(self) -> Flow[None]:
        """Stop the LLM; its traces say that it was cancelled, and how much it had written."""
        self.cancelled.update(cancelled=STOPPED, tokens=self.partial.count)
        yield from self.close()

    def _without_logprobs(self) -> ArmStream:
        return ArmStream(self.direct.arm, *self._call)

    def remember(self, *, has_logprobs: bool) -> None:
        """Let the arm be asked for none from now on, if its LLM has none."""
        if not has_logprobs:
            self.direct.with_logprobs = None

    def whole(self) -> Flow[Any]:
        """Release the answer; returns the whole of it, or what the arm raised."""
        try:
            return merge_chunks((yield self.drain()))
        except Exception as error:  # in a batch it concerns this input only
            return error


class ArmStream(ChunkStream):
    """The chunks of an arm, which ends when it is closed, even if it reads an LLM to its end."""

    def __init__(
        self,
        arm: Runnable[Any, Any],
        value: Any,
        config: RunnableConfig,
        options: dict[str, Any],
        events: BufferingHandler,
    ) -> None:
        super().__init__(
            partial(arm.stream, value, config, **options), partial(arm.astream, value, config, **options)
        )
        self._events = events

    def close(self) -> None:
        """Stop the LLM at its next token, then close the arm.

        Closed while it waits, a synchronous parser reads what is left of its input, for its trace: the whole answer
        would be written.
        """
        self._events.shut_down()
        try:
            while self._events.writing and self.next() is not END:
                pass
            super().close()
        except GenerationCancelled:
            pass

    async def aclose(self) -> None:
        """Stop the LLM, and wait until it has ended."""
        self._events.shut_down()
        await super().aclose()
        # Of generators one within another, each inner one ends in a task that the loop starts when it is let go.
        for _ in range(_TURNS):
            if not self._events.writing:
                return
            await asyncio.sleep(0)


# The last is that of `with_structured_output(include_raw=True)`.
_ANSWER_KEYS = ("answer", "output", "result", "text", "raw")


def extract_text(chunk: Any) -> str | None:
    """Return the text of an answer in a chunk; None for a tool call or a parsed object."""
    if isinstance(chunk, Mapping):
        for key in _ANSWER_KEYS:
            if isinstance(chunk.get(key), str | BaseMessage):
                return extract_text(chunk[key])
        if isinstance(chunk, AddableDict):
            return ""  # chains with several outputs stream one after another: their answer may come yet
    if isinstance(chunk, BaseMessage):
        calls = getattr(chunk, "tool_call_chunks", None) or getattr(chunk, "tool_calls", None)
        if not calls:
            return chunk.text
    return chunk if isinstance(chunk, str) else None


def merge_chunks(chunks: Sequence[Any]) -> Any:
    """Return the answer that chunks add up to: what the arm, invoked, would have returned."""
    if not chunks:
        return None
    total = chunks[0]
    for chunk in chunks[1:]:
        addable = isinstance(total, str | BaseMessageChunk | AddableDict) and isinstance(chunk, type(total))
        if isinstance(total, list) and isinstance(chunk, list):
            addable = chunk[: len(total)] != total
        # Parsers give the whole object anew, each time with more in it.
        total = total + chunk if addable else chunk
    return message_chunk_to_message(total) if isinstance(total, BaseMessageChunk) else total
