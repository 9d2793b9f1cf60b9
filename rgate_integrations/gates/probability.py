"""Probabilities, their logits, and maps from scores to probabilities."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from rgate_integrations.decision import Finite, Frozen, Probability
from rgate_integrations.runtime.arrays import Float64Array

_EDGE = 1e-6  # keeps logits within ±14
# Without a margin, the lowest questions of one half of a log would count as unknown by the other half.
CLEARLY_LESS = 1.0
"""How much lower, in logits, a score must be than those of all known questions to be of another kind."""


class ProbabilityMap(Frozen):
    """A monotone map from scores to probabilities.

    Attributes:
        method: ``"platt"`` scales and shifts the score's logit; ``"none"`` keeps the score.
        slope: Factor of the logit, for ``"platt"``.
        intercept: Added to the scaled logit, for ``"platt"``.
        least_known: A score clearly below those of all questions that the LLM knew. A lower one is never raised,
            because nothing shows that the LLM knows such questions.
    """

    method: Literal["platt", "none"] = "none"
    slope: Finite = 1.0
    intercept: Finite = 0.0
    least_known: Probability = 0.0

    def __call__(self, p: float) -> float:
        """Return the probability for one score in [0, 1]; NaN stays NaN."""
        if self.method == "none":
            return p
        mapped = sigmoid(self.slope * logit(p) + self.intercept)
        return min(mapped, p) if p < self.least_known else mapped


def sigmoid(logit: float) -> float:
    """Return the probability of a logit; NaN stays NaN."""
    # Clipped, because exp overflows above 709.
    return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))


def sigmoids(logits: Float64Array) -> Float64Array:
    """Return the probabilities of logits."""
    return 1 / (1 + np.exp(-np.clip(logits, -500, 500)))


def softmax(logits: Float64Array) -> Float64Array:
    """Return the softmax of each row of logits; each row of the result sums to 1."""
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def logit(p: float) -> float:
    """Return the logit of a probability, which is clipped to [1e-6, 1 - 1e-6]."""
    p = min(max(p, _EDGE), 1 - _EDGE)
    return math.log(p / (1 - p))


def logits(p: Float64Array) -> Float64Array:
    """Return the logits of probabilities, which are clipped to [1e-6, 1 - 1e-6]."""
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    return np.log(clipped) - np.log1p(-clipped)
