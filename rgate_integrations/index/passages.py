"""Passages: what is searched, how they are read from JSONL, and how they are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from rgate_integrations.errors import DataFormatError, IndexCorruptError
from rgate_integrations.runtime.arrays import PositionArray
from rgate_integrations.runtime.files import read_jsonl

_LINE = 'Each line needs a JSON object such as {"id": "1", "title": "…", "text": "…"}.'

_DEEPEST = 64  # lists and objects within each other; far less than what the JSON parser can read back
# Row, id, title, text and metadata, as they are saved.
_LINE_OF_FILE = TypeAdapter(tuple[int, str, str, str, dict[str, Any]], config=ConfigDict(strict=True))

Record: TypeAlias = tuple[str, str, str, str]
"""A passage as it is stored, checked: id, title, text, and metadata as JSON."""


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index. A whole number becomes its text: 0 is "0". The empty text is an id like others.
        text: The passage; not empty.
        title: Title of the document it is from; may be empty.
        metadata: JSON values that travel with it.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Ids come from tables as numbers.
        object.__setattr__(self, "id", as_id(self.id))

    @property
    def searchable(self) -> str:
        """Title and text, as they are embedded."""
        return f"{self.title}. {self.text}" if self.title else self.text


def digest_of(passages: Iterable[Passage], *facts: str) -> str:
    """Return what tells a corpus apart from another: a hash of its passages, in their order, and of further facts."""
    digest = hashlib.sha256(repr(facts).encode())
    for passage in passages:
        digest.update(repr((passage.id, passage.title, passage.text)).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def as_id(given: Any) -> Any:
    """Return a whole number as text, and anything else as it is: ids come from tables as numbers."""
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return str(given) if is_number else given


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Read a corpus: JSONL, plain or gzipped, with ``text``, optional ``id``, ``title`` and further keys a line.

    A line whose ``id`` is missing or null gets its line number; further keys become metadata.

    Raises:
        DataFormatError: The file cannot be read, or a line is no passage or not UTF-8; the message names file and
            line.
    """
    for number, record in read_jsonl(path, hint=_LINE):
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataFormatError(f"{path}, line {number}: no text.", hint=_LINE)
        text = record.pop("text")
        if not text.strip():
            raise DataFormatError(f"{path}, line {number}: the text is empty.", hint="Leave the passage out.")
        given = record.pop("id", None)
        name = number if given is None else given  # 0 and "" are ids
        title = str(record.pop("title", "") or "")
        yield Passage(id=str(name), text=text, title=title, metadata=record)


def in_batches(passages: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    """Yield passages in lists of ``size``; the last may be shorter."""
    waiting = iter(passages)
    while batch := list(islice(waiting, size)):
        yield batch


def as_records(passages: Sequence[Passage], *, blank: bool = False) -> list[Record]:
    """Check passages and write their metadata as JSON, before anything is changed.

    Args:
        passages: The passages.
        blank: Whether a text may be empty.

    Raises:
        DataFormatError: An id is twice there, a text is empty, or a value cannot be stored; the message names the
            passage, and the key of the metadata.
    """
    records: dict[str, Record] = {}
    for passage in passages:
        for name in ("id", "title", "text"):
            if not _is_text(getattr(passage, name)):
                raise DataFormatError(
                    f"The {name} of the passage {passage.id!r} cannot be stored.",
                    hint="It must be text without lone surrogates; an id may be a whole number.",
                )
        if not blank and not passage.text.strip():
            raise DataFormatError(f"The passage {passage.id!r} has no text.", hint="Leave it out.")
        if passage.id in records:
            raise known_id(passage.id)
        records[passage.id] = (passage.id, passage.title, passage.text, _metadata(passage))
    return list(records.values())


def known_id(name: str) -> DataFormatError:
    """Build the error for an id that is there already."""
    return DataFormatError(f"The id {name!r} is there twice.", hint="Ids of passages must differ.")


def _metadata(passage: Passage) -> str:
    """Return the metadata of a passage as JSON."""
    if not isinstance(passage.metadata, Mapping):
        raise DataFormatError(
            f"The metadata of the passage {passage.id!r} is no mapping.", hint='Give {"key": value}.'
        )
    metadata = dict(passage.metadata)
    written = _as_json(metadata)
    if written is None:
        unfit = [repr(key) for key, value in metadata.items() if _as_json({key: value}) is None]
        raise DataFormatError(
            f"The metadata of the passage {passage.id!r} cannot be stored as JSON: {', '.join(unfit)}.",
            hint="JSON holds text, numbers, true, false, null, lists, and objects whose keys are text: convert the "
            "value or leave it out.",
        )
    return written


def _as_json(value: dict[Any, Any]) -> str | None:
    """Return a value as JSON, or None if JSON cannot hold it."""
    if not _fits_json(value, _DEEPEST):
        return None
    try:
        written = json.dumps(value, ensure_ascii=False)
    except ValueError:  # a whole number of thousands of digits
        return None
    return written if _is_text(written) else None


def _fits_json(value: Any, deepest: int) -> bool:
    """Whether JSON gives a value back as it was; but a tuple comes back as a list."""
    if isinstance(value, dict):
        # `json.dumps` makes text of other keys: 1 and "1" would become the same.
        if not all(isinstance(key, str) for key in value):
            return False
        value = list(value.values())
    if isinstance(value, list | tuple):
        # Where no depth is left there may be a circle.
        return deepest > 0 and all(_fits_json(inner, deepest - 1) for inner in value)
    return value is None or isinstance(value, str | int | float)


def _is_text(value: Any) -> bool:
    """Whether a value is text with a UTF-8 form: half of a surrogate pair, as JSON escapes may give it, has none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class PassageStore:
    """Passages by row number and by id, in memory. The index that owns it lets in one thread at a time."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._rows: dict[str, int] = {}

    @classmethod
    def read(cls, path: Path) -> PassageStore:
        """Read a file that `save` made. It may come from anywhere.

        Raises:
            IndexCorruptError: It cannot be read, or holds anything else than passages.
        """
        store = cls()
        try:
            with path.open("rb") as lines:
                saved = [_LINE_OF_FILE.validate_json(line) for line in lines]
            for row, name, title, text, metadata in saved:
                store.replace([], [row], [(name, title, text, json.dumps(metadata, ensure_ascii=False))])
            if not len(store._records) == len(store._rows) == len(saved):
                raise ValueError("a row or an id is there twice")
        except (OSError, ValueError) as error:
            raise IndexCorruptError(
                f"The file {str(path)!r} cannot be read: {error}.", hint="Build the index again."
            ) from error
        return store

    def save(self, path: Path) -> None:
        """Write into a file, one passage a line."""
        with path.open("w", encoding="utf-8", newline="\n") as out:
            for row, (name, title, text, metadata) in sorted(self._records.items()):
                start = json.dumps([row, name, title, text], ensure_ascii=False)
                out.write(f"{start[:-1]}, {metadata}]\n")

    def replace(self, old_rows: Sequence[int], new_rows: Sequence[int], records: Sequence[Record]) -> None:
        """Remove some rows, if they are there, and add others.

        Args:
            old_rows: Rows to remove.
            new_rows: Rows to add.
            records: One for each new row; their ids may be those of removed rows.
        """
        for row in old_rows:
            if row in self._records:
                self._rows.pop(self._records.pop(row)[0], None)
        for row, record in zip(new_rows, records, strict=True):
            self._records[row] = record
            self._rows[record[0]] = row

    def take(self, rows: Iterable[int]) -> list[Record]:
        """Return what is stored in some rows, all of which are there."""
        return [self._records[row] for row in rows]

    def get(self, rows: Iterable[int]) -> dict[int, Passage]:
        """Return the passages in some rows, all of which are there."""
        return {row: _as_passage(self._records[row]) for row in rows}

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the row of each id that exists."""
        found = {}
        for name in map(as_id, ids):
            if isinstance(name, str) and name in self._rows:
                found[name] = self._rows[name]
        return found

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        return np.array(sorted(self._records), dtype=np.int64)

    def __iter__(self) -> Iterator[Passage]:
        # A copy: what is handed out later does not see what is written in between.
        return map(_as_passage, [record for _, record in sorted(self._records.items())])


def _as_passage(record: Record) -> Passage:
    name, title, text, metadata = record
    return Passage(id=name, title=title, text=text, metadata=json.loads(metadata))
