"""The two arms of a LangChain router: running them, and searching with one of them ahead of a decision."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import patch_config

from rgate_integrations.answering.routing import Strategy
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.evidence.search import FoundPassage
from rgate_integrations.langchain.buffering import CancelledRun
from rgate_integrations.langchain.chat_models import parts_of, with_logprobs
from rgate_integrations.langchain.runnable import BatchCall, RunBatch, only


class Arms:
    """The arms of a router, and their parts as a strategy needs them.

    Args:
        retrieve: The arm for unknown questions.
        direct: The arm for known ones.
        strategy: What is looked at before there is a decision.

    Attributes:
        search: The retrieve arm up to its retriever, where it searches ahead.
        rest: What goes on with what that found.
        with_logprobs: The direct arm, asked for log-probabilities where it answers first; None where its LLM has
            none, or has refused to give them.

    Raises:
        ConfigurationError: The retrieve arm cannot search ahead.
    """

    def __init__(self, retrieve: Runnable[Any, Any], direct: Runnable[Any, Any], strategy: Strategy) -> None:
        self.retrieve = retrieve
        self.direct = direct
        self.search, self.rest = split(retrieve) if strategy.searches_ahead else (retrieve, retrieve)
        self.with_logprobs = None if strategy.answer_first is None else with_logprobs(direct)


@dataclass(frozen=True)
class ArmRun:
    """An arm that is left to run for an input."""

    arm: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    options: dict[str, Any]

    def stream(self) -> Iterator[Any]:
        """Run it as a stream."""
        return self.arm.stream(self.input, self.config, **self.options)

    def astream(self) -> AsyncIterator[Any]:
        """Run it as an asynchronous stream."""
        return self.arm.astream(self.input, self.config, **self.options)

    @staticmethod
    def batch(runs: Sequence[ArmRun]) -> BatchCall:
        """Return the step that runs one arm for several inputs."""
        first = runs[0]
        return BatchCall(
            first.arm, [run.input for run in runs], [run.config for run in runs], **first.options
        )


def arm_config(batch: RunBatch, place: int, decision: Decision) -> RunnableConfig:
    """Return the config an arm runs with: its tag, what was decided, and the draft to go on with if there is one."""
    tag = "retrieve" if decision.retrieve else "direct"
    metadata: dict[str, Any] = {"rgate_retrieve": decision.retrieve, "rgate_p_known": decision.p_known}
    draft = decision.draft
    if not decision.retrieve and draft is not None and draft.source == "llm":
        metadata["rgate_draft"] = draft.text  # the beginning of the answer, for models that can go on with it
    config = patch_config(batch.configs[place], callbacks=batch.managers[place].get_child(tag))
    config["tags"] = [*config.get("tags", []), tag]
    config["metadata"] = {**config.get("metadata", {}), **metadata}
    return config


NOT_NEEDED = "by the retrieval gate: the search was not needed"


class ArmSearch(BatchCall):
    """The searches of a batch, one an input; each result is what the search returned, or what it raised.

    Args:
        first: What searches: the retrieve arm up to its retriever.
        batch: The inputs and their runs.
    """

    def __init__(self, first: Runnable[Any, Any], batch: RunBatch) -> None:
        self._cancelled = CancelledRun()
        self._runs = [RetrieverRuns() for _ in batch.inputs]
        configs = batch.children("retrieve")
        for config, listener in zip(configs, self._runs, strict=True):
            manager: Any = config["callbacks"]  # a child of the router's run, made for this one
            manager.set_handlers(self._cancelled.views(manager.handlers))
            manager.add_handler(listener, inherit=True)
        super().__init__(first, batch.inputs, configs, **batch.options)

    def run(self) -> list[Any]:
        """Search; what fails after nobody needs it any more is raised, for the log."""
        found = super().run()
        if self._cancelled.outputs is not None:
            only(found[:1])
        return found

    async def arun(self) -> list[Any]:
        """Search without blocking the event loop; cancelled, it ends the runs that its retrievers leave open."""
        try:
            return await super().arun()
        except asyncio.CancelledError:
            self._cancelled.end_searches()
            raise

    def cancel(self) -> None:
        """Let traces say that nobody needed it."""
        self._cancelled.cancel(NOT_NEEDED)

    def passages(self, place: int, found: Any) -> list[FoundPassage]:
        """Return what a search found: by its retrievers, or else the documents in what it returned."""
        passages = []
        for document in self._runs[place].documents or _documents_in(found):
            passage = _passage(document)
            if passage is not None:
                passages.append(passage)
        return passages


class RetrieverRuns(BaseCallbackHandler):
    """Notes what retrievers find, whatever becomes of it in their chain. Those within a retriever do not count."""

    run_inline = True  # told before whoever waits for the search goes on

    def __init__(self) -> None:
        self._within: set[UUID] = set()  # runs of retrievers, and those below them
        self._found: dict[UUID, list[Document]] = {}

    @property
    def documents(self) -> list[Document]:
        """All documents, in the order in which the retrievers began."""
        return list(itertools.chain.from_iterable(self._found.values()))

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        """Note a retriever."""
        if parent_run_id not in self._within:
            self._found[run_id] = []
        self._within.add(run_id)

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        """Note a chain that a retriever runs."""
        if parent_run_id in self._within:
            self._within.add(run_id)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **facts: Any) -> None:
        """Note what it found."""
        if run_id in self._found and isinstance(documents, Sequence):
            self._found[run_id] = list(documents)


def split(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a retrieve arm into what searches, up to its retriever, and the rest.

    Without a retriever among its steps, as in a chain of functions, the first step is what searches.

    Raises:
        ConfigurationError: It is a single step, and no retriever.
    """
    if isinstance(arm, BaseRetriever):
        return arm, RunnablePassthrough()
    if isinstance(arm, RunnableBindingBase):
        first, rest = split(arm.bound)
        # What was bound to a chain goes to its first step; its config concerns all of them.
        return arm.model_copy(update={"bound": first}), arm.model_copy(update={"bound": rest, "kwargs": {}})
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            f"To search ahead, a router needs a retrieve arm of several steps; {type(arm).__name__} is one.",
            hint="Pass the chain itself, with its retriever in one of the first steps, or guard the retriever.",
        )
    steps = arm.steps
    end = 1
    for place, step in enumerate(steps[:-1]):
        if _searches(step):
            end = place + 1
            break
    return _sequence(steps[:end]), _sequence(steps[end:])


def _sequence(steps: list[Runnable[Any, Any]]) -> Runnable[Any, Any]:
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps)


def _searches(step: Any) -> bool:
    """Whether there is a retriever in a step."""
    if isinstance(step, BaseRetriever):
        return True
    return any(_searches(part) for part in parts_of(step))


def _passage(document: Any) -> FoundPassage | None:
    """Return what can be read of a document; None if nothing can.

    Retrievers of the user's own return texts, mappings and documents without metadata, which their arm can read.
    """
    if isinstance(document, str):
        return FoundPassage(document)
    fields = document if isinstance(document, Mapping) else getattr(document, "__dict__", {})
    text, metadata = fields.get("page_content"), fields.get("metadata")
    if not isinstance(text, str):
        return None
    title = metadata.get("title") if isinstance(metadata, Mapping) else None
    return FoundPassage(text, str(title or ""))


def _documents_in(value: Any) -> Iterator[Document]:
    """Yield the documents in what a chain returned."""
    if isinstance(value, Document):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _documents_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _documents_in(part)
