"""JSONL: reading files with errors that name the line, and logs that a later run can continue."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import expand, json_line, open_regular, parse_json, write_error

_LONGEST_LINE = 1 << 26  # bytes; a file without line feeds must not fill the memory


def read_jsonl(path: str | Path, *, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Read a JSONL file, plain or gzipped, and yield line number and value of each line that is not blank.

    Only a line feed ends a line, because unescaped text may contain other separators, such as U+2028.

    Args:
        path: The file.
        hint: What a line should look like, for the error.

    Raises:
        DataFormatError: The file cannot be read, or a line is not UTF-8, not JSON, or longer than 64 MiB; the
            message names file and line.
    """
    path = expand(path)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            # Bounded reads, because a file without line feeds would fill the memory.
            lines = iter(partial(file.readline, _LONGEST_LINE), b"")
            yield from _parse_lines(lines, path, hint)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFormatError(f"The file {str(path)!r} cannot be read: {reason}.") from error


class JsonlLog:
    """A JSONL file of objects that a run appends to and the next run continues.

    If a killed process left an incomplete last line, it is skipped, and the next `append` removes it. If it is the
    only line, the new text must begin with it; otherwise the file may be another one, and is rejected. A complete
    last line is kept, even without its line feed. Opening and reading never change an existing file, because it may
    have been named by mistake. Processes take turns to append, so that none cuts off another's unfinished line.

    Args:
        path: The file; it and its folder are created whenever they are missing. Only the owner may read a new
            file, because it contains questions.
        keys: Keys that every object has; a file whose last object lacks one is rejected.

    Raises:
        DataFormatError: The file is not such a log.
        WriteError: The file cannot be written.
    """

    def __init__(self, path: str | Path, keys: Collection[str] = ()) -> None:
        self.path = expand(path)
        self._keys = frozenset(keys)
        with self._open() as file:  # raises now if the file cannot be written
            self._check_end(file)

    def values(self) -> list[Any]:
        """Return all values in the file, in order, including those of earlier runs.

        Raises:
            DataFormatError: A line is not UTF-8 or not JSON.
            OSError: The file cannot be read.
        """
        *lines, last = self.path.read_bytes().split(b"\n")
        if _parse_line(last) is not None:
            lines.append(last)
        return [value for _, value in _parse_lines(lines, self.path)]

    def append(self, values: Iterable[Any]) -> None:
        """Append values, one per line; on an error, none of them is appended.

        Raises:
            DataFormatError: The file is not such a log; see the class.
            WriteError: The values could not be written, as on a full disk. Earlier complete lines are kept.
        """
        lines = "".join(json_line(value) for value in values).encode()
        with self._open() as file:
            with suppress(ImportError, OSError):  # Windows and some file systems have no such locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            # The process was killed, or an editor dropped the last line feed.
            if file.read(1) not in (b"", b"\n"):
                torn = self._check_end(file, lines)
                size -= torn
                lines = lines if torn else b"\n" + lines
            try:
                file.truncate(size)
                remaining = memoryview(lines)
                while remaining:  # on a full disk, a write may be partial without an error
                    remaining = remaining[file.write(remaining) or 0 :]
            except BaseException as error:
                file.truncate(size)
                if isinstance(error, OSError):
                    raise write_error(self.path, error) from error
                raise

    def _open(self) -> FileIO:
        """Open the file for appending, and for reading its end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return open(self.path, "a+b", buffering=0, opener=open_regular)  # unbuffered, so in one write
        except OSError as error:
            raise write_error(self.path, error) from error

    def _check_end(self, file: FileIO, lines: bytes | None = None) -> int:
        """Return the length in bytes of an incomplete last line; 0 if the last line is complete.

        Args:
            file: The file; only the end of a long file is read.
            lines: The lines to append; None when the log is opened.

        Raises:
            DataFormatError: The file is not such a log; see the class.
        """
        start = max(file.seek(0, os.SEEK_END) - _LONGEST_LINE, 0)
        file.seek(start)
        *complete, last = file.read().split(b"\n")
        # The first line of the end of a long file may be only the end of a line.
        records = [line for line in complete[bool(start) :] if line.strip()]
        is_torn = bool(last.strip()) and _parse_line(last) is None
        if last.strip() and not is_torn:
            records.append(last)
        is_ours = start == 0
        if records:
            value = _parse_line(records[-1])
            is_ours = isinstance(value, dict) and self._keys <= value.keys()
        if is_torn:
            # Without a complete line, the file is ours only if it has the beginning of the line that we append now.
            is_ours &= last.startswith(b"{") and (bool(records) or lines is None or lines.startswith(last))
        if not is_ours:
            raise DataFormatError(
                f"{str(self.path)!r} cannot be continued: its last line is not one that this run would write.",
                hint="Choose another output path (--out, or --shadow of rgate serve).",
            )
        return len(last) if is_torn else 0


def _parse_line(line: bytes) -> Any:
    """Return the value of a line; None if it is not JSON."""
    with suppress(ValueError):
        return parse_json(line)
    return None


def _parse_lines(lines: Iterable[bytes], path: Path, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Yield number and value of each line that is not blank; raises the `DataFormatError` of `read_jsonl`."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if len(line) == _LONGEST_LINE:
            raise DataFormatError(f"{where}: longer than {_LONGEST_LINE:,} bytes.", hint=hint)
        try:
            yield number, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataFormatError(
                f"{where}: byte {error.start + 1} of the line is not UTF-8.", hint="Save the file as UTF-8."
            ) from error
        except ValueError as error:  # its own text counts lines from this one
            problem = str(error).partition(": line ")[0]
            raise DataFormatError(f"{where}: not JSON ({problem}).", hint=hint) from error
