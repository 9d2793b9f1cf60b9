"""The questions that an LLM is asked: read, made unique, and a part of them that stands for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.records import Record, read_records

_HINT = 'Each line is {"question": "…"}, with "gold_answers": ["…"] where they are known.'
_CLUSTER_SIZE = 10  # questions of the sample, about, so that each cluster has some

DATASETS: dict[str, dict[str, str]] = {
    "nq_open": {"question": "question", "gold_answers": "answer"},
    "akariasai/PopQA": {
        "question": "question",
        "gold_answers": "possible_answers",
        "popularity": "s_pop",
        "id": "id",
    },
    "trivia_qa": {"question": "question", "gold_answers": "answer.aliases", "id": "question_id"},
    "hotpotqa/hotpot_qa": {"question": "question", "gold_answers": "answer", "id": "id"},
}
"""Columns of Hugging Face data sets by the names of `Question`'s fields; a dot reaches into a column."""

_PARTS = {
    "nq_open": {"split": "validation"},
    "akariasai/PopQA": {"split": "test"},
    "trivia_qa": {"name": "rc.nocontext", "split": "validation"},
    "hotpotqa/hotpot_qa": {"name": "fullwiki", "split": "validation"},
}


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
"""A JSONL file, the name of a data set in `DATASETS`, or texts and objects."""


def read_questions(source: Questions, limit: int | None = None, *, gold: bool = False) -> list[Question]:
    """Return questions, each once, in order.

    Args:
        source: A JSONL file, also gzipped, with ``question`` and, where known, ``gold_answers`` (or ``answer``),
            ``id``, ``dataset`` and ``popularity`` a line; the name of a Hugging Face data set in `DATASETS`, which
            needs the library ``datasets`` and the network; or texts and such objects.
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
    if isinstance(source, str) and source in DATASETS:
        yield from from_rows(_rows(source), source)
        return
    dataset, records = "", _given(source)
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            hint = f"Give a JSONL file, or one of {', '.join(DATASETS)}."
            raise DataFormatError(f"There is no file {str(path)!r}.", hint=hint)
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


def from_rows(rows: Iterable[Mapping[str, Any]], dataset: str) -> Iterator[Question]:
    """Read the rows of a data set in `DATASETS`.

    Raises:
        DataFormatError: A row lacks a column, or holds something else there.
    """
    for number, row in enumerate(rows, start=1):
        where = f"Row {number} of {dataset}"
        fields: dict[str, Any] = {}
        try:
            for name, column in DATASETS[dataset].items():
                value: Any = row
                for part in column.split("."):
                    value = value[part]
                fields[name] = value
            if dataset == "akariasai/PopQA":
                fields["gold_answers"] = parse_json(fields["gold_answers"])  # a list that is kept as text
        except (LookupError, TypeError, ValueError) as error:
            raise DataFormatError(f"{where} is not as expected: {type(error).__name__}: {error}.") from error
        yield Question.of(Record(where, number, fields), dataset)


def _rows(name: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise missing_dependency("datasets", "datasets") from error
    return load_dataset(name, **_PARTS[name])


def sample_questions(
    questions: Sequence[Question], n: int, embedder: Embedder | None, seed: int
) -> list[Question]:
    """Return ``n`` questions that stand for all: from every cluster of their embeddings its share, at random.

    Args:
        questions: The questions.
        n: How many, at least 1; all are returned when there are no more.
        embedder: Embeds them; the sample is a plain random one when None.
        seed: Seed of clusters and draws.
    """
    if n >= len(questions):
        return list(questions)
    rng = np.random.default_rng(seed)
    # Random within a cluster, and clusters one after another: every n-th of that order takes from each its share.
    order = rng.permutation(len(questions))
    if embedder is not None and n >= 2 * _CLUSTER_SIZE:
        labels = clusters(embedder.embed([q.text for q in questions]), n // _CLUSTER_SIZE, seed)
        order = order[np.argsort(labels[order], kind="stable")]
    places = (np.arange(n) + rng.random()) * len(questions) / n
    return [questions[order[place]] for place in np.sort(places.astype(int))]


def clusters(vectors: Any, n: int, seed: int) -> Any:
    """Return the cluster of each vector, shape (n,), by k-means.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    return MiniBatchKMeans(min(n, len(vectors)), random_state=seed, n_init=3).fit_predict(vectors)
