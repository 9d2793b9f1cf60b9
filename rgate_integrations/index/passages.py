"""Passages: reads them from JSONL, checks them before they are stored, and stores them as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.records import first_problem

_LINE = 'Each line must be a JSON object such as {"id": "1", "title": "…", "text": "…"}.'
# Id, title, text and metadata.
_ROWS = TypeAdapter(list[tuple[str, str, str, dict[str, Any]]])


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index. The empty string is a valid id.
        text: The passage.
        title: Title of its document; may be empty.
        metadata: Further JSON values. Do not change the metadata of a passage that an index returned, because the
            index uses the same objects.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searchable(self) -> str:
        """The text to embed and search: title and text."""
        return f"{self.title}. {self.text}" if self.title else self.text

    @property
    def titled_metadata(self) -> dict[str, Any]:
        """A copy of the metadata, with the title, if there is one, under ``title``."""
        return {**self.metadata, "title": self.title} if self.title else dict(self.metadata)


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a JSONL file, plain or gzipped.

    Each line needs ``text``; ``id`` and ``title`` are optional, and all other keys become metadata. If ``id`` is
    missing or null, the line number is the id.

    Raises:
        DataFormatError: The file cannot be read, or a line is not UTF-8 or not a passage. The message names the file
            and, for a line, its number.
    """
    for number, record in read_jsonl(path, hint=_LINE):
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataFormatError(f"{path}, line {number}: text is missing or not a string.", hint=_LINE)
        text = record.pop("text")
        if not text.strip():
            raise DataFormatError(f"{path}, line {number}: the text is empty.", hint="Remove the line.")
        name = record.pop("id", None)
        title = str(record.pop("title", "") or "")
        # 0 and "" are ids, too.
        yield Passage(str(number if name is None else name), text, title, metadata=record)


def check_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Check passages, and return copies with what JSON gives back: in metadata, a tuple becomes a list.

    Raises:
        DataFormatError: An id occurs twice, or a passage cannot be stored; the message
            names it.
    """
    checked: dict[str, Passage] = {}
    for passage in passages:
        try:
            (stored,) = decode_passages(encode_passages([passage]))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataFormatError(
                f"The passage {passage.id!r} cannot be stored as JSON: {first_problem(error)}.",
                hint="Id, title and text must be strings, and metadata JSON values, without lone surrogates.",
            ) from None
        if stored.id in checked:
            raise DataFormatError(f"Several passages have the id {stored.id!r}.", hint="Make the ids unique.")
        checked[stored.id] = stored
    return list(checked.values())


def encode_passages(passages: Iterable[Passage]) -> bytes:
    """Return passages as JSON, as an index saves them.

    Raises:
        TypeError: JSON has no such type.
        ValueError: A value is NaN, infinite, an integer of thousands of digits, has a lone surrogate, or contains
            itself.
        RecursionError: A value is nested too deeply.
    """
    rows = [(row.id, row.title, row.text, dict(row.metadata or {})) for row in passages]
    return json.dumps(rows, ensure_ascii=False, allow_nan=False).encode()


def decode_passages(saved: bytes) -> list[Passage]:
    """Return the passages that `encode_passages` wrote.

    Raises:
        ValueError: ``saved`` is something else, or nested too deeply.
    """
    rows = _ROWS.validate_json(saved, strict=True)
    return [Passage(name, text, title, metadata) for name, title, text, metadata in rows]
