"""Files that are whole or absent, locks on them, JSON that raises one kind of error, JSONL that is continued."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rgate_integrations.errors import ConfigurationError, DataFormatError, LockedError, WriteError

_END = 1 << 16  # bytes at the end of a log that are read
_LONGEST_LINE = 1 << 26  # bytes of a JSONL file; a file without line feeds must not fill the memory
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP}  # some network file systems: written to without a lock


SHIPPED = Path(__file__).parents[1] / "weights"
"""The folder of what ships with the package."""


def write_atomically(path: str | Path, content: bytes | str) -> Path:
    """Write a file that appears whole or not at all, and replaces one that was there.

    Args:
        path: Where to; folders that are missing are made.
        content: The content; text is written as UTF-8.

    Returns:
        The path.

    Raises:
        WriteError: It could not be written, such as on a full disk; what was there is as it was.
    """
    target = Path(path)
    with _replacement(target) as made:
        _write(made, content)
        made.replace(target)
    return target


def write_folder(folder: str | Path, files: Mapping[str, bytes | str]) -> Path:
    """Write a folder that appears whole or not at all, and replaces one that was there.

    Args:
        folder: Where to; folders above it that are missing are made.
        files: Contents by name; a name may begin with a sub-folder.

    Returns:
        The folder.

    Raises:
        ConfigurationError: A file, or a folder with something else in it, is there.
        WriteError: It could not be written, such as on a full disk; what was there is as it was.
    """
    target = Path(folder)
    with _replacement(target) as made:
        made.mkdir()
        for name, content in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            _write(made / name, content)
        rename_folder(made, target)
    return target


def rename_folder(made: Path, target: Path) -> None:
    """Give a finished folder its name; the folder that has the name is replaced.

    A folder with files in it cannot be replaced in one step, so the earlier one is put aside for a moment. What a
    process leaves that is killed in that moment is still found by `find_folder`, and put back by the next call.

    Args:
        made: The finished folder, beside ``target``.
        target: Its name.

    Raises:
        ConfigurationError: A file has that name, or a folder with something else in it.
    """
    check_replaceable(target, os.listdir(made))
    aside = _beside(target, "before")
    if target.exists():
        _remove(aside)  # left by a process that was killed after its second step
        target.rename(aside)
    try:
        made.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    _remove(aside)


def check_replaceable(target: Path, names: Iterable[str]) -> None:
    """Refuse to replace what is something else than a folder of the same kind: a typo must not cost what is there.

    Args:
        target: The name that a folder is going to have.
        names: What is going to be in it. One of these, other than a README, shows that a folder is of the same kind.

    Raises:
        ConfigurationError: A file has that name, or a folder with something else in it.
    """
    if target.is_file():
        raise ConfigurationError(f"{str(target)!r} is a file.", hint="Give the name of a folder.")
    there = set(os.listdir(target)) if target.is_dir() else set()
    if there and not (there & set(names)) - {"README.md"}:
        raise ConfigurationError(
            f"{str(target)!r} is a folder with something else in it, such as {min(there)!r}.",
            hint="Give the name of another folder.",
        )


def find_folder(folder: str | Path) -> Path:
    """Return where the content of a folder is: under its name, unless `rename_folder` was killed half way."""
    # `os.path` says that there is nothing under a name that no file can have, where `Path` raises.
    target = Path(os.path.expanduser(folder))
    if os.path.exists(target):
        return target
    aside = _beside(target, "before")
    return aside if os.path.isdir(aside) else target


@contextmanager
def locked(target: str | Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold the lock of a file or folder that is going to be written; it need not exist yet.

    The lock is on a file beside the target, ``.NAME.lock``. The system gives it free when this process ends, however
    it ends, and a file that a killed process left locks nobody out.

    Args:
        target: What is going to be written.
        waiting: Called once if another process has the lock, which is then waited for.

    Raises:
        LockedError: Another process has the lock, and ``waiting`` is None.
        WriteError: The lock file cannot be made, or what has its name is none: a file of somebody's, or a link, which
            in a shared folder may be another user's to any file of ours.
    """
    # By the real path: a link is another name for the same place.
    real = Path(target).expanduser().resolve()
    path = real.with_name(f".{real.name}.lock")
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # whoever has the lock may give it back, and its file is gone
            if path.stat().st_size > 0:  # some versions of filelock would empty it
                raise OSError(errno.EEXIST, f"{path.name} is no lock file")
        lock.acquire(blocking=False)
    except Timeout as error:
        if waiting is None:
            raise LockedError(
                f"Another process is writing to {str(target)!r}.",
                hint="Wait until it has ended, or name another place to write to.",
            ) from error
        waiting()
        lock.acquire()
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise _write_error(Path(target), error) from error
    try:
        yield
    finally:
        # Gone before it is free: who waits for it sees that, and makes a file of its own.
        with suppress(OSError):
            path.unlink()
        lock.release()


def read_file(path: str | Path, limit: int = 1 << 24) -> bytes:
    """Return the content of a regular file: reading a pipe may hang, and ``/dev/zero`` would fill the memory.

    Args:
        path: The file.
        limit: Maximum size in bytes; by default 16 MiB, ample for a JSON file.

    Raises:
        OSError: It cannot be read, is not a regular file, or is larger.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a regular file")
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"{os.path.basename(path)} has more than {limit:,} bytes")
        return file.read(limit)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe is opened without waiting for its other end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, wherever it comes from.

    Raises:
        ValueError: It is not JSON, not UTF-8, or nested too deeply. Nothing else is ever raised.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_jsonl(path: str | Path, *, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Read a JSONL file, also gzipped: line number and value of each line that is not blank.

    Only a line feed ends a line: text that is not escaped may hold other separators, such as U+2028.

    Args:
        path: The file.
        hint: What a line should look like, for the error.

    Raises:
        DataFormatError: The file cannot be read, or a line is not UTF-8 or not JSON; the message names file and line.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            lines = iter(partial(file.readline, _LONGEST_LINE), b"")
            yield from _parse_lines(lines, path, hint)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFormatError(f"The file {str(path)!r} cannot be read: {reason}.") from error


class JsonlLog:
    """A JSONL file of objects that a run appends to, and that a run which is started again continues.

    A last line that a kill left half written is passed over, and cut off when something is appended. One that is a
    whole object is kept, with or without its line feed. Opening and reading change nothing: the file may turn out to
    be somebody else's. Two runs that append at once need a lock: see `locked`.

    Args:
        path: The file; it and its folder are made if they are missing. Only its owner may read it: it has questions.
        keys: What every object has; a file whose last object has other keys is somebody else's.

    Raises:
        DataFormatError: The file holds something else.
        WriteError: The file cannot be written to.
    """

    def __init__(self, path: str | Path, keys: Collection[str] = ()) -> None:
        self.path = Path(path)
        self._keys = frozenset(keys)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as file:  # what cannot be written to fails here
                self._check_end(file)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def values(self) -> list[Any]:
        """Return what was appended so far, in order.

        Raises:
            DataFormatError: A line is not JSON.
        """
        *lines, last = self.path.read_bytes().split(b"\n")
        if _is_json(last):
            lines.append(last)
        return [value for _, value in _parse_lines(lines, self.path)]

    def append(self, values: Iterable[Any]) -> None:
        """Append values, one a line: all of them or, with an error, none.

        Raises:
            DataFormatError: The file holds no line that was appended, but something else.
            WriteError: They could not be written, such as on a full disk. The file ends as it did before.
        """
        lines = "".join(json_line(value) for value in values).encode()
        with self._open() as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):  # a kill, or an editor
                torn = self._check_end(file, lines)
                size -= torn
                lines = lines if torn else b"\n" + lines
            try:
                file.truncate(size)
                left = memoryview(lines)
                while left:  # when the disk becomes full, a write takes a part, and says nothing
                    left = left[file.write(left) or 0 :]
            except BaseException as error:
                file.truncate(size)
                if isinstance(error, OSError):
                    raise _write_error(self.path, error) from error
                raise

    def _open(self) -> FileIO:
        """Open the file to append to it, and to read its end."""
        # Unbuffered: all lines go out in one write, so that those of another process do not come between.
        return open(self.path, "a+b", buffering=0, opener=_open_private)

    def _check_end(self, file: FileIO, lines: bytes | None = None) -> int:
        """Return how many bytes at the end are half a line.

        Args:
            file: The file; of a long one only the end is read.
            lines: What is going to be appended.

        Raises:
            DataFormatError: It is somebody else's.
        """
        size, block = file.seek(0, os.SEEK_END), _END
        while True:
            file.seek(max(size - block, 0))
            end = file.read()
            *whole, last = end.split(b"\n")
            if block < size:
                del whole[:1]  # perhaps the end of a line
            records = [line for line in whole if line.strip()]
            if records or block >= min(size, _LONGEST_LINE):
                break
            block *= 4
        is_torn = bool(last.strip()) and not _is_json(last)
        if last.strip() and not is_torn:
            records.append(last)
        is_ours = block >= size
        if records:
            value = parse_json(records[-1]) if _is_json(records[-1]) else None
            is_ours = isinstance(value, dict) and self._keys <= value.keys()
        if is_torn:
            # Where not one line is whole, only the same line, begun by an earlier run, is known to be ours.
            is_ours &= last.startswith(b"{") and (bool(records) or lines is None or lines.startswith(last))
        if not is_ours:
            raise DataFormatError(
                f"{str(self.path)!r} holds something else than what is written to it.",
                hint="Name another file.",
            )
        return len(last) if is_torn else 0


def _open_private(path: str, flags: int) -> int:
    """Open a regular file, which only its owner may read if it is made: a device may have no end."""
    opened = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return opened


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def json_line(value: Any) -> str:
    """Return a value as one line of JSONL."""
    return _unicode(json.dumps(value, ensure_ascii=False)) + "\n"


def json_text(value: Any) -> str:
    """Return a value as the text of a JSON file for people to read."""
    return _unicode(json.dumps(value, indent=1, ensure_ascii=False)) + "\n"


def _unicode(text: str) -> str:
    """Return JSON with half surrogate pairs, which UTF-8 has no bytes for, as JSON's own escapes."""
    return text.encode(errors="backslashreplace").decode()


def _parse_lines(lines: Iterable[bytes], path: Path, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Parse the lines of a file: number and value of each that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if len(line) == _LONGEST_LINE:
            raise DataFormatError(f"{where}: it has more than {_LONGEST_LINE:,} bytes.", hint=hint)
        try:
            yield number, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            problem = f"{where}: byte {error.start + 1} of it is not UTF-8."
            raise DataFormatError(problem, hint="Save the file as UTF-8.") from error
        except ValueError as error:
            raise DataFormatError(f"{where}: not JSON ({error}).", hint=hint) from error


@contextmanager
def _replacement(target: Path) -> Iterator[Path]:
    """Name something that is written before it takes the target's place; after an error it is removed.

    Raises:
        WriteError: It could not be written.
    """
    made = _beside(target, uuid.uuid4().hex[:12])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield made
    except BaseException as error:
        _remove(made)
        if isinstance(error, OSError):
            raise _write_error(target, error) from error
        raise


def _beside(target: Path, mark: str) -> Path:
    """Return another name in the same folder: only within a file system is a rename one step."""
    if target.name in ("", ".."):  # the current folder, or the root
        raise ConfigurationError(f"{str(target)!r} cannot name a file or folder.")
    return target.with_name(f".{target.name}-{mark}")


def _remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, content: bytes | str) -> None:
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a name must never stand for a file that is still empty


def _write_error(target: Path, error: OSError) -> WriteError:
    """Build the error for a file or folder that could not be written."""
    hint = "Check that it may be written to, or name another place."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free some space, then run the same command again: what was written before is kept."
    return WriteError(f"{str(target)!r} could not be written: {error.strerror or error}.", hint=hint)
