"""A saved tuned gate: a correction of another gate's logit, with that gate beside it in the same folder."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from rgate_integrations.gates.artifacts.gate_file import (
    STRICT,
    Count,
    Finite,
    SavedGate,
    Weights,
    check_shape,
)
from rgate_integrations.models.base import PooledLayer

PRIOR = "prior"
"""Sub-folder of the gate whose logit is corrected."""

ANSWER_FIRST = "answer-first"
"""Sub-folder of the gate that judges begun answers."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TunedArtifact(SavedGate):
    """A correction of another gate, the prior: ``slope * prior + weight · states + head · features + bias``.

    Attributes:
        slope: Of the prior's logit.
        bias: Added.
        weight: Of the hidden states of the question, shape (layers, hidden size), float32.
        head: Of the features of a begun answer's log-probabilities, float32; empty for the question alone.
        layers: Which hidden states: (layer, span, pooling) each.
        tokens: How many tokens of the begun answer are read; 0 for the question alone.
    """

    method: Literal["tuned"] = "tuned"
    slope: Finite
    bias: Finite
    weight: Weights = field(repr=False, compare=False)
    head: Weights = field(repr=False, compare=False)
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0

    def __post_init__(self) -> None:
        """Check that there is one vector a layer."""
        check_shape("weight", self.weight, len(self.layers))
        if self.head.ndim != 1:
            raise ValueError(f"head has the shape {self.head.shape}, not that of a vector")
