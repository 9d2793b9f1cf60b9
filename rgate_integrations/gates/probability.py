"""Probabilities, their logits, and monotone maps between them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rgate_integrations.decision import Frozen
from rgate_integrations.runtime.arrays import Float64Array

Method = Literal["platt", "isotonic", "none"]
_EDGE = 1e-6


class ProbabilityMap(Frozen):
    """A monotone map from scores to probabilities.

    Attributes:
        method: How it was fitted.
        slope: Of the logit (Platt).
        intercept: Of the logit (Platt).
        x: Scores of the steps (isotonic).
        y: Probabilities at the steps, linear between them (isotonic).
    """

    method: Method = "none"
    slope: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    intercept: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __call__(self, p: float) -> float:
        """Map one score in [0, 1]; NaN stays NaN."""
        if self.method == "none" or math.isnan(p):
            return p
        if self.method == "isotonic":
            return float(np.interp(p, self.x, self.y))
        return sigmoid(self.slope * logit(p) + self.intercept)


def sigmoid(logit: float) -> float:
    """Return the probability of a logit."""
    return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))


def logit(p: float) -> float:
    """Return the logit of a probability, which is clipped away from 0 and 1."""
    p = min(max(p, _EDGE), 1 - _EDGE)
    return math.log(p / (1 - p))


def logits(p: Float64Array) -> Float64Array:
    """Return the logits of probabilities, clipped away from 0 and 1."""
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    found: Float64Array = np.log(clipped) - np.log1p(-clipped)
    return found
