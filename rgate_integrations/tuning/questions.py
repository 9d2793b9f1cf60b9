"""The questions that an LLM is asked: read, made unique, and a part of them that stands for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.records import Record, read_records

_HINT = 'Each line is {"question": "…"}, with "gold_answers": ["…"] where they are known.'


@dataclass(frozen=True)
class Question:
    """A question, and what is known of it.

    Attributes:
        text: The question, without the white space around it.
        gold: Its right answers; none where they are not known.
        id: What a file calls it; empty where it has no name.
        dataset: Which set it is from; may be empty.
        popularity: Popularity of its entity, where it is known.
    """

    text: str
    gold: tuple[str, ...] = ()
    id: str = ""
    dataset: str = ""
    popularity: float | None = None

    @property
    def key(self) -> str:
        """What tells it from others: the same question is asked once, however often it occurs."""
        return hashlib.sha256(self.text.casefold().encode(errors="replace")).hexdigest()[:16]

    @classmethod
    def of(cls, record: Record, dataset: str = "") -> Question:
        """Read a question from a record; ``dataset`` is used where the record names none.

        Raises:
            DataFormatError: The record has no question, or a field of another kind than it must be.
        """
        key = "gold_answers" if "gold_answers" in record.fields else "answer"
        return cls(
            text=record.text("question"),
            gold=tuple(answer for answer in record.texts(key) if answer.strip()),
            id=record.optional_text("id"),
            dataset=record.optional_text("dataset") or dataset,
            popularity=record.optional_number("popularity"),
        )


Questions = str | Path | Iterable[str | Mapping[str, Any] | Question]
"""A JSONL file, or texts and objects."""


def read_questions(source: Questions, limit: int | None = None, *, gold: bool = False) -> list[Question]:
    """Return questions, each once, in order.

    Args:
        source: A JSONL file, also gzipped, with ``question`` and, where known, ``gold_answers`` (or ``answer``),
            ``id``, ``dataset`` and ``popularity`` a line; or texts and such objects.
        limit: The first so many; all when None.
        gold: Whether each question must have gold answers.

    Raises:
        DataFormatError: A line cannot be used, or there is no question; the message names file and line.
    """
    found: dict[str, Question] = {}
    for question in _read(source, gold):
        # A later line may know the answers that an earlier one left out.
        if question.key not in found or not found[question.key].gold:
            found[question.key] = question
        if len(found) == limit:
            break
    if not found:
        name = repr(str(source)) if isinstance(source, str | Path) else "what was given"
        raise DataFormatError(f"There are no questions in {name}.", hint=_HINT)
    return list(found.values())


def _read(source: Questions, gold: bool) -> Iterator[Question]:
    dataset, records = "", _given(source)
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise DataFormatError(f"There is no file {str(path)!r}.", hint=_HINT)
        dataset, records = path.name.split(".")[0], read_records(path, hint=_HINT)
    for record in records:
        question = record if isinstance(record, Question) else Question.of(record, dataset)
        if gold and not question.gold:
            raise DataFormatError(f"{question.text[:60]!r} has no gold_answers.", hint=_HINT)
        yield question


def _given(source: Any) -> Iterator[Record | Question]:
    for number, given in enumerate(source, start=1):
        if isinstance(given, Question):
            yield given
            continue
        fields = {"question": given} if isinstance(given, str) else given
        is_object = isinstance(fields, Mapping)
        yield Record(f"question {number}", number, dict(fields) if is_object else {}, _HINT)


def sample_questions(questions: Sequence[Question], n: int, seed: int) -> list[Question]:
    """Return ``n`` questions at random, in their order; all of them if there are no more.

    Args:
        questions: The questions.
        n: How many, at least 1.
        seed: Seed of the draw.
    """
    drawn = np.random.default_rng(seed).permutation(len(questions))[:n]
    return [questions[place] for place in np.sort(drawn)]
