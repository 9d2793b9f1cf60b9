"""Many callers at once: from threads, and on an event loop, where some leave before they are answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(call: Callable[[str], Any], texts: list[str]) -> list[Any]:
    """Ask from a thread for each text; the answers, or the exceptions, in their order."""
    with ThreadPoolExecutor(len(texts)) as pool:
        asked = [pool.submit(call, text) for text in texts]
    return [done.exception() or done.result() for done in asked]


def on_a_loop(call: Callable[[str], Awaitable[Any]], texts: list[str], chance: random.Random) -> list[Any]:
    """Ask in a task for each text, and cancel about one in four; the answers, or the exceptions, in their order."""

    async def ask() -> list[Any]:
        tasks = [asyncio.ensure_future(call(text)) for text in texts]
        await asyncio.sleep(chance.choice([0, 0, 0.003]))
        for task in tasks:
            if chance.random() < 0.25:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(ask())


def has_left(result: Any) -> bool:
    """Return whether a result is that of a caller who left."""
    return isinstance(result, asyncio.CancelledError)
