"""What a process holds on to: memory, threads, descriptors."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import asdict, dataclass

import psutil

_MIB = 1024 * 1024


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

        What glibc keeps free for each thread depends on how the threads met: 60 MiB in use had 100 to 280 MiB free
        beside them. It is given back first, so that only what is held is counted.
        """
        if pid is None:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process(pid)
        return cls(process.memory_info().rss / _MIB, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.memory:,.0f} MiB, {self.threads} threads, {self.descriptors} descriptors"


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
