"""The content of saved gates: the validated fields of ``gate.json``, and arrays.

Gates with a LoRA adapter and calibrated gates are plain `SavedGate` objects; the others also have weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field, PlainValidator
from pydantic.dataclasses import dataclass

from rgate_integrations.decision import DraftSource, Finite, Probability, Threshold
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import (
    Float32Array,
)

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
"""Pydantic configuration for ``gate.json``, which rejects unknown fields because a file may come from anywhere."""

MIN_LOGPROB = -20.0
"""Lower log-probabilities count as this: such tokens are practically impossible, and some servers write -9999."""


def _check_weights(value: Any) -> Float32Array:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or not np.isfinite(value).all():
        raise ValueError("not a float32 array of finite numbers")
    return value


Weights: TypeAlias = Annotated[Float32Array, PlainValidator(_check_weights)]
"""A float32 array of a saved gate; all its numbers are finite."""
Count: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SavedGate:
    """The fields that all saved gates have.

    Attributes:
        method: Name of the gate, as for `load_gate`.
        base_model: The proxy, the model with which it was trained or calibrated: catalogue name (see ``rgate
            download``), folder or Hub id; empty for none.
        fingerprint: Hash of the proxy's weights (`rgate_integrations.models.base.Proxy.fingerprint`); empty if
            unknown. A calibrated gate's file has it in `parameters` instead.
        llm: Name of the LLM whose answers it was trained on; empty if not recorded.
        threshold: Default threshold, at least 0.
        prompts: Hash of each prompt that it was trained with, by name; with other prompts its scores are meaningless.
        parameters: Other parameters of the gate (if tuned: of the prior), as JSON values.
        provenance: Its origin as JSON values: data, label, seed, recipe, metrics, versions, licence.
    """

    method: str
    base_model: str = ""
    fingerprint: str = ""
    llm: str = ""
    threshold: Threshold = 0.5
    prompts: dict[str, str] = field(default_factory=lambda: {ANSWER.name: ANSWER.hash})
    parameters: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


def check_shape(name: str, array: Float32Array, *shape: int) -> None:
    """Raise a `ValueError` about an array, by its name, if it is empty or has not these axes before its last."""
    if array.shape[:-1] != shape or not array.size:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has the shape {array.shape}, not ({expected}, n) with n > 0")


@dataclass(frozen=True, config=STRICT)
class LogprobHead:
    """Combines a probe's logit with a draft's log-probabilities; P(known) is the sigmoid of a weighted sum.

    Attributes:
        text: Weight of the probe's calibrated logit.
        total: Weight of the sum of the log-probabilities.
        least: Weight of the lowest log-probability.
        mean: Weight of the mean log-probability.
        bias: Added to the weighted sum.
    """

    text: Finite
    total: Finite
    least: Finite
    mean: Finite
    bias: Finite

    def logit(self, text: float, logprobs: Sequence[float]) -> float:
        """Return the logit of P(known).

        Args:
            text: The probe's calibrated logit.
            logprobs: Natural log-probability of each token, at least one; values below -20 count as -20.
        """
        values = np.maximum(logprobs, MIN_LOGPROB)
        confidence = self.total * values.sum() + self.least * values.min() + self.mean * values.mean()
        return float(self.text * text + confidence + self.bias)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProbeArtifact(SavedGate):
    """A trained linear probe: a weighted sum of hidden states that gives the logit of P(known).

    Attributes:
        weight: Weights of the hidden states, shape (layers, hidden size), float32.
        bias: Added to the sum of ``weight * states``; the result is a logit.
        layers: The hidden states to read, as (layer, span, pooling).
        tokens: Maximum number of draft tokens to read; 0 for the question alone.
        source: Who writes the draft.
        slope: Slope of the logit's Platt calibration.
        intercept: Intercept of the calibration.
        logprobs: Weights for the draft's log-probabilities, if it has any; None to read only the words.
        system: System message of the prompt; None for that of `ANSWER`.
    """

    method: Literal["probe"] = "probe"
    weight: Weights = field(repr=False, compare=False)
    bias: Finite
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0
    source: DraftSource = "proxy"
    slope: Finite = 1.0
    intercept: Finite = 0.0
    logprobs: LogprobHead | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one weight vector per layer."""
        check_shape("weight", self.weight, len(self.layers))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TunedArtifact(SavedGate):
    """A correction of another gate, the prior.

    The logit of P(known) is ``slope * prior + weight · states + head · features + bias``; ``prior`` is a logit, too.

    Attributes:
        slope: Factor of the prior's logit.
        bias: Added to the other terms.
        weight: Weights of the hidden states of the question, shape (layers, hidden size), float32.
        head: Weights of the `draft_features` of a partial answer, float32; empty for the question alone.
        layers: The hidden states to read, as (layer, span, pooling).
        tokens: Maximum number of tokens of the partial answer to read; 0 for the question alone.
        least_known: P(known) by the prior clearly below that of all known questions. A lower one is never raised.
    """

    method: Literal["tuned"] = "tuned"
    slope: Finite
    bias: Finite
    weight: Weights = field(repr=False, compare=False)
    head: Weights = field(repr=False, compare=False)
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0
    least_known: Probability = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one weight vector per layer, and the head is a vector."""
        check_shape("weight", self.weight, len(self.layers))
        if self.head.ndim != 1:
            raise ValueError(f"head must be a vector, but has the shape {self.head.shape}")
