"""Searches of a retriever that may hang, fail, or return something else: bounded in time and in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, islice

from rgate_integrations.errors import RGateError
from rgate_integrations.index.retriever import Hit, Retriever
from rgate_integrations.runtime.flow import Call, Start

_THREADS = 32
_LATE_IN_A_ROW = 3
_PAUSE = 10.0


class SearchError(RGateError):
    """A search was late, or was not started because those before it were."""


class LimitedSearch:
    """Searches in threads of its own; what is late is dropped.

    A thread cannot be interrupted. So a search that hangs keeps its thread, but no more than ``threads`` are ever
    used, and after three late searches in a row only one every ten seconds is started until one is in time again.

    Args:
        retriever: What searches.
        k: Passages a query; what a retriever returns beyond them is not read.
        timeout: Seconds that a search may take, with the wait for a thread.
        threads: How many searches may run at a time.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self,
        retriever: Retriever,
        *,
        k: int,
        timeout: float,
        threads: int = _THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retriever = retriever
        self._k = k
        self._timeout = timeout
        self._free = asyncio.Semaphore(threads)
        self._clock = clock
        self._late = 0
        self._paused_until = 0.0

    async def search(self, queries: list[str]) -> list[list[Hit]]:
        """Return the hits of each query, best first.

        Raises:
            SearchError: The search is late, or paused.
            Exception: What the retriever raises, or a `TypeError` if it returns something other than hits.
        """
        if self._late >= _LATE_IN_A_ROW:
            if self._clock() < self._paused_until:
                raise SearchError("The search is paused, since it was late several times in a row.")
            self._paused_until = self._clock() + _PAUSE
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                hits = await self._run(queries)
        except Exception as error:
            if not deadline.expired():
                self._late = 0
                raise
            self._late += 1
            self._paused_until = self._clock() + _PAUSE
            raise SearchError(f"The search took longer than {self._timeout:g} s.") from error
        self._late = 0
        return hits

    async def _run(self, queries: list[str]) -> list[list[Hit]]:
        """Search in a thread, whose place is free again when it ends, however late that is."""
        await self._free.acquire()
        try:
            job = Start(Call(self._search, None, queries)).run().job
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise
        job.add_done_callback(partial(self._release, asyncio.get_running_loop()))
        hits: list[list[Hit]] = await asyncio.wrap_future(job)
        return hits

    def _release(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._free.release)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        hits: list[list[Hit]] = []
        try:
            for ranking in islice(self._retriever.search(queries, self._k), len(queries)):
                hits.append(list(islice(ranking, self._k)))
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # SystemExit, or a panic in Rust, would end the server, and no future can hold a StopIteration.
            raise SearchError(f"The search failed: {type(error).__name__}.") from error
        for hit in chain.from_iterable(hits):
            passage = getattr(hit, "passage", None)
            texts = (getattr(passage, "text", None), getattr(passage, "title", None))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"The retriever returned a {type(hit).__name__}, not a Hit with a Passage.")
        return hits
