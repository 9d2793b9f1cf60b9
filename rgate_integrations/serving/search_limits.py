"""Limits the time and threads of a retriever's searches, which may hang, fail or return something other than hits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from time import monotonic

from rgate_integrations.errors import RGateError
from rgate_integrations.index.retriever import Hit, Retriever
from rgate_integrations.runtime.flow import Call, Start

# A hanging search cannot be stopped and keeps its thread: the limit saves the rest of the process.
_THREADS = 32
# One slow search is not an outage, and a pause costs every client its passages.
_LATE_IN_A_ROW = 3
# Seconds after which searches are tried again.
_PAUSE = 10.0


class SearchError(RGateError):
    """A search timed out or crashed, or was not started because earlier ones timed out."""


class LimitedSearch:
    """Searches in its own threads, with a timeout.

    A thread cannot be interrupted, so a search that hangs keeps its thread, but there are at most 32 of them. After
    three timeouts in a row, only one search every ten seconds starts and the others fail at once, until one ends in
    time.

    Args:
        retriever: The retriever.
        k: Passages per query; further ones are not read.
        timeout: Seconds for a search, including the wait for a thread.
    """

    def __init__(self, retriever: Retriever, *, k: int, timeout: float) -> None:
        self._retriever = retriever
        self._k = k
        self._timeout = timeout
        # Counts threads, not callers: a caller that times out leaves, but its thread may go on.
        self._free = asyncio.Semaphore(_THREADS)
        self._late = 0
        self._paused_until = 0.0

    async def search(self, queries: list[str]) -> list[list[Hit]]:
        """Return the hits of each query that have text, best first.

        Raises:
            SearchError: The search timed out or crashed, or searches are paused.
            Exception: The error of the retriever, or a `TypeError` if it returned something other than one list of
                hits per query.
        """
        # Without pauses, a retriever that hangs would use up all threads. One search per pause tests if it is back.
        if self._late >= _LATE_IN_A_ROW:
            if monotonic() < self._paused_until:
                raise SearchError(
                    f"After {_LATE_IN_A_ROW} timeouts in a row, searches are paused for another "
                    f"{self._paused_until - monotonic():.1f} s.",
                    hint="Check the retriever, or raise the timeout (--timeout).",
                )
            self._paused_until = monotonic() + _PAUSE
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                hits = await self._run(queries)
        except Exception as error:
            if not deadline.expired():
                self._late = 0
                raise
            self._late += 1
            self._paused_until = monotonic() + _PAUSE
            raise SearchError(
                f"The search took longer than {self._timeout:g} s.",
                hint="Check the retriever, or raise the timeout (--timeout).",
            ) from error
        self._late = 0
        return hits

    async def _run(self, queries: list[str]) -> list[list[Hit]]:
        """Search in a new thread, once fewer than 32 exist; a search that timed out counts until it ends."""
        await self._free.acquire()
        try:
            job = Start(Call(self._search, None, queries)).run().job
        except RuntimeError:  # the process has too many threads
            self._free.release()
            raise
        job.add_done_callback(partial(self._release, asyncio.get_running_loop()))
        return await asyncio.wrap_future(job)

    def _release(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._free.release)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        try:
            # `islice` also bounds a generator that never ends.
            rankings = islice(self._retriever.search(queries, self._k), len(queries))
            hits = [list(islice(ranking, self._k)) for ranking in rankings]
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # SystemExit or a panic in Rust would stop the server, and a future cannot hold a StopIteration.
            raise SearchError(
                f"The retriever raised {type(error).__name__}, which a search must not raise.",
                hint="Catch it in the retriever, and raise an ordinary exception instead, such as RuntimeError.",
            ) from error
        if len(hits) < len(queries):
            raise TypeError(f"The retriever returned {len(hits)} lists of hits for {len(queries)} queries.")
        for hit in chain.from_iterable(hits):
            passage = getattr(hit, "passage", None)
            texts = [getattr(passage, name, None) for name in ("text", "title")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(
                    f"A result of the retriever, of type {type(hit).__name__}, has no passage, or the passage's text "
                    "or title is not a string."
                )
        return [[hit for hit in ranking if hit.passage.text.strip()] for ranking in hits]
