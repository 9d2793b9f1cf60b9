"""Reads questions with their gold answers, drafts and labels, from logs and from files of answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from rgate_integrations.decision import Draft, valid_choice
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.runtime.arrays import BoolArray
from rgate_integrations.runtime.files import expand
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.runtime.text import is_correct, matching_ratio, normalise

_T = TypeVar("_T")
_HINT = 'Write each question as {"question": "…"}, with "gold_answers": ["…"] where required.'

LABEL = "closed_book_correct"
"""Default key of the label."""

DraftKind = Literal["proxy", "recorded", "none"]
"""Which drafts a gate reads: those that its proxy writes, the LLM's recorded answers, or none (only the question)."""


def as_paths(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return one or several paths as a list."""
    return [Path(paths)] if isinstance(paths, str | Path) else list(map(Path, paths))


@dataclass(frozen=True)
class Question:
    """A question with its gold answers and other fields of its record.

    Attributes:
        text: The question, without surrounding white space.
        gold: Gold answers; may be empty.
        id: Identifier in its file; may be empty.
        dataset: Name of its data set; may be empty.
        popularity: Popularity of the question's subject, on any scale that starts at 0, or None.
        context: A passage that answers it; may be empty.
        draft: The recorded answer of the LLM without retrieval, or None.
    """

    text: str
    gold: tuple[str, ...] = ()
    id: str = ""
    dataset: str = ""
    popularity: float | None = None
    context: str = ""
    draft: Draft | None = None

    @property
    def key(self) -> str:
        """Hash of the text, ignoring case; repetitions have the same key."""
        # `replace`, because lone surrogates cannot be encoded.
        return hashlib.sha256(self.text.casefold().encode(errors="replace")).hexdigest()[:16]

    @property
    def normalised(self) -> str:
        """The text after `normalise`, or the text itself if that is empty, as for one that consists of symbols."""
        return normalise(self.text) or self.text

    @classmethod
    def from_record(cls, record: Record, dataset: str = "", *, answer_is_gold: bool = True) -> Question:
        """Read a question from a record; ``dataset`` is the default for records without one.

        Without ``gold_answers``, ``answer`` counts as gold if ``answer_is_gold``.

        Raises:
            DataFormatError: The record has no question, the question has NUL bytes or only control characters, or a
                field has the wrong type, or the popularity is below 0.
        """
        asked = record.text("question")
        if "\0" in asked or not asked.strip():
            problem = "contains NUL bytes" if "\0" in asked else "has only control characters"
            raise record.error(f"question {problem}")
        popularity = record.optional_number("popularity")
        if popularity is not None and popularity < 0:
            raise record.error("popularity is below 0")
        key = "answer" if answer_is_gold and "gold_answers" not in record.fields else "gold_answers"
        draft = None
        names = ("closed_book_text", "closed_book_answer")
        texts = [record.optional_text(name) for name in names if record.fields.get(name) is not None]
        if texts:  # the LLM may have answered with nothing
            text = next(filter(None, texts), "")
            draft = Draft(text=text, logprobs=record.logprobs("closed_book_logprobs"), source="recorded")
        return cls(
            text=asked,
            gold=tuple(filter(None, record.texts(key))),  # the texts are stripped
            id=record.optional_text("id"),
            dataset=record.optional_text("dataset") or dataset,
            popularity=popularity,
            context=record.optional_text("context"),
            draft=draft,
        )


Questions = str | Path | Iterable[str | Mapping[str, Any] | Question]
"""A JSONL file, or an iterable of texts, mappings and `Question` objects."""


def read_questions(source: Questions, *, gold: bool = False) -> list[Question]:
    """Read questions, in order and without repetitions.

    Args:
        source: A JSONL file, plain or gzipped, with ``question`` and optionally ``gold_answers``, ``id``, ``dataset``
            and ``popularity`` per line; or an iterable, see `Questions`.
        gold: Whether each question must have gold answers, which may then be called ``answer``. In a log, that is
            what an LLM answered.

    Raises:
        DataFormatError: The file cannot be read, a line or item is invalid (the message names it), a question
            lacks required gold answers, or there are no questions.
    """
    if isinstance(source, str | Path):
        read = _read_file(Path(source), _HINT, answer_is_gold=gold)
        questions: Iterable[Question] = (question for _, question in read)
    else:
        questions = (_as_question(item, number, gold) for number, item in enumerate(source, start=1))
    by_key: dict[str, Question] = {}
    for question in questions:
        if gold and not question.gold:
            raise DataFormatError(
                f"The question {question.text[:60]!r} has no gold_answers.",
                hint='Add "gold_answers": ["…"] to this question, or remove the question.',
            )
        # A repetition may have the gold answers that the first occurrence lacks.
        if question.key not in by_key or not by_key[question.key].gold:
            by_key[question.key] = question
    if not by_key:
        raise DataFormatError(
            f"{source} has no questions." if isinstance(source, str | Path) else "There are no questions.",
            hint=_HINT,
        )
    return list(by_key.values())


def _as_question(source: Any, number: int, answer_is_gold: bool) -> Question:
    if isinstance(source, Question):
        return source
    fields = dict(source) if isinstance(source, Mapping) else {"question": source}
    return Question.from_record(Record(f"question {number}", fields, _HINT), answer_is_gold=answer_is_gold)


def _read_file(path: Path, hint: str, *, answer_is_gold: bool = True) -> Iterator[tuple[Record, Question]]:
    """Yield each record of a JSONL file with its question, see `Question.from_record`.

    A question without a ``dataset`` gets the file's name up to the first dot.
    """
    for record in read_records(path, hint=hint):
        yield record, Question.from_record(record, path.name.split(".")[0], answer_is_gold=answer_is_gold)


@dataclass(frozen=True)
class Example:
    """A question with the labels of an LLM's answers.

    Attributes:
        question: The question, with the recorded answer, if any.
        target: Label of the answer without retrieval: 1 if right, 0 if wrong; soft labels lie in between.
        rag_correct: Whether the answer with retrieval is right; None if unknown.
    """

    question: Question
    target: float
    rag_correct: bool | None = None

    @property
    def known(self) -> bool:
        """Whether the answer without retrieval counts as right: the target is at least 0.5."""
        return self.target >= 0.5


@dataclass(frozen=True)
class DataFile:
    """A file of labelled questions.

    Attributes:
        name: Name of the file, without folders.
        sha256: Checksum of the file.
        examples: Its questions with their labels, without repetitions.
        repeated: Number of its lines that `read_paired` left out as repetitions.
    """

    name: str
    sha256: str
    examples: tuple[Example, ...]
    repeated: int = 0

    @classmethod
    def from_examples(cls, path: Path, examples: Sequence[Example], repeated: int = 0) -> DataFile:
        """Return a `DataFile` of the examples read from a path.

        Raises:
            DataFormatError: There are no examples.
        """
        if not examples:
            raise DataFormatError(
                f"{path} has no questions, or earlier files have them all.",
                hint="Add questions, or leave this file out.",
            )
        digest = hashlib.sha256(expand(path).read_bytes()).hexdigest()
        return cls(path.name, digest, tuple(examples), repeated)

    def as_provenance(self) -> dict[str, Any]:
        """Return name, checksum, number of questions and share of known ones, as JSON values."""
        known = sum(example.known for example in self.examples) / len(self.examples)
        return {"name": self.name, "sha256": self.sha256, "n": len(self.examples), "known": known}


def check_all(items: object, kind: type[Example] | type[DataFile], hint: str) -> None:
    """Check that items are a sequence of examples or files, not for example a path.

    Raises:
        ConfigurationError: They are not; ``hint`` says where to get them.
    """
    wrong = [items]
    if isinstance(items, Sequence):
        wrong = [item for item in items if not isinstance(item, kind)]
    if wrong:
        raise ConfigurationError(
            f"Paired data must be a list of {kind.__name__} objects, but {type(wrong[0]).__name__} was given.",
            hint=hint,
        )


def all_examples(files: Sequence[DataFile]) -> list[Example]:
    """Return the examples of all files, in order."""
    return list(chain.from_iterable(file.examples for file in files))


def without_repetitions(items: Iterable[_T], question: Callable[[_T], Question]) -> list[_T]:
    """Return the items without those whose question is, after `normalise`, that of an earlier item.

    A guarantee requires it: a question must not be in both halves of the data, or in two folds, nor count twice.
    """
    first: dict[str, _T] = {}
    for item in items:
        first.setdefault(question(item).normalised, item)
    return list(first.values())


def read_examples(
    paths: str | Path | Sequence[str | Path],
    label: str = LABEL,
    targets: Mapping[str, float] | None = None,
) -> list[DataFile]:
    """Read files of labelled questions; of a question that is repeated in any of them, the first line counts.

    Questions are the same if they are equal after `normalise`.

    Each line needs ``question`` and, without ``targets``, the label; ``closed_book_text``, ``gold_answers``,
    ``context`` and ``dataset`` are optional.

    Args:
        paths: A JSONL file, plain or gzipped, or several.
        label: Key of the label, which is a boolean or a number in [0, 1]. Or ``"match_ratio"``, SlimPLM's label: 1 if
            ``closed_book_text`` contains more than half of the ``gold_answers``, otherwise 0.
        targets: The label of every question, in [0, 1], by its text; replaces the labels in the files.

    Raises:
        DataFormatError: A file cannot be read or has no new question, or a line lacks a key or has an invalid value.
            The message names the file and, for a line, its number.
    """
    seen: set[str] = set()
    files = []
    for path in as_paths(paths):
        examples = []
        needed = '"gold_answers" and "closed_book_text"' if label == "match_ratio" else f'"{label}"'
        for record, question in _read_file(path, f'Each line needs "question" and {needed}.'):
            target = _read_target(record, question, label) if targets is None else targets[question.text]
            if question.normalised not in seen:
                seen.add(question.normalised)
                examples.append(Example(question, target))
        files.append(DataFile.from_examples(path, examples))
    return files


def _read_target(record: Record, question: Question, label: str) -> float:
    """Return the label of a record, in [0, 1]; ``"match_ratio"`` is computed, see `read_examples`.

    Raises:
        DataFormatError: The label is missing or invalid, or cannot be computed.
    """
    if label == "match_ratio":
        if not question.gold or question.draft is None:
            raise record.error(f"{'closed_book_text' if question.gold else 'gold_answers'} is missing")
        # SlimPLM, section 3.2: known if more than half of the gold answers are contained.
        return float(matching_ratio(question.draft.text, question.gold) > 0.5)
    target = record.fields.get(label)
    if isinstance(target, bool | int | float) and 0 <= target <= 1:
        return float(target)
    found = f"not {target!r:.60}" if label in record.fields else "but is missing"
    raise record.error(f"{label} must be true, false or a number from 0 to 1, {found}")


def read_paired(paths: str | Path | Sequence[str | Path]) -> list[DataFile]:
    """Read paired data: questions with the labels of both arms, one JSON record per line.

    Of a question that a data set of a file repeats, ignoring case, the first line counts: repetitions would narrow
    intervals and weaken guarantees.

    A record needs ``question`` and, for each arm, the label (``closed_book_correct``, ``rag_correct``) or the answer
    (``closed_book_answer``, ``rag_answer``) with ``gold_answers``. Optional: ``dataset``, ``closed_book_text``,
    ``closed_book_logprobs``, ``popularity``.

    Args:
        paths: A JSONL file, plain or gzipped, or several.

    Raises:
        DataFormatError: A file cannot be read, is empty or has the same content as an earlier one, or a record lacks
            a key or has an invalid value. The message names the file and, for a record, its line.
    """
    files: list[DataFile] = []
    for path in as_paths(paths):
        examples: dict[tuple[str, str], Example] = {}
        lines = 0
        for record, question in _read_file(path, 'Each line needs "question" and the labels of both arms.'):
            lines += 1
            known = _is_right(record, question, "closed_book")
            example = Example(question, float(known), _is_right(record, question, "rag"))
            examples.setdefault((question.dataset, question.key), example)
        file = DataFile.from_examples(path, list(examples.values()), lines - len(examples))
        # Nor must a file that is given twice count twice.
        if file.sha256 in {earlier.sha256 for earlier in files}:
            raise DataFormatError(
                f"{path} has no new questions: an earlier file has the same content.",
                hint="Leave this file out.",
            )
        files.append(file)
    return files


def _is_right(record: Record, question: Question, arm: str) -> bool:
    """Return the label of a record's answer or, without a label, whether the answer contains a gold answer.

    ``arm`` is the beginning of the record's keys for it: ``"closed_book"`` or ``"rag"``.

    Raises:
        DataFormatError: The label is invalid; or there is no label, and the answer or the gold answers are missing.
    """
    label = record.fields.get(f"{arm}_correct")
    if label in (True, False):
        return bool(label)
    answer = record.fields.get(f"{arm}_answer")
    if label is None and isinstance(answer, str) and question.gold:
        return is_correct(answer, question.gold)
    raise record.error(
        f"it has neither {arm}_correct (true or false) nor {arm}_answer with gold_answers"
        if label is None
        else f"{arm}_correct must be true or false, not {label!r:.60}"
    )


def check_labels(examples: Sequence[Example], folds: int) -> BoolArray:
    """Check that labels can be learned, and return whether each question is known, shape (n,).

    Args:
        examples: The questions.
        folds: Folds of the cross-validation, at least 2, or 0 for none.

    Raises:
        DataFormatError: All labels are the same, or a label has fewer questions than there are folds.
    """
    known = np.array([example.known for example in examples])
    right = int(known.sum())
    wrong = len(known) - right
    if not right or not wrong:
        raise DataFormatError(
            f"All {len(known)} questions are labelled {'known' if right else 'unknown'}.",
            hint=f"Add questions labelled {'unknown' if right else 'known'}: a gate learns from the difference.",
        )
    if folds > min(right, wrong):
        raise DataFormatError(
            f"{right} known and {wrong} unknown questions cannot be split into {folds} folds: each needs a known and "
            "an unknown question.",
            hint="Add questions, or use fewer folds (--folds).",
        )
    return known


def recorded_drafts(questions: Sequence[Question], kind: DraftKind) -> Sequence[Draft | None]:
    """Return each question's recorded draft, or a list of None if ``kind`` is not ``"recorded"``.

    Raises:
        ConfigurationError: ``kind`` is not one of `DraftKind`.
        DataFormatError: ``kind`` is ``"recorded"``, and a question has no recorded draft.
    """
    valid_choice(kind, "draft", get_args(DraftKind))
    if kind != "recorded":
        return [None] * len(questions)
    for question in questions:
        if question.draft is None:
            raise DataFormatError(
                f"The question {question.text[:60]!r} has no closed_book_text (the LLM's answer without passages).",
                hint='Add it, or use draft="proxy" (--draft proxy).',
            )
    return [question.draft for question in questions]
