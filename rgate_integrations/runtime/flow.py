"""Logic that is written once and runs both in threads and on asyncio.

A *flow* is a generator that yields `Step`s and gets their results back. It never waits: `run` and `arun` drive it and
do the waiting. (httpx implements authentication this way.)

>>> def greeting(name):
...     text = yield Call(str.title, None, name)
...     return f"Hello {text}"
>>> run(greeting("ada"))
'Hello Ada'
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rgate_integrations.runtime.threads import start_thread

_T = TypeVar("_T")
_log = logging.getLogger("rgate_integrations")


class Step(ABC):
    """An operation that a flow yields."""

    @abstractmethod
    def run(self) -> Any:
        """Run it, blocking."""

    @abstractmethod
    async def arun(self) -> Any:
        """Run it without blocking the event loop."""


Flow: TypeAlias = Generator[Step, Any, _T]
"""A generator of steps that returns a ``_T``."""


def run(flow: Flow[_T]) -> _T:
    """Drive a flow, blocking, and return its result."""
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
        value: _T = end.value
        return value


async def arun(flow: Flow[_T]) -> _T:
    """Drive a flow on the event loop, and return its result; a cancellation is raised at the flow's current step."""
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
        value: _T = end.value
        return value


class Call(Step):
    """A call with a blocking and an async form; ``Call(run, arun, flow)`` is a whole flow as one step.

    Args:
        blocking: The blocking form.
        awaitable: The async form; None runs the blocking one in a thread.
        *arguments: For both.
        **options: For both.
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
    """Steps that run side by side, in threads or on the event loop. The result is a list in their order.

    If one raises, the error is raised, and the others are dropped.
    """

    steps: Sequence[Step]

    def run(self) -> list[Any]:
        """Run the last step in this thread and each other one in its own."""
        # The caller's thread would only wait, so it runs one step itself.
        jobs = [_run_in_thread(step) for step in self.steps[:-1]]
        try:
            last = [step.run() for step in self.steps[-1:]]
            return [*(job.run() for job in jobs), *last]
        finally:
            for job in jobs:
                job.drop()

    async def arun(self) -> list[Any]:
        """Run the steps as tasks; a single one in the caller's task."""
        if len(self.steps) == 1:
            return [await self.steps[0].arun()]
        return list(await asyncio.gather(*(step.arun() for step in self.steps)))


@dataclass
class Start(Step):
    """Starts a step in the background; the result is its `Task`."""

    step: Step

    def run(self) -> Task:
        """Start in a thread, in the caller's context."""
        return _run_in_thread(self.step)

    async def arun(self) -> Task:
        """Start as a task."""
        return Task(asyncio.ensure_future(self.step.arun()))


@dataclass
class Task(Step):
    """A running step. Yield it to wait for its result, or `drop` it."""

    job: Future[Any] | asyncio.Future[Any]

    def run(self) -> Any:
        """Wait for the result."""
        return self.job.result()

    async def arun(self) -> Any:
        """Wait for the result."""
        return await self.job  # type: ignore[misc]  # started by `arun`, so it is asyncio's

    def drop(self) -> None:
        """Cancel the job, or ignore its result; an error is only logged."""
        if not self.job.done():
            cancel(self.job)
        self.job.add_done_callback(_log_failure)


def cancel(job: Future[Any] | asyncio.Future[Any]) -> None:
    """Cancel a job, unless its event loop is closed: cancelling would raise, and nothing waits for it."""
    if not (isinstance(job, asyncio.Future) and job.get_loop().is_closed()):
        job.cancel()


def _run_in_thread(step: Step) -> Task:
    """Start a step in its own thread, in the caller's context.

    Not in a pool: dropped jobs that cannot be interrupted would occupy its threads, and block all later jobs.
    """
    job: Future[Any] = Future()
    context = contextvars.copy_context()  # tracing and callbacks of frameworks live there

    def work() -> None:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = context.run(step.run)
        except BaseException as error:  # raised to whoever waits for the result
            job.set_exception(error)
        else:
            job.set_result(result)

    start_thread(work, "rgate-background")
    return Task(job)


def _log_failure(job: Future[Any] | asyncio.Future[Any]) -> None:
    if not job.cancelled() and job.exception() is not None:
        # Only its type: the message may quote a question.
        _log.info("A background job that was not needed failed: %s", type(job.exception()).__name__)
