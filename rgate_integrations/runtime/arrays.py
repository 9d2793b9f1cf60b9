"""Array types."""

from __future__ import annotations

from typing import TypeAlias

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
