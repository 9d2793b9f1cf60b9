"""The direct arm begins to answer: until its answer is released, only tracers hear of its runs.

Tracers see such runs as they happen, and as *cancelled* if they are cut short. Everybody else, such as
``astream_events``, LangGraph's message stream or a handler that prints tokens, may show them to a user: they are told
once the answer is released, and never of one that is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.log_stream import LogStreamCallbackHandler

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.langchain.chat_models import with_logprobs
from rgate_integrations.langchain.runnable import Run
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import message_logprobs

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
        text = text_of(chunk)
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
        """Ask the LLM for no log-probabilities, now and from now on."""
        self.direct.with_logprobs = None
        return ArmStream(self.direct.arm, *self._call)

    def whole(self) -> Flow[Any]:
        """Release the answer; returns the whole of it, or what the arm raised."""
        try:
            return added_up((yield self.drain()))
        except Exception as error:  # in a batch it concerns this input only
            return error


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
    if isinstance(chunk, Mapping):
        for key in _ANSWER_KEYS:
            if isinstance(chunk.get(key), str | BaseMessage):
                return text_of(chunk[key])
        if isinstance(chunk, AddableDict):
            return ""  # chains with several outputs stream one after another: their answer may come yet
    if isinstance(chunk, BaseMessage):
        calls = getattr(chunk, "tool_call_chunks", None) or getattr(chunk, "tool_calls", None)
        if not calls:
            return chunk.text
    return chunk if isinstance(chunk, str) else None


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


# --- what is told of its runs --------------------------------------------------------------------------------------

# Every event, and the attribute by which a handler says that it does not want it.
EVENTS = {
    "on_llm_start": "ignore_llm",
    "on_chat_model_start": "ignore_chat_model",
    "on_llm_new_token": "ignore_llm",
    "on_llm_end": "ignore_llm",
    "on_llm_error": "ignore_llm",
    "on_stream_event": "ignore_llm",
    "on_chain_start": "ignore_chain",
    "on_chain_end": "ignore_chain",
    "on_chain_error": "ignore_chain",
    "on_tool_start": "ignore_agent",
    "on_tool_end": "ignore_agent",
    "on_tool_error": "ignore_agent",
    "on_agent_action": "ignore_agent",
    "on_agent_finish": "ignore_agent",
    "on_retriever_start": "ignore_retriever",
    "on_retriever_end": "ignore_retriever",
    "on_retriever_error": "ignore_retriever",
    "on_retry": "ignore_retry",
    "on_custom_event": "ignore_custom_event",
    "on_text": None,
}


class GenerationCancelled(BaseException):
    """Raised in an LLM that writes what nobody wants any more. No error: nothing on the way is to handle it."""


class BufferingHandler:
    """Keeps what the runs of a begun answer say until it is released, and notes what the LLM writes.

    LangChain takes it for a handler of every event. Of the manager's other handlers tracers are told at once, and the
    rest what is flushed.

    Args:
        answer: Its `PartialAnswer` gets the tokens and log-probabilities of the LLM that answers.
        manager: The callback manager of a child, as ``get_child`` returns it; it is changed.
        cancelled: See `CancellableTracer`.

    Attributes:
        writing: The runs in which an LLM is writing.
    """

    run_inline = True  # what happened first is told first
    raise_error = False

    def __init__(self, answer: BufferedAnswer, manager: Any, cancelled: dict[str, Any]) -> None:
        self._answer = answer
        tracers, self._listeners = split_handlers(manager, cancelled)
        manager.set_handlers([*tracers, self])
        self._kept: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._writer: UUID | None = None
        self.writing: set[UUID] = set()
        self._shut = False

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:
            return partial(self._hear, name)
        if name.startswith("ignore_"):
            return False
        raise AttributeError(name)

    def shut_down(self) -> None:
        """Stop the LLM at its next token, and tell nobody of what is left.

        What is kept is forgotten now: an error among it would hold, by its traceback, the very generators of the arm,
        and the LLM's stream stayed open until garbage is collected.
        """
        self._shut = True
        self._kept.clear()

    def flush(self) -> Flow[None]:
        """Tell the listeners what was kept, in order."""
        while self._kept:
            name, values, options = self._kept.pop(0)
            yield Call(handle_event, ahandle_event, self._listeners, name, EVENTS[name], *values, **options)

    def _hear(self, event: str, *values: Any, **options: Any) -> None:
        """Keep an event, and note what it says of the answer."""
        if event == "on_llm_new_token":
            if self._shut:
                raise GenerationCancelled
            self._note(options.get("chunk"), options["run_id"])
        elif event in ("on_llm_start", "on_chat_model_start"):
            self.writing.add(options["run_id"])
        elif event in ("on_llm_end", "on_llm_error"):
            self.writing.discard(options["run_id"])
            # Of an LLM that streams, each chunk has been noted.
            if event == "on_llm_end" and options["run_id"] != self._writer:
                self._note(values[0].generations[0][0], options["run_id"])
        if self._listeners and not self._shut:
            self._kept.append((event, values, options))

    def _note(self, chunk: Any, run_id: UUID) -> None:
        if run_id != self._writer:  # the LLM that writes last is the one that answers
            self._writer = run_id
            self._answer.partial = PartialAnswer(self._answer.partial.pieces)
        if not isinstance(chunk, ChatGeneration):
            return
        answer = self._answer.partial
        metadata = {**chunk.message.response_metadata, **(chunk.generation_info or {})}
        tokens, logprobs = message_logprobs(metadata)
        answer.tokens += tokens
        answer.logprobs += logprobs
        answer.set_response(chunk.message.id)
        answer.model = str(metadata.get("model_name") or answer.model)
        # OpenAI's two APIs end with one of these; of other LLMs, nothing is known.
        if metadata.get("finish_reason") or metadata.get("status"):
            answer.has_end = True
        elif metadata.get("model_provider") == "openai" and answer.has_end is None:
            answer.has_end = False
        # Some LLMs tell it with the first chunk, others with the last, which a stopped one never writes.
        usage = getattr(chunk.message, "usage_metadata", None)
        if usage:
            answer.prompt_tokens = max(answer.prompt_tokens, usage["input_tokens"])


class CancellableTracer:
    """Stands for a tracer in whose traces runs that are cut short are cancelled, and no errors.

    Args:
        tracer: The tracer.
        cancelled: What the traces say of such runs; nothing is cut short as long as it is empty.
    """

    run_inline = True  # told before whoever waits for a run to end

    def __init__(self, tracer: Any, cancelled: dict[str, Any]) -> None:
        self._tracer = tracer
        self._cancelled = cancelled

    @property  # type: ignore[misc]  # of an object it can be set
    def __class__(self) -> Any:  # by its type LangChain tells whether it traces already
        return type(self._tracer)

    def __getattr__(self, name: str) -> Any:
        if self._cancelled and (name == "on_chain_end" or name.endswith("_error")):
            return partial(self._cancel, name)
        return getattr(self._tracer, name)

    def copy_with_metadata_defaults(self, **defaults: Any) -> CancellableTracer:
        """Return the copy of LangSmith's tracer that LangChain makes for a run."""
        return CancellableTracer(self._tracer.copy_with_metadata_defaults(**defaults), self._cancelled)

    def _cancel(self, event: str, value: Any, *, run_id: UUID, **facts: Any) -> None:
        """Trace the end of a run as its cancellation, with what it has written or returned."""
        if event == "on_llm_error":
            response = facts.get("response") or LLMResult(generations=[[]])
            told = response.model_copy(update={"llm_output": self._cancelled})
            self._tracer.on_llm_end(told, run_id=run_id)
        elif event == "on_retriever_error":
            self._tracer.on_retriever_end([], run_id=run_id)
        elif event == "on_tool_error":
            self._tracer.on_tool_end("", run_id=run_id)
        elif event == "on_chain_error":
            self._tracer.on_chain_end(self._cancelled, run_id=run_id)
        else:
            self._tracer.on_chain_end({**self._cancelled, "output": value}, run_id=run_id)


def split_handlers(
    manager: Any, cancelled: dict[str, Any]
) -> tuple[list[CancellableTracer], list[BaseCallbackHandler]]:
    """Return what stands for the tracers of a callback manager, and its other handlers."""
    tracers = []
    listeners = []
    for handler in manager.handlers:
        # That of ``astream_log`` shows runs.
        if isinstance(handler, BaseTracer) and not isinstance(handler, LogStreamCallbackHandler):
            tracers.append(CancellableTracer(handler, cancelled))
        else:
            listeners.append(handler)
    return tracers, listeners
