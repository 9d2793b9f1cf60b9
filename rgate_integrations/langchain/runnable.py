"""`FlowRunnable`: a runnable that implements invoke, batch and their async forms as a single flow over a batch.

`run_batch` runs other runnables in such a flow; see `rgate_integrations.runtime.flow`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import get_config_list, patch_config
from langchain_core.runnables.utils import ConfigurableFieldSpec, Input, Output, get_unique_config_specs
from pydantic import ConfigDict

from rgate_integrations.decision import Options
from rgate_integrations.langchain.chat_models import list_parts
from rgate_integrations.runtime.flow import Call, Flow, Gather, arun, is_interrupt, run


@dataclass
class Run:
    """One input of a call, and its run in traces.

    Attributes:
        input: The input.
        config: Its config.
        manager: The callback manager of its run.
        options: The keyword arguments of the call, which all of its inputs share.
    """

    input: Any
    config: RunnableConfig
    manager: Any
    options: dict[str, Any] = field(default_factory=dict)

    def child(self, tag: str | None = None, *, tags: Sequence[str] = ()) -> RunnableConfig:
        """Return a config for a run inside this one.

        Args:
            tag: A tag of the new run alone.
            tags: Tags of the new run and of all runs inside it.
        """
        config = patch_config(self.config, callbacks=self.manager.get_child(tag))
        config["tags"] = [*config["tags"], *tags]
        return config


class FlowRunnable(RunnableSerializable[Input, Output], Options):
    """A runnable whose subclasses implement only `flow`; invoke, batch and their async forms run it.

    Each input has its own run in traces, even in a batch. Options are fields, so that ``configurable_fields`` and
    ``dumpd`` find them; unknown names are rejected.
    """

    # The input in an error may be the URL of a gate, with a login.
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)

    run_type: ClassVar[str | None] = None
    """The type of its runs in traces; None for a chain."""

    def __init__(self, **fields: Any) -> None:  # type checkers take the signature from here
        super().__init__(**fields)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: ``langchain_core.load.dumpd`` writes its fields."""
        return True

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The configurable fields of all runnables in its own fields."""
        return get_unique_config_specs(spec for part in list_parts(self) for spec in part.config_specs)

    @abstractmethod
    def flow(self, runs: list[Run]) -> Flow[Sequence[Output | Exception]]:
        """Return one result per run, in order: its output, or the exception if only that input failed."""

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        """Return the output for one input, or raise its exception."""
        return self.batch([input], config, **kwargs)[0]

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        """Do what `invoke` does, without blocking the event loop."""
        return (await self.abatch([input], config, **kwargs))[0]

    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Return one output per input. With ``return_exceptions``, errors are returned as outputs, not raised."""
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
        """Do what `batch` does, without blocking the event loop."""
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
        for single in configs:  # retrievers have their own tags and metadata
            single["tags"] += getattr(self, "tags", None) or []
            single["metadata"] = {**(getattr(self, "metadata", None) or {}), **single["metadata"]}
        return configs

    # LangChain passes managers and configs to arguments with exactly these names.

    def _many(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig], **options: Any
    ) -> list[Exception | Output]:
        return list(run(self.flow(_make_runs(values, config, run_manager, options))))

    async def _amany(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig], **options: Any
    ) -> list[Exception | Output]:
        return list(await arun(self.flow(_make_runs(values, config, run_manager, options))))


def _make_runs(
    values: list[Any], configs: list[RunnableConfig], managers: list[Any], options: dict[str, Any]
) -> list[Run]:
    return [Run(*row, options) for row in zip(values, configs, managers, strict=True)]


class TypedByPart:
    """Mixin for a `FlowRunnable` that takes and returns what one of its parts does."""

    @property
    @abstractmethod
    def typed_part(self) -> Runnable[Any, Any]:
        """The part whose types and schemas it has."""

    @property
    def InputType(self) -> Any:
        """The part's input type."""
        return self.typed_part.InputType

    @property
    def OutputType(self) -> Any:
        """The part's output type."""
        return self.typed_part.OutputType

    def get_input_schema(self, config: RunnableConfig | None = None) -> Any:
        """Return the part's input schema."""
        return self.typed_part.get_input_schema(config)

    def get_output_schema(self, config: RunnableConfig | None = None) -> Any:
        """Return the part's output schema."""
        return self.typed_part.get_output_schema(config)


class FlowRetriever(BaseRetriever):
    """Mixin that makes a `FlowRunnable` a LangChain retriever."""

    model_config = ConfigDict(extra="forbid")  # LangChain's own retrievers ignore unknown names

    @property
    def InputType(self) -> Any:
        """The type of any retriever's input: ``as_tool`` needs one that a tool's argument can have."""
        return str

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        # Abstract in LangChain, and old code calls it directly.
        return self.invoke(query, {"callbacks": run_manager.get_child()}, **options)


def run_batch(
    runnable: Runnable[Any, Any], inputs: Sequence[Any], configs: Sequence[RunnableConfig], **options: Any
) -> Flow[list[Any]]:
    """Run a runnable on a batch, and return a result per input; that of a failed input is its exception.

    Args:
        runnable: The runnable.
        inputs: The inputs.
        configs: The config of each input.
        **options: Further arguments of the call.
    """
    results: list[Any] = yield Call(
        runnable.batch, runnable.abatch, list(inputs), list(configs), return_exceptions=True, **options
    )
    for result in results:
        if is_interrupt(result):  # LangChain returns it like any other exception
            raise result
    return results


def run_groups(
    runnable: Runnable[Any, Any],
    groups: Sequence[Sequence[Any]],
    configs: Sequence[RunnableConfig],
    **options: Any,
) -> Flow[list[list[Any]]]:
    """Run a runnable on groups of inputs, in one batch; return for each group the results of its inputs.

    Args:
        runnable: The runnable.
        groups: The groups of inputs; a group may be empty.
        configs: The config of each group.
        **options: Further arguments of the call.
    """
    inputs: list[Any] = []
    input_configs: list[RunnableConfig] = []
    for group, config in zip(groups, configs, strict=True):
        inputs += group
        input_configs += [config] * len(group)
    results = iter((yield from run_batch(runnable, inputs, input_configs, **options)))
    return [list(islice(results, len(group))) for group in groups]


def run_batches(batches: Sequence[Flow[list[Any]]], config: RunnableConfig) -> Flow[list[list[Any]]]:
    """Run flows such as those of `run_batch`, and return the list of results of each, in order.

    They run in parallel. With ``max_concurrency`` in the config, they run one after the other, because the limit
    applies to all of them together.
    """
    steps = [Call(run, arun, batch) for batch in batches]
    groups = [steps] if config.get("max_concurrency") is None else [[step] for step in steps]
    results: list[list[Any]] = []
    for group in groups:
        results += yield Gather(group)
    return results
