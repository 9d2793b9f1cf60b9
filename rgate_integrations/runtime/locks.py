"""Locks between processes: who writes to a place has it for himself."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from rgate_integrations.errors import LockedError, WriteError

HAS_LOCKS = fcntl is not None
"""Whether the system has such locks; where it has none, nothing is locked."""

_LONGEST_ID = 20  # digits of a process id
_UNKNOWN_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # some network file systems


@contextmanager
def locked(target: str | Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder that is going to be written; it need not exist yet.

    The lock is a file beside the target, ``.NAME.lock``, that holds the process id. The system gives it free when
    this process ends, however it ends, and a file that a killed process left locks nobody out.

    Args:
        target: What is going to be written.
        waiting: Called once if another process has the lock, which is then waited for.

    Raises:
        LockedError: Another process has the lock, and ``waiting`` is None. The message names the process.
        WriteError: The lock file cannot be made, or what has its name is none: a link, or a file of somebody's.
    """
    if not HAS_LOCKS:
        yield
        return
    path = _lock_file(Path(target))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened(path, waiting)
    except BlockingIOError as error:
        raise LockedError(
            f"Another process{_holder(path)} is writing to {str(target)!r}.",
            hint="Wait until it has ended, or name another place to write to.",
        ) from error
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(
            f"{str(target)!r} cannot be written to: {error.strerror or error}.",
            hint="Check that the folder may be written to, or name another place.",
        ) from error
    try:
        yield
    finally:
        # Gone before it is free. Whoever waits for it sees that, and makes a file of its own.
        path.unlink(missing_ok=True)
        file.close()


def _lock_file(target: Path) -> Path:
    # By the real path: a link is another name for the same place.
    real = target.expanduser().resolve()
    return real.with_name(f".{real.name}.lock")


def _opened(path: Path, waiting: Callable[[], None] | None) -> io.FileIO:
    """Open the lock file and lock it; raises BlockingIOError where it is held and nobody waits."""
    while True:
        # A link is not followed: in a shared folder it may be another user's, to any file of ours.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        file = io.FileIO(descriptor, "r+b")
        try:
            _lock(file, waiting)
            if _is(file, path):
                _check_ours(file, path)
                with suppress(OSError):  # on a full disk: the lock is as good without the number
                    file.seek(0)
                    file.write(str(os.getpid()).encode())
                    file.truncate()
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the one who had it removed the file: this lock is of nothing


def _lock(file: io.FileIO, waiting: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            raise
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNKNOWN_HERE:
            raise


def _check_ours(file: io.FileIO, path: Path) -> None:
    """Refuse a file that is no lock file: one that has other names, too, or holds something else than a number.

    Raises:
        WriteError: It is none; nothing of it was changed.
    """
    facts = os.fstat(file.fileno())
    is_plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    # A pipe is not read: it would wait.
    if not is_plain or not (file.read(_LONGEST_ID + 1) or b"0").isdigit():
        raise WriteError(
            f"{str(path)!r} has the name of a lock file, and is something else.",
            hint="Move it away, or name another place to write to.",
        )


def _is(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        written = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return f" ({written})" if written.isdigit() else ""
