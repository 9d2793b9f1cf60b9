"""Passages: what is searched, and how they are read from JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import read_jsonl

_LINE = 'Each line needs a JSON object such as {"id": "1", "title": "…", "text": "…"}.'
_DEEPEST = 64  # lists and objects within each other; far less than what the JSON parser can read back


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index. A whole number becomes its text: 0 is "0". The empty text is an id like others.
        text: The passage.
        title: Title of the document it is from; may be empty.
        metadata: JSON values that travel with it. Read only: what an index finds is what it holds.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.id, int):  # ids come from tables as numbers
            object.__setattr__(self, "id", str(self.id))
        if self.metadata is None:  # as some stores and files have it
            object.__setattr__(self, "metadata", {})

    @property
    def searchable(self) -> str:
        """Title and text, as they are embedded."""
        return f"{self.title}. {self.text}" if self.title else self.text


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


def check_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Return passages as a saved index gives them back: with a copy of their metadata, in which tuples are lists.

    Raises:
        DataFormatError: An id is twice there, or a value cannot be stored; the message names the passage, and the key
            of the metadata.
    """
    checked: dict[str, Passage] = {}
    for passage in passages:
        for name in ("id", "title", "text"):
            if not _fits_json(getattr(passage, name), str):
                raise DataFormatError(
                    f"The {name} of the passage {passage.id!r} cannot be stored.",
                    hint="It must be text without lone surrogates; an id may be a whole number.",
                )
        if passage.id in checked:
            raise duplicate_id(passage.id)
        metadata = {}
        for key, value in passage.metadata.items():
            if not _fits_json({key: value}, dict):
                raise DataFormatError(
                    f"The metadata of the passage {passage.id!r} cannot be stored as JSON: {key!r}.",
                    hint="JSON holds text, numbers, true, false, null, lists, and objects whose keys are text: "
                    "convert the value or leave it out.",
                )
            metadata[key] = json.loads(json.dumps(value))
        checked[passage.id] = replace(passage, metadata=metadata)
    return list(checked.values())


def duplicate_id(name: str) -> DataFormatError:
    """Build the error for an id that is there already."""
    return DataFormatError(f"The id {name!r} is there twice.", hint="Ids of passages must differ.")


def _fits_json(value: Any, kind: type) -> bool:
    """Whether a value is of a kind, and JSON in UTF-8 gives it back as it was, but with lists for tuples."""
    if not isinstance(value, kind) or not _keys_are_text(value, _DEEPEST):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (
        TypeError,
        ValueError,
    ):  # such as NaN, an integer of thousands of digits, half of a surrogate pair
        return False
    return True


def _keys_are_text(value: Any, deepest: int) -> bool:
    """Whether no object has other keys, of which JSON would make text: 1 and "1" would become the same."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return False
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return True
    # Where no depth is left there may be a circle.
    return deepest > 0 and all(_keys_are_text(inner, deepest - 1) for inner in value)
