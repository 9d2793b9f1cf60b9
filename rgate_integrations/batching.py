"""Merges the calls of concurrent callers, from threads and from asyncio alike, into batches."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Batcher(Generic[_Item, _Result]):
    """One worker thread that runs a batch function over whatever has been submitted meanwhile.

    An idle worker starts at once on a lone item, unless other callers were seen in the last batch: then it
    waits a moment for them. Futures that were cancelled before their batch starts are skipped. A worker with
    nothing to do ends, and the next call starts another; after a fork the child starts one of its own.

    Args:
        run: Maps items to results, in order. If it raises, every item of the batch gets the exception.
        max_size: Greatest number of items in a batch.
        max_wait: How long to wait for others, in seconds, when there were others just before.
        max_idle: How long a worker stays without work, in seconds.
        timeout: An item that has waited longer than this for its batch, in seconds, is not run: under a load
            that the worker cannot keep up with, callers learn it in time.
        overdue: Maps such an item, and how long it waited, to its result.
    """

    def __init__(
        self,
        run: Callable[[Sequence[_Item]], Sequence[_Result]],
        *,
        max_size: int = 64,
        max_wait: float = 0.003,
        max_idle: float = 1.0,
        timeout: float | None = None,
        overdue: Callable[[_Item, float], _Result] | None = None,
    ) -> None:
        self._run = run
        self._max_size = max_size
        self._max_wait = max_wait
        self._max_idle = max_idle
        self._timeout = math.inf if timeout is None else timeout
        self._overdue = overdue
        self._lock = threading.Lock()
        self._pid = -1
        self._queue: queue.SimpleQueue[_Waiting[_Item, _Result]] = queue.SimpleQueue()

    def submit(self, items: Sequence[_Item]) -> list[Future[_Result]]:
        """Queue items; their futures are completed in whatever batches they end up in."""
        futures: list[Future[_Result]] = [Future() for _ in items]
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._queue = queue.SimpleQueue()
                threading.Thread(
                    target=self._work, args=(self._queue,), name="rgate-batcher", daemon=True
                ).start()
            now = time.monotonic()
            for item, future in zip(items, futures, strict=True):
                self._queue.put(_Waiting(item, future, now))
        return futures

    def _work(self, waiting: queue.SimpleQueue[_Waiting[_Item, _Result]]) -> None:
        crowded = False
        while True:
            batch: list[_Waiting[_Item, _Result]] = []
            try:
                self._admit(waiting.get(timeout=self._max_idle), batch)
            except queue.Empty:
                with self._lock:  # nobody can submit between the look and the end
                    if not waiting.empty():
                        continue
                    if self._queue is waiting:
                        self._pid = -1
                    return
            deadline = time.monotonic() + (self._max_wait if crowded else 0.0)
            while len(batch) < self._max_size:
                try:
                    self._admit(waiting.get(timeout=max(deadline - time.monotonic(), 0.0)), batch)
                except queue.Empty:
                    break
            crowded = len(batch) > 1
            if batch:
                self._finish(batch)

    def _admit(self, each: _Waiting[_Item, _Result], batch: list[_Waiting[_Item, _Result]]) -> None:
        """Put an item into the batch, unless its caller has left or it has waited too long."""
        if not each.future.set_running_or_notify_cancel():
            return
        waited = time.monotonic() - each.since
        if waited <= self._timeout or self._overdue is None:
            batch.append(each)
        else:
            each.future.set_result(self._overdue(each.item, waited))

    def _finish(self, batch: Sequence[_Waiting[_Item, _Result]]) -> None:
        try:
            results = self._run([each.item for each in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(results)} results.")
        except BaseException as error:
            for each in batch:
                each.future.set_exception(error)
            return
        for each, result in zip(batch, results, strict=True):
            each.future.set_result(result)


class _Waiting(NamedTuple, Generic[_Item, _Result]):
    item: _Item
    future: Future[_Result]
    since: float
