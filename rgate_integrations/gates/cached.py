"""A gate that remembers: the same question, or one that is nearly the same, is judged once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, PrivateAttr

from rgate_integrations.decision import Cost
from rgate_integrations.evidence import Evidence
from rgate_integrations.gates.base import GateInfo, Score
from rgate_integrations.gates.collector import Collector
from rgate_integrations.gates.combined import WrappingGate

Vector = npt.NDArray[np.float32]


class Memory:
    """The scores of the latest questions, safe for threads; it is pickled and copied empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Score, Vector | None]] = OrderedDict()

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()

    def __len__(self) -> int:
        return len(self._known)

    def exact(self, keys: Mapping[int, str]) -> dict[int, Score]:
        """Return the score of each question that was asked before."""
        with self._lock:
            found = {i: key for i, key in keys.items() if key in self._known}
            for key in found.values():
                self._known.move_to_end(key)
            return {i: _again(self._known[key][0], "asked before") for i, key in found.items()}

    def near(self, vectors: Mapping[int, Vector], similarity: float) -> dict[int, Score]:
        """Return the score of the nearest question for each that is near enough to one."""
        with self._lock:
            places = [(key, score, v) for key, (score, v) in self._known.items() if v is not None]
            if not places:
                return {}
            cosines = np.stack(list(vectors.values())) @ np.stack([v for _, _, v in places]).T
            found = {}
            for i, row in zip(vectors, cosines, strict=True):
                key, score, _ = places[int(row.argmax())]
                if row.max() >= similarity:
                    self._known.move_to_end(key)
                    found[i] = _again(score, f"cosine {row.max():.2f} to {key!r}")
            return found

    def put(self, key: str, score: Score, vector: Vector | None, size: int) -> None:
        """Remember a score, and forget the question that was not asked for longest."""
        with self._lock:
            self._known[key] = score, vector
            while len(self._known) > size:
                self._known.popitem(last=False)


class CachedGate(WrappingGate):
    """Reuses the scores of another gate, in memory.

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

    _memory: Memory = PrivateAttr(default_factory=Memory)

    def score(self, evidence: Evidence) -> Score:
        """Score by the gate, without the memory."""
        return self.inner.score(evidence)

    def scores(self, collector: Collector, indices: Sequence[int]) -> dict[int, Score | Exception]:
        """Look questions up; let the gate score the others, and remember them."""
        keys = {
            i: " ".join(collector.inputs[i].question.casefold().split())
            for i in indices
            if collector.inputs[i].draft is None and collector.inputs[i].popularity is None
        }
        found: dict[int, Score] = self._memory.exact(keys)
        vectors: dict[int, Vector] = {}
        if self.similarity is not None and len(found) < len(keys):
            from rgate_integrations.index.embedder import SentenceEmbedder

            new = [i for i in keys if i not in found]
            # The question as it is: who else embeds it shares the vector.
            asked = [collector.inputs[i].question for i in new]
            vectors = dict(zip(new, SentenceEmbedder(self.embedder).embed_queries(asked), strict=True))
            found |= self._memory.near(vectors, self.similarity)
        fresh = self.inner.scores(collector, [i for i in indices if i not in found])
        for i, score in fresh.items():
            if i in keys and isinstance(score, Score):
                self._memory.put(keys[i], score, vectors.get(i), self.size)
        return {**found, **fresh}


def _again(score: Score, why: str) -> Score:
    return replace(score, reason=f"{score.reason} (Reused: {why}.)", cost=Cost())
