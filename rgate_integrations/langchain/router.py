"""`RetrievalRouter`: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.graph import Graph, Node
from langchain_core.runnables.utils import (
    ConfigurableFieldSpec,
    Input,
    Output,
    get_unique_config_specs,
)
from pydantic import PrivateAttr

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.flow import Background, Call, Each, Flow, Start, arun, run
from rgate_integrations.langchain.carried import carrying
from rgate_integrations.langchain.events import EVENT, event_of
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch


class RetrievalRouter(FlowRunnable[Input, Output]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm; the order is kept.
    Arms get the router's input unchanged. Each decision is a child run in traces and a custom event,
    ``retrieval_gate``; the chosen arm's run has the tag ``retrieve`` or ``direct``.

    A speculative router searches while the gate decides when it has a single input: invoked, streamed, or in a
    batch of one. In a batch of several the gate decides first, in its one call, and then only the unknown questions
    are searched: one shared decision is too short to be worth searching for questions that are known.

    Args:
        gate: Decides; a `RetrievalGate`.
        retrieve: Arm for unknown questions.
        direct: Arm for known questions.
        speculative: Run the first step of the retrieve arm, the retriever's, while the gate decides. For a known
            question it is cancelled or its result dropped, and what it raises is logged only.

    Raises:
        ConfigurationError: ``speculative``, and the retrieve arm is not a sequence of steps.
    """

    gate: Runnable[Any, Decision]
    retrieve: Runnable[Any, Any]
    direct: Runnable[Any, Any]
    speculative: bool = False

    # What is run while the gate decides, and the steps of the retrieve arm that go on with what it found.
    _first: Runnable[Any, Any] | None = PrivateAttr(default=None)
    _rest: Runnable[Any, Any] = PrivateAttr()

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        speculative: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            gate=gate,
            retrieve=_arm(retrieve),
            direct=_arm(direct),
            speculative=speculative,
            name=name,
        )
        self._rest = self.retrieve
        if speculative:
            self._first, self._rest = _split(self.retrieve)

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
        graph = Graph()
        gate = graph.add_node(self.gate)
        ends = []
        for name, arm in (("retrieve", self.retrieve), ("direct", self.direct)):
            first, last = _drawn(graph, name, arm, config)
            graph.add_edge(gate, first, data=name, conditional=True)
            ends.append(last)
        output = graph.add_node(self.get_output_schema(config))
        for last in ends:
            graph.add_edge(last, output)
        return graph

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Output]:
        """Decide, then stream the chosen arm."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Decide, then stream the chosen arm."""
        async for chunk in self.atransform(_single(input), config, **kwargs):
            yield chunk

    def transform(
        self, input: Iterator[Input], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Output]:
        """Gather the input, decide, then stream the chosen arm."""
        yield from self._transform_stream_with_config(input, self._transform, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Input], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Gather the input, decide, then stream the chosen arm."""
        async for chunk in self._atransform_stream_with_config(input, self._atransform, config, **kwargs):
            yield chunk

    def flow(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch in one call of the gate, then run each arm on its share."""
        if len(batch.inputs) > 1:
            return (yield from self._answering_several(batch))
        task = yield from self._choosing(batch)
        answer = yield Call(task.arm.invoke, task.arm.ainvoke, task.input, task.config, **task.options)
        return [answer]

    def _transform(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> Iterator[Any]:
        value = _joined(list(values))
        task = run(self._choosing(RunBatch([value], [config], [run_manager], options)))
        yield from task.arm.stream(task.input, task.config, **task.options)

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        value = _joined([v async for v in values])
        task = await arun(self._choosing(RunBatch([value], [config], [run_manager], options)))
        async for chunk in task.arm.astream(task.input, task.config, **task.options):
            yield chunk

    def _deciding(self, batch: RunBatch) -> Flow[list[Decision | Exception]]:
        """Ask the gate once for the whole batch, and tell listeners what it decided."""
        decisions: list[Decision | Exception]
        decisions = yield BatchCall(self.gate, batch.inputs, batch.children("gate"))
        for place, (decision, config) in enumerate(zip(decisions, batch.children(), strict=True)):
            if isinstance(decision, Decision):
                yield Call(
                    dispatch_custom_event, adispatch_custom_event, EVENT, event_of(decision), config=config
                )
                # What runs in the arm need not decide or draft again.
                batch.configs[place] = carrying(
                    batch.configs[place], self.gate, batch.inputs[place], decision
                )
        return decisions

    def _choosing(self, batch: RunBatch) -> Flow[_Task]:
        """Decide for a batch of one, searching meanwhile if this router is speculative.

        Raises:
            InvalidQuestionError: There is no question in the input.
        """
        search: Background | None = None
        if self._first is not None:
            (config,) = batch.children("retrieve")
            search = yield Start(
                Call(self._first.invoke, self._first.ainvoke, batch.inputs[0], config, **batch.options)
            )
        try:
            (decision,) = yield from self._deciding(batch)
            if isinstance(decision, Exception):
                raise decision
            config = _arm_config(batch, 0, decision)
            if not decision.retrieve:
                return _Task(self.direct, batch.inputs[0], config, batch.options)
            if search is None:
                return _Task(self.retrieve, batch.inputs[0], config, batch.options)
            found = yield search
            return _Task(self._rest, found, config, {})  # the first step had the options
        finally:
            if search is not None:
                search.drop()

    def _answering_several(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch, then run both arms, each on its share as one batch."""
        decisions = yield from self._deciding(batch)
        retrieve, direct = _Share(self.retrieve), _Share(self.direct)
        for place, decision in enumerate(decisions):
            if isinstance(decision, Decision):
                share = retrieve if decision.retrieve else direct
                share.places.append(place)
                share.inputs.append(batch.inputs[place])
                share.configs.append(_arm_config(batch, place, decision))
        shares = [share for share in (retrieve, direct) if share.places]
        answers = yield Each(
            [BatchCall(share.arm, share.inputs, share.configs, **batch.options) for share in shares]
        )
        results: list[Any] = list(decisions)  # an input without a question keeps its exception
        for share, found in zip(shares, answers, strict=True):
            for place, answer in zip(share.places, found, strict=True):
                results[place] = answer
        return results


@dataclass(frozen=True)
class _Task:
    """What is left to do for a single input once it is decided."""

    arm: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    options: dict[str, Any]


@dataclass
class _Share:
    """The inputs of a batch that go to one arm, with their places in the batch."""

    arm: Runnable[Any, Any]
    places: list[int] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    configs: list[RunnableConfig] = field(default_factory=list)


def _arm(arm: RunnableLike[Any, Any]) -> Runnable[Any, Any]:
    return coerce_to_runnable(arm)


def _split(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a sequence into its first step and the rest."""
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            f"A speculative router needs a retrieve arm of several steps; {type(arm).__name__} is one.",
            hint="Pass the chain itself, with its retriever in the first step, or guard the retriever.",
        )
    first, *rest = arm.steps
    return first, rest[0] if len(rest) == 1 else RunnableSequence(*rest)


def _arm_config(batch: RunBatch, place: int, decision: Decision) -> RunnableConfig:
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


def _drawn(
    graph: Graph, name: str, arm: Runnable[Any, Any], config: RunnableConfig | None
) -> tuple[Node, Node]:
    """Add an arm to a graph; returns its first and last node."""
    inner = arm.get_graph(config)
    inner.trim_first_node()
    inner.trim_last_node()
    if inner.nodes:
        first, last = graph.extend(inner, prefix=name)
        if first is not None and last is not None:
            return first, last
    node = graph.add_node(arm, id=f"{name}:{arm.get_name()}")
    return node, node


def _joined(chunks: Sequence[Any]) -> Any:
    """Add up streamed input chunks, as LangChain does; what cannot be added is taken as it came last."""
    if not chunks:
        return ""
    total = chunks[0]
    for chunk in chunks[1:]:
        try:
            total = total + chunk
        except TypeError:
            total = chunk
    return total


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value
