"""`FlowRunnable`: a runnable whose logic is one flow over a batch, whichever way it is called.

`BatchCall` is the step in which such a flow runs other runnables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import get_config_list, patch_config
from langchain_core.runnables.utils import Input, Output
from pydantic import ConfigDict

from rgate_integrations.runtime.flow import Call, Flow, arun, run


@dataclass(frozen=True)
class RunBatch:
    """What one call of a runnable brings; a single input is a batch of one.

    Attributes:
        inputs: The inputs.
        configs: The config of each input.
        managers: The callback manager of each input's run.
        options: The keyword arguments of the call.
    """

    inputs: list[Any]
    configs: list[RunnableConfig]
    managers: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def child(self, place: int, tag: str | None = None) -> RunnableConfig:
        """Return a config that makes what runs with it a child run of an input's, with a tag if one is given."""
        return patch_config(self.configs[place], callbacks=self.managers[place].get_child(tag))

    def children(self, tag: str | None = None) -> list[RunnableConfig]:
        """Return such a config for each input."""
        return [self.child(place, tag) for place in range(len(self.inputs))]

    def part(self, start: int, end: int) -> RunBatch:
        """Return the inputs from one place up to another."""
        part = slice(start, end)
        return RunBatch(self.inputs[part], self.configs[part], self.managers[part], self.options)


class FlowRunnable(RunnableSerializable[Input, Output]):
    """A runnable that has one method, `flow`: invoke, batch and their async forms all drive it.

    Each input has a run of its own in traces, also in a batch. Its options are fields, which
    ``configurable_fields`` and ``dumpd`` find; a name that is not one of them is an error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    run_type: ClassVar[str | None] = None
    """What traces call its runs; None for a chain."""

    def __init__(self, **fields: Any) -> None:  # type checkers read the fields from here
        super().__init__(**fields)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether ``langchain_core.load.dumpd`` writes its fields: it does."""
        return True

    @abstractmethod
    def flow(self, batch: RunBatch) -> Flow[Sequence[Output | Exception]]:
        """Work on a batch.

        Returns:
            One result an input, in order: the output, or the exception that concerns this input only.
        """

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        """Run on one input."""
        return self.batch([input], config, **kwargs)[0]

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        """Run on one input without blocking the event loop."""
        return (await self.abatch([input], config, **kwargs))[0]

    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Run on a batch, in one go."""
        return self._batch_with_config(
            self._many,
            inputs,
            self._configs(config, inputs),
            return_exceptions=return_exceptions,
            run_type=self.run_type,
            **kwargs,
        )

    async def abatch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Run on a batch, in one go, without blocking the event loop."""
        return await self._abatch_with_config(
            self._amany,
            inputs,
            self._configs(config, inputs),
            return_exceptions=return_exceptions,
            run_type=self.run_type,
            **kwargs,
        )

    def _configs(
        self, config: RunnableConfig | list[RunnableConfig] | None, inputs: list[Input]
    ) -> list[RunnableConfig]:
        configs = get_config_list(config, len(inputs))
        for each in configs:
            each["tags"] += getattr(self, "tags", None) or []
            each["metadata"] = {**(getattr(self, "metadata", None) or {}), **each["metadata"]}
        return configs

    # LangChain passes the managers and configs to arguments of exactly these names.

    def _many(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig], **options: Any
    ) -> list[Exception | Output]:
        return list(run(self.flow(RunBatch(values, config, run_manager, options))))

    async def _amany(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig], **options: Any
    ) -> list[Exception | Output]:
        return list(await arun(self.flow(RunBatch(values, config, run_manager, options))))


class BatchCall(Call):
    """Runs a runnable on a batch; the result of an input that fails is its exception.

    Args:
        runnable: The runnable.
        inputs: The inputs.
        configs: The config of each input.
        **options: Further arguments of the call.
    """

    def __init__(
        self,
        runnable: Runnable[Any, Any],
        inputs: Sequence[Any],
        configs: Sequence[RunnableConfig],
        **options: Any,
    ) -> None:
        super().__init__(
            runnable.batch, runnable.abatch, list(inputs), list(configs), return_exceptions=True, **options
        )

    def run(self) -> list[Any]:
        """Run it, blocking."""
        return _without_interrupts(super().run())

    async def arun(self) -> list[Any]:
        """Run it without blocking the event loop."""
        return _without_interrupts(await super().arun())


def _without_interrupts(results: list[Any]) -> list[Any]:
    """Raise the cancellation or interrupt that LangChain returns as if it were the exception of an input."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return results
