"""The encoder's sentence vectors of a request and of its segments, from a pass that a gate has it read in anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece, expand_specs
from rgate_integrations.gates.evidence.model_outputs import RequestSpec
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.encoder_file import LAYERS
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.runtime.arrays import Float32Array

VECTOR = PooledLayer(LAYERS, "question", "mean")
"""The states whose direction is e5's sentence vector."""


@dataclass(frozen=True)
class RequestVectors:
    """A request and its segments as the encoder embeds them.

    Attributes:
        texts: The segments, in order.
        whole: Vector of all of it, shape (384,), of length 1.
        segments: Those of each segment, shape (segments, 384).
    """

    texts: tuple[str, ...]
    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)


@dataclass(frozen=True)
class VectorSpec(EvidenceSpec[RequestVectors]):
    """Sentence vectors of a request.

    Attributes:
        states: The pass that they are taken from.
    """

    states: RequestSpec

    @classmethod
    def shared_with(cls, specs: Sequence[EvidenceSpec[object]]) -> VectorSpec:
        """Return vectors that are taken from the pass of other evidence, if there is one, or else from their own."""
        for spec in expand_specs(specs):
            if not isinstance(spec, RequestSpec) or spec.model != ENCODER:
                continue
            if VECTOR in spec.whole and VECTOR in spec.segments:
                return cls(spec)
        return cls(RequestSpec((VECTOR,), (VECTOR,), model=ENCODER))

    def compute(self, context: Context) -> list[Piece[RequestVectors]]:
        """Take the last layer of the states."""
        whole, segments = self.states.whole.index(VECTOR), self.states.segments.index(VECTOR)
        pieces = []
        for read in context.get(self.states):
            vectors = np.vstack([read.whole[whole], read.segments[:, segments]])
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            pieces.append(Piece(RequestVectors(read.texts, vectors[0], vectors[1:])))
        return pieces
