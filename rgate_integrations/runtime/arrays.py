"""Array types, and a function that scales vectors to length 1."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
"""Hidden states, embeddings and weights."""

Float64Array: TypeAlias = npt.NDArray[np.float64]
"""Probabilities and statistics."""

BoolArray: TypeAlias = npt.NDArray[np.bool_]
"""Labels and decisions."""

PositionArray: TypeAlias = npt.NDArray[np.int64]
"""Positions in another array."""

_Vectors = TypeVar("_Vectors", Float32Array, Float64Array)


def unit(vectors: _Vectors) -> _Vectors:
    """Return vectors, shape (vectors, dimension), scaled to length 1. Zero vectors stay zero."""
    # A zero vector stays zero, so that its cosine with anything is 0 and not NaN.
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
