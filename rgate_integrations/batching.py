"""Merges the calls of concurrent callers, from threads and from asyncio alike, into batches."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from rgate_integrations.errors import OverloadedError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Waiting(NamedTuple, Generic[_Item, _Result]):
    item: _Item
    future: Future[_Result]
    since: float


_Queue: TypeAlias = "queue.SimpleQueue[_Waiting[_Item, _Result]]"


class Batcher(Generic[_Item, _Result]):
    """One worker thread that runs a batch function over whatever has been submitted meanwhile.

    An idle worker starts at once on a lone item, unless other callers were seen in the last batch: then it
    waits a moment for them. Futures that were cancelled before their batch starts are skipped. A worker with
    nothing to do ends, and the next call starts another; after a fork the child starts one of its own.

    No call hangs: whatever ends a worker, those who wait for it get an error, and the next call starts a new one.

    Args:
        run: Maps items to results, in order. If it raises, every item of the batch gets the exception.
        max_size: Maximum number of items in a batch.
        max_wait: How long to wait for others, in seconds, when there were others just before.
        max_idle: How long a worker stays without work, in seconds.
        timeout: An item that has waited longer than this for its batch, in seconds, is not run and gets an
            `OverloadedError`: under a load that the worker cannot keep up with, callers learn it in time.
    """

    def __init__(
        self,
        run: Callable[[Sequence[_Item]], Sequence[_Result]],
        *,
        max_size: int = 64,
        max_wait: float = 0.003,
        max_idle: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        self._run = run
        self._max_size = max_size
        self._max_wait = max_wait
        self._max_idle = max_idle
        self._timeout = math.inf if timeout is None else timeout
        self._lock = threading.Lock()
        # The process that has a worker, and the queue which that worker reads. A worker owns its queue: one that
        # ends, or that was left behind by a fork, can never take what was meant for the next.
        self._pid = -1
        self._queue: _Queue[_Item, _Result] = queue.SimpleQueue()

    def submit(self, items: Sequence[_Item]) -> list[Future[_Result]]:
        """Queue items; their futures are completed in whatever batches they end up in."""
        waiting = [_Waiting[_Item, _Result](item, Future(), time.monotonic()) for item in items]
        with self._lock:
            try:
                self._ensure_worker()
            except Exception as error:  # no thread could be started now; the next call tries again
                _fail(waiting, error)
            else:
                for each in waiting:
                    self._queue.put(each)
        return [each.future for each in waiting]

    def _ensure_worker(self) -> None:
        if self._pid == os.getpid():
            return
        mine: _Queue[_Item, _Result] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(mine,), name="rgate-batcher", daemon=True).start()
        self._queue = mine
        self._pid = os.getpid()

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
        """Fill a batch with what is waiting; False when there was nothing for so long that the worker ends."""
        try:
            self._admit(mine.get(timeout=self._max_idle), batch)
        except queue.Empty:
            return not self._ends(mine)
        deadline = time.monotonic() + wait
        while len(batch) < self._max_size:
            try:
                self._admit(mine.get(timeout=max(deadline - time.monotonic(), 0.0)), batch)
            except queue.Empty:
                break
        return True

    def _ends(self, mine: _Queue[_Item, _Result]) -> bool:
        with self._lock:  # nobody can submit between the look and the end
            if not mine.empty():
                return False
            self._leave(mine)
            return True

    def _leave(self, mine: _Queue[_Item, _Result]) -> None:
        """Make the next call start a worker; called with the lock held."""
        if self._queue is mine:
            self._pid = -1

    def _admit(self, each: _Waiting[_Item, _Result], batch: list[_Waiting[_Item, _Result]]) -> None:
        """Put an item into the batch, unless its caller has left or it has waited too long."""
        if not each.future.set_running_or_notify_cancel():
            return
        waited = time.monotonic() - each.since
        if waited <= self._timeout:
            batch.append(each)
            return
        overdue = OverloadedError(
            f"The question waited {waited:.1f} s for its turn.",
            hint="Raise queue_timeout, ask less at once, or run the gate on faster hardware.",
        )
        each.future.set_exception(overdue)

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
        for each, result in zip(batch, results, strict=True):
            each.future.set_result(result)


def _drained(waiting: _Queue[_Item, _Result]) -> list[_Waiting[_Item, _Result]]:
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found


def _fail(batch: Sequence[_Waiting[_Item, _Result]], error: BaseException) -> None:
    """Give an error to all who wait. What would end a thread, such as SystemExit, must not end theirs."""
    given = error if isinstance(error, Exception) else RuntimeError(f"The worker ended: {error!r}.")
    for each in batch:
        with contextlib.suppress(InvalidStateError):  # its caller has left, or it has a result already
            each.future.set_exception(given)
