"""`RetrievalRouter`: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    BaseCallbackHandler,
    CallbackManagerForChainRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnablePassthrough,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableLike, coerce_to_runnable
from langchain_core.runnables.utils import (
    ConfigurableFieldSpec,
    Input,
    Output,
    get_unique_config_specs,
)
from pydantic import PrivateAttr, SkipValidation

from rgate_integrations.answering.routing import Outcomes, Routed, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.langchain.answer_first import (
    ArmAnswer,
    DirectArm,
    split_handlers,
)
from rgate_integrations.langchain.chat_models import condensing, instances_in, parts_of
from rgate_integrations.langchain.questions import Asked, announcing, asked_in_all, bind, given_threshold
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch
from rgate_integrations.runtime.flow import Call, Flow, Gather, Step, arun, run

NOT_NEEDED = "by the retrieval gate: the search was not needed"


class RetrievalRouter(FlowRunnable[Input, Output]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm, side by side, or one after the
    other if ``max_concurrency`` limits them; the order is kept.
    Arms get the router's input unchanged, or with ``condensed_key`` a mapping with the question in it. Each decision
    is a child run in traces and a custom event, ``retrieval_gate``, which LangGraph's custom stream has, too; the
    chosen arm's run has the tag ``retrieve`` or ``direct``.

    Where the direct arm answers first, it runs as a stream, whatever the caller called, and its first tokens are held
    back and judged. Known: they are released and the stream goes on. Unknown: the stream is closed, which cancels the
    request to the LLM, and the retrieve arm runs. Until then nobody but tracers hears of the direct arm, and of an
    arm that was stopped nobody else ever does. A batch with ``max_concurrency`` goes in parts of that size, since an
    answer that waits to be judged holds its place at the LLM.

    Where it looks first, the retrieve arm runs up to its retriever while the gate decides. What was found is judged,
    and where it is read, the rest of the arm goes on with it. Where the search fails or finds nothing, the gate's
    decision stands, and a question that it retrieves for gets what the search raised, as without a gate.

    Args:
        gate: Decides; a `RetrievalGate`. What runs in the retrieve arm takes the decision as its.
        retrieve: Arm for unknown questions. With a strategy that searches ahead, a sequence of steps or a retriever.
        direct: Arm for known questions.
        strategy: What is looked at before there is a decision, by default the question alone. Its judge takes
            ``drafts=``, as a `RetrievalGate`.
        condensed_key: Where arms find the question, as the gate's ``condense`` made it; see `RetrievalGate.route`.

    Raises:
        ConfigurationError: The strategy searches ahead, and the retrieve arm is neither a sequence of steps nor a
            retriever.
    """

    gate: Runnable[Any, Decision]
    retrieve: Runnable[Any, Any]
    direct: Runnable[Any, Any]
    strategy: SkipValidation[Strategy] = Strategy()
    condensed_key: str | None = None

    _direct: DirectArm = PrivateAttr()
    _first: Runnable[Any, Any] = PrivateAttr()
    _rest: Runnable[Any, Any] = PrivateAttr()

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        strategy: Strategy | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            gate=gate,
            retrieve=coerce_to_runnable(retrieve),
            direct=coerce_to_runnable(direct),
            strategy=strategy or Strategy(),
            name=name,
            **fields,
        )
        self._direct = DirectArm(self.direct)
        if self.strategy.searches_ahead:
            self._first, self._rest = split_arm(self.retrieve)

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of both arms."""
        return get_unique_config_specs(
            [*self.gate.config_specs, *self.retrieve.config_specs, *self.direct.config_specs]
        )

    @property
    def InputType(self) -> Any:
        """The input type of the retrieve arm."""
        return self.retrieve.InputType

    @property
    def OutputType(self) -> Any:
        """The output type of the retrieve arm."""
        return self.retrieve.OutputType

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Output]:
        """Decide, then stream the chosen arm."""
        yield from self._transform_stream_with_config(iter([input]), self._stream, config, **kwargs)

    async def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Decide, then stream the chosen arm."""
        streamed: Any = self._atransform_stream_with_config(_single(input), self._astream, config, **kwargs)
        # A stream is closed when its reader leaves it, and not only when the generator is collected.
        async with aclosing(streamed) as chunks:
            async for chunk in chunks:
                yield chunk

    def _stream(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> Iterator[Any]:
        left = run(self._route_one(RunBatch(list(values), [config], [run_manager], options)))
        yield from left.stream()

    async def _astream(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        batch = RunBatch([value async for value in values], [config], [run_manager], options)
        left = await arun(self._route_one(batch))
        async with aclosing(left.astream()) as chunks:
            async for chunk in chunks:
                yield chunk

    def flow(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch in one call of the gate, then run each arm on its share."""
        limit = batch.configs[0].get("max_concurrency")
        size = len(batch.inputs)
        if limit is not None and self.strategy.answer_first is not None:
            size = limit
        results: list[Any] = []
        for start in range(0, len(batch.inputs), size):
            results += yield from self._answer(batch.part(start, start + size), limit)
        return results

    def _answer(self, batch: RunBatch, limit: int | None) -> Flow[list[Any]]:
        """Decide, finish the answers that were begun, and run each arm on its share of the inputs."""
        results: list[Any] = list((yield from self._route(batch)))
        shares: dict[Any, list[int]] = {}
        for place, left in enumerate(results):  # an exception is the result of its input
            if isinstance(left, ArmAnswer):
                shares.setdefault("begun", []).append(place)
            elif isinstance(left, ArmRun):
                shares.setdefault(id(left.arm), []).append(place)
        steps: list[Step] = []
        for places in shares.values():
            share = [results[place] for place in places]
            if isinstance(share[0], ArmAnswer):
                steps.append(Gather([Call(run, arun, answer.whole()) for answer in share]))
            else:
                configs = [each.config for each in share]
                steps.append(
                    BatchCall(share[0].arm, [each.input for each in share], configs, **share[0].options)
                )
        answers: list[list[Any]] = []
        if limit is None:
            answers = yield Gather(steps)
        else:  # it holds for all that runs together
            for step in steps:
                answers += yield Gather([step])
        for places, answered in zip(shares.values(), answers, strict=True):
            for place, answer in zip(places, answered, strict=True):
                results[place] = answer
        return results

    def _route_one(self, batch: RunBatch) -> Flow[ArmRun | ArmAnswer]:
        """Decide for a batch of one; returns what is left to run, or raises."""
        (left,) = yield from self._route(batch)
        if isinstance(left, Exception):
            raise left
        return left

    def _route(self, batch: RunBatch) -> Flow[list[ArmRun | ArmAnswer | Exception]]:
        """Decide for a batch; returns what is left to run for each input, or the exception that concerns it."""
        asked = batch.inputs
        if self.condensed_key is not None:
            asked, batch = yield from self._condense(batch, self.condensed_key)
        call = RouterCall(self, batch, asked)
        routed = yield from call.route()
        return [call.left(place, each) for place, each in enumerate(routed)]

    def _condense(self, batch: RunBatch, key: str) -> Flow[tuple[list[Any], RunBatch]]:
        """Condense the follow-ups; returns what the gate is asked, and the batch with the inputs of the arms."""
        turns, _ = asked_in_all(batch.inputs, getattr(self.gate, "input_key", None))
        condensed = yield from condensing(getattr(self.gate, "condense", None), turns, batch)
        asked, inputs = list(batch.inputs), list(batch.inputs)
        for place, turn in turns.items():
            found = condensed.get(place)
            if isinstance(
                found, Asked
            ):  # what could not be condensed keeps its history, and the gate says why
                turn = found
                asked[place] = found.question
            value = batch.inputs[place]
            inputs[place] = {
                **(value if isinstance(value, Mapping) else {"input": value}),
                key: turn.question,
            }
        return asked, replace(batch, inputs=inputs)


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value


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

    def astream(self) -> Any:
        """Run it as an asynchronous stream."""
        return self.arm.astream(self.input, self.config, **self.options)


class RouterCall(RoutedCall):
    """One call of a `RetrievalRouter`.

    Args:
        router: The router.
        batch: The inputs of its arms, and their runs.
        asked: What the gates are asked, one an input.
    """

    def __init__(self, router: RetrievalRouter[Any, Any], batch: RunBatch, asked: Sequence[Any]) -> None:
        thresholds = [given_threshold(router.gate, config) for config in batch.configs]
        super().__init__(router.strategy, thresholds)
        self.router = router
        self.batch = batch
        self.asked = list(asked)
        self._search: ArmSearch | None = None

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate once for the whole batch."""
        found: list[Any] = yield BatchCall(self.router.gate, self.asked, self.batch.children("gate"))
        return found

    def ask(self, gate: Any, drafts: dict[int, Draft | None] | None = None) -> Flow[Outcomes]:
        """Ask a gate once: about every question, or about several begun answers."""
        batch = self.batch
        if drafts is None:
            found = yield BatchCall(gate, self.asked, batch.children("first_look"))
            return dict(enumerate(found))
        inputs = []
        for place in drafts:
            screened = self.screened.get(place)
            # What was condensed to be screened is not condensed again; else the judge reads the turns, too.
            if isinstance(screened, Decision) and getattr(gate, "condense", None) is not None:
                inputs.append(screened.question)
            else:
                inputs.append(self.asked[place])
        configs = [batch.child(place, "gate") for place in drafts]
        found = yield BatchCall(gate, inputs, configs, drafts=list(drafts.values()))
        return dict(zip(drafts, found, strict=True))

    def begin(self, place: int) -> ArmAnswer:
        """Let the direct arm begin to answer."""
        return ArmAnswer(self.router._direct, self.batch, place)

    def search(self) -> ArmSearch:
        """Return the step that runs the retrieve arm up to its retriever."""
        self._search = ArmSearch(self.router._first, self.batch)
        return self._search

    def drop_search(self) -> None:
        """Let go of a search that nobody needs, and say so in its traces."""
        if self._search is not None:
            self._search.cancelled["cancelled"] = NOT_NEEDED
        super().drop_search()

    def passages(self, place: int, found: Any) -> Sequence[FoundPassage]:
        """Return what was found for an input, by its retrievers or in what the search returned."""
        return [] if self._search is None else self._search.passages(place, found)

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners, and let what runs in an arm take the decision: it need not decide or draft again."""
        batch = self.batch
        yield from announcing(decision, batch.child(place))
        batch.configs[place] = bind(batch.configs[place], self.router.gate, batch.inputs[place], decision)

    def left(self, place: int, routed: Routed | Exception) -> ArmRun | ArmAnswer | Exception:
        """Return what is left to run for an input, with a tag, its decision, and a draft to go on with."""
        if isinstance(routed, Exception):
            return routed
        if isinstance(routed.answer, ArmAnswer):
            return routed.answer
        decision = routed.decision
        metadata: dict[str, Any] = {"rgate_retrieve": decision.retrieve, "rgate_p_known": decision.p_known}
        tag = "direct"
        arm = self.router.direct
        if decision.retrieve:
            tag = "retrieve"
            arm = self.router.retrieve
        elif decision.draft is not None and decision.draft.source == "llm":
            metadata["rgate_draft"] = decision.draft.text
        config = self.batch.child(place, tag)
        config["tags"] = [*config.get("tags", []), tag]
        config["metadata"] = {**config.get("metadata", {}), **metadata}
        if routed.searched:  # the first step had the options
            return ArmRun(self.router._rest, routed.found, config, {})
        return ArmRun(arm, self.batch.inputs[place], config, self.batch.options)


# --- searching ahead of a decision ---------------------------------------------------------------------------------


class ArmSearch(BatchCall):
    """The searches of a batch, one an input; each result is what the search returned, or what it raised.

    Args:
        first: What searches: the retrieve arm up to its retriever.
        batch: The inputs and their runs.

    Attributes:
        cancelled: What traces say of searches that nobody needs; see `CancellableTracer`.
    """

    def __init__(self, first: Runnable[Any, Any], batch: RunBatch) -> None:
        self.cancelled: dict[str, Any] = {}
        configs = batch.children("retrieve")
        self._runs = [RetrieverRuns(config["callbacks"], self.cancelled) for config in configs]
        super().__init__(first, batch.inputs, configs, **batch.options)

    async def arun(self) -> list[Any]:
        """Search without blocking the event loop; cancelled, it ends the runs that its retrievers leave open."""
        try:
            return await super().arun()
        except asyncio.CancelledError:
            for runs in self._runs:
                runs.end()
            raise

    def passages(self, place: int, found: Any) -> list[FoundPassage]:
        """Return what a search found: by its retrievers, or else the documents in what it returned."""
        return list(map(as_passage, instances_in(self._runs[place].documents or found, Document)))


def as_passage(document: Document) -> FoundPassage:
    """Return a document as passages are judged and read."""
    metadata = document.metadata or {}  # some stores give None
    return FoundPassage(document.page_content, str(metadata.get("title") or ""))


class RetrieverRuns(BaseCallbackHandler):
    """Notes what retrievers find, whatever becomes of it in their chain.

    Args:
        manager: The callback manager of a search's run, which this handler is added to.
        cancelled: See `CancellableTracer`.
    """

    run_inline = True  # told before whoever waits for the search goes on

    def __init__(self, manager: Any, cancelled: dict[str, Any]) -> None:
        self._tracers, listeners = split_handlers(manager, cancelled)
        manager.set_handlers([*self._tracers, *listeners, self])
        self._parents: dict[UUID, UUID | None] = {}
        self._found: dict[UUID, Any] = {}

    @property
    def documents(self) -> list[Any]:
        """What each found, in the order in which they began; those within a retriever do not count."""
        found: list[Any] = []
        for run_id, parent in self._parents.items():
            if parent not in self._parents:
                found.append(self._found.get(run_id))
        return found

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


def split_arm(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a retrieve arm into what searches, up to its retriever, and the rest.

    Without a retriever among its steps, as in a chain of functions, the first step is what searches.

    Raises:
        ConfigurationError: It is a single step, and no retriever.
    """
    if isinstance(arm, BaseRetriever):
        return arm, RunnablePassthrough()
    if isinstance(arm, RunnableBindingBase):
        first, rest = split_arm(arm.bound)
        # What was bound to a chain goes to its first step; its config concerns all of them.
        return arm.model_copy(update={"bound": first}), arm.model_copy(update={"bound": rest, "kwargs": {}})
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            f"To search ahead, a router needs a retrieve arm of several steps; {type(arm).__name__} is one.",
            hint="Pass the chain itself, with its retriever in one of the first steps, or guard the retriever.",
        )
    steps = arm.steps
    for end, step in enumerate(steps[:-1], start=1):
        if _searches(step):
            return _sequence(steps[:end]), _sequence(steps[end:])
    return steps[0], _sequence(steps[1:])


def _sequence(steps: list[Runnable[Any, Any]]) -> Runnable[Any, Any]:
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps)


def _searches(step: Any) -> bool:
    """Whether there is a retriever in a step."""
    if isinstance(step, BaseRetriever):
        return True
    return any(_searches(part) for part in parts_of(step))
