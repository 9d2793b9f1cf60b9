"""A gate that remembers: the same question, or one that is nearly the same, is judged once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from rgate_integrations.arrays import Float32Array
from rgate_integrations.evidence.base import Context, Evidence, EvidenceSpec, Inputs, Piece
from rgate_integrations.evidence.embedding import EmbeddingSpec
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.gate_of_gates import WrappingGate
from rgate_integrations.gates.scoring import ScoreSpec
from rgate_integrations.processes import reset_after_fork


class CachedGate(WrappingGate):
    """Reuses the scores of another gate, as long as its engine lives.

    Scores are kept, not decisions: a changed threshold takes effect at once. A copy with other options begins with an
    empty memory. A question that comes with a draft or a popularity is always judged: they are evidence. Failures
    are not kept.

    Attributes:
        inner: The gate that judges what is new.
        size: How many questions are remembered.
        similarity: Cosine in (0, 1] from which on two questions count as one; None for repetitions only, but for
            case and white space. Questions about two entities of a kind are near 0.8 with MiniLM.
        embedder: Sentence embedder for ``similarity``.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "cached", "decision cache (this package)", "earlier questions", "optional", "draft + judgment"
    )

    size: int = Field(default=10_000, ge=1)
    similarity: float | None = Field(default=None, gt=0.0, le=1.0)
    embedder: str = "all-minilm-l6-v2"

    @property
    def _remembered(self) -> RememberedScore:
        return RememberedScore(self._judged, self.size, self.similarity, self.embedder)

    @property
    def specs(self) -> Specs:
        """The inner gate's score, of now or of before."""
        return (self._remembered,)

    def score(self, evidence: Evidence) -> Score:
        """Score as the inner gate does or did."""
        return evidence[self._remembered]


@dataclass(frozen=True)
class RememberedScore(EvidenceSpec[Score]):
    """A gate's score of a question, or of one that was asked before and counts as the same.

    Attributes:
        judged: The score that is remembered.
        size: How many questions are remembered.
        similarity: Cosine from which on two questions count as one; None for repetitions only.
        embedder: Sentence embedder for ``similarity``.
    """

    reads_model: ClassVar[bool] = False  # if a model reads the question, the gate's own specs say so

    judged: ScoreSpec
    size: int
    similarity: float | None
    embedder: str

    @property
    def may_need(self) -> tuple[EvidenceSpec[Any], ...]:
        """The score of what is new, and the embedding if there is a similarity."""
        if self.similarity is None:
            return (self.judged,)
        return (self.judged, EmbeddingSpec(self.embedder))

    def compute(self, context: Context) -> list[Piece[Score] | Exception]:
        """Look questions up; let the gate score the others, and remember them."""
        memory = context.memory(self, Memory)
        keys = {place: _key(each) for place, each in enumerate(context.inputs) if not _has_evidence(each)}
        found = memory.same(keys)
        vectors = self._vectors(context, [place for place in keys if place not in found])
        found |= memory.near(vectors, self.similarity or 1.0)
        outcomes: dict[int, Piece[Score] | Exception] = {p: Piece(score) for p, score in found.items()}
        new = [place for place in range(len(context.inputs)) if place not in found]
        scores = context.part(new).find(self.judged)
        for place, score in zip(new, scores, strict=True):
            if isinstance(score, Exception):
                outcomes[place] = score
                continue
            outcomes[place] = Piece(score)
            if place in keys:
                memory.put(keys[place], score, vectors.get(place), self.size)
        return [outcomes[place] for place in range(len(context.inputs))]

    def _vectors(self, context: Context, places: list[int]) -> dict[int, Float32Array]:
        if self.similarity is None or not places:
            return {}
        embedded = context.part(places).find(EmbeddingSpec(self.embedder))
        vectors = {}
        for place, vector in zip(places, embedded, strict=True):
            if isinstance(vector, Exception):
                raise vector
            vectors[place] = vector
        return vectors


class Memory:
    """The scores of the latest questions, safe for threads."""

    def __init__(self) -> None:
        self.after_fork()
        reset_after_fork(self)
        self._known: OrderedDict[str, tuple[Score, Float32Array | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def after_fork(self) -> None:
        """Forget whoever held the lock in the parent."""
        self._lock = threading.Lock()

    def same(self, keys: Mapping[int, str]) -> dict[int, Score]:
        """Return the score of each question that was asked before."""
        found = {}
        with self._lock:
            for place, key in keys.items():
                if key in self._known:
                    self._known.move_to_end(key)
                    found[place] = _again(self._known[key][0], "asked before")
        return found

    def near(self, vectors: Mapping[int, Float32Array], similarity: float) -> dict[int, Score]:
        """Return the score of the nearest question for each that is near enough to one."""
        found = {}
        with self._lock:
            known = [(key, score, v) for key, (score, v) in self._known.items() if v is not None]
            if not known or not vectors:
                return {}
            cosines = np.stack(list(vectors.values())) @ np.stack([v for _, _, v in known]).T
            for place, row in zip(vectors, cosines, strict=True):
                key, score, _ = known[int(row.argmax())]
                if row.max() >= similarity:
                    self._known.move_to_end(key)
                    found[place] = _again(score, f"cosine {row.max():.2f} to {key!r}")
        return found

    def put(self, key: str, score: Score, vector: Float32Array | None, size: int) -> None:
        """Remember a score, and forget the question that was not asked for longest."""
        with self._lock:
            self._known[key] = score, vector
            while len(self._known) > size:
                self._known.popitem(last=False)


def _has_evidence(inputs: Inputs) -> bool:
    """Return whether a question brings evidence of its own, so that it is not the same as another."""
    return inputs.draft is not None or inputs.popularity is not None


def _key(inputs: Inputs) -> str:
    return " ".join(inputs.question.casefold().split())


def _again(score: Score, why: str) -> Score:
    return replace(score, reason=f"{score.reason} (Reused: {why}.)")
