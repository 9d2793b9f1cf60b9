"""How callers wait for their results: for all of them together, with a deadline, in threads and on event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rgate_integrations.errors import OverloadedError

_T = TypeVar("_T")


def wait_results(futures: Sequence[Future[_T]], timeout: float | None) -> list[_T | Exception]:
    """Wait, blocking, for results or errors; what is not there when the time is up is an `OverloadedError`.

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
            each.cancel()


def _outcome(future: Future[Any] | asyncio.Future[Any], timeout: float | None) -> Any:
    if not future.done():
        return OverloadedError(
            f"There was no decision after {timeout:g} s.",
            hint="Raise timeout, ask less at once, or run the gate on faster hardware.",
        )
    error = future.exception()
    return error if isinstance(error, Exception) else future.result()
