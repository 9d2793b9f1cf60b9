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

# Seconds. Threads that call at once arrive within a millisecond or two; a pass of the encoder takes 5 ms.
_MAX_WAIT = 0.003
# Seconds without work after which the worker ends. Starting a thread takes far less, so nobody notices.
MAX_IDLE = 1.0


class Batcher(Generic[_Item, _Result]):
    """One worker thread that runs a function over batches of whatever was submitted in the meantime.

    An idle worker starts on a lone item at once, unless the last batch had several callers: then it waits a moment
    for them. Futures cancelled before their batch starts are skipped; they may also be cancelled while it runs.

    Args:
        run: Maps items to results, in order. If it raises, every item of the batch gets the exception.
        max_size: Maximum number of items per batch.
    """

    def __init__(self, run: Callable[[Sequence[_Item]], Sequence[_Result]], *, max_size: int = 64) -> None:
        self._run = run
        self._max_size = max_size
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Start afresh: a forked child has neither the worker nor the callers that wait for it."""
        self._changed = threading.Condition()  # guards the three below
        self._queue: deque[_Queued[_Item, _Result]] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, items: Iterable[_Item]) -> list[Future[_Result]]:
        """Queue items; each future completes with whatever batch its item is in."""
        queued: list[_Queued[_Item, _Result]] = [(item, Future()) for item in items]
        futures = [future for _, future in queued]
        try:
            with self._changed:
                if self._closed and threading.current_thread() is not threading.main_thread():
                    return futures
                if self._closed:  # the main thread runs exit handlers, and must not wait forever
                    raise RuntimeError("The process is ending.")
                # A worker that died is replaced like one that ended.
                if self._worker is None or not self._worker.is_alive():
                    self._worker = start_thread(self._work, "rgate-batcher")
                    close_at_exit(self)
                self._queue.extend(queued)
                self._changed.notify()
        except Exception as error:  # no thread could be started; the next call tries again
            for future in futures:
                future.set_exception(error)
        return futures

    def close(self) -> None:
        """Let the worker end after its current batch, whose results are dropped.

        Only daemon threads are left when a process ends. One that runs inside an extension, such as pydantic's, while
        the interpreter shuts down would crash the process; so they get nothing more.
        """
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def _work(self) -> None:
        expects_more = False
        while (batch := self._next_batch(expects_more)) is not None:
            if batch:
                self._run_batch(batch)
            expects_more = len(batch) > 1

    def _next_batch(self, expects_more: bool) -> list[_Queued[_Item, _Result]] | None:
        """Wait for items; None tells the worker to end, after a while without work."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, MAX_IDLE)
            if not self._queue:
                # Under the lock, so that `submit` either sees this or has queued its items before.
                self._worker = None
                return None
            if expects_more:
                self._changed.wait_for(lambda: len(self._queue) >= self._max_size, _MAX_WAIT)
            batch: list[_Queued[_Item, _Result]] = []
            while self._queue and len(batch) < self._max_size:
                queued = self._queue.popleft()
                if not queued[1].cancelled():
                    batch.append(queued)
            return batch

    def _run_batch(self, batch: Sequence[_Queued[_Item, _Result]]) -> None:
        complete: Callable[[Future[Any], Any], None] = Future.set_result
        try:
            outcomes = list(zip(batch, self._run([item for item, _ in batch]), strict=True))
        except BaseException as error:
            # SystemExit and the like end a thread; here they must not end those of the callers.
            failure = error if isinstance(error, Exception) else RuntimeError(f"The worker ended: {error!r}.")
            complete, outcomes = Future.set_exception, [(queued, failure) for queued in batch]  # type: ignore[misc]
        if self._closed:
            return
        for (_, future), outcome in outcomes:
            with contextlib.suppress(InvalidStateError):  # its caller cancelled it
                complete(future, outcome)


def wait_results(futures: Sequence[Future[_T]], timeout: float | None) -> list[_T | Exception]:
    """Wait for results or errors, blocking; a result that is not there in time is a `DecisionTimeoutError`.

    Futures that are not done by then are cancelled, so that nobody works for callers who have left.

    Args:
        futures: The futures.
        timeout: Seconds to wait for all of them together; None waits forever.
    """
    try:
        wait(futures, timeout)
        return [_get_outcome(future, timeout) for future in futures]
    finally:  # after Ctrl-C, too
        for future in futures:
            future.cancel()


async def await_results(futures: Sequence[Future[_T]], timeout: float | None) -> list[_T | Exception]:
    """Wait as `wait_results` does, without blocking the event loop."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        return [_get_outcome(future, timeout) for future in waiting]
    finally:
        # Both: the event loop may end before it passes the cancellation on.
        for future, wrapped in zip(futures, waiting, strict=True):
            future.cancel()
            cancel(wrapped)


def _get_outcome(future: Future[Any] | asyncio.Future[Any], timeout: float | None) -> Any:
    if not future.done():
        return DecisionTimeoutError(
            f"There was no decision after {timeout:g} s.",
            hint="Raise timeout, ask less at once, or run the gate on faster hardware.",
        )
    error = future.exception()
    return error if isinstance(error, Exception) else future.result()
