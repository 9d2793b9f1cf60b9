"""Passages: what is searched, how they are read from JSONL, and how they are kept in SQLite."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rgate_integrations.errors import DataFormatError, IndexCorruptError
from rgate_integrations.runtime.arrays import PositionArray
from rgate_integrations.runtime.files import read_jsonl

_LINE = 'Each line needs a JSON object such as {"id": "1", "title": "…", "text": "…"}.'

_VARIABLES = 500  # of one statement; old builds of SQLite take 999
_DEEPEST = 64  # lists and objects within each other; far less than what the JSON parser can read back
_COLUMNS = ("id", "title", "text", "metadata")
_TABLE = (
    "CREATE TABLE passages (row INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT, metadata TEXT)"
)

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
        # SQLite would make it text, too, and then it would not be equal to the id that the caller knows.
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
    """Passages by row number and by id, in SQLite in memory.

    One connection serves all threads; the index that owns it lets in one at a time.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", uri=True, check_same_thread=False)
        self._db.execute(_TABLE)

    @classmethod
    def read(cls, path: Path) -> PassageStore:
        """Copy a file that `save` made. It may come from anywhere.

        Raises:
            IndexCorruptError: It cannot be read, or holds anything else than passages.
        """
        store = cls()
        try:
            store._copy(path)
        # SQLite quotes what it cannot read, and that may be no text.
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise IndexCorruptError(
                f"The file {str(path)!r} cannot be read: {error}.", hint="Build the index again."
            ) from error
        return store

    def _copy(self, path: Path) -> None:
        """Copy the rows of a file; raises an error of SQLite if they are no passages."""
        self._db.execute("ATTACH ? AS saved", (f"{path.resolve().as_uri()}?mode=ro",))
        try:
            # Only a plain table is copied: a view, for example, could be a query that never ends.
            schema = self._db.execute("SELECT type, name, sql FROM saved.sqlite_master WHERE sql IS NOT NULL")
            if schema.fetchall() != [("table", "passages", _TABLE)]:
                raise sqlite3.DatabaseError("it has other tables")
            with self._db:
                self._db.execute(
                    "INSERT INTO passages SELECT row, id, title, text, metadata FROM saved.passages"
                )
        finally:
            self._db.execute("DETACH saved")
        no_text = " OR ".join(f"typeof({name}) <> 'text'" for name in _COLUMNS)
        wrong = self._db.execute(f"SELECT row FROM passages WHERE {no_text}")  # noqa: S608  names only
        if wrong.fetchone() is not None:
            raise sqlite3.DatabaseError("not all of it is text")

    def __getstate__(self) -> bytes:
        return self._db.serialize()

    def __setstate__(self, state: bytes) -> None:
        PassageStore.__init__(self)
        self._db.deserialize(state)

    def transaction(self) -> sqlite3.Connection:
        """Return a context that keeps what `replace` does in it, or undoes it if something raises."""
        return self._db

    def replace(self, old_rows: Sequence[int], new_rows: Sequence[int], records: Sequence[Record]) -> None:
        """Remove some rows and add others, within a `transaction`.

        Args:
            old_rows: Rows to remove.
            new_rows: Rows to add; none may be there.
            records: One for each new row; their ids may be those of removed rows.
        """
        self._db.executemany("DELETE FROM passages WHERE row = ?", [(row,) for row in old_rows])
        numbered = [(row, *record) for row, record in zip(new_rows, records, strict=True)]
        self._db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?)", numbered)

    def get(self, rows: Iterable[int]) -> dict[int, Passage]:
        """Return the passages in some rows; rows that do not exist are left out."""
        return {found[0]: _as_passage(found) for found in self._select("*", "row", list(rows))}

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the row of each id that exists; what can be no id does not."""
        wanted = [name for name in map(as_id, ids) if _is_text(name)]
        return dict(self._select("id, row", "id", wanted))

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        found = self._query("SELECT row FROM passages ORDER BY row")
        return np.array(found, dtype=np.int64).reshape(-1)

    def __iter__(self) -> Iterator[Passage]:
        # All at once: what is handed out later does not see what is written in between.
        return map(_as_passage, self._query("SELECT * FROM passages ORDER BY row"))

    def save(self, path: Path) -> None:
        """Copy into a file."""
        target = sqlite3.connect(path)
        try:
            self._db.backup(target)
        finally:
            target.close()

    def _select(self, columns: str, by: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(values), _VARIABLES):
            some = values[start : start + _VARIABLES]
            marks = ",".join("?" * len(some))
            query = f"SELECT {columns} FROM passages WHERE {by} IN ({marks})"  # noqa: S608  names and marks only
            yield from self._query(query, some)

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        # Bytes that are no text. They come from a file that was changed.
        except (sqlite3.OperationalError, UnicodeDecodeError) as error:
            raise IndexCorruptError(
                f"A passage cannot be read: {error}.", hint="Build the index again."
            ) from error


def _as_passage(row: tuple[Any, ...]) -> Passage:
    _, name, title, text, written = row
    try:
        metadata = json.loads(written)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):  # of a file that was changed
        raise IndexCorruptError(
            f"The metadata of the passage {name!r} is no JSON object.", hint="Build the index again."
        )
    return Passage(id=name, title=title, text=text, metadata=metadata)
