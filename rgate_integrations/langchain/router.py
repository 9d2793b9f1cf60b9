"""`RetrievalRouter`: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
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

from rgate_integrations.answering.routing import RoutedCall, RoutedInput, RouteResult, Strategy
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.langchain.answer_first import ArmAnswer, DirectArm
from rgate_integrations.langchain.arm_callbacks import RetrieverRuns
from rgate_integrations.langchain.bound_decision import bind_decision, emit_decision_event, read_threshold
from rgate_integrations.langchain.chat_models import instances_in, runnables_in
from rgate_integrations.langchain.corpora import CorpusChain
from rgate_integrations.langchain.documents import as_passage
from rgate_integrations.langchain.drafting import GateCall, condense_follow_ups
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, Run, run_batches
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
    request to the LLM, and the retrieve arm runs. Until then only tracers hear of the direct arm, and of an arm
    that was stopped only they ever do. A batch with ``max_concurrency`` goes in parts of that size, since an
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

    _arms: Arms = PrivateAttr()

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        strategy: Strategy | None = None,
        condensed_key: str | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            gate=gate,
            retrieve=coerce_to_runnable(retrieve),
            direct=coerce_to_runnable(direct),
            strategy=strategy or Strategy(),
            condensed_key=condensed_key,
            name=name,
            **fields,
        )
        search = split_arm(self.retrieve) if self.strategy.searches_ahead else None
        self._arms = Arms(DirectArm(self.direct), search)

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
        (value,) = values
        remaining = run(self._route_one(Run(value, config, run_manager, options)))
        yield from remaining.stream()

    async def _astream(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        (value,) = [value async for value in values]
        remaining = await arun(self._route_one(Run(value, config, run_manager, options)))
        async with aclosing(remaining.astream()) as chunks:
            async for chunk in chunks:
                yield chunk

    def flow(self, runs: list[Run]) -> Flow[list[Any]]:
        """Decide for a batch in one call of the gate, then run each arm on its share."""
        limit = runs[0].config.get("max_concurrency")
        size = len(runs)
        if limit is not None and self.strategy.answer_first is not None:
            size = limit
        results: list[Any] = []
        for start in range(0, len(runs), size):
            results += yield from self._answer(runs[start : start + size])
        return results

    def _answer(self, runs: list[Run]) -> Flow[list[Any]]:
        """Decide, finish the answers that were begun, and run each arm on its share of the inputs."""
        inputs = yield from self._route(runs)
        shares: dict[Any, list[RouterInput]] = {}
        for each in inputs:  # an exception is the result of its input
            if isinstance(each.result, ArmAnswer):
                shares.setdefault("begun", []).append(each)
            elif isinstance(each.result, ArmRun):
                shares.setdefault(id(each.result.arm), []).append(each)
        steps: list[Step] = []
        for key, share in shares.items():
            remaining = [each.result for each in share]
            if key == "begun":
                steps.append(Gather([Call(run, arun, answer.whole()) for answer in remaining]))
            else:
                values, configs = [each.input for each in remaining], [each.config for each in remaining]
                steps.append(BatchCall(remaining[0].arm, values, configs, **remaining[0].options))
        results = yield from run_batches(steps, runs[0].config)
        for share, share_results in zip(shares.values(), results, strict=True):
            for each, result in zip(share, share_results, strict=True):
                each.result = result
        return [each.result for each in inputs]

    def _route_one(self, single: Run) -> Flow[ArmRun | ArmAnswer]:
        """Decide for one input; returns what is left to run, or raises."""
        (each,) = yield from self._route([single])
        if isinstance(each.result, Exception):
            raise each.result
        remaining: ArmRun | ArmAnswer = each.result
        return remaining

    def _route(self, runs: list[Run]) -> Flow[Sequence[RouterInput]]:
        """Decide for a batch; the result of each input is what is left to run, or the exception that concerns it."""
        call = RouterCall(self, runs, self._arms)
        if self.condensed_key is not None:
            yield from call.condense(self.condensed_key)
        results = yield from call.route()
        for each, result in zip(call.inputs, results, strict=True):
            each.result = result if isinstance(result, Exception) else call.remaining_run(each, result)
        return call.inputs


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value


@dataclass(frozen=True)
class Arms:
    """The arms of a router in the forms in which they run.

    Attributes:
        direct: The direct arm, with and without log-probabilities.
        search: What searches in the retrieve arm, and the rest of it; None if nothing is searched ahead.
    """

    direct: DirectArm
    search: tuple[Runnable[Any, Any], Runnable[Any, Any]] | None


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


@dataclass
class RouterInput(RoutedInput):
    """One input of a `RetrievalRouter`.

    Attributes:
        run: The input of the arms, and its run.
        asked: What the gates are asked.
        retrievers: The retrievers of its search, once the retrieve arm searches ahead.
        result: What is left to run; then what that returned, or the exception that concerns this input.
    """

    run: Run = field(kw_only=True)
    asked: Any = field(kw_only=True)
    retrievers: RetrieverRuns | None = None
    result: Any = None


class RouterCall(RoutedCall[RouterInput]):
    """One call of a `RetrievalRouter`.

    Args:
        router: The router.
        runs: Its inputs and their runs.
        arms: Its arms.
    """

    def __init__(self, router: RetrievalRouter[Any, Any], runs: list[Run], arms: Arms) -> None:
        inputs = []
        for each in runs:
            threshold = read_threshold(router.gate, each.config)
            # A copy: what is bound to the arms' config is not the caller's.
            inputs.append(RouterInput(threshold=threshold, run=replace(each), asked=each.input))
        super().__init__(router.strategy, inputs)
        self.router = router
        self._arms = arms
        self._cancelled: dict[str, Any] = {}

    def condense(self, key: str) -> Flow[None]:
        """Let follow-ups stand alone: for the gates, and under a key for the arms."""
        gate = self.router.gate
        calls = [GateCall.read(each.run, getattr(gate, "input_key", None)) for each in self.inputs]
        yield from condense_follow_ups(getattr(gate, "condense", None), calls)
        for each, call in zip(self.inputs, calls, strict=True):
            if call.result is not None:  # there is no question: the gate says so
                continue
            value = each.run.input
            others = value if isinstance(value, Mapping) else {"input": value}
            each.run.input = {**others, key: call.turn.question}
            if (
                not call.turn.history
            ):  # else the gate reads the earlier turns, or says why they were not condensed
                each.asked = call.turn.question

    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate once for the whole batch."""
        decisions: list[Decision | Exception] = yield self._ask(self.router.gate, "gate")
        return decisions

    def screen(self, gate: Any) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate that screens once for the whole batch."""
        decisions: list[Decision | Exception] = yield self._ask(gate, "first_look")
        return decisions

    def _ask(self, gate: Any, tag: str) -> BatchCall:
        values = [each.asked for each in self.inputs]
        return BatchCall(gate, values, [each.run.child(tag) for each in self.inputs])

    def judge(self, gate: Any, inputs: Sequence[RouterInput]) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate once about several partial answers."""
        values = []
        for each in inputs:
            # What was condensed to be screened is not condensed again; else the judge reads the turns, too.
            is_condensed = each.screened is not None and getattr(gate, "condense", None) is not None
            values.append(each.screened.question if is_condensed and each.screened else each.asked)
        configs = [each.run.child("gate") for each in inputs]
        drafts = [each.draft for each in inputs]
        decisions: list[Decision | Exception] = yield BatchCall(gate, values, configs, drafts=drafts)
        return decisions

    def begin(self, each: RouterInput) -> ArmAnswer:
        """Let the direct arm begin to answer."""
        return ArmAnswer(self._arms.direct, each.run)

    def search(self, inputs: Sequence[RouterInput]) -> ArmSearch:
        """Return the step that runs the retrieve arm up to its retriever."""
        assert self._arms.search is not None  # noqa: S101  only a strategy that searches ahead asks
        configs = []
        for each in inputs:
            config = each.run.child("retrieve")
            if self.strategy.chooses_corpus and each.decided is not None:
                config = bind_decision(config, self.router.gate, each.run.input, each.decided)
            each.retrievers = RetrieverRuns(config["callbacks"], self._cancelled)
            configs.append(config)
        return ArmSearch(self._arms.search[0], inputs, configs)

    def drop_search(self) -> None:
        """Drop a search that is not needed, and say so in its traces."""
        self._cancelled["cancelled"] = NOT_NEEDED
        super().drop_search()

    def passages(self, each: RouterInput) -> Sequence[FoundPassage]:
        """Return what was found for an input: by retrievers, or else the documents in what the search returned."""
        found = (each.retrievers and each.retrievers.documents) or each.found
        return list(map(as_passage, instances_in(found, Document)))

    def announce(self, each: RouterInput, decision: Decision) -> Flow[None]:
        """Emit the decision, and let what runs in an arm reuse it: nothing decides or drafts again."""
        yield from emit_decision_event(decision, each.run.child())
        each.run.config = bind_decision(each.run.config, self.router.gate, each.run.input, decision)

    def remaining_run(self, each: RouterInput, result: RouteResult) -> ArmRun | ArmAnswer:
        """Return what is left to run for an input, with a tag, its decision, and a draft to go on with."""
        if isinstance(result.answer, ArmAnswer):
            return result.answer
        decision = result.decision
        metadata: dict[str, Any] = {"rgate_retrieve": decision.retrieve, "rgate_p_known": decision.p_known}
        if decision.corpus is not None:
            metadata["rgate_corpus"] = decision.corpus
        tag = "direct"
        arm = self.router.direct
        if decision.retrieve:
            tag = "retrieve"
            arm = self.router.retrieve
        elif decision.draft is not None and decision.draft.source == "llm":
            metadata["rgate_draft"] = decision.draft.text
        config = each.run.child(tag)
        config["tags"] = [*config.get("tags", []), tag]
        config["metadata"] = {**config.get("metadata", {}), **metadata}
        if result.searched and self._arms.search is not None:  # what searched had the options
            return ArmRun(self._arms.search[1], result.found, config, {})
        return ArmRun(arm, each.run.input, config, each.run.options)


# --- searching ahead of a decision ---------------------------------------------------------------------------------


class ArmSearch(BatchCall):
    """The searches of a batch, one an input; each result is what the search returned, or what it raised.

    Args:
        first: What searches: the retrieve arm up to its retriever.
        inputs: The inputs, each with the listener to its retrievers.
        configs: The config of each.
    """

    def __init__(
        self, first: Runnable[Any, Any], inputs: Sequence[RouterInput], configs: Sequence[RunnableConfig]
    ) -> None:
        self._listeners = [each.retrievers for each in inputs if each.retrievers is not None]
        super().__init__(first, [each.run.input for each in inputs], configs, **inputs[0].run.options)

    async def arun(self) -> list[Any]:
        """Search without blocking the event loop; cancelled, it ends the runs that its retrievers leave open."""
        try:
            return await super().arun()
        except asyncio.CancelledError:
            for listener in self._listeners:
                listener.end()
            raise


def split_arm(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a retrieve arm into what searches, up to its retriever, and the rest.

    Without a retriever among its steps, as in a chain of functions, the first step is what searches.

    Raises:
        ConfigurationError: It is a single step, and no retriever.
    """
    if isinstance(arm, BaseRetriever):
        return arm, RunnablePassthrough()
    if isinstance(arm, CorpusChain):
        halves = {name: split_arm(part) for name, part in arm.parts.items()}
        searches = {name: search for name, (search, _) in halves.items()}
        return arm.with_parts(searches), arm.with_parts({name: rest for name, (_, rest) in halves.items()})
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
        if next(runnables_in(step, BaseRetriever), None) is not None:
            return _sequence(steps[:end]), _sequence(steps[end:])
    return steps[0], _sequence(steps[1:])


def _sequence(steps: list[Runnable[Any, Any]]) -> Runnable[Any, Any]:
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps)
