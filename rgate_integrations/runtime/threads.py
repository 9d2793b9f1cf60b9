"""What must not outlive its process: threads are waited for at exit, and a forked child finds no lock held.

A thread that is inside a model when the interpreter ends takes the whole process down with SIGABRT. A lock that
another thread held at a fork is never released in the child, where that thread does not exist.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  it refuses to be imported while the process ends, as torch may do
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_PATIENCE = 2.0  # seconds that the end of the process waits for threads that no model holds


def count_cores() -> int:
    """Return on how many cores to compute: ``OMP_NUM_THREADS``, or those that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Closable(Protocol):
    """Something that runs in threads of its own."""

    def close(self) -> None:
        """Begin nothing more, and wait for what cannot be interrupted."""


class ForkAware(Protocol):
    """Something that holds locks or threads."""

    def after_fork(self) -> None:
        """Forget, in a forked child, what the threads of the parent held."""


_ending = threading.Event()
_closing: weakref.WeakSet[Closable] = weakref.WeakSet()
_forgetting: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ForkSafeLock:
    """A re-entrant lock that is free in each forked child; what a writer was changing may be half changed there."""

    def __init__(self) -> None:
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Forget who holds the lock."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # in the child of a thread that forked while it held the lock
            self._lock.release()


def close_at_exit(owner: Closable) -> None:
    """Have something closed when the process ends normally, by an exception or by Ctrl-C."""
    _closing.add(owner)
    if not _ending.is_set():  # a callback must not be unregistered while it runs
        # Again each time, to be called before what was registered meanwhile: torch cleans up behind itself, too.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def reset_after_fork(owner: ForkAware) -> None:
    """Have something reset in each forked child."""
    _forgetting.add(owner)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread. The end of the process waits for it, but not for long.

    Raises:
        RuntimeError: No thread can be started now.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def _at_exit() -> None:
    _ending.set()
    for owner in list(_closing):
        owner.close()
    end = time.monotonic() + _PATIENCE
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    for owner in list(_forgetting):
        owner.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
