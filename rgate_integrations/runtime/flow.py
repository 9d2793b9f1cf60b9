"""Flows: logic that is written once and runs both in threads and on asyncio.

A *flow* is a generator that yields `Step`s and receives their results. It never waits itself: `run` and `arun` run
its steps and wait for them. (httpx implements authentication this way.)

>>> def greeting(name):
...     text = yield Call(str.title, None, name)
...     return f"Hello {text}"
>>> run(greeting("ada"))
'Hello Ada'
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rgate_integrations.runtime.text import logger
from rgate_integrations.runtime.threads import start_thread

_T = TypeVar("_T")


class Step(ABC):
    """Something that a `Flow` yields and waits for, such as a request to an LLM. It can run blocking or async."""

    @abstractmethod
    def run(self) -> Any:
        """Run the step, block until it is done, and return its result."""

    @abstractmethod
    async def arun(self) -> Any:
        """Run the step without blocking the event loop, and return its result."""


Flow: TypeAlias = Generator[Step, Any, _T]
"""A generator that yields steps and returns a ``_T``."""


def run(flow: Flow[_T]) -> _T:
    """Run a flow, block until it is done, and return its result. A step's error is raised inside the flow."""
    try:
        step = next(flow)
        while True:
            try:
                result = step.run()
            except BaseException as error:  # the flow may handle it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        return end.value


async def arun(flow: Flow[_T]) -> _T:
    """Run a flow on the event loop, and return its result. Errors and cancellations are raised inside the flow."""
    try:
        step = next(flow)
        while True:
            try:
                result = await step.arun()
            except BaseException as error:  # the flow may handle it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        return end.value


def is_interrupt(error: object) -> bool:
    """Return whether an object is an exception that no failure handling may catch.

    That is a cancellation, or LangGraph's interrupt, by which an application asks its user something.
    """
    # Without LangGraph, nothing interrupts. If an error has its type, the module is already imported.
    kinds = getattr(sys.modules.get("langgraph.errors"), "GraphBubbleUp", ())
    return isinstance(error, kinds) or (isinstance(error, BaseException) and not isinstance(error, Exception))


class Call(Step):
    """A step that calls a function, which has a blocking and perhaps an async form. The result is the function's.

    ``Call(run, arun, flow)`` runs a whole flow as one step.

    Args:
        blocking: The blocking form.
        awaitable: The async form; None runs the blocking form in a thread.
        *arguments: Positional arguments of both forms.
        **options: Keyword arguments of both forms.
    """

    def __init__(
        self,
        blocking: Callable[..., Any],
        awaitable: Callable[..., Awaitable[Any]] | None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        self.blocking = blocking
        self.awaitable = awaitable
        self.arguments = arguments
        self.options = options

    def run(self) -> Any:
        """Call the blocking form."""
        return self.blocking(*self.arguments, **self.options)

    async def arun(self) -> Any:
        """Await the async form, or the blocking one in a thread."""
        if self.awaitable is None:
            return await asyncio.to_thread(self.blocking, *self.arguments, **self.options)
        return await self.awaitable(*self.arguments, **self.options)


@dataclass
class Gather(Step):
    """Steps that run in parallel, in threads or on the event loop. The result is the list of their results.

    If one fails, its error is raised, and the results of the others are ignored.
    """

    steps: Sequence[Step]

    def run(self) -> list[Any]:
        """Run the last step in this thread, and each of the others in its own thread."""
        # The caller's thread would only wait, so it runs one of the steps.
        jobs = [_run_in_thread(step) for step in self.steps[:-1]]
        try:
            last = [step.run() for step in self.steps[-1:]]
            return [*(job.run() for job in jobs), *last]
        finally:
            for job in jobs:
                job.drop()

    async def arun(self) -> list[Any]:
        """Run the steps as tasks; a single step runs in the caller's task."""
        if len(self.steps) == 1:
            return [await self.steps[0].arun()]
        return list(await asyncio.gather(*(step.arun() for step in self.steps)))


@dataclass
class Start(Step):
    """A step that starts another step in the background. Its result is the `Task` to wait for, or to drop."""

    step: Step

    def run(self) -> Task:
        """Start the step in a thread, in the caller's context."""
        return _run_in_thread(self.step)

    async def arun(self) -> Task:
        """Start the step as a task of the event loop."""
        return Task(asyncio.ensure_future(self.step.arun()))


@dataclass
class Task(Step):
    """A step that is already running, from `Start`. Yield it to wait for its result, or `drop` it."""

    job: Future[Any] | asyncio.Future[Any]

    def run(self) -> Any:
        """Wait for the result, and return it."""
        return self.job.result()

    async def arun(self) -> Any:
        """Wait for the result, and return it."""
        return await self.job  # type: ignore[misc]  # started by `arun`, so it is asyncio's

    def drop(self) -> None:
        """Cancel the job if possible, or else ignore its result; an error is only logged."""
        cancel(self.job)  # without effect if it is done
        self.job.add_done_callback(_log_failure)


def cancel(job: Future[Any] | asyncio.Future[Any]) -> None:
    """Cancel a job, unless its event loop is closed: then cancelling would raise, and nothing waits for the job."""
    if not (isinstance(job, asyncio.Future) and job.get_loop().is_closed()):
        job.cancel()


def _run_in_thread(step: Step) -> Task:
    """Start a step in its own thread, in the caller's context.

    Not in a pool, because dropped jobs cannot be interrupted and would occupy its threads.
    """
    job: Future[Any] = Future()
    context = contextvars.copy_context()  # frameworks keep tracing and callbacks in context variables

    def work() -> None:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = context.run(step.run)
        except BaseException as error:  # re-raised to the caller that waits for the result
            job.set_exception(error)
        else:
            job.set_result(result)

    start_thread(work, "rgate-background")
    return Task(job)


def _log_failure(job: Future[Any] | asyncio.Future[Any]) -> None:
    if not job.cancelled() and job.exception() is not None:
        # Log only the type, because the message may quote a question.
        logger.info("A background job that was not needed failed: %s", type(job.exception()).__name__)


@contextmanager
def variable_set(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable in the ``with`` block, and restore its earlier value afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
