"""Files that are whole or not there: written in one step, and JSONL that is read and continued line by line."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rgate_integrations.errors import ConfigurationError, DataFormatError


def write_atomically(path: str | Path, content: bytes | str) -> Path:
    """Write a file that appears whole or not at all, and replaces one that was there.

    Args:
        path: Where to; folders that are missing are made.
        content: The content; text is written as UTF-8.

    Returns:
        The path.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = _temporary(target)
    try:
        _write(made, content)
        made.replace(target)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return target


def write_folder(folder: str | Path, files: Mapping[str, bytes | str]) -> Path:
    """Write a folder that appears whole or not at all, and replaces one that was there.

    Args:
        folder: Where to; folders above it that are missing are made.
        files: Contents by name.

    Returns:
        The folder.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = _temporary(target)
    made.mkdir()
    try:
        for name, content in files.items():
            _write(made / name, content)
        rename_folder(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return target


def rename_folder(made: Path, target: Path) -> None:
    """Give a finished folder its name; the folder that has the name is replaced.

    A folder with files in it cannot be replaced in one step, so the earlier one is put aside for a moment. What a
    process leaves that is killed in that moment is still found by `existing_folder`, and put back by the next call.

    Args:
        made: The finished folder, beside ``target``.
        target: Its name.

    Raises:
        ConfigurationError: A file has that name.
    """
    if target.is_file():
        raise ConfigurationError(f"{str(target)!r} is a file.", hint="Give the name of a folder.")
    aside = _aside(target)
    if not target.exists() and aside.exists():
        aside.rename(target)
    _remove(aside)  # of a process that was killed after its second step
    if not target.exists():
        made.rename(target)
        return
    target.rename(aside)
    try:
        made.rename(target)
    except OSError:
        aside.rename(target)
        raise
    _remove(aside)


def existing_folder(folder: str | Path) -> Path:
    """Return where the content of a folder is: under its name, unless `rename_folder` was killed half way."""
    target = Path(folder)
    aside = _aside(target)
    return aside if not target.exists() and aside.is_dir() else target


def read_jsonl(
    path: str | Path, *, hint: str = "", errors: Literal["strict", "replace"] = "strict"
) -> Iterator[tuple[int, Any]]:
    """Read a JSONL file, also gzipped: line number and value of each line that is not blank.

    Only a line feed ends a line: text that is not escaped may hold other separators, such as U+2028.

    Args:
        path: The file.
        hint: What a line should look like, for the error.
        errors: What bytes that are no UTF-8 are: an error, or U+FFFD.

    Raises:
        DataFormatError: The file cannot be read, or a line is not JSON; the message names file and line.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors=errors) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _value(line, f"{path}, line {number}", hint)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFormatError(f"The file {str(path)!r} cannot be read: {reason}.") from error


class JsonlLog:
    """A JSONL file that a run appends to, and that a run which is started again continues.

    A last line that a kill left half written is cut off when the log is opened.

    Args:
        path: The file; it and its folder are made if they are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with self.path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def values(self) -> list[Any]:
        """Return what was appended so far, in order.

        Raises:
            DataFormatError: A line is not JSON.
        """
        return [value for _, value in read_jsonl(self.path)]

    def append(self, values: Iterable[Any]) -> None:
        """Append values, one a line."""
        lines = "".join(json_line(value) for value in values)
        # Unbuffered: all lines go out in one write, so that those of another process do not come between.
        with self.path.open("ab", buffering=0) as file:
            file.write(lines.encode())


def json_line(value: Any) -> str:
    """Return a value as one line of JSONL."""
    return json.dumps(value, ensure_ascii=False) + "\n"


def json_text(value: Any) -> str:
    """Return a value as the text of a JSON file for people to read."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _value(line: str, where: str, hint: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataFormatError(f"{where}: not JSON ({error}).", hint=hint) from error


def _temporary(target: Path) -> Path:
    """Return a name of this write's own, in the same folder: only within a file system is a rename one step."""
    return target.with_name(f".{target.name}-{uuid.uuid4().hex[:12]}")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}-before")


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _write(path: Path, content: bytes | str) -> None:
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a name must never stand for a file that is still empty
