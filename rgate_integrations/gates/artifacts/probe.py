"""A saved linear probe: a weight vector for each hidden state that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from rgate_integrations.decision import DraftSource
from rgate_integrations.gates.artifacts.gate_file import (
    STRICT,
    Count,
    Finite,
    SavedGate,
    Weights,
    check_shape,
)
from rgate_integrations.models.base import PooledLayer

_LEAST_LOGPROB = -20.0  # some servers write -9999 for "never"


@dataclass(frozen=True, config=STRICT)
class EarlyExit:
    """A probe of the question alone, asked first: what it is sure to be known needs no draft.

    Attributes:
        weight: Shape (question layers, hidden size), float32, calibrated: P(known) is the sigmoid of the logit.
        bias: Added to the sum of ``weight * states``.
        p_known: From this probability on the question is known without a draft.
    """

    weight: Weights = field(repr=False, compare=False)
    bias: Finite
    p_known: Finite


@dataclass(frozen=True, config=STRICT)
class LogprobHead:
    """Weighs an LLM's own token log-probabilities against a probe of its words; P(known) is the sigmoid of the sum.

    Attributes:
        text: Weight of the probe's calibrated logit.
        total: Weight of the sum of the log-probabilities.
        least: That of the lowest.
        mean: That of their mean.
        bias: Added to the sum.
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
            logprobs: Natural log-probability of each token that is read, at least one; below -20 they count as -20.
        """
        values = [max(value, _LEAST_LOGPROB) for value in logprobs]
        total = sum(values)
        read = self.total * total + self.least * min(values) + self.mean * total / len(values)
        return self.text * text + read + self.bias


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProbeArtifact(SavedGate):
    """A trained linear probe.

    Attributes:
        weight: Shape (layers, hidden size), float32.
        bias: Added to the sum of ``weight * states``; the result is a logit.
        layers: Which hidden states: (layer, span, pooling) each.
        tokens: Draft tokens that are read; 0 for the question alone.
        source: Who writes the draft.
        slope: Platt calibration of the logit, with `intercept`.
        intercept: See `slope`.
        early_exit: The first look, at the question alone, or None.
        logprobs: Reads the draft's log-probabilities too, where its writer gives them; None reads the words alone.
        system: System turn of the prompt that question and draft stand in; None is that of `ANSWER`.
    """

    method: Literal["probe"] = "probe"
    weight: Weights = field(repr=False, compare=False)
    bias: Finite
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0
    source: DraftSource = "proxy"
    slope: Finite = 1.0
    intercept: Finite = 0.0
    early_exit: EarlyExit | None = None
    logprobs: LogprobHead | None = None
    system: str | None = None

    @property
    def question_layers(self) -> tuple[PooledLayer, ...]:
        """The hidden states that need no draft."""
        return tuple(layer for layer in self.layers if layer.span == "question")

    def __post_init__(self) -> None:
        """Check that there is one vector a layer."""
        check_shape("weight", self.weight, len(self.layers))
        if self.early_exit is not None:
            check_shape("early_exit.weight", self.early_exit.weight, len(self.question_layers))
