"""Labelled questions from paired data: one JSONL record a question."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.errors import DataFormatError
from rgate_integrations.text import normalise

LABEL = "closed_book_correct"


@dataclass(frozen=True)
class Example:
    """A question and whether the LLM answered it rightly without retrieval.

    Attributes:
        question: The question.
        known: The label.
        text: What the LLM wrote closed book; empty when it was not recorded.
        dataset: Which set it is from.
    """

    question: str
    known: bool
    text: str
    dataset: str


@dataclass(frozen=True)
class DataFile:
    """A file of examples, for the provenance of what is trained on it.

    Attributes:
        name: Name of the file, without folders.
        sha256: Its checksum.
        examples: What it holds, without repeated questions.
    """

    name: str
    sha256: str
    examples: tuple[Example, ...]


def read_examples(paths: Sequence[str | Path]) -> list[DataFile]:
    """Read files of labelled questions; a question that occurred before, in any file, is left out.

    Each line needs ``question`` and ``closed_book_correct``; ``closed_book_text`` and ``dataset`` are optional.

    Raises:
        DataFormatError: A file cannot be read or is empty, a line lacks a key, or a question has both labels;
            the message names file and line.
    """
    seen: dict[str, tuple[bool, str]] = {}
    files = []
    for path in map(Path, paths):
        examples = []
        for number, record in _records(path):
            where = f"{path}, line {number}"
            example = _example(record, where, path)
            key = normalise(example.question) or example.question
            if key in seen:
                known, first = seen[key]
                if known != example.known:
                    raise DataFormatError(
                        f"{where}: {example.question[:60]!r} is {'known' if example.known else 'unknown'}, but "
                        f"{'known' if known else 'unknown'} in {first}.",
                        hint="A question can have one label; remove one of the lines.",
                    )
                continue
            seen[key] = (example.known, where)
            examples.append(example)
        if not examples:
            raise DataFormatError(f"{path} holds no questions that are not in the files before it.")
        files.append(DataFile(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), tuple(examples)))
    return files


def _records(path: Path) -> list[tuple[int, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    records = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    records.append((number, json.loads(line)))
                except ValueError as error:
                    raise DataFormatError(f"{path}, line {number}: not JSON ({error}).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(f"The file {str(path)!r} cannot be read: {error}.") from error
    return records


def _example(record: Any, where: str, path: Path) -> Example:
    hint = f'Each line needs {{"question": "…", "{LABEL}": true|false}}.'
    if not isinstance(record, dict):
        raise DataFormatError(f"{where}: not a JSON object.", hint=hint)
    for key, kind in (("question", str), (LABEL, bool)):
        if not isinstance(record.get(key), kind):
            raise DataFormatError(f"{where}: no {key}.", hint=hint)
    return Example(
        question=record["question"].strip(),
        known=record[LABEL],
        text=str(record.get("closed_book_text") or "").strip(),
        dataset=str(record.get("dataset") or path.name.split(".")[0]),
    )
