"""The questions of a log: read, made unique, and a part of them that stands for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.runtime.records import Record, read_records

_HINT = 'Each line is {"question": "…"}, with "gold_answers": ["…"] where they are known.'
_A_CLUSTER = 10  # questions of the sample, about, so that each cluster has some


@dataclass(frozen=True)
class Question:
    """A question of a log.

    Attributes:
        text: The question, without the white space around it.
        gold: Its right answers; none where they are not known.
    """

    text: str
    gold: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What tells it from others: the same question is asked once, however often it is in the log."""
        return hashlib.sha256(self.text.casefold().encode(errors="replace")).hexdigest()[:16]


def read_log(source: str | Path | Iterable[str | Mapping[str, Any]]) -> list[Question]:
    """Return the questions of a log, each once, in order.

    Args:
        source: A JSONL file with ``question`` and, where known, ``gold_answers`` (or ``answer``) a line; or texts and
            such objects.

    Raises:
        DataFormatError: A line cannot be used, or there is no question; the message names file and line.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise DataFormatError(f"There is no file {str(path)!r}.", hint=_HINT)
        records = list(read_records(path, hint=_HINT))
    else:
        records = [_record(number, each) for number, each in enumerate(source, start=1)]
    found: dict[str, Question] = {}
    for record in records:
        key = "gold_answers" if "gold_answers" in record.fields else "answer"
        gold = tuple(answer for answer in record.texts(key) if answer.strip())
        question = Question(record.text("question"), gold)
        if question.key not in found or not found[question.key].gold:
            found[question.key] = question
    if not found:
        raise DataFormatError(f"There are no questions in {_name(source)}.", hint=_HINT)
    return list(found.values())


def sampled(questions: Sequence[Question], n: int, embedder: Embedder | None, seed: int) -> list[Question]:
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
    if embedder is not None and n >= 2 * _A_CLUSTER:
        labels = clusters(embedder.embed([q.text for q in questions]), n // _A_CLUSTER, seed)
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


def _record(number: int, given: str | Mapping[str, Any]) -> Record:
    if isinstance(given, str):
        return Record(f"question {number}", number, {"question": given}, _HINT)
    fields = dict(given) if isinstance(given, Mapping) else {}
    return Record(f"question {number}", number, fields, _HINT)


def _name(source: object) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else "what was given"
