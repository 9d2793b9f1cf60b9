"""Passages: reads them from JSONL, and checks them before they are stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import encodable

_LINE = 'Each line must be a JSON object such as {"id": "1", "title": "…", "text": "…"}.'
_MAX_DEPTH = 64  # nesting of lists and objects; far less than the JSON parser can read back


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index. An int is converted to a string: 0 becomes "0". The empty string is a valid id.
        text: The passage.
        title: Title of its document; may be empty.
        metadata: Further JSON values; None becomes an empty dict. Do not change the metadata of a passage that an
            index returned, because the index uses the same objects.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.id, int):  # ids come from tables as numbers
            # A frozen dataclass can only be changed this way, even in __post_init__.
            object.__setattr__(self, "id", str(self.id))
        if self.metadata is None:  # some stores and files have null
            object.__setattr__(self, "metadata", {})

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


def check_type(passage: object) -> None:
    """Raise `DataFormatError` unless something is a `Passage`."""
    if not isinstance(passage, Passage):
        raise DataFormatError(
            f"A passage must be a Passage, not {type(passage).__name__}.",
            hint='For example, Passage("1", "The text.").',
        )


def check_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Check passages, and return copies with the metadata that JSON would give back: a tuple becomes a list.

    Raises:
        DataFormatError: An id occurs twice, something is not a `Passage`, or a value cannot be stored; the message
            names the passage and the metadata key.
    """
    checked: dict[str, Passage] = {}
    for passage in passages:
        check_type(passage)
        for name in ("id", "title", "text"):
            value = getattr(passage, name)
            if not isinstance(value, str):
                raise DataFormatError(
                    f"The {name} of the passage {passage.id!r} must be a string, not {type(value).__name__}.",
                    hint="Convert it with str().",
                )
            if value != encodable(value):
                raise DataFormatError(
                    f"The {name} of the passage {passage.id!r} has a lone surrogate, which UTF-8 cannot encode.",
                    hint='Replace it: text.encode("utf-8", errors="replace").decode().',
                )
        if passage.id in checked:
            raise DataFormatError(
                f"Several passages have the id {passage.id!r}.", hint="Make the ids unique."
            )
        metadata: dict[str, Any] = {}
        for key, value in passage.metadata.items():
            try:
                metadata |= _copy_json({key: value}, _MAX_DEPTH)
            except (TypeError, ValueError) as error:
                raise DataFormatError(
                    f"The metadata {key!r} of the passage {passage.id!r} cannot be stored as JSON: {error}.",
                    hint="JSON has text, numbers, true, false, null, lists, and objects whose keys are text. "
                    "Convert the value or leave it out.",
                ) from None
        checked[passage.id] = replace(passage, metadata=metadata)
    return list(checked.values())


def _copy_json(value: Any, depth: int) -> Any:
    """Return a copy of a value as it would be after saving it as JSON and reading it back.

    Raises:
        TypeError: JSON has no such type, or a key is not text (JSON would turn 1 and "1" into the same key).
        ValueError: The value is nested deeper than ``depth``, for example because it contains itself; or it
            is NaN, infinite, an integer of thousands of digits, or a string with a lone surrogate.
    """
    if depth < 0:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key of an object is not text")
        return {_copy_json(key, 0): _copy_json(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_json(inner, depth - 1) for inner in value]
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
