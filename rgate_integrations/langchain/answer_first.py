"""Answer first: the direct arm streams its answer, whose chunks and events are held back until the gate judges it.

Tracers see the arm's runs as they happen, and as *cancelled* if they are cut short. Listeners, such as
``astream_events``, LangGraph's message stream or a handler that prints tokens, may show events to a user. So they get
the events only once the answer is released, and none if it is discarded.

A router gives each arm a child of its run's callback manager. LangChain passes that to every runnable inside the arm,
and each of them reports to the manager's handlers (`on_chain_start`, `on_llm_new_token`, …). Three kinds of handlers
matter. *Tracers* (LangSmith, `RunCollectorCallbackHandler`) keep a tree of runs, so they must get each event when
it happens. *Listeners* (`astream_events`, LangGraph's message stream, a handler that prints tokens) may show events
to a user, so they must not get those of an answer that is thrown away. *Hooks*, such as the handler of
``get_usage_metadata_callback``, are added by LangChain to every run that lacks them: they get each event when it
happens, and count stopped answers, too. A hook that is a tracer, as in ``collect_runs``, counts as a tracer. A
listener with ``raise_error``, such as a check of a budget, gets each event when it happens, too: it must be able to
stop an LLM before it is asked.

So `split_handlers` separates the first two. In the direct arm, tracers stay, each wrapped in a `CancellableTracer`,
as do such checks, and one `BufferingHandler` replaces all other listeners. It records the LLM's log-probabilities and
metadata, and keeps every event for the listeners. If the answer is released, the router's stream calls `flush` for
each chunk, and the listeners get all events in order. If the answer is stopped, `shut_down` drops the events, and
the next token raises `GenerationCancelled` inside the LLM. That ends a synchronous stream; an asynchronous one is
closed by its consumer. Either way the tracers get errors and early ends, which they record as *cancelled*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial, partialmethod
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.manager import ahandle_event, handle_event
from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.context import _configure_hooks
from langchain_core.tracers.log_stream import LogStreamCallbackHandler

from rgate_integrations.answering.partial_answer import END, BufferedAnswer, ChunkStream, PartialAnswer
from rgate_integrations.langchain.chat_models import chooses_llm, get_llm_name, runnables_in, with_logprobs
from rgate_integrations.langchain.runnable import Run
from rgate_integrations.runtime.flow import Call, Flow, variable_set
from rgate_integrations.runtime.records import read_choice_logprobs
from rgate_integrations.runtime.replies import count_thinking, read_reply

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
        self._chooses_llm = chooses_llm(arm)

    def chosen_llm(self, config: RunnableConfig) -> str | None:
        """Return the name of the LLM that answers in a call; None if its config cannot choose one, or fails to."""
        if not self._chooses_llm:
            return None
        try:
            return get_llm_name(self.arm, config)
        except Exception:  # for example, there is no such alternative; the arm raises that itself
            return None

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
        """Set whether the arm is asked for log-probabilities from now on.

        Without them, the arm is asked again, and listeners get no events of the request that the LLM has refused.
        """
        self._direct.wants_logprobs = enabled
        if not enabled:
            self._events.drop()

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


# --- callbacks of the arm -----------------------------------------------------------------------------------

# LangChain's events, and for each the attribute with which a handler declines it.
_IGNORED_BY: dict[str, str | None] = {
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


class GenerationCancelled(asyncio.CancelledError):
    """Stops an LLM whose answer is no longer needed.

    Not an `Exception`: LangChain would log and swallow it, and a chain's fallback would start another LLM. As a
    cancellation, it ends a task without asyncio logging that its exception was never retrieved.
    """


@contextmanager
def inherited_config(config: RunnableConfig | None) -> Iterator[None]:
    """Make runnables in the ``with`` block inherit this config instead of the router's; with None, they inherit none.

    A binding, such as that of ``with_config`` or ``with_retry``, merges the callbacks that it inherits into those of
    its call. If it inherited the router's, the listeners would get the arm's events at once. In the block, hooks that
    are tracers are unset, because the arm's callbacks already contain them, wrapped.
    """
    unset: dict[ContextVar[Any], Any] = {
        hook: None for hook, *_ in _configure_hooks if isinstance(hook.get(), BaseTracer)
    }
    with ExitStack() as stack:
        for variable, value in {**unset, var_child_runnable_config: config}.items():
            stack.enter_context(variable_set(variable, value))
        yield


class BufferingHandler(BaseCallbackHandler):
    """Keeps the events of a partial answer until it is released, and records the LLM's metadata.

    Tracers among the manager's handlers get events at once, listeners when the events are flushed. Hooks are left to
    LangChain; the module describes these three kinds.

    Args:
        answer: The answer, whose `PartialAnswer` receives the LLM's log-probabilities and metadata.
        manager: The callback manager of a child run, from ``get_child``; its handlers are replaced.
        cancellation: See `CancellableTracer`.

    Attributes:
        running: Ids of the runs in which an LLM is generating.
    """

    run_inline = True  # keeps the events in order

    def __init__(self, answer: BufferedAnswer, manager: Any, cancellation: dict[str, Any]) -> None:
        self._answer = answer
        # Must run before the arm starts: children copy the handlers of their parent's manager.
        tracers, listeners = split_handlers(manager, cancellation)
        checks = [handler for handler in listeners if handler.raise_error]
        self._listeners = [handler for handler in listeners if not handler.raise_error]
        manager.set_handlers([*tracers, *checks, self])
        self._events: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._writer: UUID | None = None
        self.running: set[UUID] = set()
        self._is_shut_down = False
        self._is_released = False

    def shut_down(self) -> None:
        """Stop the LLM at its next token. Drop the kept events, unless `flush` has already released the answer.

        They are dropped because the traceback of an error among them would keep the arm's generators, and with them
        the LLM's stream, open until the next garbage collection.
        """
        self._is_shut_down = True
        if not self._is_released:
            self.drop()

    def drop(self) -> None:
        """Drop the kept events: listeners do not get them."""
        self._events.clear()

    def flush(self) -> Flow[None]:
        """Pass the kept events to the listeners, in order."""
        self._is_released = True
        while self._events:
            event, args, kwargs = self._events.pop(0)
            yield Call(
                handle_event, ahandle_event, self._listeners, event, _IGNORED_BY[event], *args, **kwargs
            )

    def keep(self, event: str, /, *args: Any, **kwargs: Any) -> None:
        """Keep an event for the listeners, if there are any, until `flush` passes it on or `shut_down` drops it.

        The start and end of an LLM also update `running`.

        Args:
            event: Name of the handler's method for it.
            *args: Positional arguments of that method.
            **kwargs: Its keyword arguments, among them the ``run_id``.
        """
        if event in ("on_llm_start", "on_chat_model_start"):
            self.running.add(kwargs["run_id"])
        elif event in ("on_llm_end", "on_llm_error"):
            self.running.discard(kwargs["run_id"])
        if not self._listeners or (self._is_shut_down and not self._is_released):
            return
        if self._is_shut_down and event.endswith("_error"):
            args = (GenerationCancelled(),)  # without the traceback, see `shut_down`
        self._events.append((event, args, kwargs))

    # --- called by LangChain ---------------------------------------------------------------------------------

    def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
        """Keep the event and record the token's metadata; after `shut_down`, raise `GenerationCancelled` instead."""
        if self._is_shut_down:
            raise GenerationCancelled
        self._record(kwargs.get("chunk"), kwargs["run_id"])
        self.keep("on_llm_new_token", *args, **kwargs)

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the event, and record the metadata of an LLM that did not stream."""
        self.keep("on_llm_end", *args, **kwargs)
        if kwargs["run_id"] != self._writer:
            self._record(args[0].generations[0][0], kwargs["run_id"])

    def _record(self, chunk: Any, run_id: UUID) -> None:
        """Record the log-probabilities and metadata of a chunk, or of a whole answer."""
        if run_id != self._writer:  # a chain may call several LLMs: the last one writes the answer
            self._writer = run_id
            self._answer.partial = PartialAnswer(self._answer.partial.pieces)
        if not isinstance(chunk, ChatGeneration):
            return
        answer = self._answer.partial
        metadata = {**chunk.message.response_metadata, **(chunk.generation_info or {})}
        answer.add_logprobs(read_choice_logprobs(metadata))
        answer.set_response(chunk.message.id)
        answer.model = str(metadata.get("model_name") or answer.model)
        # Both of OpenAI's APIs end with one of these. Other LLMs may send neither, so absence proves nothing.
        if metadata.get("finish_reason") or metadata.get("status"):
            answer.has_end = True
        elif metadata.get("model_provider") == "openai" and answer.has_end is None:
            answer.has_end = False
        # Some LLMs report the usage with the first chunk, others with the last, which a stopped LLM never sends.
        usage = getattr(chunk.message, "usage_metadata", None)
        answer.has_thoughts |= read_reply(chunk.message).thoughts is not None or count_thinking(usage) > 0
        if usage:
            # The maximum, because chunks after the first may report 0.
            answer.prompt_tokens = max(answer.prompt_tokens, usage["input_tokens"])


# LangChain calls one method per event. The class itself defines those that do more than keep their event.
for _event in _IGNORED_BY.keys() - vars(BufferingHandler).keys():
    setattr(BufferingHandler, _event, partialmethod(BufferingHandler.keep, _event))


class CancellableTracer:
    """Wraps a tracer. If a run is cut short, it is recorded as cancelled or empty, not as an error.

    Args:
        tracer: The tracer.
        cancellation: What to record for such runs, such as the reason; filled by the router when it cuts them short.
    """

    run_inline = True  # the trace must be complete before the caller continues

    def __init__(self, tracer: Any, cancellation: dict[str, Any]) -> None:
        self._tracer = tracer
        self._cancellation = cancellation

    @property  # type: ignore[misc]  # mypy expects a class attribute
    def __class__(self) -> Any:  # LangChain adds its own tracer unless one of that type is there
        return type(self._tracer)

    def __getattr__(self, name: str) -> Any:
        if self._cancellation and (name == "on_chain_end" or name.endswith("_error")):
            return partial(self._cancel, name)
        return getattr(self._tracer, name)

    def copy_with_metadata_defaults(self, **defaults: Any) -> CancellableTracer:
        """Return a wrapped copy of the tracer; LangChain copies LangSmith's tracer in this way for its runs."""
        return CancellableTracer(self._tracer.copy_with_metadata_defaults(**defaults), self._cancellation)

    def _cancel(self, event: str, value: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a run as cancelled, with its output; a retriever or tool gets an empty result."""
        if event == "on_llm_error":
            response = kwargs.get("response") or LLMResult(generations=[[]])
            response = response.model_copy(update={"llm_output": self._cancellation})
            self._tracer.on_llm_end(response, run_id=run_id)
        elif event == "on_retriever_error":
            self._tracer.on_retriever_end([], run_id=run_id)
        elif event == "on_tool_error":
            self._tracer.on_tool_end("", run_id=run_id)
        else:
            output = {} if event == "on_chain_error" else {"output": value}
            self._tracer.on_chain_end({**self._cancellation, **output}, run_id=run_id)


def split_handlers(
    manager: Any, cancellation: dict[str, Any]
) -> tuple[list[CancellableTracer], list[BaseCallbackHandler]]:
    """Return the tracers of a callback manager, wrapped, and its listeners; see the module for what these are."""
    tracers = []
    listeners = []
    # Hooks that are no tracers stay out of both lists, because LangChain adds them to every run that lacks them.
    hooked = [variable.get() for variable, *_ in _configure_hooks]
    for handler in [*manager.handlers, *(hook for hook in hooked if hook not in manager.handlers)]:
        # The handler of ``astream_log`` is a tracer, but it shows runs to a user.
        if isinstance(handler, BaseTracer) and not isinstance(handler, LogStreamCallbackHandler):
            tracers.append(CancellableTracer(handler, cancellation))
        elif not any(handler is hook for hook in hooked):
            listeners.append(handler)
    return tracers, listeners
