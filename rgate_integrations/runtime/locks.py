"""Locks between processes: who writes to a place has it for himself."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rgate_integrations.errors import LockedError, WriteError

_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP}  # some network file systems: written to without a lock


@contextmanager
def locked(target: str | Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder that is going to be written; it need not exist yet.

    The lock is on a file beside the target, ``.NAME.lock``. The system gives it free when this process ends, however
    it ends, and a file that a killed process left locks nobody out.

    Args:
        target: What is going to be written.
        waiting: Called once if another process has the lock, which is then waited for.

    Raises:
        LockedError: Another process has the lock, and ``waiting`` is None.
        WriteError: The lock file cannot be made, or what has its name is none: a link, or a file of somebody's.
    """
    # By the real path: a link is another name for the same place.
    real = Path(target).expanduser().resolve()
    path = real.with_name(f".{real.name}.lock")
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_what_is_no_lock_file(path)
        _acquire(lock, str(target), waiting)
    except WriteError:
        raise
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise WriteError(
                f"{str(target)!r} cannot be written to: {error.strerror or error}.",
                hint="Check that the folder may be written to, or name another place.",
            ) from error
    try:
        yield
    finally:
        # Gone before it is free: who waits for it sees that, and makes a file of its own.
        with suppress(OSError):
            path.unlink()
        lock.release()


def _acquire(lock: FileLock, target: str, waiting: Callable[[], None] | None) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        if waiting is None:
            raise LockedError(
                f"Another process is writing to {target!r}.",
                hint="Wait until it has ended, or name another place to write to.",
            ) from error
        waiting()
        lock.acquire()


def _refuse_what_is_no_lock_file(path: Path) -> None:
    """Refuse a link, which in a shared folder may be another user's to any file of ours, and a file with content."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > 0:
        raise WriteError(
            f"{str(path)!r} has the name of a lock file, and is something else.",
            hint="Move it away, or name another place to write to.",
        )
