"""Threads that end with the process, and locks that are released in a forked child.

If a thread is inside a model when the interpreter ends, the process crashes with SIGABRT. A lock that another
thread holds during a fork is never released in the child, because that thread does not exist there.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  torch may import it while the process ends, when it can no longer be loaded
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property:
        """`functools.cached_property` as of Python 3.12: without a lock. Two threads may compute the value twice.

        A child that is forked while another thread computes a value would wait for Python 3.11's lock forever.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Return the computed value, which replaces this descriptor in the instance; itself for a class."""
            if instance is None:
                return self
            return vars(instance).setdefault(self._name, self._compute(instance))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_JOIN_SECONDS = 2.0  # how long the end of the process waits for threads outside models


def count_cores() -> int:
    """Return the number of cores to use: ``OMP_NUM_THREADS``, or all that this process may use."""
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal() and int(number) > 0:
        return int(number)
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Closable(Protocol):
    """An object that owns threads and can be closed when the process ends."""

    def close(self) -> None:
        """Start no more work. May also wait for work that cannot be interrupted, such as that of a model."""


class ForkAware(Protocol):
    """An object that owns locks or threads and must be reset in a forked child."""

    def after_fork(self) -> None:
        """Reset locks and threads in a forked child."""


_closable: weakref.WeakSet[Closable] = weakref.WeakSet()
_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ForkSafeLock:
    """A re-entrant lock that is always free in a newly forked child. What it guards may be half changed there."""

    def __init__(self) -> None:
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock with a new one."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # in the child of a thread that forked while it held the lock
            self._lock.release()


def close_at_exit(owner: Closable) -> None:
    """Close an object, if it still exists, when the process ends: normally, by an exception or by Ctrl-C."""
    _closable.add(owner)
    # Register again each time, so that it runs before earlier registrations, such as torch's own cleanup.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def reset_after_fork(owner: ForkAware) -> None:
    """Reset an object in every child process forked from now on, as long as the object exists."""
    _fork_aware.add(owner)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that calls ``run``, and return the thread.

    If `close_at_exit` was ever called, the process waits for such threads when it ends, up to 2 s in all.

    Raises:
        RuntimeError: The system cannot start another thread now.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def map_parallel(run: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """Return ``run(item)`` of each item, in order, computed by the calling thread and up to ``threads - 1`` others.

    Where another thread fails, perhaps without a result or an error, because it had no memory for them, the calling
    thread computes the item again. So it waits only for threads to end, which all do.

    Raises:
        Exception: ``run`` raised it in the calling thread.
        RuntimeError: The system cannot start another thread now.
    """
    results: dict[int, _Result] = {}
    indices = iter(range(len(items)))  # shared: each thread takes the next one

    def work() -> None:
        for i in indices:
            results[i] = run(items[i])

    def assist() -> None:
        with suppress(Exception):
            work()

    assistants: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(items)) - 1):
            thread = threading.Thread(target=assist)
            thread.start()
            assistants.append(thread)
        work()
    finally:
        for _ in indices:  # after an error, the others begin nothing more
            pass
        for thread in assistants:
            thread.join()
    return [results[i] if i in results else run(item) for i, item in enumerate(items)]


def _at_exit() -> None:
    for owner in list(_closable):
        owner.close()
    end = time.monotonic() + _JOIN_SECONDS
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    for owner in list(_fork_aware):
        owner.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
