"""Searches that start while the gate decides: a pool of threads, and what becomes of those nobody needs."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_log = logging.getLogger("rgate_integrations")
_POOL = ThreadPoolExecutor(8, thread_name_prefix="rgate-search")  # threads start with the first search


def start(search: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Run a search in a thread, in the caller's context."""
    return _POOL.submit(contextvars.copy_context().run, search, *arguments)


def drop(search: Future[Any] | asyncio.Future[Any]) -> None:
    """Cancel a search, or forget its result; what it raises is logged only. One that is done is left alone."""
    if not search.done():
        search.cancel()
    search.add_done_callback(_note)


def _note(search: Future[Any] | asyncio.Future[Any]) -> None:
    if not search.cancelled() and (error := search.exception()) is not None:
        _log.info("A search that was not needed failed: %s: %s", type(error).__name__, error)
