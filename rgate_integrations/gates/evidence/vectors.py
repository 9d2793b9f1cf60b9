"""The encoder's sentence vectors of a request and of its segments, from the gate's encoder pass if it has one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.model_outputs import RequestSpec
from rgate_integrations.models.encoder_file import LAYERS
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.runtime.arrays import Float32Array, unit

VECTOR = PooledLayer(LAYERS, "question", "mean")
"""The states whose direction is the sentence vector of the encoder, multilingual-e5-small."""


@dataclass(frozen=True)
class RequestVectors:
    """Sentence vectors of length 1 of a request and its segments.

    Attributes:
        texts: The segments (sentences or lines), in order.
        whole: Vector of the request, shape (384,).
        segments: Vectors of the segments, shape (segments, 384).
    """

    texts: tuple[str, ...]
    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)


@dataclass(frozen=True)
class VectorSpec(EvidenceSpec[RequestVectors]):
    """Evidence: the sentence vectors of a request and of its segments.

    Attributes:
        states: Spec of the encoder's states from which the vectors are taken.
    """

    states: RequestSpec

    def compute(self, context: Context) -> list[Piece[RequestVectors]]:
        """Take the vectors from the encoder's states, and scale them to length 1."""
        whole, segments = self.states.whole.index(VECTOR), self.states.segments.index(VECTOR)
        pieces = []
        for read in context.get(self.states):
            vectors = unit(np.vstack([read.whole[whole], read.segments[:, segments]]))
            pieces.append(Piece(RequestVectors(read.texts, vectors[0], vectors[1:])))
        return pieces
