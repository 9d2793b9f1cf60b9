"""Merges the calls of concurrent callers, from threads and from asyncio alike, into batches."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork, start_thread

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Later:
    """What a batch function returns for an item that is to go on in the next batcher.

    Attributes:
        item: What the next batch function gets.
    """

    item: Any


class _Waiting(NamedTuple, Generic[_Item, _Result]):
    item: _Item
    future: Future[_Result]


_Queue: TypeAlias = "queue.SimpleQueue[_Waiting[_Item, _Result] | None]"


class Batcher(Generic[_Item, _Result]):
    """One worker thread that runs a batch function over whatever has been submitted meanwhile.

    An idle worker starts at once on a lone item, unless other callers were seen in the last batch: then it
    waits a moment for them. Futures that were cancelled before their batch starts are skipped, and may be cancelled
    while it runs. A worker with nothing to do ends, and the next call starts another; after a fork the child starts
    one of its own.

    No call hangs: whatever ends a worker, those who wait for it get an error, and the next call starts a new one.

    Args:
        run: Maps items to results, in order; `Later` sends one to the next batcher. If it raises, every item of the
            batch gets the exception.
        then: The next batcher.
        max_size: Maximum number of items in a batch.
        max_wait: How long to wait for others, in seconds, when there were others just before.
        max_idle: How long a worker stays without work, in seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[_Item]], Sequence[_Result | Later]],
        *,
        then: Batcher[Any, _Result] | None = None,
        max_size: int = 64,
        max_wait: float = 0.003,
        max_idle: float = 1.0,
    ) -> None:
        self._run = run
        self._then = then
        self._max_size = max_size
        self._max_wait = max_wait
        self._max_idle = max_idle
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Forget the worker of another process."""
        self._lock = threading.Lock()
        # What the worker reads; None if there is no worker. A worker owns its queue: one that ends, or that was left
        # behind by a fork, can never take what was meant for the next.
        self._queue: _Queue[_Item, _Result] | None = None
        self._closed = False

    def submit(self, items: Sequence[_Item]) -> list[Future[_Result]]:
        """Queue items; their futures are completed in whatever batches they end up in."""
        waiting = [_Waiting[_Item, _Result](item, Future()) for item in items]
        self._put(waiting)
        return [each.future for each in waiting]

    def close(self) -> None:
        """Let the worker end after the batch that it is running."""
        self._closed = True
        mine = self._queue
        if mine is not None:
            mine.put(None)  # wakes it

    def _put(self, waiting: Sequence[_Waiting[_Item, _Result]]) -> None:
        with self._lock:
            try:
                mine = self._queue or self._started()
            except Exception as error:  # no thread could be started now; the next call tries again
                _fail(waiting, error)
                return
            for each in waiting:
                mine.put(each)

    def _started(self) -> _Queue[_Item, _Result]:
        """Start a worker; returns its queue."""
        mine: _Queue[_Item, _Result] = queue.SimpleQueue()
        start_thread(partial(self._work, mine), "rgate-batcher")
        close_at_exit(self)
        self._queue = mine
        return mine

    def _work(self, mine: _Queue[_Item, _Result]) -> None:
        """Run batches until there is nothing to do."""
        batch: list[_Waiting[_Item, _Result]] = []
        wait = 0.0
        try:
            while self._gather(mine, batch, wait):
                self._finish(batch)
                wait = self._max_wait if len(batch) > 1 else 0.0
                batch.clear()
        except BaseException as error:
            # Nothing should come here. If something does, nobody waits for a worker that is gone.
            with self._lock:
                self._leave(mine)
            _fail([*batch, *_drained(mine)], error)

    def _gather(
        self, mine: _Queue[_Item, _Result], batch: list[_Waiting[_Item, _Result]], wait: float
    ) -> bool:
        """Fill a batch with what is waiting; False when the worker is to end, after a while without work."""
        try:
            found = mine.get(timeout=self._max_idle)
        except queue.Empty:
            return not self._ends(mine)
        with self._lock:
            pass  # whoever is just submitting several items has put them all
        deadline = time.monotonic() + wait
        while found is not None and not self._closed:
            if not found.future.cancelled():
                batch.append(found)
            if len(batch) == self._max_size:
                return True
            try:
                found = mine.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return True
        raise RuntimeError("The process is ending.")

    def _ends(self, mine: _Queue[_Item, _Result]) -> bool:
        with self._lock:  # nobody can submit between the look and the end
            if not mine.empty():
                return False
            self._leave(mine)
            return True

    def _leave(self, mine: _Queue[_Item, _Result]) -> None:
        """Make the next call start a worker; called with the lock held."""
        if self._queue is mine:
            self._queue = None

    def _finish(self, batch: Sequence[_Waiting[_Item, _Result]]) -> None:
        if not batch:
            return
        try:
            results = self._run([each.item for each in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(results)} results.")
        except BaseException as error:
            _fail(batch, error)
            return
        later = []
        for each, result in zip(batch, results, strict=True):
            if isinstance(result, Later):
                later.append(_Waiting[Any, _Result](result.item, each.future))
            else:
                with contextlib.suppress(InvalidStateError):  # its caller has left
                    each.future.set_result(result)
        if later and self._then is not None:
            self._then._put(later)


def _drained(waiting: _Queue[_Item, _Result]) -> list[_Waiting[_Item, _Result]]:
    found = []
    while not waiting.empty():
        each = waiting.get()
        if each is not None:
            found.append(each)
    return found


def _fail(batch: Sequence[_Waiting[_Item, _Result]], error: BaseException) -> None:
    """Give an error to all who wait. What would end a thread, such as SystemExit, must not end theirs."""
    given = error if isinstance(error, Exception) else RuntimeError(f"The worker ended: {error!r}.")
    for each in batch:
        with contextlib.suppress(InvalidStateError):  # its caller has left, or it has a result already
            each.future.set_exception(given)
