"""The router: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.graph import Graph
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs

from rgate_integrations import speculative as searching
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.langchain.gate import RetrievalGate

EVENT = "retrieval_gate"


class RetrievalRouter(Runnable[Any, Any]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm; the order is kept.
    Arms get the router's input unchanged. Each decision is a child run in traces and a custom event,
    ``retrieval_gate``; the chosen arm's run has the tag ``retrieve`` or ``direct``.

    Args:
        gate: Decides.
        retrieve: Arm for unknown questions.
        direct: Arm for known questions.
        speculative: Run the first step of the retrieve arm, the retriever's, while the gate decides. For known
            questions it is cancelled or its result dropped, and what it raises is logged only.

    Raises:
        ConfigurationError: ``speculative``, and the retrieve arm is not a sequence of steps.
    """

    def __init__(
        self,
        gate: RetrievalGate,
        *,
        retrieve: RunnableLike[Any, Any],
        direct: RunnableLike[Any, Any],
        speculative: bool = False,
    ) -> None:
        self.gate = gate
        self.retrieve: Runnable[Any, Any] = coerce_to_runnable(retrieve)
        self.direct: Runnable[Any, Any] = coerce_to_runnable(direct)
        self.speculative = speculative
        self._first: Runnable[Any, Any] | None = None
        self._rest = self.retrieve
        if speculative:
            self._first, self._rest = _steps(self.retrieve)

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of both arms."""
        parts: list[Runnable[Any, Any]] = [self.gate, self.retrieve, self.direct]
        return get_unique_config_specs(spec for part in parts for spec in part.config_specs)

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
        end = None
        for name, arm in (("retrieve", self.retrieve), ("direct", self.direct)):
            inner = arm.get_graph(config)
            inner.trim_first_node()
            inner.trim_last_node()
            first, last = graph.extend(inner, prefix=name) if inner.nodes else (None, None)
            if first is None or last is None:
                node = graph.add_node(arm, id=f"{name}:{arm.get_name()}")
                first = last = node
            graph.add_edge(gate, first, data=name, conditional=True)
            end = end or graph.add_node(self.get_output_schema(config))
            graph.add_edge(last, end)
        return graph

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Decide, then run the chosen arm."""
        return self._call_with_config(self._invoke, input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Decide, then run the chosen arm."""
        return await self._acall_with_config(self._ainvoke, input, config, **kwargs)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Any]:
        """Decide for all inputs in one call of the gate, then run each arm on its share as a batch."""
        return self._batch_with_config(
            self._batch, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Any]:
        """Decide for all inputs in one call of the gate, then run each arm on its share as a batch."""
        return await self._abatch_with_config(
            self._abatch, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Decide, then stream the chosen arm."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Decide, then stream the chosen arm."""
        async for chunk in self.atransform(_single(input), config, **kwargs):
            yield chunk

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Gather the input, decide, then stream the chosen arm."""
        yield from self._transform_stream_with_config(input, self._transform, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Gather the input, decide, then stream the chosen arm."""
        async for chunk in self._atransform_stream_with_config(input, self._atransform, config, **kwargs):
            yield chunk

    # --- each call style runs the shares that one call of the gate has made -------------------------------

    def _invoke(
        self, value: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        share = self._decide([value], [run_manager], [config], kwargs).only
        return share.arm.invoke(share.values[0], share.configs[0], **share.kwargs)

    async def _ainvoke(
        self, value: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        share = (await self._adecide([value], [run_manager], [config], kwargs)).only
        return await share.arm.ainvoke(share.values[0], share.configs[0], **share.kwargs)

    def _batch(
        self,
        values: list[Any],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        routed = self._decide(values, run_manager, config, kwargs)
        for share in routed.shares:
            found = share.arm.batch(share.values, share.configs, return_exceptions=True, **share.kwargs)
            routed.take(share, found)
        return routed.results

    async def _abatch(
        self,
        values: list[Any],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        routed = await self._adecide(values, run_manager, config, kwargs)

        async def run(share: _Share) -> None:
            routed.take(
                share,
                await share.arm.abatch(share.values, share.configs, return_exceptions=True, **share.kwargs),
            )

        await asyncio.gather(*(run(share) for share in routed.shares))
        return routed.results

    def _transform(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[Any]:
        share = self._decide([_joined(list(values))], [run_manager], [config], kwargs).only
        yield from share.arm.stream(share.values[0], share.configs[0], **share.kwargs)

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        value = _joined([v async for v in values])
        share = (await self._adecide([value], [run_manager], [config], kwargs)).only
        async for chunk in share.arm.astream(share.values[0], share.configs[0], **share.kwargs):
            yield chunk

    # --- one call of the gate, for the whole batch ---------------------------------------------------------

    def _decide(
        self,
        values: list[Any],
        managers: Sequence[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        kwargs: dict[str, Any],
    ) -> _Routed:
        search = None
        if self._first is not None:
            configs = _children(config, managers, "retrieve")
            search = searching.start(
                partial(self._first.batch, values, configs, return_exceptions=True, **kwargs)
            )
        try:
            gate = _children(config, managers, "gate")
            decisions = self.gate.batch(values, gate, return_exceptions=True)
            for decision, inner in zip(decisions, _children(config, managers), strict=True):
                if isinstance(decision, Decision):
                    dispatch_custom_event(EVENT, _event(decision), config=inner)
            early = search.result() if search is not None and _any_unknown(decisions) else None
        finally:
            if search is not None:
                searching.drop(search)
        return self._routed(values, decisions, early, managers, config, kwargs)

    async def _adecide(
        self,
        values: list[Any],
        managers: Sequence[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        kwargs: dict[str, Any],
    ) -> _Routed:
        search = None
        if self._first is not None:
            configs = _children(config, managers, "retrieve")
            search = asyncio.ensure_future(
                self._first.abatch(values, configs, return_exceptions=True, **kwargs)
            )
        try:
            gate = _children(config, managers, "gate")
            decisions = await self.gate.abatch(values, gate, return_exceptions=True)
            for decision, inner in zip(decisions, _children(config, managers), strict=True):
                if isinstance(decision, Decision):
                    await adispatch_custom_event(EVENT, _event(decision), config=inner)
            early = await search if search is not None and _any_unknown(decisions) else None
        finally:
            if search is not None:
                searching.drop(search)
        return self._routed(values, decisions, early, managers, config, kwargs)

    def _routed(
        self,
        values: list[Any],
        decisions: Sequence[Any],
        early: Sequence[Any] | None,
        managers: Sequence[Any],
        config: Sequence[RunnableConfig],
        kwargs: dict[str, Any],
    ) -> _Routed:
        """Sort the inputs by arm; ``early`` holds what the first step found, for the steps after it."""
        retrieve = _Share(self._rest, {} if early is not None else kwargs)
        direct = _Share(self.direct, kwargs)
        routed = _Routed([None] * len(values), [retrieve, direct])
        for i, decision in enumerate(decisions):
            if not isinstance(decision, Decision):
                routed.results[i] = decision  # what could not be read stays its exception
                continue
            value = early[i] if early is not None and decision.retrieve else values[i]
            if isinstance(value, Exception):
                routed.results[i] = value
                continue
            share, tag = (retrieve, "retrieve") if decision.retrieve else (direct, "direct")
            share.places.append(i)
            share.values.append(value)
            share.configs.append(_child(config[i], managers[i], tag, decision))
        routed.shares = [share for share in routed.shares if share.places]
        return routed


@dataclass
class _Share:
    """The inputs of a batch that go to one arm, with their places in the batch."""

    arm: Runnable[Any, Any]
    kwargs: dict[str, Any]
    places: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    configs: list[RunnableConfig] = field(default_factory=list)


@dataclass
class _Routed:
    """A decided batch: the exceptions of inputs that reach no arm, and each arm's share."""

    results: list[Any]
    shares: list[_Share]

    @property
    def only(self) -> _Share:
        """The share of a batch of one; its exception is raised."""
        if not self.shares:
            raise self.results[0]
        return self.shares[0]

    def take(self, share: _Share, found: Sequence[Any]) -> None:
        for i, result in zip(share.places, found, strict=True):
            self.results[i] = result


def _steps(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            f"A speculative router needs a retrieve arm of several steps; {type(arm).__name__} is one.",
            hint="Pass the chain itself, with its retriever in the first step, or guard the retriever.",
        )
    first, *rest = arm.steps
    return first, rest[0] if len(rest) == 1 else RunnableSequence(*rest)


def _any_unknown(decisions: Sequence[Any]) -> bool:
    return any(isinstance(d, Decision) and d.retrieve for d in decisions)


def _event(decision: Decision) -> dict[str, Any]:
    names = {"question", "retrieve", "p_known", "threshold", "reason", "gate"}
    return decision.model_dump(mode="json", include=names)


def _children(
    config: Sequence[RunnableConfig], managers: Sequence[Any], tag: str | None = None
) -> list[RunnableConfig]:
    return [patch_config(c, callbacks=m.get_child(tag)) for c, m in zip(config, managers, strict=True)]


def _child(config: RunnableConfig, manager: Any, tag: str, decision: Decision) -> RunnableConfig:
    child = patch_config(config, callbacks=manager.get_child(tag))
    child["tags"] = [*child.get("tags", []), tag]
    metadata: dict[str, Any] = {"retrieve": decision.retrieve, "p_known": decision.p_known}
    if not decision.retrieve and decision.draft is not None and decision.draft.source == "llm":
        metadata["draft"] = (
            decision.draft.text
        )  # the beginning of the answer, for models that can go on with it
    child["metadata"] = {**child.get("metadata", {}), **metadata}
    return child


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
