"""SKR-kNN: labelled questions near this one vote."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from pydantic import Field

from rgate_integrations.errors import DataFormatError
from rgate_integrations.evidence import Evidence, EvidenceSpec, Neighbour, NeighboursSpec
from rgate_integrations.files import read_jsonl
from rgate_integrations.gates.base import Gate, GateInfo, Score


def vote(known: Sequence[bool]) -> float:
    """Return the votes for known over one more than the number of voters.

    The extra voter says unknown: a strict majority is at least 0.5, a tie is below it, so ties retrieve.

    >>> vote([True, True, True, False, False]), vote([True, True, False, False])
    (0.5, 0.4)
    """
    return sum(known) / (len(known) + 1)


class LabelledQuestions:
    """Questions with a label, searchable by the cosine similarity of their embeddings.

    Args:
        path: JSONL file; each line has ``question`` and ``known`` or ``closed_book_correct`` (a boolean).
        embedder: Catalogue name, folder or Hub id of a sentence embedder.
    """

    def __init__(self, path: str, embedder: str) -> None:
        from rgate_integrations.index.embedder import SentenceEmbedder

        self.questions, self.known = _read_labels(path)
        self._embedder = SentenceEmbedder(embedder)
        self._vectors = self._embedder.embed(self.questions)

    def nearest(self, questions: Sequence[str], k: int) -> list[tuple[Neighbour, ...]]:
        """Return the ``k`` nearest labelled questions of each question, nearest first; one embedding call."""
        similarities = self._embedder.embed_queries(questions) @ self._vectors.T
        order = (-similarities).argsort(axis=1, kind="stable")[:, :k]
        return [
            tuple(Neighbour(self.questions[j], self.known[j], float(row[j])) for j in best)
            for row, best in zip(similarities, order, strict=True)
        ]


def _read_labels(path: str) -> tuple[list[str], list[bool]]:
    questions, known = [], []
    hint = 'Each line needs {"question": "…", "known": true|false}.'
    for number, record in read_jsonl(path, hint=hint):
        fields = record if isinstance(record, dict) else {}
        question = fields.get("question")
        label = fields.get("known", fields.get("closed_book_correct"))
        if not isinstance(question, str) or not isinstance(label, bool):
            raise DataFormatError(f"{path}, line {number}: no labelled question.", hint=hint)
        questions.append(question)
        known.append(label)
    if not questions:
        raise DataFormatError(f"{path} holds no labelled questions.")
    return questions, known


@functools.lru_cache(maxsize=8)
def _labelled_questions(path: str, embedder: str, changed: float) -> LabelledQuestions:
    return LabelledQuestions(path, embedder)


def labelled_questions(path: str, embedder: str) -> LabelledQuestions:
    """Return the labelled questions of a file, embedded once until the file changes."""
    changed = os.stat(path).st_mtime if os.path.exists(path) else 0.0
    return _labelled_questions(path, embedder, changed)


class NeighboursGate(Gate):
    """SKR-kNN (Wang et al. 2023; a baseline of SlimPLM, section 4.3): the k nearest labelled questions vote.

    Attributes:
        examples: JSONL file of labelled questions: which ones the LLM answered rightly by itself.
        k: How many vote.
        embedder: Sentence embedder.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "neighbours", "SKR-kNN (Wang et al. 2023)", "labelled questions nearby", "yes", "search"
    )

    examples: str
    k: int = Field(default=5, ge=1)
    embedder: str = "all-minilm-l6-v2"

    @classmethod
    def from_argument(cls, argument: str, **options: Any) -> Self:
        """Read ``neighbours:FILE.jsonl``."""
        return cls(examples=argument, **options)

    @property
    def _neighbours(self) -> NeighboursSpec:
        return NeighboursSpec(self.k, self.examples, self.embedder)

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """The nearest labelled questions."""
        return (self._neighbours,)

    def score(self, evidence: Evidence) -> Score:
        """Score by the vote."""
        near = evidence.neighbours(self._neighbours)
        known = [n.known for n in near]
        return Score(vote(known), f"{sum(known)} of the {len(known)} nearest labelled questions were known.")
