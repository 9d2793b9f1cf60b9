"""What a corpus is compared with: requests that need nothing, and directions in which texts differ.

The encoder's sentence vectors lie close together, and those of one language still closer. So they are compared
without what all questions share, or all passages; without what tells languages apart; and with every other direction
scaled towards the same variance. ``benchmarks/corpora.py --write`` makes the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array

FILE = Path(__file__).with_name("background.npz")


@dataclass(frozen=True)
class Background:
    """Directions, and requests that need nothing.

    Attributes:
        question_mean: Mean vector of questions, shape (384,).
        passage_mean: That of passages.
        directions: What a vector without its mean is multiplied by, shape (384, directions).
        requests: Directions of requests that need nothing, of no corpus, shape (requests, directions).
    """

    question_mean: Float32Array
    passage_mean: Float32Array
    directions: Float32Array
    requests: Float32Array

    def compare_questions(self, vectors: Float32Array) -> Float32Array:
        """Return the directions of questions, of length 1, shape (questions, directions)."""
        return unit(np.float32(vectors - self.question_mean) @ self.directions)

    def compare_passages(self, vectors: Float32Array) -> Float32Array:
        """Return the directions of passages, of length 1, shape (passages, directions)."""
        return unit(np.float32(vectors - self.passage_mean) @ self.directions)


@cache
def background() -> Background:
    """Return what ships with the package."""
    saved = {name: array.astype(np.float32) for name, array in np.load(FILE).items()}
    return Background(**saved | {"requests": unit(saved["requests"])})


def unit(vectors: Float32Array) -> Float32Array:
    """Return vectors of length 1; those of length 0 stay so."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Float32Array = vectors / np.maximum(lengths, 1e-12)
    return found
