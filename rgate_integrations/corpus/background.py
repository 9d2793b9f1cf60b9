"""What all profiles share: a projection that spreads sentence vectors apart, and vectors of unrelated requests.

The encoder's sentence vectors are close together, and those of one language even closer. So the projection removes
the mean of questions or passages and the directions that distinguish languages, and scales the other directions
towards equal variance. ``benchmarks/corpora.py --write`` makes ``background.npz``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array, unit

FILE = Path(__file__).with_name("background.npz")


@dataclass(frozen=True)
class Background:
    """A projection of the encoder's sentence vectors, and requests that need no corpus.

    Attributes:
        question_mean: Mean vector of questions, shape (384,).
        passage_mean: Mean vector of passages, shape (384,).
        directions: Projection matrix, applied after one of these means is subtracted, shape (384, 256).
        requests: Projected vectors of requests that need no corpus, such as small talk, shape (requests, 256).
    """

    question_mean: Float32Array
    passage_mean: Float32Array
    directions: Float32Array
    requests: Float32Array

    def project_questions(self, vectors: Float32Array) -> Float32Array:
        """Return the projections, of length 1 and shape (questions, 256), of vectors of shape (questions, 384)."""
        return unit(np.float32(vectors - self.question_mean) @ self.directions)

    def project_passages(self, vectors: Float32Array) -> Float32Array:
        """Return the projections, of length 1 and shape (passages, 256), of vectors of shape (passages, 384)."""
        return unit(np.float32(vectors - self.passage_mean) @ self.directions)


@cache
def background() -> Background:
    """Return the shipped `Background`, which is loaded once per process."""
    saved = {name: array.astype(np.float32) for name, array in np.load(FILE).items()}
    return Background(**saved | {"requests": unit(saved["requests"])})
