"""Array types, and arithmetic on vectors and states."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

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

AnyStates: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""Hidden states of any precision."""

# Not `@`, if NumPy is at least 2: BLAS would share the product among threads, which go on spinning for a while.
_dot = getattr(np, "vecdot", np.matmul)

_Vectors = TypeVar("_Vectors", Float32Array, Float64Array)


def unit(vectors: _Vectors) -> _Vectors:
    """Return vectors, shape (vectors, dimension), scaled to length 1. Zero vectors stay zero."""
    # A zero vector stays zero, so that its cosine with anything is 0 and not NaN.
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def multiply(matrix: AnyStates, rows: AnyStates) -> AnyStates:
    """Return the product of a matrix, shape (m, d), with each of n rows, shape (n, d); shape (n, m).

    Row by row: the result of a product of matrices depends on their sizes, and a segment must have the same logits
    in any batch.
    """
    return np.stack([_dot(matrix, row) for row in rows])


def weighted(states: AnyStates, weight: Float32Array) -> Float64Array:
    """Return the weighted sum of each item's states, shape (n,): states are (n, L, H), weights (L, H)."""
    return flatten(states) @ weight.ravel().astype(np.float64)


def flatten(states: AnyStates) -> Float64Array:
    """Return the states of each of n items as one vector, shape (n, d)."""
    return states.reshape(len(states), -1).astype(np.float64)
