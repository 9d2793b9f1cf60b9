"""Whose turn it is to use a model: one thread's at a time, and a long job lets short ones in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PATIENCE = 10.0  # seconds that the end of the process waits for one pass of a model, or until it is loaded


@dataclass(eq=False)
class _Turn:
    """A thread's turn, or its wait for one.

    Attributes:
        thread: The thread's id.
        long: Whether it lets short ones in.
        depth: How often it has asked for it; it ends when all of these have.
    """

    thread: int
    long: bool
    depth: int = 0


class Turns:
    """Turns at a model, in the order in which threads ask for them. A thread that has the turn may ask again.

    Who writes a text asks for a *long* turn and calls `give_way` between two tokens: all who wait for a short one,
    such as a question that is only read, are let in, and then it goes on. So nobody waits behind a whole text.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Forget whoever had the turn or waited for it."""
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[_Turn] = []
        self._now: _Turn | None = None
        self._closed = False

    @property
    def taken(self) -> bool:
        """Whether a thread has the turn, or is letting others in."""
        return self._now is not None or bool(self._waiting)

    @contextmanager
    def turn(self, *, long: bool = False) -> Iterator[None]:
        """Have the turn. Inside of another turn of the same thread, that one says whether it is long.

        Raises:
            RuntimeError: The process is ending.
        """
        mine = self._begin(long)
        try:
            yield
        finally:
            with self._changed:
                mine.depth -= 1
                if mine.depth == 0 and self._now is mine:
                    self._now = None
                    self._changed.notify_all()

    @property
    def wanted(self) -> bool:
        """Whether `give_way` would do anything. A look without the lock: what it misses, the next look sees."""
        mine = self._now
        someone_waits = any(each is not mine and not each.long for each in self._waiting)
        return self._closed or (mine is not None and mine.long and someone_waits)

    def give_way(self) -> None:
        """Let those in who wait for a short turn now; called by the thread that has the turn.

        Raises:
            RuntimeError: The process is ending.
        """
        with self._changed:
            mine = self._now
            if mine is None or not self.wanted:
                return
            guests = [each for each in self._waiting if not each.long]
            others = [each for each in self._waiting if each.long]
            # Who asks for a short turn from now on comes after this one: a text goes on after each of its tokens.
            self._waiting = [*guests, mine, *others]
            self._now = None
            self._changed.notify_all()
            try:
                self._wait(mine)
            except KeyboardInterrupt:
                self._wait(mine)  # the model is put in order on the way out, which nobody else may see
                raise

    def close(self) -> None:
        """Let nobody begin or go on, and wait until the thread that has the turn has noticed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            mine = threading.get_ident()
            self._changed.wait_for(lambda: self._now is None or self._now.thread == mine, _PATIENCE)

    def _begin(self, long: bool) -> _Turn:
        with self._changed:
            mine = self._now
            if mine is None or mine.thread != threading.get_ident():
                mine = _Turn(threading.get_ident(), long)
                self._waiting.append(mine)
                try:
                    self._wait(mine)
                except KeyboardInterrupt:
                    self._waiting.remove(mine)
                    self._changed.notify_all()
                    raise
            mine.depth += 1
            return mine

    def _wait(self, mine: _Turn) -> None:
        """Wait until it is this one's turn, with the lock held."""
        self._changed.wait_for(lambda: self._closed or (self._now is None and self._waiting[0] is mine))
        self._waiting.remove(mine)
        if self._closed:
            raise RuntimeError("The process is ending: its models are not used any more.")
        self._now = mine
