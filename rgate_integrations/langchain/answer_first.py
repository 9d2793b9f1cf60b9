"""The direct arm begins to answer: as a stream of which only tracers hear until it is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.langchain.arms import Arms
from rgate_integrations.langchain.buffering import (
    BufferingHandler,
    CancelledRun,
    GenerationCancelled,
    attach_handler,
)
from rgate_integrations.langchain.runnable import RunBatch
from rgate_integrations.runtime.flow import Flow

STOPPED = "by the retrieval gate: the begun answer is not known to be right"
_TURNS = 1_000  # of the loop, to wait for generators that end; each takes a few


class ArmAnswer(BufferedAnswer):
    """One answer of the direct arm, whose runs tell their listeners only what is released.

    Args:
        arms: The arms of the router.
        batch: The batch that the input belongs to.
        place: Its place there.
    """

    def __init__(self, arms: Arms, batch: RunBatch, place: int) -> None:
        config = batch.child(place, "direct")
        config["tags"] = [*config.get("tags", []), "direct"]
        self.arms = arms
        self.cancelled = CancelledRun()
        answer = PartialAnswer()
        self.events = attach_handler(config["callbacks"], self.cancelled, answer)
        self._asking = (batch.inputs[place], config, batch.options, self.events)
        if arms.with_logprobs is None:
            super().__init__(answer, ArmStream(arms.direct, *self._asking))
        else:
            super().__init__(answer, ArmStream(arms.with_logprobs, *self._asking), self._without_logprobs)

    def read(self, chunk: Any) -> bool:
        """Note the text of a chunk; returns False for a tool call or a parsed object."""
        text = text_of(chunk)
        if text:
            self.partial.pieces.append(text)
        return text is not None

    def flush_events(self) -> Flow[None]:
        """Tell listeners what the runs said since the last time."""
        yield from self.events.flush()

    def cancel(self) -> Flow[None]:
        """Stop the LLM; its traces say that it was cancelled, and how much it had written."""
        self.cancelled.cancel(STOPPED, tokens=self.partial.count)
        yield from self.close()

    def _without_logprobs(self) -> ArmStream:
        """Ask the LLM for no log-probabilities, now and from now on."""
        self.arms.with_logprobs = None
        return ArmStream(self.arms.direct, *self._asking)

    def whole(self) -> Flow[list[Any]]:
        """Release the answer; returns the whole of it, or what the arm raised, as a batch of one does."""
        try:
            chunks = yield self.drain()
        except Exception as error:  # in a batch it concerns this input only
            return [error]
        return [added_up(chunks)]


class ArmStream(TokenStream):
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

    def shut(self) -> None:
        """Stop the LLM at its next token, then close the arm.

        Closed while it waits, a synchronous parser reads what is left of its input, for its trace: the whole answer
        would be written.
        """
        self._events.shut_down()
        try:
            while self._events.writing and self.pull() is not END:
                pass
            super().shut()
        except GenerationCancelled:
            pass

    async def ashut(self) -> None:
        """Stop the LLM, and wait until it has ended."""
        self._events.shut_down()
        await super().ashut()
        # Of generators one within another, each inner one ends in a task that the loop starts when it is let go.
        for _ in range(_TURNS):
            if not self._events.writing:
                return
            await asyncio.sleep(0)


# The last is that of `with_structured_output(include_raw=True)`.
_ANSWER_KEYS = ("answer", "output", "result", "text", "raw")


def text_of(chunk: Any) -> str | None:
    """Return the text of an answer in a chunk; None for a tool call or a parsed object."""
    if isinstance(chunk, str):
        return chunk
    if isinstance(chunk, BaseMessage):
        calls = (
            getattr(chunk, "tool_call_chunks", None),
            getattr(chunk, "tool_calls", None),
            chunk.additional_kwargs.get("tool_calls"),
            chunk.additional_kwargs.get("function_call"),
        )
        return None if any(calls) else chunk.text
    if isinstance(chunk, Mapping):
        for key in _ANSWER_KEYS:
            if isinstance(chunk.get(key), str | BaseMessage):
                return text_of(chunk[key])
        # Chains with several outputs stream one after another: their answer may come yet.
        return "" if isinstance(chunk, AddableDict) else None
    return None


def added_up(chunks: Sequence[Any]) -> Any:
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
