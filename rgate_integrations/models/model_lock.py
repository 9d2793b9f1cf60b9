"""The lock of a model: one thread uses it at a time, and a long job lets others in between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 10.0  # seconds that the end of the process waits for one pass of a model, or until it is loaded


class ModelLock:
    """A re-entrant lock that threads get in the order in which they ask for it.

    Who writes texts calls `yield_to_waiters` between two tokens, so that nobody waits for a whole text.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Forget whoever held the lock or waited for it."""
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[int] = []  # ids of threads: the first one holds the lock, the others wait
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
        own = threading.get_ident()
        if self._queue[:1] == [own]:  # only this thread puts itself there, so it need not be guarded
            yield
            return
        try:
            with self._changed:
                self._queue.append(own)
                self._wait_until_first(own)
            yield
        finally:  # also where the wait ended by Ctrl-C, or with the process
            with self._changed:
                if own in self._queue:  # not after a fork
                    self._queue.remove(own)
                self._changed.notify_all()

    def yield_to_waiters(self) -> None:
        """Let those go first who wait now; called by the thread that holds the lock.

        Raises:
            RuntimeError: The process is ending.
        """
        with self._changed:
            own = self._queue.pop(0)
            self._queue.append(own)  # whoever asks from now on comes after this one
            self._changed.notify_all()
            try:
                self._wait_until_first(own)
            except KeyboardInterrupt:
                # The caller still needs the lock to put the model in order.
                self._wait_until_first(own)
                raise

    def close(self) -> None:
        """Let nobody begin or go on, and wait until the thread that holds the lock has noticed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            own = threading.get_ident()
            self._changed.wait_for(lambda: self._queue[:1] in ([], [own]), _PATIENCE)

    def _wait_until_first(self, thread: int) -> None:
        self._changed.wait_for(lambda: self._closed or self._queue[0] == thread)
        if self._closed:
            raise RuntimeError("The process is ending: its models are not used any more.")
