"""The router: one gate call a batch, each arm run as a batch, streams kept alive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.graph import Graph
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs

from rgate_integrations.decision import Decision

if TYPE_CHECKING:
    from rgate_integrations.langchain.gate import RetrievalGate

EVENT = "retrieval_gate"
_Batches = tuple[tuple["Runnable[Any, Any]", list[int]], ...]


class RetrievalRouter(Runnable[Any, Any]):
    """Sends each input to the retrieve arm or the direct arm, as `RetrievalGate.route` made it.

    A batch makes one call of the gate, whatever its size, and one batch of each arm; the order is kept.
    Arms get the router's input unchanged. Each decision is a child run in traces and a custom event,
    ``retrieval_gate``; the chosen arm's run has the tag ``retrieve`` or ``direct``.

    Args:
        gate: Decides.
        retrieve: Arm for unknown questions.
        direct: Arm for known questions.
    """

    def __init__(
        self, gate: RetrievalGate, *, retrieve: RunnableLike[Any, Any], direct: RunnableLike[Any, Any]
    ) -> None:
        self.gate = gate
        self.retrieve: Runnable[Any, Any] = coerce_to_runnable(retrieve)
        self.direct: Runnable[Any, Any] = coerce_to_runnable(direct)

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

    # --- one implementation a call style -------------------------------------------------------------------

    def _invoke(
        self, value: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        decision = self.gate.invoke(value, patch_config(config, callbacks=run_manager.get_child("gate")))
        dispatch_custom_event(
            EVENT, _event(decision), config=patch_config(config, callbacks=run_manager.get_child())
        )
        arm, tag = self._arm(decision)
        return arm.invoke(value, _child(config, run_manager, tag, decision), **kwargs)

    async def _ainvoke(
        self, value: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        decision = await self.gate.ainvoke(
            value, patch_config(config, callbacks=run_manager.get_child("gate"))
        )
        inner = patch_config(config, callbacks=run_manager.get_child())
        await adispatch_custom_event(EVENT, _event(decision), config=inner)
        arm, tag = self._arm(decision)
        return await arm.ainvoke(value, _child(config, run_manager, tag, decision), **kwargs)

    def _batch(
        self,
        values: list[Any],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        decisions = self.gate.batch(values, _gate_configs(config, run_manager), return_exceptions=True)
        for decision, each, manager in zip(decisions, config, run_manager, strict=True):
            if isinstance(decision, Decision):
                dispatch_custom_event(
                    EVENT, _event(decision), config=patch_config(each, callbacks=manager.get_child())
                )
        results: list[Any] = list(decisions)  # what could not be read stays its exception
        for arm, share in self._shares(decisions):
            configs = [
                _child(config[i], run_manager[i], self._arm(decisions[i])[1], decisions[i]) for i in share
            ]
            found = arm.batch([values[i] for i in share], configs, return_exceptions=True, **kwargs)
            for i, result in zip(share, found, strict=True):
                results[i] = result
        return results

    async def _abatch(
        self,
        values: list[Any],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        **kwargs: Any,
    ) -> list[Any]:
        import asyncio

        decisions = await self.gate.abatch(values, _gate_configs(config, run_manager), return_exceptions=True)
        for decision, each, manager in zip(decisions, config, run_manager, strict=True):
            if isinstance(decision, Decision):
                inner = patch_config(each, callbacks=manager.get_child())
                await adispatch_custom_event(EVENT, _event(decision), config=inner)
        results: list[Any] = list(decisions)

        async def run(arm: Runnable[Any, Any], share: list[int]) -> None:
            configs = [
                _child(config[i], run_manager[i], self._arm(decisions[i])[1], decisions[i]) for i in share
            ]
            found = await arm.abatch([values[i] for i in share], configs, return_exceptions=True, **kwargs)
            for i, result in zip(share, found, strict=True):
                results[i] = result

        await asyncio.gather(*(run(arm, share) for arm, share in self._shares(decisions)))
        return results

    def _transform(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[Any]:
        value = _joined(list(values))
        decision = self.gate.invoke(value, patch_config(config, callbacks=run_manager.get_child("gate")))
        dispatch_custom_event(
            EVENT, _event(decision), config=patch_config(config, callbacks=run_manager.get_child())
        )
        arm, tag = self._arm(decision)
        yield from arm.stream(value, _child(config, run_manager, tag, decision), **kwargs)

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        value = _joined([v async for v in values])
        decision = await self.gate.ainvoke(
            value, patch_config(config, callbacks=run_manager.get_child("gate"))
        )
        inner = patch_config(config, callbacks=run_manager.get_child())
        await adispatch_custom_event(EVENT, _event(decision), config=inner)
        arm, tag = self._arm(decision)
        async for chunk in arm.astream(value, _child(config, run_manager, tag, decision), **kwargs):
            yield chunk

    def _arm(self, decision: Decision) -> tuple[Runnable[Any, Any], str]:
        return (self.retrieve, "retrieve") if decision.retrieve else (self.direct, "direct")

    def _shares(self, decisions: Sequence[Any]) -> _Batches:
        judged = [(i, d) for i, d in enumerate(decisions) if isinstance(d, Decision)]
        unknown = [i for i, d in judged if d.retrieve]
        known = [i for i, d in judged if not d.retrieve]
        return tuple((arm, share) for arm, share in ((self.retrieve, unknown), (self.direct, known)) if share)


def _event(decision: Decision) -> dict[str, Any]:
    names = {"question", "retrieve", "p_known", "threshold", "reason", "gate"}
    return decision.model_dump(mode="json", include=names)


def _gate_configs(config: Sequence[RunnableConfig], managers: Sequence[Any]) -> list[RunnableConfig]:
    return [patch_config(c, callbacks=m.get_child("gate")) for c, m in zip(config, managers, strict=True)]


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
