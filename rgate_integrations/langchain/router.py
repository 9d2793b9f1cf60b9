"""`RetrievalRouter`: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
)
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.graph import Graph, Node
from langchain_core.runnables.utils import (
    ConfigurableFieldSpec,
    Input,
    Output,
    get_unique_config_specs,
)

from rgate_integrations.decision import Decision
from rgate_integrations.langchain.decision_context import bind
from rgate_integrations.langchain.events import announcing
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch, only
from rgate_integrations.runtime.flow import Call, Flow, Gather, arun, run


class RetrievalRouter(FlowRunnable[Input, Output]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm, side by side, or one after the
    other if ``max_concurrency`` limits them; the order is kept.
    Arms get the router's input unchanged. Each decision is a child run in traces and a custom event,
    ``retrieval_gate``, which LangGraph's custom stream has, too; the chosen arm's run has the tag ``retrieve`` or
    ``direct``.

    Args:
        gate: Decides; a `RetrievalGate`.
        retrieve: Arm for unknown questions.
        direct: Arm for known questions.
    """

    gate: Runnable[Any, Decision]
    retrieve: Runnable[Any, Any]
    direct: Runnable[Any, Any]

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        name: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            gate=gate,
            retrieve=coerce_to_runnable(retrieve),
            direct=coerce_to_runnable(direct),
            name=name,
            **fields,
        )

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
        async with ending(self.atransform(_single(input), config, **kwargs)) as chunks:
            async for chunk in chunks:
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
        streamed = self._atransform_stream_with_config(input, self._atransform, config, **kwargs)
        async with ending(streamed) as chunks:
            async for chunk in chunks:
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
        value = joined(list(values))
        task = run(self._choosing(RunBatch([value], [config], [run_manager], options)))
        yield from task.arm.stream(task.input, task.config, **task.options)

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        value = joined([v async for v in values])
        task = await arun(self._choosing(RunBatch([value], [config], [run_manager], options)))
        async with ending(task.arm.astream(task.input, task.config, **task.options)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _deciding(self, batch: RunBatch) -> Flow[list[Decision | Exception]]:
        """Ask the gate once for the whole batch, and tell listeners what it decided."""
        decisions: list[Decision | Exception]
        decisions = yield BatchCall(self.gate, batch.inputs, batch.children("gate"))
        yield from self._announcing(decisions, batch)
        return decisions

    def _announcing(self, decisions: Sequence[Decision | Exception], batch: RunBatch) -> Flow[None]:
        """Tell listeners what was decided for each input of a batch."""
        for place, (decision, config) in enumerate(zip(decisions, batch.children(), strict=True)):
            if isinstance(decision, Decision):
                yield from announcing(decision, config)
                # What runs in the arm need not decide or draft again.
                batch.configs[place] = bind(batch.configs[place], self.gate, batch.inputs[place], decision)

    def _choosing(self, batch: RunBatch) -> Flow[Task]:
        """Decide for a batch of one; returns what is left to do.

        Raises:
            Exception: What concerns this input: there is no question in it, or, if it was searched for, the search
                failed.
        """
        return only((yield from self._tasks(batch)))

    def _tasks(self, batch: RunBatch) -> Flow[list[Task | Exception]]:
        """Decide for a batch; returns for each input what is left to do, or why there is no question."""
        decisions = yield from self._deciding(batch)
        tasks: list[Task | Exception] = []
        for place, decision in enumerate(decisions):
            if isinstance(decision, Exception):
                tasks.append(decision)
            else:
                arm = self.retrieve if decision.retrieve else self.direct
                config = arm_config(batch, place, decision)
                tasks.append(Task(arm, batch.inputs[place], config, batch.options))
        return tasks

    def _answering_several(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch, then run both arms, each on its share as one batch."""
        tasks = yield from self._tasks(batch)
        shares: dict[int, _Share] = {}
        for place, task in enumerate(tasks):
            if isinstance(task, Task):
                shares.setdefault(id(task.arm), _Share()).add(place, task)
        calls = [share.call() for share in shares.values()]
        if batch.configs[0].get("max_concurrency") is None:
            answers = yield Gather(calls)
        else:  # the limit holds for both arms together
            answers = []
            for call in calls:
                answers.append((yield call))
        results: list[Any] = list(tasks)  # an input without a question keeps its exception
        for share, found in zip(shares.values(), answers, strict=True):
            for place, answer in zip(share.places, found, strict=True):
                results[place] = answer
        return results


@dataclass(frozen=True)
class Task:
    """What is left to do for a single input once it is decided."""

    arm: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    options: dict[str, Any]


@dataclass
class _Share:
    """The inputs of a batch that go to one arm, with their places in the batch."""

    places: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)

    def add(self, place: int, task: Task) -> None:
        self.places.append(place)
        self.tasks.append(task)

    def call(self) -> BatchCall:
        """Return the step that runs the arm on all of them."""
        inputs = [task.input for task in self.tasks]
        first = self.tasks[0]
        return BatchCall(first.arm, inputs, [task.config for task in self.tasks], **first.options)


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


def joined(chunks: Sequence[Any]) -> Any:
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


@asynccontextmanager
async def ending(chunks: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """End a stream when its reader leaves it, now and not when the generator is collected."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value
