"""`FlowRetriever`: a retriever whose logic is one flow over a batch, with a retriever run for each query."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForRetrieverRun,
    CallbackManager,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from rgate_integrations.langchain.runnable import RunBatch, only
from rgate_integrations.runtime.flow import Call, Flow, Step, arun, run


class FlowRetriever(BaseRetriever):
    """A retriever that has one method, `flow`: invoke, batch and their async forms all drive it.

    LangChain's own `BaseRetriever` retrieves for one query at a time and does not see the config. A name that is not
    one of the fields is an error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @abstractmethod
    def flow(self, batch: RunBatch) -> Flow[list[list[Document] | Exception]]:
        """Retrieve for a batch.

        Returns:
            One result an input, in order: the documents, or the exception that concerns this input only.
        """

    def shown(self, value: Any) -> str:
        """Return an input as traces show it."""
        return str(value)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Retrieve for one input."""
        return only(run(self._in_runs([input], config, kwargs)))

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """Retrieve for one input without blocking the event loop."""
        return only(await arun(self._in_runs([input], config, kwargs)))

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[list[Document]]:
        """Retrieve for a batch, in one go."""
        return _returned(run(self._in_runs(inputs, config, kwargs)), return_exceptions)

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[list[Document]]:
        """Retrieve for a batch, in one go, without blocking the event loop."""
        return _returned(await arun(self._in_runs(inputs, config, kwargs)), return_exceptions)

    # Nothing here calls these two. A retriever must have the first, and old code calls them.

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return only(run(self.flow(RunBatch([query], [{}], [run_manager], options))))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return only(await arun(self.flow(RunBatch([query], [{}], [run_manager], options))))

    def _in_runs(
        self, inputs: list[Any], config: RunnableConfig | list[RunnableConfig] | None, options: dict[str, Any]
    ) -> Flow[list[list[Document] | Exception]]:
        """Retrieve for a batch, each input in a retriever run of its own."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        if "run_id" in options:
            configs[0]["run_id"] = options.pop("run_id")
        managers: list[Any] = []
        for value, each in zip(inputs, configs, strict=True):
            managers.append((yield _StartRun(self.shown(value), each, self._callbacks(each))))
        results: list[list[Document] | Exception]
        try:
            results = yield from self.flow(RunBatch(inputs, configs, managers, options))
        except BaseException as error:
            for manager in managers:
                yield Call(manager.on_retriever_error, manager.on_retriever_error, error)
            raise
        for manager, result in zip(managers, results, strict=True):
            failed = isinstance(result, Exception)
            end = manager.on_retriever_error if failed else manager.on_retriever_end
            yield Call(end, end, result)
        return results

    def _callbacks(self, config: RunnableConfig) -> dict[str, Any]:
        """Return the arguments of LangChain's ``CallbackManager.configure``, as `BaseRetriever` gives them."""
        return {
            "name": config.get("run_name") or self.get_name(),
            "inheritable_tags": config.get("tags"),
            "local_tags": self.tags,
            "inheritable_metadata": {**(config.get("metadata") or {}), **self._get_ls_params()},
            "local_metadata": self.metadata,
        }


class _StartRun(Step):
    """Starts a retriever run; the result is its callback manager."""

    def __init__(self, query: str, config: RunnableConfig, callbacks: dict[str, Any]) -> None:
        self.query = query
        self.config = config
        self.name = callbacks.pop("name")
        self.callbacks = callbacks

    def run(self) -> CallbackManagerForRetrieverRun:
        """Start it."""
        started: CallbackManagerForRetrieverRun = self._started(CallbackManager.configure)
        return started

    async def arun(self) -> AsyncCallbackManagerForRetrieverRun:
        """Start it without blocking the event loop."""
        started: AsyncCallbackManagerForRetrieverRun = await self._started(AsyncCallbackManager.configure)
        return started

    def _started(self, configure: Callable[..., Any]) -> Any:
        manager = configure(self.config.get("callbacks"), **self.callbacks)
        return manager.on_retriever_start(None, self.query, name=self.name, run_id=self.config.get("run_id"))


def _returned(results: Sequence[list[Document] | Exception], return_exceptions: bool) -> list[list[Document]]:
    """Return the results of a batch; raise the first exception among them, unless they are to be returned too."""
    returned: list[Any] = list(results)
    if not return_exceptions:
        for result in returned:
            if isinstance(result, Exception):
                raise result
    return returned
