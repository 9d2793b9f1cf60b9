"""Passages: what is searched, how they are read from JSONL, and how they are kept in SQLite."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.files import read_jsonl

_LINE = 'Each line needs a JSON object such as {"id": "1", "title": "…", "text": "…"}.'

_VARIABLES = 500  # of one statement; old builds of SQLite take 999


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index.
        text: The passage; not empty.
        title: Title of the document it is from; may be empty.
        metadata: JSON values that travel with it.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searchable(self) -> str:
        """Title and text, as they are embedded."""
        return f"{self.title}. {self.text}" if self.title else self.text


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Read a corpus: JSONL, plain or gzipped, with ``text``, optional ``id``, ``title`` and further keys a line.

    A line without ``id`` gets its line number; further keys become metadata.

    Raises:
        DataFormatError: The file cannot be read, or a line is no passage; the message names file and line.
    """
    for number, record in read_jsonl(path, hint=_LINE, errors="replace"):
        yield _passage(record, f"{path}, line {number}", str(number))


def _passage(record: Any, where: str, number: str) -> Passage:
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataFormatError(f"{where}: no text.", hint=_LINE)
    if not record["text"].strip():
        raise DataFormatError(f"{where}: the text is empty.", hint="Leave the passage out.")
    name = str(record.pop("id", number))
    text = record.pop("text")
    title = str(record.pop("title", "") or "")
    return Passage(id=name, text=text, title=title, metadata=record)


class PassageStore:
    """Passages by row number and by id, in SQLite: in memory, or a file that is only read.

    Args:
        path: A file made by `save`; None for an empty store in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        # One connection serves all threads; SQLite leaves it to us that they take turns.
        self._lock = threading.Lock()
        if path is None:
            self._db = sqlite3.connect(":memory:", check_same_thread=False)
            self._db.execute(
                "CREATE TABLE passages "
                "(row INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT, metadata TEXT)"
            )
        else:
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False
            )

    def __len__(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM passages").fetchone()[0])

    def add(self, rows: Sequence[int], passages: Sequence[Passage]) -> None:
        """Store passages under row numbers; ids that are there already are an error of the caller."""
        values = []
        for row, passage in zip(rows, passages, strict=True):
            metadata = json.dumps(dict(passage.metadata), ensure_ascii=False)
            values.append((row, passage.id, passage.title, passage.text, metadata))
        with self._lock:
            self._db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?)", values)
            self._db.commit()

    def get(self, rows: Iterable[int]) -> dict[int, Passage]:
        """Return the passages in some rows; rows that do not exist are left out."""
        return dict(self._select("row", [int(row) for row in rows]))

    def rows_of(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the row of each id that exists."""
        return {passage.id: row for row, passage in self._select("id", list(ids))}

    def delete(self, rows: Iterable[int]) -> None:
        """Remove some rows."""
        with self._lock:
            self._db.executemany("DELETE FROM passages WHERE row = ?", [(int(row),) for row in rows])
            self._db.commit()

    def __iter__(self) -> Iterator[tuple[int, Passage]]:
        with self._lock:
            found = self._db.execute("SELECT * FROM passages ORDER BY row").fetchall()
        return (_from_row(row) for row in found)

    def save(self, path: Path) -> None:
        """Copy into a file."""
        target = sqlite3.connect(path)
        try:
            with self._lock:
                self._db.backup(target)
        finally:
            target.close()

    def writable(self) -> PassageStore:
        """Return a copy in memory that can be changed."""
        copy = PassageStore()
        with self._lock:
            self._db.backup(copy._db)
        return copy

    def _select(self, column: str, values: Sequence[Any]) -> Iterator[tuple[int, Passage]]:
        for start in range(0, len(values), _VARIABLES):
            some = values[start : start + _VARIABLES]
            marks = ",".join("?" * len(some))
            with self._lock:
                query = f"SELECT * FROM passages WHERE {column} IN ({marks})"  # noqa: S608  marks only
                found = self._db.execute(query, some).fetchall()
            yield from map(_from_row, found)


def _from_row(row: tuple[Any, ...]) -> tuple[int, Passage]:
    return int(row[0]), Passage(id=row[1], title=row[2], text=row[3], metadata=json.loads(row[4]))
