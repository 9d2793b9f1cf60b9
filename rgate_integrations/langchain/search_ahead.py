"""Runs the search of a retrieve arm before the decision: splits the arm, and records what its retrievers find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnablePassthrough, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain.answer_first import inherited_config, split_handlers
from rgate_integrations.langchain.chat_models import runnables_in
from rgate_integrations.langchain.corpora import CorpusChain
from rgate_integrations.langchain.runnable import run_batch
from rgate_integrations.runtime.flow import Flow


class RetrieverRuns(BaseCallbackHandler):
    """Records what retrievers find.

    The result of a search is not enough, because a chain may have turned its documents into text.

    Args:
        manager: The callback manager of a search's run, to which this handler is added.
        cancellation: See `CancellableTracer`.
    """

    run_inline = True  # the documents must be recorded before the caller continues

    def __init__(self, manager: Any, cancellation: dict[str, Any]) -> None:
        self._tracers, listeners = split_handlers(manager, cancellation)
        manager.set_handlers([*self._tracers, *listeners, self])
        self._parents: dict[UUID, UUID | None] = {}
        self._documents: dict[UUID, Any] = {}

    @property
    def documents(self) -> list[Any]:
        """What each retriever found, in the order in which they started; None for one that has not ended.

        Retrievers that another retriever has called are left out.
        """
        # A retriever that calls another one, such as a reranker, returns the documents that count.
        outermost = [run_id for run_id, parent in self._parents.items() if parent not in self._parents]
        return list(map(self._documents.get, outermost))

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Record the start of a retriever."""
        self._parents[run_id] = parent_run_id

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record what a retriever found."""
        self._documents[run_id] = documents

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record an empty list for a retriever that failed."""
        self._documents[run_id] = []

    def end(self) -> None:
        """End the traces of retrievers that were cancelled: LangChain leaves them open."""
        for run_id in self._parents.keys() - self._documents.keys():
            for tracer in self._tracers:
                tracer.on_retriever_end([], run_id=run_id)


def run_search(
    search: Runnable[Any, Any],
    inputs: Sequence[Any],
    configs: Sequence[RunnableConfig],
    retrievers: Sequence[RetrieverRuns],
    **options: Any,
) -> Flow[list[Any]]:
    """Search for a batch, and return what each search found or raised.

    If the search is cancelled, the traces of its retrievers are ended, too.

    Args:
        search: The retrieve arm up to its retriever.
        inputs: The inputs.
        configs: The config of each input.
        retrievers: The handlers that record what each search finds.
        **options: Further arguments of the call.
    """
    try:
        with inherited_config(configs[0] if len(configs) == 1 else None):
            return (yield from run_batch(search, inputs, configs, **options))
    except asyncio.CancelledError:
        for retriever in retrievers:
            retriever.end()
        raise


def split_arm(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a retrieve arm after its search, and return both halves.

    If the last step is a retriever, the search is the whole arm. Otherwise, it ends with the first step that has a
    retriever, not counting the last step. If there is none, as in a chain of functions, the search is the first step
    alone. The chains of a `CorpusChain` are split one by one.

    Raises:
        ConfigurationError: The arm is a single step other than a retriever.
    """
    last = arm.last if isinstance(arm, RunnableSequence) else arm
    if isinstance(getattr(last, "bound", last), BaseRetriever):
        return arm, RunnablePassthrough()
    if isinstance(arm, CorpusChain):
        halves = {name: split_arm(part) for name, part in arm.parts.items()}
        searches = {name: search for name, (search, _) in halves.items()}
        rests = {name: rest for name, (_, rest) in halves.items()}
        return arm.model_copy(update={"parts": searches}), arm.model_copy(update={"parts": rests})
    if isinstance(arm, RunnableBindingBase):
        first, rest = split_arm(arm.bound)
        # A chain passes bound arguments to its first step; a bound config applies to all steps. But listeners (the
        # factories) and the name are for the answer, so that they see each answer once.
        config = {key: value for key, value in arm.config.items() if key != "run_name"}
        search = arm.model_copy(update={"bound": first, "config": config, "config_factories": []})
        return search, arm.model_copy(update={"bound": rest, "kwargs": {}})
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            "With look_first or AnswerFirst.prefetch, retrieve= must be a chain of several steps or a retriever, so "
            f"that its search can run alone, but {type(arm).__name__} is neither.",
            hint="Pass a chain whose first steps search, such as retriever | prompt | llm. Or use neither option.",
        )
    steps = arm.steps
    for end, step in enumerate(steps[:-1], start=1):
        if next(runnables_in(step, BaseRetriever), None) is not None:
            return _join_steps(steps[:end]), _join_steps(steps[end:], arm.name)
    return steps[0], _join_steps(steps[1:], arm.name)


def _join_steps(steps: list[Runnable[Any, Any]], name: str | None = None) -> Runnable[Any, Any]:
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps, name=name)
