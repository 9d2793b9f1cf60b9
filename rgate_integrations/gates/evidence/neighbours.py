"""The labelled questions nearest to the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from rgate_integrations.decision import Cost
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.runtime.records import read_records


@dataclass(frozen=True)
class Neighbour:
    """A labelled question near the question: its label and its cosine similarity in [-1, 1]."""

    question: str
    known: bool
    similarity: float


Neighbours: TypeAlias = tuple[Neighbour, ...]


@dataclass(frozen=True)
class NeighboursSpec(EvidenceSpec[Neighbours]):
    """The k labelled questions with the most similar embeddings, nearest first.

    Attributes:
        k: How many.
        examples: JSONL file of labelled questions (``question`` and ``known`` or ``closed_book_correct``). It is read
            and embedded once for each engine.
        embedder: Catalogue name, folder or Hub id of the sentence embedder.
    """

    reads_model: ClassVar[bool] = False  # embedders cut long texts themselves

    k: int
    examples: str
    embedder: str = "all-minilm-l6-v2"

    def compute(self, context: Context) -> list[Piece[Neighbours]]:
        """Search the labelled questions for all questions together."""
        key = (self.examples, self.embedder)
        labelled = context.memory(key, lambda: LabelledQuestions(self.examples, self.embedder))
        nearest = labelled.nearest([each.question for each in context.inputs], self.k)
        return [Piece(neighbours, Cost(model_calls=1)) for neighbours in nearest]


class LabelledQuestions:
    """Questions with a label, searchable by the cosine similarity of their embeddings.

    Args:
        path: JSONL file; each line has ``question`` and ``known`` or ``closed_book_correct`` (a boolean).
        embedder: Catalogue name, folder or Hub id of a sentence embedder.

    Raises:
        DataFormatError: The file cannot be read, or a line holds no labelled question.
    """

    def __init__(self, path: str, embedder: str) -> None:
        from rgate_integrations.index.embedder import SentenceEmbedder

        self.questions: list[str] = []
        self.known: list[bool] = []
        for record in read_records(path, hint='Each line needs {"question": "…", "known": true|false}.'):
            label = record.fields.get("known", record.fields.get("closed_book_correct"))
            if not isinstance(label, bool):
                raise record.wrong("no label")
            self.questions.append(record.text("question"))
            self.known.append(label)
        if not self.questions:
            raise DataFormatError(f"{path} holds no labelled questions.")
        self._embedder = SentenceEmbedder(embedder)
        self._vectors = self._embedder.embed(self.questions)

    def nearest(self, questions: Sequence[str], k: int) -> list[Neighbours]:
        """Return the ``k`` nearest labelled questions of each question, nearest first; one embedding call."""
        similarities = self._embedder.embed_queries(questions) @ self._vectors.T
        order = (-similarities).argsort(axis=1, kind="stable")[:, :k]
        found = []
        for row, best in zip(similarities, order, strict=True):
            found.append(tuple(Neighbour(self.questions[j], self.known[j], float(row[j])) for j in best))
        return found
