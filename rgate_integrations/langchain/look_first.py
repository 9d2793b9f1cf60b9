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

from rgate_integrations.answering.look_first import LookFirst, looked
from rgate_integrations.decision import Decision
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.langchain.gate_runnable import THRESHOLD_KEY
from rgate_integrations.langchain.retrieve_arm import split
from rgate_integrations.langchain.router import RetrievalRouter, Task, arm_config
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.runtime.flow import Call, Flow, Gather


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

    # The retrieve arm up to its retriever, and what goes on with what that found.
    _search: Runnable[Any, Any] = PrivateAttr()
    _rest: Runnable[Any, Any] = PrivateAttr()

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

    def _tasks(self, batch: RunBatch) -> Flow[list[Task | Exception]]:
        """Search, decide, and look; returns for each input what is left to do, or the exception that concerns it."""
        search = BatchSearch(self._search, self._rest, batch)
        asking = BatchCall(self.gate, batch.inputs, batch.children("gate"))
        decisions, search.found = yield Gather([asking, search.step])
        decisions = yield Call(self._looked, None, batch, decisions, search)
        yield from self._announcing(decisions, batch)
        tasks: list[Task | Exception] = []
        for place, decision in enumerate(decisions):
            if isinstance(decision, Exception):
                tasks.append(decision)
            elif decision.retrieve:
                tasks.append(search.task(place, decision))
            else:
                config = arm_config(batch, place, decision)
                tasks.append(Task(self.direct, batch.inputs[place], config, batch.options))
        return tasks

    def _looked(
        self, batch: RunBatch, decisions: Sequence[Decision | Exception], search: BatchSearch
    ) -> list[Decision | Exception]:
        """Return the decisions that also count what was found."""
        results: list[Decision | Exception] = []
        for place, decision in enumerate(decisions):
            if isinstance(decision, Exception):
                results.append(decision)
            else:
                has_threshold = threshold_was_given(self.gate, batch.configs[place])
                results.append(search.looked(place, decision, self.options, has_threshold=has_threshold))
        return results


class BatchSearch:
    """The searches of a batch, one an input, and what is made of what they find.

    Args:
        first: What searches: the retrieve arm up to its retriever.
        rest: What goes on with what was found.
        batch: The inputs and their runs.

    Attributes:
        step: The step that searches.
        found: Its result, which whoever takes the step puts here: for each input what the first part of the arm
            returned, or the exception that it raised.
    """

    def __init__(self, first: Runnable[Any, Any], rest: Runnable[Any, Any], batch: RunBatch) -> None:
        self._rest = rest
        self._batch = batch
        self._heard = [RetrieverRuns() for _ in batch.inputs]
        configs = batch.children("retrieve")
        for config, listener in zip(configs, self._heard, strict=True):
            _listening(config, listener)
        self.step = BatchCall(first, batch.inputs, configs, **batch.options)
        self.found: list[Any] = []

    def passages(self, place: int) -> list[FoundPassage] | Exception:
        """Return what was found for an input, or what its search raised."""
        return _passages(self._heard[place], self.found[place])

    def looked(self, place: int, decision: Decision, options: LookFirst, *, has_threshold: bool) -> Decision:
        """Return the decision that also counts what was found for an input.

        Args:
            place: The place of the input.
            decision: The gate's.
            options: How what was found is judged.
            has_threshold: Whether the caller chose the decision's threshold.
        """
        known_from = decision.threshold if has_threshold else None
        return looked(decision, self.passages(place), options, known_from=known_from)

    def task(self, place: int, decision: Decision) -> Task | Exception:
        """Return what is left to do for an input that is retrieved for: the arm goes on with what was found."""
        found = self.found[place]
        if isinstance(found, Exception):
            return found
        return Task(
            self._rest, found, arm_config(self._batch, place, decision), {}
        )  # the first step had the options


def threshold_was_given(gate: Runnable[Any, Decision], config: RunnableConfig) -> bool:
    """Whether the caller chose a threshold, for this call or for the gate."""
    chosen = config.get("configurable", {}).get(THRESHOLD_KEY)
    return chosen is not None or getattr(gate, "threshold", None) is not None


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
        if run_id in self._found and isinstance(documents, Sequence):
            self._found[run_id] = list(documents)


def _listening(config: RunnableConfig, listener: BaseCallbackHandler) -> None:
    """Let a listener hear of the runs that a config is for."""
    manager: Any = config["callbacks"]  # a child of the router's run, made for this one
    manager.add_handler(listener, inherit=True)


def _passages(listener: RetrieverRuns, found: Any) -> list[FoundPassage] | Exception:
    """Return what a search found: by its retrievers, or else the documents in what it returned."""
    if isinstance(found, Exception):
        return found
    documents: list[Any] = listener.documents or list(_documents_in(found))
    passages = [_passage(document) for document in documents]
    return [passage for passage in passages if passage is not None]


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
