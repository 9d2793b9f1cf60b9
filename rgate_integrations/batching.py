"""Merges the calls of concurrent callers, from threads and from asyncio alike, into batches."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

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
        self._lock = threading.Lock()
        self._pid = -1
        self._queue: queue.SimpleQueue[tuple[_Item, Future[_Result]]] = queue.SimpleQueue()

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
            for pair in zip(items, futures, strict=True):
                self._queue.put(pair)
        return futures

    def _work(self, waiting: queue.SimpleQueue[tuple[_Item, Future[_Result]]]) -> None:
        crowded = False
        while True:
            try:
                batch = [waiting.get(timeout=self._max_idle)]
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
                    batch.append(waiting.get(timeout=max(deadline - time.monotonic(), 0.0)))
                except queue.Empty:
                    break
            crowded = len(batch) > 1
            live = [(item, future) for item, future in batch if future.set_running_or_notify_cancel()]
            if live:
                self._finish(live)

    def _finish(self, batch: Sequence[tuple[_Item, Future[_Result]]]) -> None:
        try:
            results = self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(batch)} items gave {len(results)} results.")
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
