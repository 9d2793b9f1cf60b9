"""Labelled questions from paired data: one JSONL record a question."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.arrays import BoolArray
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import matching_ratio, normalise

LABEL = "closed_book_correct"
MATCH_RATIO = "match_ratio"


@dataclass(frozen=True)
class Example:
    """A question and whether the LLM answered it rightly without retrieval.

    Attributes:
        question: The question.
        known: The label.
        text: What the LLM wrote closed book; empty when it was not recorded.
        dataset: Which set it is from.
        target: The label as a number in [0, 1]; soft labels lie between.
        gold: Gold answers.
        context: A passage that answers the question; empty when there is none.
    """

    question: str
    known: bool
    text: str
    dataset: str
    target: float
    gold: tuple[str, ...] = ()
    context: str = ""


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

    def as_provenance(self) -> dict[str, Any]:
        """Return name, checksum, number of questions and share of known ones."""
        known = sum(e.known for e in self.examples) / len(self.examples)
        return {"name": self.name, "sha256": self.sha256, "n": len(self.examples), "known": known}


def read_examples(
    paths: Sequence[str | Path], label: str = LABEL, targets: Mapping[str, float] | None = None
) -> list[DataFile]:
    """Read files of labelled questions; a question that occurred before, in any file, is left out.

    Each line needs ``question`` and the label; ``closed_book_text``, ``gold_answers``, ``context`` and ``dataset``
    are optional.

    Args:
        paths: JSONL files, also gzipped.
        label: Key of the label, a boolean or a number in [0, 1]; or ``"match_ratio"``: the label of SlimPLM,
            computed from ``gold_answers`` and ``closed_book_text``.
        targets: Labels by question, in place of those in the files.

    Raises:
        DataFormatError: A file cannot be read or is empty, a line lacks a key, or a question has both labels;
            the message names file and line.
    """
    seen: dict[str, tuple[bool, str]] = {}
    files = []
    for path in map(Path, paths):
        examples = []
        for record in read_records(path, hint=_hint(label)):
            where = record.where
            example = _example(record, path, label, targets)
            key = normalise(example.question) or example.question
            if key not in seen:
                seen[key] = (example.known, where)
                examples.append(example)
                continue
            known, first = seen[key]
            if known != example.known:
                raise DataFormatError(
                    f"{where}: {example.question[:60]!r} is {_word(example.known)}, but {_word(known)} in {first}.",
                    hint="A question can have one label; remove one of the lines.",
                )
        if not examples:
            raise DataFormatError(f"{path} holds no questions that are not in the files before it.")
        files.append(DataFile(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), tuple(examples)))
    return files


def check_labels(examples: Sequence[Example], folds: int) -> BoolArray:
    """Return the labels, if they can be learned.

    Args:
        examples: The questions.
        folds: Folds of the cross-validation, or 0 for none.

    Raises:
        DataFormatError: All labels are the same, or there are fewer questions of a label than folds.
    """
    known = np.array([e.known for e in examples])
    if known.all() or not known.any():
        raise DataFormatError(
            f"All {len(known)} questions are {_word(bool(known.all()))}.",
            hint="Both labels are needed.",
        )
    if folds and not 2 <= folds <= int(min(known.sum(), (~known).sum())):
        raise DataFormatError(
            f"{folds} folds need at least {folds} questions of each label; there are {int(known.sum())} known and "
            f"{int((~known).sum())} unknown.",
            hint="Give more data or fewer folds.",
        )
    return known


def _word(known: bool) -> str:
    return "known" if known else "unknown"


def _hint(label: str) -> str:
    if label == MATCH_RATIO:
        return 'Each line needs {"question": "…", "gold_answers": […], "closed_book_text": "…"}.'
    return f'Each line needs {{"question": "…", "{label}": true|false}}.'


def _example(record: Record, path: Path, label: str, targets: Mapping[str, float] | None) -> Example:
    question = record.text("question")
    text = record.optional_text("closed_book_text")
    gold = record.texts("gold_answers")
    target: Any
    if targets is not None:
        target = targets[question]
    elif label == MATCH_RATIO:
        if not text or not gold:
            raise record.wrong(f"no {'closed_book_text' if gold else 'gold_answers'}")
        target = match_ratio(text, gold)
    else:
        target = record.fields.get(label)
    is_soft = isinstance(target, float) and 0 <= target <= 1
    if not isinstance(target, bool) and not is_soft:
        raise record.wrong(f"no {label}")
    return Example(
        question=question,
        known=target >= 0.5,
        text=text,
        dataset=record.optional_text("dataset") or path.name.split(".")[0],
        target=float(target),
        gold=gold,
        context=record.optional_text("context"),
    )


def match_ratio(text: str, gold: Sequence[str], threshold: float = 0.5) -> bool:
    """Label by SlimPLM's matching ratio (section 3.2): more than ``threshold`` of the gold answers are contained.

    Containment is on token boundaries; the published code's substring match finds the answer "no" in "know".
    """
    return matching_ratio(text, gold) > threshold
