"""What a process holds on to: memory, threads, descriptors."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import asdict, dataclass

import psutil

_MIB = 1024 * 1024
_TRIM_THRESHOLD = -1  # glibc's M_TRIM_THRESHOLD
_KEPT = 128 * 1024  # bytes that an arena may keep free at its end: what glibc begins with


@dataclass(frozen=True)
class Held:
    """What a process holds at some moment.

    Attributes:
        memory: Resident memory in MiB.
        threads: Running threads.
        descriptors: Open files, pipes and sockets.
    """

    memory: float
    threads: int
    descriptors: int

    @classmethod
    def by(cls, pid: int | None = None) -> Held:
        """Look at a process; this one, after garbage was collected, unless another is named.

        What malloc has free between blocks in use is given back first, so that only what is held is counted. What is
        free at the ends of its arenas must be given back by the process itself: see `give_back_at_once`.
        """
        if pid is None:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process(pid)
        return cls(process.memory_info().rss / _MIB, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.memory:,.0f} MiB, {self.threads} threads, {self.descriptors} descriptors"


def give_back_at_once() -> None:
    """Have glibc give back what is free at the end of an arena, for the rest of this process.

    Threads share eight arenas a core, and which one a thread gets depends on how the threads met. glibc lets each
    keep up to 64 MiB free at its end, once a large block was freed, and `malloc_trim` shortens the main one alone.
    So a process grows until every arena has had the largest that any thread asks for: after two minutes of a soak
    250 MiB were in use by malloc, and 410 MiB free at the ends of 15 arenas.
    """
    if not ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, _KEPT):
        raise OSError("glibc did not take the threshold.")


@dataclass(frozen=True)
class Allowance:
    """How much more than at the beginning a process may hold at the end, in `Held`'s units."""

    memory: float = 150.0
    threads: int = 12
    descriptors: int = 24

    def exceeded(self, first: Held, last: Held) -> list[str]:
        """Return what grew by more than is allowed."""
        grown = []
        for name, more in asdict(self).items():
            before, after = getattr(first, name), getattr(last, name)
            if after - before > more:
                grown.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
        return grown


def settled(pause: float) -> Held:
    """Look when idle threads have ended: when none ended between two looks, ``pause`` seconds apart."""
    held, again = None, Held.by()
    while held is None or again.threads < held.threads:
        held = again
        time.sleep(pause)
        again = Held.by()
    return again
