"""The lock of a model: one thread uses it at a time, and a long job lets others in between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PATIENCE = 10.0  # seconds that the end of the process waits for one pass of a model, or until it is loaded


@dataclass(eq=False)
class _Request:
    """A thread that holds the lock or waits for it; ``depth`` counts how often it has taken it."""

    thread: int
    depth: int = 0


class ModelLock:
    """A re-entrant lock that threads get in the order in which they ask for it.

    Who writes texts calls `yield_to_waiters` between two tokens, so that nobody waits for a whole text.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Forget whoever held the lock or waited for it."""
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[_Request] = []  # the first one holds the lock, the others wait
        self._closed = False

    @property
    def users(self) -> int:
        """How many threads hold the lock or wait for it."""
        return len(self._queue)

    @property
    def wanted(self) -> bool:
        """Whether `yield_to_waiters` would do anything. Read without the lock: what it misses, the next look sees."""
        return self._closed or len(self._queue) > 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock; a thread that holds it already may do so again.

        Raises:
            RuntimeError: The process is ending.
        """
        with self._changed:
            if self._queue and self._queue[0].thread == threading.get_ident():
                mine = self._queue[0]
            else:
                mine = _Request(threading.get_ident())
                self._queue.append(mine)
                try:
                    self._wait_until_first(mine)
                except BaseException:  # Ctrl-C, or the end of the process
                    self._remove(mine)
                    raise
            mine.depth += 1
        try:
            yield
        finally:
            with self._changed:
                mine.depth -= 1
                if mine.depth == 0:
                    self._remove(mine)

    def yield_to_waiters(self) -> None:
        """Let those go first who wait now; called by the thread that holds the lock.

        Raises:
            RuntimeError: The process is ending.
        """
        with self._changed:
            mine = self._queue.pop(0)
            self._queue.append(mine)  # whoever asks from now on comes after this one
            self._changed.notify_all()
            try:
                self._wait_until_first(mine)
            except KeyboardInterrupt:
                # The caller still needs the lock to put the model in order.
                self._wait_until_first(mine)
                raise

    def close(self) -> None:
        """Let nobody begin or go on, and wait until the thread that holds the lock has noticed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            own = threading.get_ident()
            self._changed.wait_for(lambda: not self._queue or self._queue[0].thread == own, _PATIENCE)

    def _wait_until_first(self, mine: _Request) -> None:
        self._changed.wait_for(lambda: self._closed or self._queue[0] is mine)
        if self._closed:
            raise RuntimeError("The process is ending: its models are not used any more.")

    def _remove(self, mine: _Request) -> None:
        if mine in self._queue:  # not after a fork
            self._queue.remove(mine)
        self._changed.notify_all()
