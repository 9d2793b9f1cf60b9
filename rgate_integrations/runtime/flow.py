"""Logic that is written once and runs in both worlds, with threads and with asyncio.

A *flow* is a generator: it yields each thing that it wants done, a `Step`, and gets the result back. It never
waits by itself. `run` and `arun` drive it and do the waiting, each in its own way. (httpx writes authentication so.)

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
    """Something that a flow wants done."""

    @abstractmethod
    def run(self) -> Any:
        """Do it, blocking."""

    @abstractmethod
    async def arun(self) -> Any:
        """Do it without blocking the event loop."""


Flow: TypeAlias = Generator[Step, Any, _T]
"""A generator of steps that returns a ``_T``."""


def run(flow: Flow[_T]) -> _T:
    """Drive a flow, blocking; returns what it returns, raises what it raises."""
    try:
        step = next(flow)
        while True:
            try:
                result = step.run()
            except BaseException as error:  # the flow decides what a failing step means
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        found: _T = end.value
        return found


async def arun(flow: Flow[_T]) -> _T:
    """Drive a flow on the event loop; a cancellation is raised inside the flow, at the step it waits for."""
    try:
        step = next(flow)
        while True:
            try:
                result = await step.arun()
            except BaseException as error:  # the flow decides what a failing step means
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        found: _T = end.value
        return found


class Call(Step):
    """A call that has a blocking form and one to be awaited; ``Call(run, arun, flow)`` is a whole flow as one step.

    Args:
        blocking: The blocking form.
        awaitable: The other form; None if there is none: then the blocking one runs in a thread.
        *arguments: For either.
        **options: For either.
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
        """Await the other form, or the blocking one in a thread."""
        if self.awaitable is None:
            return await asyncio.to_thread(self.blocking, *self.arguments, **self.options)
        return await self.awaitable(*self.arguments, **self.options)


@dataclass
class Gather(Step):
    """Several steps side by side, in threads or on the event loop. The result is a list in their order.

    When one raises, that is raised, and the others are dropped.
    """

    steps: Sequence[Step]

    def run(self) -> list[Any]:
        """Do the last one in this thread and the others in threads of their own."""
        jobs = [_run_in_thread(step) for step in self.steps[:-1]]
        try:
            last = [step.run() for step in self.steps[-1:]]
            return [*(job.run() for job in jobs), *last]
        finally:
            for job in jobs:
                job.drop()

    async def arun(self) -> list[Any]:
        """Do all side by side; a single one in the caller's own task."""
        if len(self.steps) == 1:
            return [await self.steps[0].arun()]
        return list(await asyncio.gather(*(step.arun() for step in self.steps)))


@dataclass
class Start(Step):
    """Begins a step in the background; the result is the `Task` that it runs in."""

    step: Step

    def run(self) -> Task:
        """Begin in a thread, in the caller's context."""
        return _run_in_thread(self.step)

    async def arun(self) -> Task:
        """Begin as a task."""
        return Task(asyncio.ensure_future(self.step.arun()))


@dataclass
class Task(Step):
    """A step that is under way. Yield it to wait for its result; `drop` it when nobody will."""

    job: Future[Any] | asyncio.Future[Any]

    def run(self) -> Any:
        """Wait for the result."""
        return self.job.result()

    async def arun(self) -> Any:
        """Wait for the result."""
        return await self.job  # type: ignore[misc]  # begun by `arun`, so it is asyncio's

    def drop(self) -> None:
        """Cancel the job, or forget its result; what it raises is logged only. A job that is done is left alone."""
        if not self.job.done():
            cancel(self.job)
        self.job.add_done_callback(_log_failure)


def cancel(job: Future[Any] | asyncio.Future[Any]) -> None:
    """Cancel a job, unless its event loop is closed: that would raise, and nobody waits there any more."""
    if not (isinstance(job, asyncio.Future) and job.get_loop().is_closed()):
        job.cancel()


def _run_in_thread(step: Step) -> Task:
    """Begin a step in a thread of its own, in the caller's context.

    There is no pool: jobs that were dropped, but cannot be interrupted, would hold its threads, and all later jobs.
    """
    job: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = context.run(step.run)
        except BaseException as error:  # raised where the result is asked for
            job.set_exception(error)
        else:
            job.set_result(result)

    start_thread(work, "rgate-background")
    return Task(job)


def _log_failure(job: Future[Any] | asyncio.Future[Any]) -> None:
    if not job.cancelled() and job.exception() is not None:
        # Without its message, which may quote a question.
        _log.info("A background job that was not needed failed: %s", type(job.exception()).__name__)
