"""What listeners are told of runs that may turn out not to be needed: begun answers, and searches made ahead.

Tracers see such runs as they happen, and as *cancelled* if they are cut short. Everybody else, such as
``astream_events``, LangGraph's message stream or a handler that prints tokens, may show them to a user: they are told
once an answer is released, and never of one that is not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.log_stream import LogStreamCallbackHandler

from rgate_integrations.answering.partial_answer import PartialAnswer
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import message_logprobs

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


class CancelledRun:
    """Whether runs were cut short, and what their traces say then; nothing before `cancel` is called."""

    def __init__(self) -> None:
        self.outputs: dict[str, Any] | None = None
        self._open: dict[UUID, BaseTracer] = {}
        self._ended: set[UUID] = set()

    def cancel(self, reason: str, **facts: Any) -> None:
        """Say that whatever ends from now on was cancelled.

        Args:
            reason: Why, in a few words.
            **facts: What else the traces say.
        """
        self.outputs = {"cancelled": reason, **facts}

    def views(self, handlers: Sequence[BaseCallbackHandler]) -> list[BaseCallbackHandler]:
        """Return handlers of which the tracers take the end of a run that was cut short as cancelled."""
        return [self._view(handler) if _traces(handler) else handler for handler in handlers]

    def end_searches(self) -> None:
        """End the runs of cancelled retrievers: LangChain leaves them open."""
        for run_id, tracer in list(self._open.items()):
            tracer.on_retriever_end([], run_id=run_id)
        self._open.clear()

    def _view(self, tracer: Any) -> BaseCallbackHandler:
        # The view shares what the tracer keeps of its runs, and is of its type: by that LangChain tells whether it
        # traces already. (`copy.copy` of a tracer is the tracer itself.)
        view = object.__new__(type(tracer))
        vars(view).update(vars(tracer), run_inline=True)  # told before whoever waits for a run to end
        for kind in ("chain", "llm", "retriever", "tool"):
            for how in ("end", "error"):
                name = f"on_{kind}_{how}"
                setattr(view, name, functools.partial(self._ending, tracer, kind, name))
        view.on_retriever_start = functools.partial(self._searching, tracer)
        found: BaseCallbackHandler = view
        return found

    def _searching(self, tracer: BaseTracer, /, *values: Any, run_id: UUID, **options: Any) -> Any:
        self._open[run_id] = tracer
        return tracer.on_retriever_start(*values, run_id=run_id, **options)

    def _ending(
        self, tracer: BaseTracer, kind: str, name: str, value: Any, /, *, run_id: UUID, **options: Any
    ) -> Any:
        self._open.pop(run_id, None)
        if run_id in self._ended:  # an awaited chat model that was stopped ends twice
            return None
        if self.outputs is None or (kind != "chain" and not name.endswith("error")):
            return getattr(tracer, name)(value, run_id=run_id, **options)
        if kind == "chain":
            partly = {} if isinstance(value, BaseException) else {"output": value}
            return tracer.on_chain_end({**self.outputs, **partly}, run_id=run_id)
        self._ended.add(run_id)
        if kind == "llm":
            response = options.get("response") or LLMResult(generations=[[]])
            told = response.model_copy(update={"llm_output": self.outputs})
            return tracer.on_llm_end(told, run_id=run_id)
        if kind == "retriever":
            return tracer.on_retriever_end([], run_id=run_id)
        return tracer.on_tool_end("", run_id=run_id)


class GenerationCancelled(BaseException):
    """Raised in an LLM that writes what nobody wants any more. No error: nothing on the way is to handle it."""

    # An awaited chat model takes whatever is no `Exception` for a result before it raises it.
    generations: tuple[()] = ()
    llm_output = None


class BufferingHandler(BaseCallbackHandler):
    """Keeps what the runs of a begun answer say until it is released, and notes what the LLM writes.

    Args:
        listeners: Who is told then.
        partial: Gets the tokens and log-probabilities of the LLM that answers.

    Attributes:
        shut: Whether the next token raises `GenerationCancelled`; `shut_down` sets it.
    """

    run_inline = True  # what happened first is told first

    def __init__(self, listeners: Sequence[BaseCallbackHandler], partial: PartialAnswer) -> None:
        self.listeners = list(listeners)
        self.partial = partial
        self._kept: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._writer: UUID | None = None
        self._open: set[UUID] = set()
        self.shut = False

    @property
    def writing(self) -> bool:
        """Whether an LLM is writing."""
        return bool(self._open)

    def shut_down(self) -> None:
        """Stop the LLM at its next token, and tell nobody of what is left.

        What is kept is forgotten now: an error among it would hold, by its traceback, the very generators of the arm,
        and the LLM's stream stayed open until garbage is collected.
        """
        self.shut = True
        self._kept.clear()

    def flush(self) -> Flow[None]:
        """Tell the listeners what was kept, in order."""
        while self._kept and self.listeners:
            name, values, options = self._kept.pop(0)
            yield Call(handle_event, ahandle_event, self.listeners, name, EVENTS[name], *values, **options)

    def hear(self, name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Keep an event, and note what it says of the answer."""
        if name == "on_llm_new_token":
            if self.shut:
                raise GenerationCancelled
            self._note(options.get("chunk"), options["run_id"])
        elif name in ("on_llm_start", "on_chat_model_start"):
            self._open.add(options["run_id"])
        elif name in ("on_llm_end", "on_llm_error"):
            self._open.discard(options["run_id"])
            if name == "on_llm_end":
                self._note_whole(values[0], options["run_id"])
        if self.listeners and not self.shut:
            self._kept.append((name, values, options))

    def _note_whole(self, response: LLMResult, run_id: UUID) -> None:
        """Note an answer of an LLM that does not stream; of one that does, each chunk has been noted."""
        if run_id == self._writer:
            return
        for generations in response.generations[:1]:
            for generation in generations[:1]:
                self._note(generation, run_id)

    def _note(self, chunk: Any, run_id: UUID) -> None:
        if run_id != self._writer:  # the LLM that writes last is the one that answers
            self._writer = run_id
            self.partial.tokens.clear()
            self.partial.logprobs.clear()
            self.partial.prompt_tokens = 0
            self.partial.response_id, self.partial.kept = "", None
            self.partial.has_end = None
        if not isinstance(chunk, ChatGeneration):
            return
        metadata = {**chunk.message.response_metadata, **(chunk.generation_info or {})}
        tokens, logprobs = message_logprobs(metadata)
        self.partial.tokens += tokens
        self.partial.logprobs += logprobs
        self.partial.set_response(chunk.message.id)
        self.partial.model = str(metadata.get("model_name") or self.partial.model)
        # OpenAI's two APIs end with one of these; of other LLMs, nothing is known.
        if metadata.get("finish_reason") or metadata.get("status"):
            self.partial.has_end = True
        elif metadata.get("model_provider") == "openai" and self.partial.has_end is None:
            self.partial.has_end = False
        # Some LLMs tell it with the first chunk, others with the last, which a stopped one never writes.
        usage = getattr(chunk.message, "usage_metadata", None)
        if usage:
            self.partial.prompt_tokens = max(self.partial.prompt_tokens, usage["input_tokens"])


def _hear(name: str) -> Any:
    def told(self: BufferingHandler, *values: Any, **options: Any) -> None:
        self.hear(name, values, options)

    return told


for _name in EVENTS:
    setattr(BufferingHandler, _name, _hear(_name))


def attach_handler(manager: Any, cancelled: CancelledRun, partial: PartialAnswer) -> BufferingHandler:
    """Let a callback manager tell tracers at once and keep the rest; returns who keeps it.

    Args:
        manager: The manager of a child, as ``get_child`` returns it; it is changed.
        cancelled: Says whether its runs were cut short.
        partial: Gets the tokens and log-probabilities of the LLM that answers.
    """
    tracers = [handler for handler in manager.handlers if _traces(handler)]
    listeners = [handler for handler in manager.handlers if not _traces(handler)]
    held = BufferingHandler(listeners, partial)
    manager.set_handlers([*cancelled.views(tracers), held])
    return held


def _traces(handler: BaseCallbackHandler) -> bool:
    return isinstance(handler, BaseTracer) and not isinstance(handler, LogStreamCallbackHandler)
