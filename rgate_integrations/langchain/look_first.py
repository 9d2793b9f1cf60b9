"""`LookFirstRouter`: searches, and reads what was found only where that helps more than what the LLM knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.utils import Input, Output
from pydantic import PrivateAttr, SkipValidation

from rgate_integrations.decision import Decision
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.flow import Call, Each, Flow
from rgate_integrations.langchain.gate_runnable import THRESHOLD_KEY
from rgate_integrations.langchain.router import RetrievalRouter, Task, arm_config
from rgate_integrations.langchain.runnable import BatchCall, RunBatch, only
from rgate_integrations.langchain.speculation import split
from rgate_integrations.look_first import LookFirst, looked


class LookFirstRouter(RetrievalRouter[Input, Output]):
    """Searches first, as ``RetrievalGate.route(..., look_first=True)`` made it.

    The retrieve arm runs up to its retriever while the gate decides. What was found is judged, and where it is read,
    the rest of the retrieve arm goes on with it: nothing is searched twice. A batch makes one call of the gate and
    one batch of searches.

    Where the search fails or finds nothing, the gate's decision by the question alone stands. A question that it
    retrieves for then gets what the search raised, as without a gate.

    Args:
        gate: The gate whose router this is.
        retrieve: Arm for what is answered with passages: a sequence of steps, or a retriever.
        direct: Arm for what is answered alone.
        options: How what was found is judged.

    Raises:
        ConfigurationError: The retrieve arm is neither a sequence of steps nor a retriever.
    """

    options: SkipValidation[LookFirst]

    _search: Runnable[Any, Any] = PrivateAttr()  # the retrieve arm up to its retriever

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        options: LookFirst,
        name: str | None = None,
    ) -> None:
        super().__init__(gate, retrieve=retrieve, direct=direct, name=name, options=options)
        self._search, self._rest = split(self.retrieve)

    def _choosing(self, batch: RunBatch) -> Flow[Task]:
        """Search, decide, and look for a batch of one.

        Raises:
            Exception: There is no question in the input; or the search failed, and nothing else will do.
        """
        return only((yield from self._tasks(batch)))

    def _tasks(self, batch: RunBatch) -> Flow[list[Task | Exception]]:
        """Search, decide, and look; returns for each input what is left to do, or the exception that concerns it."""
        heard = [RetrieverRuns() for _ in batch.inputs]
        configs = batch.children("retrieve")
        for config, listener in zip(configs, heard, strict=True):
            _listening(config, listener)
        asking = BatchCall(self.gate, batch.inputs, batch.children("gate"))
        searching = BatchCall(self._search, batch.inputs, configs, **batch.options)
        decisions, found = yield Each([asking, searching])
        passages = [_passages(listener, each) for listener, each in zip(heard, found, strict=True)]
        decisions = yield Call(self._looked, None, batch, decisions, passages)
        yield from self._announcing(decisions, batch)
        tasks: list[Task | Exception] = []
        for place, decision in enumerate(decisions):
            tasks.append(self._task(batch, place, decision, found[place]))
        return tasks

    def _looked(
        self,
        batch: RunBatch,
        decisions: Sequence[Decision | Exception],
        passages: Sequence[Sequence[FoundPassage] | Exception],
    ) -> list[Decision | Exception]:
        """Return the decisions that also count what was found."""
        results: list[Decision | Exception] = []
        for decision, found, config in zip(decisions, passages, batch.configs, strict=True):
            if isinstance(decision, Exception):
                results.append(decision)
            else:
                known_from = decision.threshold if self._has_threshold(config) else None
                results.append(looked(decision, found, self.options, known_from=known_from))
        return results

    def _has_threshold(self, config: RunnableConfig) -> bool:
        """Whether the caller chose a threshold, for this call or for the gate."""
        chosen = config.get("configurable", {}).get(THRESHOLD_KEY)
        return chosen is not None or getattr(self.gate, "threshold", None) is not None

    def _task(
        self, batch: RunBatch, place: int, decision: Decision | Exception, found: Any
    ) -> Task | Exception:
        """Return what is left to do for an input; the retrieve arm goes on with what was found."""
        if isinstance(decision, Exception):
            return decision
        config = arm_config(batch, place, decision)
        if not decision.retrieve:
            return Task(self.direct, batch.inputs[place], config, batch.options)
        if isinstance(found, Exception):
            return found
        return Task(self._rest, found, config, {})  # the first step had the options


class RetrieverRuns(BaseCallbackHandler):
    """Notes what retrievers find, whatever becomes of it in their chain. Those within a retriever do not count."""

    run_inline = True  # told before whoever waits for the search goes on

    def __init__(self) -> None:
        self._within: set[UUID] = set()  # runs of retrievers, and those below them
        self._found: dict[UUID, list[Document]] = {}

    @property
    def documents(self) -> list[Document]:
        """All documents, in the order in which the retrievers began."""
        return [document for documents in self._found.values() for document in documents]

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
        if run_id in self._found:
            self._found[run_id] = list(documents)


def _listening(config: RunnableConfig, listener: BaseCallbackHandler) -> None:
    """Let a listener hear of the runs that a config is for."""
    manager: Any = config["callbacks"]  # a child of the router's run, made for this one
    manager.add_handler(listener, inherit=True)


def _passages(listener: RetrieverRuns, found: Any) -> list[FoundPassage] | Exception:
    """Return what a search found: by its retrievers, or else the documents in what it returned."""
    if isinstance(found, Exception):
        return found
    documents = listener.documents or list(_documents_in(found))
    return [
        FoundPassage(document.page_content, str(document.metadata.get("title") or ""))
        for document in documents
    ]


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
