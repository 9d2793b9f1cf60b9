"""`RetrievalRouter`: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig, RunnableParallel
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.graph import Graph
from langchain_core.runnables.utils import (
    ConfigurableFieldSpec,
    Input,
    Output,
    get_unique_config_specs,
)
from pydantic import PrivateAttr, SkipValidation

from rgate_integrations.answering.routing import Outcomes, Routed, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.gates.evidence.search import FoundPassage
from rgate_integrations.langchain.answer_first import ArmAnswer, added_up
from rgate_integrations.langchain.arms import ArmRun, Arms, ArmSearch, arm_config
from rgate_integrations.langchain.questions import announcing, bind, given_threshold
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch, only
from rgate_integrations.runtime.flow import Flow, Gather, RunFlow, Step, arun, run


class RetrievalRouter(FlowRunnable[Input, Output]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm, side by side, or one after the
    other if ``max_concurrency`` limits them; the order is kept.
    Arms get the router's input unchanged. Each decision is a child run in traces and a custom event,
    ``retrieval_gate``, which LangGraph's custom stream has, too; the chosen arm's run has the tag ``retrieve`` or
    ``direct``.

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

    Raises:
        ConfigurationError: The strategy searches ahead, and the retrieve arm is neither a sequence of steps nor a
            retriever.
    """

    gate: Runnable[Any, Decision]
    retrieve: Runnable[Any, Any]
    direct: Runnable[Any, Any]
    strategy: SkipValidation[Strategy] = Strategy()

    _arms: Arms = PrivateAttr()

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
        self._arms = Arms(self.retrieve, self.direct, self.strategy)

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of both arms."""
        specs = [*self.gate.config_specs, *self.retrieve.config_specs, *self.direct.config_specs]
        return get_unique_config_specs(specs)

    @property
    def InputType(self) -> Any:
        """The input type of the retrieve arm."""
        return self.retrieve.InputType

    @property
    def OutputType(self) -> Any:
        """The output type of the retrieve arm."""
        return self.retrieve.OutputType

    def get_graph(self, config: RunnableConfig | None = None) -> Graph:
        """Return a graph of the gate and both arms."""
        arms = RunnableParallel(retrieve=self.retrieve, direct=self.direct)
        return (self.gate | arms).get_graph(config)

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Output]:
        """Decide, then stream the chosen arm."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Decide, then stream the chosen arm."""
        async with aclosing(self.atransform(_single(input), config, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(
        self, input: Iterator[Input], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Output]:
        """Gather the input, decide, then stream the chosen arm."""
        yield from self._transform_stream_with_config(input, self._transform, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Input], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[Output]:
        """Gather the input, decide, then stream the chosen arm."""
        # A stream is closed when its reader leaves it, and not only when the generator is collected.
        streamed: Any = self._atransform_stream_with_config(input, self._atransform, config, **kwargs)
        async with aclosing(streamed) as chunks:
            async for chunk in chunks:
                yield chunk

    def flow(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch in one call of the gate, then run each arm on its share."""
        limit = batch.configs[0].get("max_concurrency")
        if limit is None or self.strategy.answer_first is None:
            return (yield from self._answer(batch, limit))
        results: list[Any] = []
        for start in range(0, len(batch.inputs), limit):
            results += yield from self._answer(batch.part(start, start + limit), limit)
        return results

    def _answer(self, batch: RunBatch, limit: int | None) -> Flow[list[Any]]:
        """Decide, finish the answers that were begun, and run each arm on its share of the inputs."""
        results: list[Any] = list((yield from self._route(batch)))
        finishing: list[tuple[list[int], Step]] = []
        shares: dict[int, list[int]] = {}
        for place, left in enumerate(results):  # an exception is the result of its input
            if isinstance(left, ArmAnswer):
                finishing.append(([place], RunFlow(left.whole())))
            elif isinstance(left, ArmRun):
                shares.setdefault(id(left.arm), []).append(place)
        running: list[tuple[list[int], Step]] = []
        for places in shares.values():
            running.append((places, ArmRun.batch([results[place] for place in places])))
        # A limit holds for all that runs together.
        groups = [finishing + running]
        if limit is not None:
            groups = [finishing, *([share] for share in running)]
        for group in groups:
            found = yield Gather([step for _, step in group])
            for (places, _), answers in zip(group, found, strict=True):
                for place, answer in zip(places, answers, strict=True):
                    results[place] = answer
        return results

    def _route(self, batch: RunBatch) -> Flow[list[ArmRun | ArmAnswer | Exception]]:
        """Decide for a batch; returns what is left to run for each input, or the exception that concerns it."""
        call = RouterCall(self.gate, self.strategy, self._arms, batch)
        return call.left((yield from call.route()))

    def _transform(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> Iterator[Any]:
        batch = RunBatch([added_up(list(values))], [config], [run_manager], options)
        left: Any = only(run(self._route(batch)))
        yield from left.stream()

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        value = added_up([value async for value in values])
        left: Any = only(await arun(self._route(RunBatch([value], [config], [run_manager], options))))
        async with aclosing(left.astream()) as chunks:
            async for chunk in chunks:
                yield chunk


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value


class RouterCall(RoutedCall):
    """One call of a `RetrievalRouter`.

    Args:
        gate: Decides by the question alone, and for what runs in the retrieve arm.
        strategy: What is looked at.
        arms: Its arms.
        batch: Its inputs and their runs.
    """

    def __init__(
        self, gate: Runnable[Any, Decision], strategy: Strategy, arms: Arms, batch: RunBatch
    ) -> None:
        super().__init__(strategy, [given_threshold(gate, config) for config in batch.configs])
        self.gate = gate
        self.arms = arms
        self.batch = batch
        self._search: ArmSearch | None = None

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate once for the whole batch."""
        found: list[Decision | Exception]
        found = yield BatchCall(self.gate, self.batch.inputs, self.batch.children("gate"))
        return found

    def screen(self) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate that screens questions, if there is one."""
        gate = self.strategy.question_gate
        if gate is None:
            return self.screened
        configs = self.batch.children("first_look")
        found: list[Decision | Exception | None]
        found = yield BatchCall(gate, self.batch.inputs, configs)
        return found

    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate once about several begun answers."""
        judge = self.strategy.judge
        configs = self.batch.children("gate")
        inputs = []
        for place in drafts:
            screened = self.screened[place]
            # What was condensed to be screened is not condensed again; else the judge reads the turns, too.
            if isinstance(screened, Decision) and getattr(judge, "condense", None) is not None:
                inputs.append(screened.question)
            else:
                inputs.append(self.batch.inputs[place])
        chosen = [configs[place] for place in drafts]
        found = yield BatchCall(judge, inputs, chosen, drafts=list(drafts.values()))
        return dict(zip(drafts, found, strict=True))

    def begin(self, place: int) -> ArmAnswer:
        """Let the direct arm begin to answer."""
        return ArmAnswer(self.arms, self.batch, place)

    def search(self) -> ArmSearch:
        """Return the step that runs the retrieve arm up to its retriever."""
        self._search = ArmSearch(self.arms.search, self.batch)
        return self._search

    def drop_search(self) -> None:
        """Let go of a search that nobody needs, and say so in its traces."""
        if self._search is not None and self.searching is not None and not self.searching.job.done():
            self._search.cancel()
        super().drop_search()

    def passages(self, place: int, found: Any) -> Sequence[FoundPassage]:
        """Return what was found for an input, by its retrievers or in what the search returned."""
        return [] if self._search is None else self._search.passages(place, found)

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners, and let what runs in an arm take the decision: it need not decide or draft again."""
        batch = self.batch
        yield from announcing(decision, batch.child(place))
        batch.configs[place] = bind(batch.configs[place], self.gate, batch.inputs[place], decision)

    def left(self, routed: Sequence[Routed | Exception]) -> list[ArmRun | ArmAnswer | Exception]:
        """Return what is left to run for each input."""
        left: list[ArmRun | ArmAnswer | Exception] = []
        for place, each in enumerate(routed):
            if isinstance(each, Exception):
                left.append(each)
            elif isinstance(each.answer, ArmAnswer):
                left.append(each.answer)
            else:
                config = arm_config(self.batch, place, each.decision)
                if each.searched:  # the first step had the options
                    left.append(ArmRun(self.arms.rest, each.found, config, {}))
                    continue
                arm = self.arms.retrieve if each.decision.retrieve else self.arms.direct
                left.append(ArmRun(arm, self.batch.inputs[place], config, self.batch.options))
        return left
