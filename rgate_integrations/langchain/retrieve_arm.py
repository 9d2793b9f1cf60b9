"""The search of a retrieve arm: which part of the arm that is, and running it before it is known to be needed."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableConfig,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import patch_config

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain.watching import Cut
from rgate_integrations.runtime.flow import Call, Flow, Start, Task

NOT_NEEDED = "by the retrieval gate: the search was not needed"


class Search:
    """The search of a retrieve arm, which runs while a begun answer is judged.

    Args:
        job: Where it runs.
        cut: Says in traces that it was cancelled.
    """

    def __init__(self, job: Task, cut: Cut) -> None:
        self.job = job
        self.cut = cut

    @classmethod
    def starting(
        cls, first: Runnable[Any, Any], value: Any, config: RunnableConfig, manager: Any, **options: Any
    ) -> Flow[Search]:
        """Begin it.

        Args:
            first: What searches, as `split` returns it.
            value: Its input.
            config: Its config.
            manager: The callback manager of its run, as ``get_child`` returns it; it is changed.
            **options: Further arguments of the call.
        """
        cut = Cut()
        manager.set_handlers(cut.views(manager.handlers))
        step = _Searching(
            first.invoke, first.ainvoke, value, patch_config(config, callbacks=manager), **options
        )
        step.cut = cut
        return cls((yield Start(step)), cut)

    def drop(self) -> None:
        """Say that nobody needs it; a search that is done is left alone."""
        if not self.job.job.done():
            self.cut.short(NOT_NEEDED)
        self.job.drop()


class _Searching(Call):
    """A search that, if it is cancelled, ends the runs that its retrievers leave open."""

    cut: Cut

    async def arun(self) -> Any:
        try:
            return await super().arun()
        except asyncio.CancelledError:
            self.cut.end_searches()
            raise


def split(arm: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Split a retrieve arm into what searches, up to its retriever, and the rest.

    Without a retriever among its steps, as in a chain of functions, the first step is what searches.

    Raises:
        ConfigurationError: It is a single step, and no retriever.
    """
    if isinstance(arm, BaseRetriever):
        return arm, RunnablePassthrough()
    if isinstance(arm, RunnableBindingBase):
        first, rest = split(arm.bound)
        # What was bound to a chain goes to its first step; its config concerns all of them.
        return _bound(arm, first), _bound(arm, rest, kwargs={})
    if not isinstance(arm, RunnableSequence):
        raise ConfigurationError(
            f"To search ahead, a router needs a retrieve arm of several steps; {type(arm).__name__} is one.",
            hint="Pass the chain itself, with its retriever in one of the first steps, or guard the retriever.",
        )
    steps = arm.steps
    searching = [place for place, step in enumerate(steps[:-1]) if _searches(step)]
    end = searching[0] + 1 if searching else 1
    return _sequence(steps[:end]), _sequence(steps[end:])


def _bound(
    arm: RunnableBindingBase[Any, Any], part: Runnable[Any, Any], **changed: Any
) -> Runnable[Any, Any]:
    return arm.model_copy(update={"bound": part, **changed})


def _sequence(steps: list[Runnable[Any, Any]]) -> Runnable[Any, Any]:
    return steps[0] if len(steps) == 1 else RunnableSequence(*steps)


def _searches(step: Runnable[Any, Any]) -> bool:
    """Whether there is a retriever in a step."""
    return isinstance(step, BaseRetriever) or any(_searches(part) for part in _parts(step))


def _parts(step: Any) -> list[Runnable[Any, Any]]:
    if isinstance(step, RunnableBindingBase):
        return [step.bound]
    if isinstance(step, RunnableSequence):
        return list(step.steps)
    if isinstance(step, RunnableParallel):
        return list(step.steps__.values())
    if isinstance(step, RunnableAssign):
        return [step.mapper]
    if isinstance(step, RunnableBranch):
        return [*(branch for _, branch in step.branches), step.default]
    if isinstance(step, RunnableWithFallbacks):
        return list(step.runnables)
    return []
