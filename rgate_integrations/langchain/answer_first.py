"""Answer first: the direct arm streams its answer, whose chunks and events are held back until the gate judges it.

Tracers see the arm's runs as they happen, and as *cancelled* if they are cut short. Listeners, such as
``astream_events``, LangGraph's message stream or a handler that prints tokens, may show events to a user. So they get
the events only once the answer is released, and none if it is discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, ChunkStream
from rgate_integrations.langchain.arm_callbacks import (
    BufferingHandler,
    GenerationCancelled,
    inherited_config,
)
from rgate_integrations.langchain.chat_models import runnables_in, with_logprobs
from rgate_integrations.langchain.runnable import Run
from rgate_integrations.runtime.flow import Flow

CANCELLATION = "by the retrieval gate: the partial answer is probably wrong"
# Iterations of the event loop to wait for nested generators, each of which needs a few to end.
_MAX_TURNS = 1_000


class DirectArm:
    """The arm for known questions, with and without log-probabilities.

    Args:
        arm: A runnable that answers without retrieval.

    Attributes:
        with_logprobs: A copy of the arm that requests log-probabilities; None if that cannot be done, see
            `rgate_integrations.langchain.chat_models.with_logprobs`.
        wants_logprobs: Whether to request log-probabilities; False once the LLM has refused them.
        is_cumulative: Whether a parser in the arm sends the whole object so far in each chunk.
    """

    def __init__(self, arm: Runnable[Any, Any]) -> None:
        self.arm = arm
        self.with_logprobs = with_logprobs(arm)
        self.wants_logprobs = True
        self.is_cumulative = next(runnables_in(arm, BaseCumulativeTransformOutputParser), None) is not None

    def merge(self, chunks: Sequence[Any]) -> Any:
        """Merge the arm's chunks into what its ``invoke`` would have returned; None without chunks.

        Texts and messages are concatenated. So are lists, unless a cumulative parser such as LangChain's
        `JsonOutputParser` sends the whole list again in each chunk. `AddableDict` chunks are merged key by key, and
        their values by these rules. Of any other type, the last chunk is returned.
        """
        if not chunks:
            return None
        if all(isinstance(chunk, AddableDict) for chunk in chunks):
            values: dict[str, list[Any]] = {}
            for chunk in chunks:
                for key, value in chunk.items():
                    values.setdefault(key, []).append(value)
            return {key: self.merge(parts) for key, parts in values.items()}
        addable: Any = (str, BaseMessageChunk) if self.is_cumulative else (str, BaseMessageChunk, list)
        total: Any = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk if isinstance(total, addable) and isinstance(chunk, type(total)) else chunk
        # As `invoke` would return it: a message, not a chunk.
        return message_chunk_to_message(total) if isinstance(total, BaseMessageChunk) else total


class ArmAnswer(BufferedAnswer):
    """One answer of the direct arm.

    Args:
        direct: The arm.
        parent: The input, and the run in which the arm answers it.
    """

    def __init__(self, direct: DirectArm, parent: Run) -> None:
        config = parent.child(tags=("direct",))
        self._direct = direct
        self._input = parent.input
        self._cancellation: dict[str, Any] = {}
        self._events = BufferingHandler(self, config["callbacks"], self._cancellation)
        call = (parent.input, config, parent.options, self._events)
        source, fallback = ArmStream(direct.arm, *call), None
        # The plain arm stays available in case the LLM refuses log-probabilities.
        if direct.with_logprobs is not None and direct.wants_logprobs:
            source, fallback = ArmStream(direct.with_logprobs, *call), source
        super().__init__(source, fallback)

    def read(self, chunk: Any) -> bool:
        """Add the text of a chunk; return False for a tool call or a parsed object, which cannot be judged."""
        if isinstance(chunk, AddableDict) and isinstance(self._input, Mapping):
            # A chain such as RunnablePassthrough.assign first passes its input on.
            chunk = AddableDict(
                {k: v for k, v in chunk.items() if k not in self._input or v is not self._input[k]}
            )
        text = extract_text(chunk)
        if text:
            self.partial.pieces.append(text)
        elif isinstance(chunk, AddableDict) and chunk and _find_answer_key(chunk) is None:
            self.has_other_content = True
        return text is not None

    def set_logprobs(self, *, enabled: bool) -> None:
        """Set whether the arm is asked for log-probabilities from now on."""
        self._direct.wants_logprobs = enabled

    def flush_events(self) -> Flow[None]:
        """Pass the events since the last flush to the listeners."""
        yield from self._events.flush()

    def cancel(self) -> Flow[None]:
        """Stop the LLM; traces show that it was cancelled, and after how many tokens."""
        # Before closing, because closing makes the tracers record the end of the runs.
        self._cancellation.update(cancelled=CANCELLATION, tokens=self.partial.count)
        yield from self.close()

    def result(self) -> Flow[Any]:
        """Release the answer, and return it in one piece; if the arm fails, return its exception."""
        try:
            return self._direct.merge((yield self.drain()))
        except Exception as error:  # in a batch, it must not fail the other inputs
            return error


class ArmStream(ChunkStream):
    """The chunks of an arm. Closing it stops the LLM, even if the arm would otherwise read the whole answer.

    Args:
        arm: The arm.
        value: Its input.
        config: The config of its run.
        options: Further arguments of its call.
        events: The handler that stops the LLM.
    """

    def __init__(
        self,
        arm: Runnable[Any, Any],
        value: Any,
        config: RunnableConfig,
        options: dict[str, Any],
        events: BufferingHandler,
    ) -> None:
        super().__init__(
            partial(arm.stream, value, config, **options),
            partial(arm.astream, value, config, **options),
            partial(inherited_config, config),
        )
        self._events = events

    def close(self) -> None:
        """Stop the LLM at its next token, then close the arm.

        If the arm were closed at once, a synchronous parser would read the rest of its input for its trace, and so
        the LLM would write the whole answer.
        """
        self._events.shut_down()
        with suppress(GenerationCancelled):
            while self._events.running and self.next() is not END:
                pass
            with self._context():
                super().close()

    async def aclose(self) -> None:
        """Stop the LLM, and wait at most `_MAX_TURNS` turns of the event loop for its run to end."""
        self._events.shut_down()
        with self._context(), suppress(GenerationCancelled):
            await super().aclose()
        # Each inner generator ends in a separate task, which the loop starts after the outer one has ended.
        for _ in range(_MAX_TURNS):
            if not self._events.running:
                return
            await asyncio.sleep(0)


# Keys of an answer in order of preference; `with_structured_output(include_raw=True)` uses the last.
_ANSWER_KEYS = ("answer", "output", "result", "response", "generation", "content", "text", "raw")


def extract_text(chunk: Any) -> str | None:
    """Return a chunk's text: empty if a later chunk may have the answer, None for a tool call or a parsed object.

    Args:
        chunk: A string, a message, or a dict with one of these.
    """
    if isinstance(chunk, Mapping):
        key = _find_answer_key(chunk)
        if key is not None:
            return extract_text(chunk[key])
        if isinstance(chunk, AddableDict) and _ANSWER_KEYS[0] not in chunk:
            return ""  # a chain streams its keys one after another, so the answer may come later
    if isinstance(chunk, BaseMessage):
        calls = getattr(chunk, "tool_call_chunks", None) or getattr(chunk, "tool_calls", None)
        return None if calls else chunk.text
    return chunk if isinstance(chunk, str) else None


def _find_answer_key(chunk: Mapping[str, Any]) -> str | None:
    return next((key for key in _ANSWER_KEYS if isinstance(chunk.get(key), str | BaseMessage)), None)
