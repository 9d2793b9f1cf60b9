"""Paired data: for each question the LLM's answers without and with retrieval, and which of them are right."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.files import read_jsonl
from rgate_integrations.text import Correctness, is_correct


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
            see `rgate_integrations.text.Correctness`.
        rag: Whether the arm with retrieval is needed.

    Raises:
        DataFormatError: A file cannot be read or is empty, or a record lacks what is needed, or an id occurs
            twice in a file; the message names file and line.
    """
    files = []
    for path in map(Path, paths):
        found: dict[str, Paired] = {}
        for number, record in read_jsonl(path):
            where = f"{path}, line {number}"
            item = _paired(record, where, number, path, correctness, rag)
            if item.id in found and found[item.id] != item:
                raise DataFormatError(f"{where}: the id {item.id!r} occurs twice with different contents.")
            found[item.id] = item
        if not found:
            raise DataFormatError(f"{path} holds no questions.")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(PairedFile(path.name, digest, tuple(found.values())))
    return files


def _paired(record: Any, where: str, number: int, path: Path, correctness: Correctness, rag: bool) -> Paired:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise DataFormatError(f"{where}: no question.", hint='Each line is {"question": "…", …}.')
    closed = _correct(record, "closed_book", where, correctness)
    if closed is None:
        raise DataFormatError(
            f"{where}: no closed_book_correct.",
            hint="Give it, or closed_book_answer and gold_answers.",
        )
    with_retrieval = _correct(record, "rag", where, correctness)
    if rag and with_retrieval is None:
        raise DataFormatError(f"{where}: no rag_correct.", hint="Give it, or rag_answer and gold_answers.")
    logprobs = record.get("closed_book_logprobs")
    popularity = record.get("popularity")
    return Paired(
        id=record_id(record, number),
        question=record["question"].strip(),
        dataset=str(record.get("dataset") or path.name.split(".")[0]),
        closed_book_correct=closed,
        rag_correct=with_retrieval,
        closed_book_text=str(
            record.get("closed_book_text") or record.get("closed_book_answer") or ""
        ).strip(),
        closed_book_logprobs=tuple(map(float, logprobs)) if logprobs else None,
        popularity=None if popularity is None else float(popularity),
    )


def record_id(record: Mapping[str, Any], number: int) -> str:
    """Return the id of a record, or its line number; 0 is an id, too."""
    given = record.get("id")
    return str(number if given is None or given == "" else given)


def _correct(record: dict[str, Any], arm: str, where: str, correctness: Correctness) -> bool | None:
    given = record.get(f"{arm}_correct")
    if given is not None:
        if not isinstance(given, bool):
            raise DataFormatError(f"{where}: {arm}_correct is {given!r}, not true or false.")
        return given
    answer, gold = record.get(f"{arm}_answer"), record.get("gold_answers")
    if not isinstance(answer, str) or not isinstance(gold, list) or not gold:
        return None
    return is_correct(answer, [str(g) for g in gold], correctness)
