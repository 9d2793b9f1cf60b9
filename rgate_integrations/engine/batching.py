"""Merges the calls of concurrent callers, from threads and from asyncio alike, into batches; and waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Generic, TypeAlias, TypeVar

from rgate_integrations.errors import DecisionTimeoutError
from rgate_integrations.runtime.flow import cancel
from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork, start_thread

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Queued: TypeAlias = tuple[_Item, Future[_Result]]


class Batcher(Generic[_Item, _Result]):
    """One worker thread that runs a batch function over whatever has been submitted meanwhile.

    An idle worker starts at once on a lone item, unless other callers were seen in the last batch: then it
    waits a moment for them. Futures that were cancelled before their batch starts are skipped, and may be cancelled
    while it runs. A worker with nothing to do ends, and the next call starts another; after a fork the child starts
    one of its own.

    Once the process is ending, nothing is delivered to other threads. Only daemon threads are left then, and one that
    is inside an extension when the interpreter is gone, such as pydantic's, takes the process down.

    Args:
        run: Maps items to results, in order. If it raises, every item of the batch gets the exception.
        max_size: Maximum number of items in a batch.
        max_wait: How long to wait for others, in seconds, when there were others just before.
        max_idle: How long a worker stays without work, in seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[_Item]], Sequence[_Result]],
        *,
        max_size: int = 64,
        max_wait: float = 0.003,
        max_idle: float = 1.0,
    ) -> None:
        self._run = run
        self._max_size = max_size
        self._max_wait = max_wait
        self._max_idle = max_idle
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Forget the worker of another process, and what its callers wait for."""
        self._changed = threading.Condition()  # guards the three below
        self._queue: deque[_Queued[_Item, _Result]] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, items: Iterable[_Item]) -> list[Future[_Result]]:
        """Queue items; their futures are completed in whatever batches they end up in."""
        queued: list[_Queued[_Item, _Result]] = [(item, Future()) for item in items]
        try:
            with self._changed:
                if self._closed and threading.current_thread() is not threading.main_thread():
                    return [future for _, future in queued]
                if self._closed:  # asked by another function that runs at exit
                    raise RuntimeError("The process is ending.")
                # Not only None: should a worker ever die, the next call starts another.
                if self._worker is None or not self._worker.is_alive():
                    self._worker = start_thread(self._work, "rgate-batcher")
                    close_at_exit(self)
                self._queue.extend(queued)
                self._changed.notify()
        except Exception as error:  # no thread could be started now; the next call tries again
            _fail(queued, error)
        return [future for _, future in queued]

    def close(self) -> None:
        """Let the worker end after the batch that it is running."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def _work(self) -> None:
        """Run batches until there is nothing to do."""
        others = False
        while (batch := self._next_batch(others)) is not None:
            if batch:
                self._run_batch(batch)
            others = len(batch) > 1

    def _next_batch(self, others: bool) -> list[_Queued[_Item, _Result]] | None:
        """Wait for items; None when the worker is to end, after a while without work."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, self._max_idle)
            if not self._queue:
                self._worker = None
                return None
            if others:
                self._changed.wait_for(lambda: len(self._queue) >= self._max_size, self._max_wait)
            batch: list[_Queued[_Item, _Result]] = []
            while self._queue and len(batch) < self._max_size:
                item, future = self._queue.popleft()
                if not future.cancelled():
                    batch.append((item, future))
            return batch

    def _run_batch(self, batch: Sequence[_Queued[_Item, _Result]]) -> None:
        try:
            results = self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(results)} results.")
        except BaseException as error:
            if not self._closed:
                # What would end a thread, such as SystemExit, must not end those of the callers.
                ended = RuntimeError(f"The worker ended: {error!r}.")
                _fail(batch, error if isinstance(error, Exception) else ended)
            return
        if self._closed:
            return
        for (_, future), result in zip(batch, results, strict=True):
            with contextlib.suppress(InvalidStateError):  # its caller has left
                future.set_result(result)


def _fail(batch: Iterable[_Queued[_Item, _Result]], error: Exception) -> None:
    """Give an error to all who wait."""
    for _, future in batch:
        with contextlib.suppress(InvalidStateError):  # its caller has left
            future.set_exception(error)


def wait_results(futures: Sequence[Future[_T]], timeout: float | None) -> list[_T | Exception]:
    """Wait, blocking, for results or errors; what is not there when the time is up is an `DecisionTimeoutError`.

    What nobody waits for any more is cancelled: it is not begun, and if it was, its result is dropped.

    Args:
        futures: What to wait for.
        timeout: How long to wait for all of them together, in seconds; None as long as it takes.
    """
    try:
        wait(futures, timeout)
        return [_outcome(future, timeout) for future in futures]
    finally:  # after Ctrl-C too
        for future in futures:
            future.cancel()


async def await_results(futures: Sequence[Future[_T]], timeout: float | None) -> list[_T | Exception]:
    """Wait as `wait_results` does, without blocking the event loop."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        return [_outcome(future, timeout) for future in waiting]
    finally:
        # Both: the event loop may end before it has told the one that the other was cancelled.
        for future, each in zip(futures, waiting, strict=True):
            future.cancel()
            cancel(each)


def _outcome(future: Future[Any] | asyncio.Future[Any], timeout: float | None) -> Any:
    if not future.done():
        return DecisionTimeoutError(
            f"There was no decision after {timeout:g} s.",
            hint="Raise timeout, ask less at once, or run the gate on faster hardware.",
        )
    error = future.exception()
    return error if isinstance(error, Exception) else future.result()
