"""Atomic writes, file locks, and JSON with uniform errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from io import BufferedReader
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from rgate_integrations.errors import ConfigurationError, LockedError, WriteError

_T = TypeVar("_T")

_MAX_READS = 5  # of a folder that is replaced each time
_ABANDONED = 86_400.0  # seconds after which a temporary file belongs to no process that still writes it
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP}  # of network file systems without locks; we write there without one

SHIPPED = Path(__file__).parents[1] / "weights"
"""The folder with the files that ship with the package."""


def expand(path: str | Path) -> Path:
    """Return a path with the home folder in place of a leading ``~``, which shells leave in ``--out=~/gate``."""
    return Path(os.path.expanduser(path))  # the method of `Path` raises for an unknown user's home


def follow(path: str | Path) -> Path:
    """Return what a path points to if it is a link, because replacing the link would leave the old content there."""
    return Path(os.path.realpath(target)) if os.path.islink(target := expand(path)) else target


def write_atomically(path: str | Path, content: bytes | str) -> Path:
    """Write or replace a file atomically, and return its path; see `follow`. It keeps its permissions.

    Args:
        path: The file; missing folders are created.
        content: The content; text is written as UTF-8.

    Raises:
        ConfigurationError: The path is the current folder or the root, or ends in ``..``.
        WriteError: The file could not be written, such as on a full disk; an earlier one is unchanged.
    """
    target = follow(path)
    with _temporary(target) as temporary:
        _write(temporary, content)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    return target


def write_folder(folder: str | Path, files: Mapping[str, bytes | str]) -> Path:
    """Write or replace a folder as a whole, and return its path; see `follow`.

    Args:
        folder: The folder; missing folders above it are created.
        files: Contents by name; a name may start with a subfolder.

    Raises:
        ConfigurationError: The folder may not be replaced, see `check_replaceable`.
        WriteError: The folder could not be written, such as on a full disk; an earlier one is unchanged.
    """
    target = follow(folder)
    with _temporary(target) as temporary:
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _write(temporary / name, content)
        rename_folder(temporary, target)
    return target


def rename_folder(folder: Path, target: Path) -> None:
    """Give a finished folder its final name, replacing an earlier folder of that name.

    A folder with files cannot be replaced atomically, so the earlier one is renamed first. If the process is killed
    between the two renames, `find_folder` still finds the earlier one. Processes take turns.

    Args:
        folder: The finished folder, in the same parent folder as ``target``.
        target: The final name.

    Raises:
        ConfigurationError: The target may not be replaced, see `check_replaceable`.
        OSError: The folder could not be renamed; an earlier one is kept.
    """
    backup = _beside(target, "before")
    with locked(backup, waiting=lambda: None):  # not the target's own lock, which callers hold
        check_replaceable(target, os.listdir(folder))
        if target.exists():
            _remove(backup)  # left by a process that was killed before removing it
            target.rename(backup)
        try:
            folder.rename(target)
        except OSError:
            if backup.exists():
                backup.rename(target)
            raise
        _remove(backup)


def check_replaceable(target: Path, names: Iterable[str]) -> None:
    """Check that a folder may be replaced, because a typo must not destroy a user's files.

    Args:
        target: The folder.
        names: Names of the new files. The folder may be replaced if it is missing or empty, or if it already has
            one of these files, or the lock file or unfinished copy of one. ``README.md`` does not count.

    Raises:
        ConfigurationError: The folder may not be replaced, cannot be read, or is a file.
    """
    if os.path.isfile(target):
        raise ConfigurationError(f"{str(target)!r} is a file, not a folder.", hint="Choose another name.")
    try:
        present = os.listdir(target) if os.path.isdir(target) else []
    except OSError as error:
        raise ConfigurationError(
            f"{str(target)!r} cannot be read: {error.strerror}.", hint="Choose another folder."
        ) from error
    ours = set(names) - {"README.md"}
    begins = tuple(start for name in ours for start in (f".{name}-", f".{name}.lock"))
    if present and not any(name in ours or name.startswith(begins) for name in present):
        raise ConfigurationError(
            f"{str(target)!r} cannot be replaced: it contains other files, such as {min(present)!r}.",
            hint="Choose another folder.",
        )


def check_output(out: str | Path, *inputs: object, files: Iterable[str] | None = None) -> None:
    """Check, before the work, that an output can be written, and replaces neither an input nor other files.

    Args:
        out: The file or folder to write.
        *inputs: The inputs. Those that are not paths of existing files or folders, such as names, are ignored.
        files: For a folder, names of the new files, see `check_replaceable`.

    Raises:
        ConfigurationError: An input is the output, or inside it, or the output may not be replaced.
        WriteError: The output's folder is not a folder, or may not be written to.
    """
    target = find_folder(out)
    _beside(target, "before")  # raises now if it could not be renamed after the work
    above = next(filter(os.path.exists, target.parents), Path())
    if not (os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)):
        raise write_error(target, OSError(f"{str(above)!r} is not a folder that you may write to"))
    for path in inputs:
        source = os.path.expanduser(path) if isinstance(path, str | Path) else ""
        # `samefile` follows links, also where a file system ignores case.
        if (os.path.exists(target) and os.path.exists(source)) and any(
            os.path.samefile(target, each) for each in (Path(source), *Path(source).resolve().parents)
        ):
            raise ConfigurationError(
                f"{str(out)!r} cannot be the output: that would replace the input {str(path)!r}.",
                hint="Choose another output path.",
            )
    if files is not None:
        check_replaceable(target, files)


def find_folder(folder: str | Path) -> Path:
    """Return the path of a folder's content: the folder, or its backup if `rename_folder` was killed halfway."""
    # For an impossible file name, `os.path` returns False and `Path` raises.
    target = follow(folder)
    if os.path.exists(target) or target.name == "..":  # which has no backup
        return target
    backup = _beside(target, "before")
    return backup if os.path.isdir(backup) else target


def read_folder(folder: str | Path, read: Callable[[], _T]) -> _T:
    """Return ``read()``, which reads files of a folder; it is called again if the folder was replaced meanwhile.

    `rename_folder` replaces a folder in two steps, and files are opened one by one. So a read that starts before
    another process replaces the folder may find some old files, some new ones, or none.

    Args:
        folder: The folder; other names, such as that of a shipped gate, are allowed.
        read: Reads the folder, and checks that its files belong together. What it raises is raised if the folder is
            unchanged, or was replaced at each of five attempts.
    """
    for _ in range(_MAX_READS - 1):
        before = _identify(folder)
        try:
            return read()
        except Exception:
            if _identify(folder) == before:
                raise
    return read()


def _identify(folder: str | Path) -> tuple[Path, int, int]:
    """Return a folder's path, inode and time of change, one of which changes if the folder is replaced."""
    path = find_folder(folder)
    with suppress(OSError, ValueError):  # it is missing, or not a path
        status = os.stat(path)
        return path, status.st_ino, status.st_mtime_ns
    return path, 0, 0


@contextmanager
def locked(target: str | Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock on a file or folder, which need not exist yet, while the ``with`` block writes it.

    The lock is on a file next to the target, ``.NAME.lock``; on a file system without locks, there is none.
    The system releases the lock when the process ends, so a lock file that a killed process left has no effect.

    Args:
        target: The file or folder.
        waiting: Called once before waiting for another process that holds the lock; None raises an error instead.

    Raises:
        LockedError: Another process holds the lock, and ``waiting`` is None.
        WriteError: The lock file cannot be created, or its name is taken by another file or by a link (in a shared
            folder, another user could have made it point to any file of ours).
    """
    real = expand(target).resolve()  # so that a link and its target have the same lock
    path = real.with_name(f".{real.name}.lock")
    lock = FileLock(path)
    is_taken = False
    with suppress(OSError):  # usually there is no such file, or it goes away just now
        is_taken = path.stat().st_size > 0
    if is_taken:  # a user's own file, which we must not remove
        raise WriteError(
            f"{str(target)!r} could not be written: the name of its lock file, {str(path)!r}, is taken.",
            hint=f"Move or rename {path.name!r}, or choose another path to write to.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        if waiting is None:
            raise LockedError(
                f"Another process is writing to {str(target)!r}.",
                hint="Wait until it has finished, or choose another path.",
            ) from error
        waiting()
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise write_error(Path(target), error) from error
    try:
        yield
    finally:
        # Remove the file before releasing the lock: a waiting process notices that and makes its own file.
        with suppress(OSError):
            path.unlink()
        lock.release()


def read_file(path: str | Path, limit: int = 1 << 24) -> bytes:
    """Return the content of a file; see `open_file`.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has more than ``limit`` bytes.
    """
    with open_file(path, limit) as file:
        return file.read(limit)


@contextmanager
def open_file(path: str | Path, limit: int) -> Iterator[BufferedReader]:
    """Open a file for reading, which must be a regular one (a pipe could hang) of at most ``limit`` bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
    """
    with open(expand(path), "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"{os.path.basename(path)} has more than {limit:,} bytes")
        yield file


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source.

    Raises:
        ValueError: The text is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, and return its descriptor; only the owner may read a new one. Devices raise `OSError`."""
    no_wait = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would otherwise wait for its other end
    descriptor = os.open(path, flags | no_wait, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a regular file")
    return descriptor


def json_line(value: Any) -> str:
    """Return a value as one line of JSONL, with its line feed."""
    return json_text(value, indent=None)


def json_text(value: Any, indent: int | None = 1) -> str:
    """Return a value, whose numbers may be NumPy's, as the text of a JSON file; ``indent=None`` gives one line."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=methodcaller("item"))
    # UTF-8 cannot encode lone surrogates; Python escapes them the same way as JSON does.
    return text.encode(errors="backslashreplace").decode() + "\n"


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the target's folder; after an error, what was written there is removed.

    After success, what killed processes left at such paths of this target is removed.

    Raises:
        ConfigurationError: The target is the current folder or the root, or its path ends in ``..``.
        WriteError: The target could not be written.
    """
    temporary = _beside(target, uuid.uuid4().hex[:12])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):
            raise write_error(target, error) from error
        raise
    with suppress(OSError):  # another process may have just removed it
        for left in target.parent.glob(f".{escape(target.name)}-{'[0-9a-f]' * 12}"):
            if time.time() - left.lstat().st_mtime > _ABANDONED:
                _remove(left)


def _beside(target: Path, mark: str) -> Path:
    """Return the hidden path ``.NAME-MARK`` next to the target, from where a rename to the target is atomic.

    Raises:
        ConfigurationError: The target is the current folder or the root, or its path ends in ``..``.
    """
    is_current = False
    with suppress(OSError, ValueError):  # it is missing (perhaps since just now), or either cannot be read
        is_current = os.path.samefile(target, os.curdir)
    if is_current or target.name in ("", ".."):
        raise ConfigurationError(
            f"Cannot write to {str(target)!r}: it is the current folder, one above it, or the root.",
            hint="Give the path of a new file or folder, such as './out'.",
        )
    return target.with_name(f".{target.name}-{mark}")


def _remove(path: Path) -> None:
    """Remove a file or folder, if it exists and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # on a read-only file system, removing a missing file fails, too
            path.unlink()


def _write(path: Path, content: bytes | str) -> None:
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # before the rename, so that after a crash the file is complete


def write_error(target: Path, error: OSError) -> WriteError:
    """Return the error for a file or folder that could not be written."""
    hint = "Check its permissions, or choose another path."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free some space or choose another path, then try again; what was written before is kept."
    return WriteError(f"{str(target)!r} could not be written: {error.strerror or error}.", hint=hint)
