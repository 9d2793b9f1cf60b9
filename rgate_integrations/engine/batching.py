"""Merges the calls of concurrent callers, both threads and asyncio tasks, into batches, and waits for results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

from rgate_integrations.errors import ConfigurationError, DecisionTimeoutError
from rgate_integrations.runtime.flow import cancel
from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork, start_thread

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Queued: TypeAlias = tuple[_Item, Future[_Result | Exception]]

# Seconds. Threads that call at the same time arrive within 1 to 2 ms, and a pass of the encoder takes 5 ms.
_MAX_WAIT = 0.003
# Seconds without work after which the worker ends. A new one starts in far less time, so callers do not notice.
MAX_IDLE = 1.0
# Seconds after which a caller looks for its results even if nothing has woken it.
_MAX_SLEEP = 5.0


class Batcher(Generic[_Item, _Result]):
    """Runs a function over batches of submitted items, in one worker thread.

    An idle worker starts on the first item at once, unless its last batch had several items: then it waits up to
    3 ms for more. A call that does not fit into a batch lets the calls that come meanwhile go first, so that a short
    one does not wait for all of a long one. Futures cancelled before their batch starts are skipped; they may also be
    cancelled while it runs.

    Args:
        run: Function from items to results, in order. If it raises, the exception is every item's result.
        max_size: Maximum number of items per batch.
    """

    def __init__(self, run: Callable[[Sequence[_Item]], Sequence[_Result]], *, max_size: int = 64) -> None:
        self._run = run
        self._max_size = max_size
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Reset: a forked child has neither the worker thread nor the callers that wait for it."""
        self._changed = threading.Condition()  # guards the four attributes below
        self._calls: deque[deque[_Queued[_Item, _Result]]] = deque()  # what each call still waits for
        self._rest: deque[_Queued[_Item, _Result]] = deque()  # of the last batch's last call
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, items: Iterable[_Item]) -> list[Future[_Result | Exception]]:
        """Queue items, and return one future per item, whose result is the item's result or an exception.

        While the process is exiting, the futures of threads other than the main thread never complete.

        Raises:
            RuntimeError: No thread can be started now, or the main thread calls while the process is exiting.
        """
        queued: list[_Queued[_Item, _Result]] = [(item, Future()) for item in items]
        futures = [future for _, future in queued]
        with self._changed:
            # Other threads are daemons: they wait for these futures until the process ends.
            if self._closed and threading.current_thread() is not threading.main_thread():
                return futures
            if self._closed:  # the main thread is running exit handlers, and must not wait forever
                raise RuntimeError(
                    "The process is exiting, so the gate makes no more decisions. Call it earlier."
                )
            # A worker that crashed is replaced like one that ended.
            if self._worker is None or not self._worker.is_alive():
                self._worker = start_thread(self._work, "rgate-batcher")
                close_at_exit(self)
            if queued:
                self._calls.append(deque(queued))
            self._changed.notify()
        return futures

    def close(self) -> None:
        """Drop all queued items, let the worker end after its current batch, and discard that batch's results.

        At exit, only daemon threads can still be waiting for results. A result would wake them, and a daemon thread
        that runs in an extension, such as pydantic's, while the interpreter shuts down crashes the process. So their
        futures never complete.
        """
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._rest.clear()
            self._changed.notify()

    def _work(self) -> None:
        expects_more = False
        while True:
            batch: list[_Queued[_Item, _Result]] = []
            try:
                if not self._fill_batch(batch, expects_more):
                    return
                if batch:
                    self._answer(batch, self._run([item for item, _ in batch]))
            except Exception as error:  # also a MemoryError in this class itself
                self._answer(batch, [error] * len(batch))
            except BaseException as error:  # such as SystemExit, which would end the callers' threads
                failure = RuntimeError(f"The thread that runs the gate was ended by {error!r}")
                self._answer(batch, [failure] * len(batch))
            expects_more = len(batch) > 1

    def _fill_batch(self, batch: list[_Queued[_Item, _Result]], expects_more: bool) -> bool:
        """Wait for items, and add them; False tells the worker to end, because it is closed or has been idle."""
        with self._changed:
            if self._rest:
                self._calls.append(self._rest)
            self._changed.wait_for(lambda: self._calls or self._closed, MAX_IDLE)
            if not self._calls:
                # Set while holding the lock, so that `submit` either sees it or has already queued its items.
                self._worker = None
                return False
            if expects_more:
                self._changed.wait_for(self._is_full, _MAX_WAIT)
            while self._calls and len(batch) < self._max_size:
                self._rest = self._calls.popleft()
                while self._rest and len(batch) < self._max_size:
                    if not self._rest[0][1].done():  # cancelled
                        batch.append(self._rest[0])
                    self._rest.popleft()  # last, so that an item is never in neither
            return True

    def _is_full(self) -> bool:
        """Return whether the waiting items fill a batch."""
        # No call is empty, so the others need not be counted.
        return sum(map(len, islice(self._calls, self._max_size))) >= self._max_size

    def _answer(
        self, batch: Sequence[_Queued[_Item, _Result]], results: Sequence[_Result | Exception]
    ) -> None:
        # As a list, which checks their number before the first is handed over.
        answers = list(zip(batch, results, strict=True))
        if self._closed:
            return
        for (_, future), result in answers:
            while not future.done():
                # The caller may cancel it now; and where there is no memory, there may be some again.
                with contextlib.suppress(InvalidStateError, MemoryError):
                    future.set_result(result)


def wait_results(futures: Sequence[Future[_T | Exception]], timeout: float | None) -> list[_T | Exception]:
    """Block until the futures are done or time is up, and return their results, in order.

    In the place of each unfinished result, the list has a `DecisionTimeoutError`. Its future is cancelled, so that
    no work is done for callers that have left.

    Args:
        futures: The futures, at least one.
        timeout: Seconds to wait for all of them together; None waits forever.
    """
    try:
        for seconds in _waits(futures, timeout):
            wait(futures, seconds)
        return [_get_outcome(future, timeout) for future in futures]
    finally:  # also after Ctrl-C
        for future in futures:
            future.cancel()


async def await_results(
    futures: Sequence[Future[_T | Exception]], timeout: float | None
) -> list[_T | Exception]:
    """Return what `wait_results` returns, without blocking the event loop.

    Raises:
        ConfigurationError: The event loop is not asyncio's.
    """
    waiting: list[asyncio.Future[_T | Exception]] = []
    try:
        loop = _running_loop()
        waiting += [asyncio.wrap_future(future, loop=loop) for future in futures]
        for seconds in _waits(futures, timeout):
            await asyncio.wait(waiting, timeout=seconds)
        return [_get_outcome(future, timeout) for future in futures]
    finally:
        # Cancel both, because the event loop may end before it passes the cancellation on.
        for future in futures:
            future.cancel()
        for wrapped in waiting:
            cancel(wrapped)


def _waits(futures: Sequence[Future[Any]], timeout: float | None) -> Iterator[float]:
    """Yield for how long to wait next, in seconds, until the futures are done or time is up."""
    # Not all at once, because a thread that has no memory to wake a caller would leave it waiting forever.
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not all(future.done() for future in futures) and (left := end - time.monotonic()) > 0:
        yield min(left, _MAX_SLEEP)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise ConfigurationError(
            "The async methods of a gate need asyncio, which does not run here.",
            hint="With trio, call decide() in a thread: await trio.to_thread.run_sync(gate.decide, question).",
        ) from error


def _get_outcome(future: Future[Any], timeout: float | None) -> Any:
    if future.done():
        return future.result()
    return DecisionTimeoutError(
        f"No decision within {timeout:g} s.",
        hint="Increase timeout= (--timeout), send fewer questions at once, or run the gate on faster hardware.",
    )
