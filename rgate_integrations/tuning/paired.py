"""Paired data: for each question the LLM's answers without and with retrieval, and which of them are right."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import Correctness, is_correct


@dataclass(frozen=True)
class Paired:
    """One question with both arms.

    Attributes:
        id: Id of the question; its line number when the file has none.
        question: The question.
        dataset: Which set it is from.
        closed_book_correct: Whether the answer without retrieval is right.
        rag_correct: Whether the answer with retrieval is right; None when there is none.
        closed_book_text: What the LLM wrote without retrieval; empty when it was not recorded.
        closed_book_logprobs: Its token log-probabilities, or None.
        popularity: Popularity of the question's entity, or None.
    """

    id: str
    question: str
    dataset: str
    closed_book_correct: bool
    rag_correct: bool | None
    closed_book_text: str = ""
    closed_book_logprobs: tuple[float, ...] | None = None
    popularity: float | None = None

    def draft(self) -> Draft | None:
        """Return what the LLM wrote without retrieval as a recorded draft, or None."""
        if not self.closed_book_text:
            return None
        return Draft(text=self.closed_book_text, logprobs=self.closed_book_logprobs, source="recorded")


@dataclass(frozen=True)
class PairedFile:
    """A file of paired data.

    Attributes:
        name: Name of the file, without folders.
        sha256: Its checksum.
        records: Its questions.
    """

    name: str
    sha256: str
    records: tuple[Paired, ...]


def read_paired(
    paths: Sequence[str | Path], *, correctness: Correctness = "contained", rag: bool = True
) -> list[PairedFile]:
    """Read paired data, one JSON record a line.

    A record needs ``question`` and, for each arm, ``*_correct`` or the answer (``closed_book_answer``,
    ``rag_answer``) with ``gold_answers``. Optional: ``id``, ``dataset``, ``closed_book_text``,
    ``closed_book_logprobs``, ``popularity``.

    Args:
        paths: JSONL files, also gzipped.
        correctness: How answers are judged where the file does not say, by ``*_correct``, whether they are right;
            see `rgate_integrations.runtime.text.Correctness`.
        rag: Whether the arm with retrieval is needed.

    Raises:
        DataFormatError: A file cannot be read or is empty, or a record lacks what is needed, or an id occurs
            twice in a file; the message names file and line.
    """
    files = []
    for path in map(Path, paths):
        found: dict[str, Paired] = {}
        for record in read_records(path, hint='Each line is {"question": "…", …}.'):
            item = _paired(record, path, correctness, rag)
            if item.id in found and found[item.id] != item:
                raise record.wrong(f"the id {item.id!r} occurs twice with different contents")
            found[item.id] = item
        if not found:
            raise DataFormatError(f"{path} holds no questions.")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(PairedFile(path.name, digest, tuple(found.values())))
    return files


def _paired(record: Record, path: Path, correctness: Correctness, rag: bool) -> Paired:
    question = record.text("question")
    closed = _correct(record, "closed_book", correctness)
    if closed is None:
        raise DataFormatError(
            f"{record.where}: no closed_book_correct.",
            hint="Give it, or closed_book_answer and gold_answers.",
        )
    with_retrieval = _correct(record, "rag", correctness)
    if rag and with_retrieval is None:
        raise DataFormatError(
            f"{record.where}: no rag_correct.", hint="Give it, or rag_answer and gold_answers."
        )
    return Paired(
        id=record_id(record.fields, record.number),
        question=question,
        dataset=record.optional_text("dataset") or path.name.split(".")[0],
        closed_book_correct=closed,
        rag_correct=with_retrieval,
        closed_book_text=record.optional_text("closed_book_text")
        or record.optional_text("closed_book_answer"),
        closed_book_logprobs=record.logprobs("closed_book_logprobs"),
        popularity=record.optional_number("popularity"),
    )


def record_id(record: Mapping[str, Any], number: int) -> str:
    """Return the id of a record, or its line number; 0 is an id, too."""
    given = record.get("id")
    return str(number if given is None or given == "" else given)


def _correct(record: Record, arm: str, correctness: Correctness) -> bool | None:
    given = record.fields.get(f"{arm}_correct")
    if given is not None:
        if not isinstance(given, bool):
            raise record.wrong(f"{arm}_correct is {repr(given)[:40]}, not true or false")
        return given
    answer, gold = record.fields.get(f"{arm}_answer"), record.texts("gold_answers")
    if not isinstance(answer, str) or not gold:
        return None
    return is_correct(answer, gold, correctness)
