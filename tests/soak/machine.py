"""What a process holds on to: memory, threads, descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Held:
    """What this process holds at some moment.

    Attributes:
        memory: Resident memory in MiB.
        threads: Running threads.
        descriptors: Open files, pipes and sockets.
    """

    memory: float
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        """Look, after garbage was collected.

        What glibc keeps free for each thread depends on how the threads met: 60 MiB in use had 100 to 280 MiB free
        beside them. It is given back first, so that only what is held is counted.
        """
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return cls(
            memory=pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
        )

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
        for name in ("memory", "threads", "descriptors"):
            before, after = getattr(first, name), getattr(last, name)
            if after - before > getattr(self, name):
                grown.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
        return grown


def settled(pause: float, looks: int = 10) -> Held:
    """Look when idle threads have ended: when none ended between two looks, ``pause`` seconds apart."""
    held = Held.now()
    for _ in range(looks):
        time.sleep(pause)
        again = Held.now()
        if again.threads >= held.threads:
            return again
        held = again
    return held
