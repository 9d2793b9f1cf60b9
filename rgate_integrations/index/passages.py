"""Passages: what is searched, how they are read from JSONL, and how they are kept in SQLite."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import DataFormatError, IndexCorruptError
from rgate_integrations.runtime.arrays import PositionArray
from rgate_integrations.runtime.files import read_jsonl

_LINE = 'Each line needs a JSON object such as {"id": "1", "title": "…", "text": "…"}.'

_VARIABLES = 500  # of one statement; old builds of SQLite take 999
_DEEPEST = 64  # lists and objects within each other; far less than what the JSON parser can read back
_SCALARS = (str, int, float)  # and booleans, which are whole numbers
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_TABLE = (
    "CREATE TABLE passages (row INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT, metadata TEXT)"
)


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
        yield _passage(record, f"{path}, line {number}", str(number))


def _passage(record: Any, where: str, number: str) -> Passage:
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataFormatError(f"{where}: no text.", hint=_LINE)
    if not record["text"].strip():
        raise DataFormatError(f"{where}: the text is empty.", hint="Leave the passage out.")
    given = record.pop("id", None)
    name = number if given is None else str(given)  # 0 and "" are ids
    text = record.pop("text")
    title = str(record.pop("title", "") or "")
    return Passage(id=name, text=text, title=title, metadata=record)


@dataclass(frozen=True)
class Record:
    """A passage as it is stored, checked. Attributes are those of `Passage`; ``metadata`` is JSON."""

    id: str
    title: str
    text: str
    metadata: str


def as_records(passages: Sequence[Passage], *, blank: bool = False) -> list[Record]:
    """Check passages and write their metadata as JSON, before anything is changed.

    Args:
        passages: The passages.
        blank: Whether a text may be empty.

    Raises:
        DataFormatError: An id is twice there, a text is empty, or a value cannot be stored; the message names the
            passage, and the key of the metadata.
    """
    seen: set[str] = set()
    records = []
    for passage in passages:
        record = _record(passage)
        if not blank and not record.text.strip():
            raise DataFormatError(f"The passage {passage.id!r} has no text.", hint="Leave it out.")
        if record.id in seen:
            raise known_id(record.id)
        seen.add(record.id)
        records.append(record)
    return records


def known_id(name: str) -> DataFormatError:
    """Build the error for an id that is there already."""
    return DataFormatError(f"The id {name!r} is there twice.", hint="Ids of passages must differ.")


def _record(passage: Passage) -> Record:
    texts = {"id": passage.id, "title": passage.title, "text": passage.text}
    for name, value in texts.items():
        if not isinstance(value, str) or not _is_unicode(value):
            raise DataFormatError(
                f"The {name} of the passage {passage.id!r} cannot be stored.",
                hint="It must be text without lone surrogates; an id may be a whole number.",
            )
    return Record(passage.id, passage.title, passage.text, _metadata(passage))


def _metadata(passage: Passage) -> str:
    if not isinstance(passage.metadata, Mapping):
        raise DataFormatError(
            f"The metadata of the passage {passage.id!r} is no mapping.", hint='Give {"key": value}.'
        )
    metadata = dict(passage.metadata)
    written = _json(metadata)
    if written is not None:
        return written
    unfit = [key for key, value in metadata.items() if _json({key: value}) is None]
    raise DataFormatError(
        f"The metadata of the passage {passage.id!r} cannot be stored as JSON: {', '.join(map(repr, unfit))}.",
        hint="JSON holds text, numbers, true, false, null, lists, and objects whose keys are text: convert the value "
        "or leave it out.",
    )


def _json(value: dict[Any, Any]) -> str | None:
    """Return a value as JSON, or None if JSON cannot hold it."""
    if not _fits_json(value, _DEEPEST):
        return None
    try:
        written = _ENCODER.encode(value)
    except (TypeError, ValueError):  # a whole number of thousands of digits
        return None
    return written if _is_unicode(written) else None


def _fits_json(value: Any, deepest: int) -> bool:
    """Whether JSON gives a value back as it was; but a tuple comes back as a list."""
    if value is None or isinstance(value, _SCALARS):
        return True
    if deepest == 0:  # or a circle
        return False
    if isinstance(value, dict):
        for key, inner in value.items():
            # `json.dumps` makes text of other keys: 1 and "1" would become the same.
            if not isinstance(key, str) or not _fits_json(inner, deepest - 1):
                return False
        return True
    if isinstance(value, list | tuple):
        return all(_fits_json(inner, deepest - 1) for inner in value)
    return False


def _is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: half of a surrogate pair, as JSON escapes may give it, cannot."""
    try:
        text.encode()
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
        """Copy a file that `save` made.

        Raises:
            IndexCorruptError: It cannot be read, or holds anything else than passages.
        """
        store = cls()
        try:
            fits = store._copy(path)
        except (
            sqlite3.Error,
            OverflowError,
            UnicodeDecodeError,
        ) as error:  # SQLite quotes what it cannot read
            raise IndexCorruptError(
                f"The file {str(path)!r} cannot be read: {error}.", hint="Build the index again."
            ) from error
        if not fits:
            raise IndexCorruptError(
                f"The file {str(path)!r} does not hold passages.", hint="Build the index again."
            )
        return store

    def _copy(self, path: Path) -> bool:
        """Copy the rows of a file, and return whether they are passages. The file may come from anywhere."""
        self._db.execute("ATTACH ? AS saved", (f"{path.resolve().as_uri()}?mode=ro",))
        try:
            # Only a plain table is copied: a view, for example, could be a query that never ends.
            found = self._db.execute("SELECT type, name, sql FROM saved.sqlite_master WHERE sql IS NOT NULL")
            if found.fetchall() != [("table", "passages", _TABLE)]:
                return False
            self._db.execute("INSERT INTO passages SELECT row, id, title, text, metadata FROM saved.passages")
            self._db.commit()
        finally:
            self._db.rollback()
            self._db.execute("DETACH saved")
        no_text = " OR ".join(f"typeof({name}) <> 'text'" for name in ("id", "title", "text", "metadata"))
        wrong = self._db.execute(f"SELECT COUNT(*) FROM passages WHERE {no_text}")  # noqa: S608  names only
        return bool(wrong.fetchone()[0] == 0)

    def __getstate__(self) -> bytes:
        return self._db.serialize()

    def __setstate__(self, state: bytes) -> None:
        PassageStore.__init__(self)
        self._db.deserialize(state)

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM passages").fetchone()[0])

    def replace(self, old_rows: Sequence[int], new_rows: Sequence[int], records: Sequence[Record]) -> None:
        """Remove some rows and add others; it lasts with `commit` and is undone by `rollback`.

        Args:
            old_rows: Rows to remove.
            new_rows: Rows to add; none may be there.
            records: One for each new row; their ids may be those of removed rows.
        """
        self._db.executemany("DELETE FROM passages WHERE row = ?", [(int(row),) for row in old_rows])
        values = []
        for row, record in zip(new_rows, records, strict=True):
            values.append((int(row), record.id, record.title, record.text, record.metadata))
        self._db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?)", values)

    def commit(self) -> None:
        """Keep what was changed."""
        self._db.commit()

    def rollback(self) -> None:
        """Undo what was changed since the last `commit`."""
        self._db.rollback()

    def get(self, rows: Iterable[int]) -> dict[int, Passage]:
        """Return the passages in some rows; rows that do not exist are left out."""
        found = self._select("*", "row", [int(row) for row in rows])
        return dict(map(_from_row, found))

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the row of each id that exists; what can be no id does not."""
        wanted = []
        for given in ids:
            name = as_id(given)
            if isinstance(name, str) and _is_unicode(name):
                wanted.append(name)
        return {name: int(row) for name, row in self._select("id, row", "id", wanted)}

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        found = self._query("SELECT row FROM passages ORDER BY row")
        return np.array([row for (row,) in found], dtype=np.int64)

    def __iter__(self) -> Iterator[tuple[int, Passage]]:
        # All at once: what is handed out later does not see what is written in between.
        found = self._query("SELECT * FROM passages ORDER BY row")
        return (_from_row(row) for row in found)

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


def _from_row(row: tuple[Any, ...]) -> tuple[int, Passage]:
    number, name, title, text, written = row
    try:
        metadata = json.loads(written)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):  # of a file that was changed
        raise IndexCorruptError(
            f"The metadata of the passage {name!r} is no JSON object.", hint="Build the index again."
        )
    return int(number), Passage(id=name, title=title, text=text, metadata=metadata)
