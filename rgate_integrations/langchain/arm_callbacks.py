"""What LangChain's callbacks hear of an arm that may not be the one that answers.

Who calls whom. A router gives each arm a child of its run's callback manager; LangChain hands that down to every
runnable inside the arm, and each of them reports to the manager's handlers (`on_chain_start`, `on_llm_new_token`, …).
Two kinds of handlers are there. *Tracers* (LangSmith, `RunCollectorCallbackHandler`) keep a tree of runs: they must
hear of a run when it happens. *Listeners* (`astream_events`, LangGraph's message stream, a handler that prints
tokens) may show what they hear to a user: they must not hear of an answer that is thrown away.

So `split_handlers` takes the manager's handlers apart. In the direct arm, tracers stay, each behind a
`CancellableTracer`, and one `BufferingHandler` stands for all listeners. It reads what the LLM writes, which is what
the gate judges, and keeps every event. If the answer is released, the router's stream calls `flush` after each
chunk, and the listeners hear all of it in order. If it is stopped, `shut_down` drops what was kept, and the next
token raises `GenerationCancelled` inside the LLM, which ends a synchronous stream; an asynchronous one is closed by
its consumer. The tracers then hear of errors and early ends, and record them as *cancelled*. In the retrieve arm that
searches ahead of a decision, a `RetrieverRuns` notes what its retrievers find.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.log_stream import LogStreamCallbackHandler

from rgate_integrations.answering.partial_answer import BufferedAnswer, PartialAnswer
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import read_choice_logprobs
from rgate_integrations.runtime.replies import count_thinking, read_reply

# The attribute by which a handler says that it does not want an event; `on_text` has none.
_IGNORED_BY = {
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
}


class GenerationCancelled(BaseException):
    """Stops an LLM that is writing what is not needed any more.

    Not an `Exception`: LangChain would log and swallow it, and a fallback on the way would start another LLM.
    """


class BufferingHandler(BaseCallbackHandler):
    """Keeps the events of a partial answer until it is released, and notes what the LLM writes.

    Of the manager's other handlers, tracers get events at once, and the rest what is flushed.

    Args:
        answer: Its `PartialAnswer` gets the tokens and log-probabilities of the LLM that answers.
        manager: The callback manager of a child, as ``get_child`` returns it; it is changed.
        cancelled: See `CancellableTracer`.

    Attributes:
        writing: The runs in which an LLM is writing.
    """

    run_inline = True  # so that listeners get events in their order

    def __init__(self, answer: BufferedAnswer, manager: Any, cancelled: dict[str, Any]) -> None:
        self._answer = answer
        tracers, self._listeners = split_handlers(manager, cancelled)
        manager.set_handlers([*tracers, self])
        self._kept: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._writer: UUID | None = None
        self.writing: set[UUID] = set()
        self._is_shut_down = False

    def shut_down(self) -> None:
        """Stop the LLM at its next token, and drop the events that are kept.

        They are dropped now: an error among them would hold, by its traceback, the very generators of the arm, and
        the LLM's stream stayed open until garbage is collected.
        """
        self._is_shut_down = True
        self._kept.clear()

    def flush(self) -> Flow[None]:
        """Hand the listeners what was kept, in order."""
        while self._kept:
            event, values, options = self._kept.pop(0)
            ignored_by = _IGNORED_BY.get(event)
            yield Call(handle_event, ahandle_event, self._listeners, event, ignored_by, *values, **options)

    # --- called by LangChain ---------------------------------------------------------------------------------

    def on_llm_start(self, *values: Any, **options: Any) -> None:
        """Note that an LLM writes."""
        self.writing.add(options["run_id"])
        self._keep("on_llm_start", values, options)

    def on_chat_model_start(self, *values: Any, **options: Any) -> None:
        """Note that a chat model writes."""
        self.writing.add(options["run_id"])
        self._keep("on_chat_model_start", values, options)

    def on_llm_new_token(self, *values: Any, **options: Any) -> None:
        """Note a token, or stop the LLM."""
        if self._is_shut_down:
            raise GenerationCancelled
        self._record(options.get("chunk"), options["run_id"])
        self._keep("on_llm_new_token", values, options)

    def on_llm_end(self, *values: Any, **options: Any) -> None:
        """Note the whole answer of an LLM that does not stream; of one that does, each chunk has been noted."""
        self.writing.discard(options["run_id"])
        if options["run_id"] != self._writer:
            self._record(values[0].generations[0][0], options["run_id"])
        self._keep("on_llm_end", values, options)

    def on_llm_error(self, *values: Any, **options: Any) -> None:
        """Note that an LLM has failed."""
        self.writing.discard(options["run_id"])
        self._keep("on_llm_error", values, options)

    def on_stream_event(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_stream_event", values, options)

    def on_chain_start(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_chain_start", values, options)

    def on_chain_end(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_chain_end", values, options)

    def on_chain_error(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_chain_error", values, options)

    def on_tool_start(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_tool_start", values, options)

    def on_tool_end(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_tool_end", values, options)

    def on_tool_error(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_tool_error", values, options)

    def on_agent_action(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_agent_action", values, options)

    def on_agent_finish(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_agent_finish", values, options)

    def on_retriever_start(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_retriever_start", values, options)

    def on_retriever_end(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_retriever_end", values, options)

    def on_retriever_error(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_retriever_error", values, options)

    def on_retry(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_retry", values, options)

    def on_custom_event(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_custom_event", values, options)

    def on_text(self, *values: Any, **options: Any) -> None:  # noqa: D102
        self._keep("on_text", values, options)

    def _keep(self, event: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._listeners and not self._is_shut_down:
            self._kept.append((event, values, options))

    def _record(self, chunk: Any, run_id: UUID) -> None:
        if run_id != self._writer:  # the LLM that writes last is the one that answers
            self._writer = run_id
            self._answer.partial = PartialAnswer(self._answer.partial.pieces)
        if not isinstance(chunk, ChatGeneration):
            return
        answer = self._answer.partial
        metadata = {**chunk.message.response_metadata, **(chunk.generation_info or {})}
        tokens, logprobs = read_choice_logprobs(metadata)
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
        answer.has_thoughts |= read_reply(chunk.message).thoughts is not None or count_thinking(usage) > 0
        if usage:
            answer.prompt_tokens = max(answer.prompt_tokens, usage["input_tokens"])


class CancellableTracer:
    """Stands for a tracer in whose traces runs that are cut short are cancelled, and no errors.

    Args:
        tracer: The tracer.
        cancelled: What the traces say of such runs; nothing is cut short as long as it is empty.
    """

    run_inline = True  # before the caller that waits for the run goes on

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
            cancelled = response.model_copy(update={"llm_output": self._cancelled})
            self._tracer.on_llm_end(cancelled, run_id=run_id)
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


class RetrieverRuns(BaseCallbackHandler):
    """Notes what retrievers find, whatever becomes of it in their chain.

    Args:
        manager: The callback manager of a search's run, which this handler is added to.
        cancelled: See `CancellableTracer`.
    """

    run_inline = True  # before the caller that waits for the search goes on

    def __init__(self, manager: Any, cancelled: dict[str, Any]) -> None:
        self._tracers, listeners = split_handlers(manager, cancelled)
        manager.set_handlers([*self._tracers, *listeners, self])
        self._parents: dict[UUID, UUID | None] = {}
        self._found: dict[UUID, Any] = {}

    @property
    def documents(self) -> list[Any]:
        """What each found, in the order in which they began; those within a retriever do not count."""
        documents: list[Any] = []
        for run_id, parent in self._parents.items():
            if parent not in self._parents:
                documents.append(self._found.get(run_id))
        return documents

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        """Note a retriever."""
        self._parents[run_id] = parent_run_id

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **facts: Any) -> None:
        """Note what it found."""
        self._found[run_id] = documents

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **facts: Any) -> None:
        """Note that it found nothing."""
        self._found[run_id] = []

    def end(self) -> None:
        """End the traces of retrievers that were cancelled: LangChain leaves them open."""
        for run_id in self._parents.keys() - self._found.keys():
            for tracer in self._tracers:
                tracer.on_retriever_end([], run_id=run_id)
