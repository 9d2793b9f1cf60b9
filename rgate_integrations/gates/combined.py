"""Gates made of gates: a cascade that drafts only when unsure, and a logistic ensemble."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, FiniteFloat, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.evidence.base import Evidence, Inputs
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs, Threshold
from rgate_integrations.gates.gate_of_gates import GateOfGates, InnerGate
from rgate_integrations.gates.ik import IKGate
from rgate_integrations.gates.scoring import ScoreSpec


def _question_alone() -> Gate:
    return IKGate(tokens=0)


def _with_a_draft() -> Gate:
    return IKGate(tokens=32)


def _both() -> tuple[Gate, ...]:
    return (_question_alone(), _with_a_draft())


class CascadeGate(GateOfGates):
    """Early exit: a cheap gate decides the clear cases, a second one those inside an undecided band.

    P(known) is the first gate's outside the band and the second gate's inside, or where the first one fails. Keep
    the threshold inside the band, or the second gate is never needed.
    `rgate_integrations.calibration.calibrate_band` sets the band.

    Attributes:
        first: The cheap gate; by default the IK score of the question alone.
        second: The thorough gate; by default the IK score after 32 draft tokens.
        low: Below it the first gate's "unknown" stands.
        high: From it on the first gate's "known" stands; above 1 it never does.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "cascade",
        "early exit (this package)",
        "question, then draft if unsure",
        "optional",
        "draft + judgment",
    )
    gate_fields = ("first", "second")

    first: InnerGate = Field(default_factory=_question_alone)
    second: InnerGate = Field(default_factory=_with_a_draft)
    low: Threshold = 0.25
    high: Threshold = 0.75

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``cascade:FIRST,SECOND``, names or folders; threshold and proxy are the second's unless given.

        A probe that is second does not look at the question alone again.
        """
        first, _, name = argument.partition(",")
        if not first or not name:
            raise ConfigurationError(f"{argument!r} does not name two gates.", hint="cascade:FIRST,SECOND")
        second = load(name)
        if "early_exit" in type(second).model_fields:
            second = second.changed(early_exit=False)
        given = {"threshold": second.threshold, "proxy": second.proxy, **options}
        return cls(first=load(first), second=second, **given)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ConfigurationError(f"The band from {self.low} to {self.high} is empty.", hint="low <= high")
        return self

    @property
    def specs(self) -> Specs:
        """The scores of both gates."""
        return (ScoreSpec(self.first), ScoreSpec(self.second))

    def looks(self, inputs: Inputs) -> Sequence[Specs]:
        """Look at the first gate's score, then at the second's."""
        return ((ScoreSpec(self.first),), (ScoreSpec(self.second),))

    def score(self, evidence: Evidence) -> Score | None:
        """Score by the first gate if that is clear, else by the second."""
        first, second = evidence.get(ScoreSpec(self.first)), evidence.get(ScoreSpec(self.second))
        if second is not None:
            return replace(second, signals=_signals([second] if first is None else [second, first]))
        first = evidence[ScoreSpec(self.first)]  # raises what it failed with
        undecided = self.low <= first.p_known < self.high
        return None if undecided else first


class EnsembleGate(GateOfGates):
    """Logistic combination of several gates: sigmoid(bias + sum of weight * logit(p_known)).

    Without weights it is the mean of the logits. Training fits weights and bias. A question that one gate cannot
    score has no score. ``"ensemble:ONE,ANOTHER"`` names the gates.

    Attributes:
        gates: At least one gate.
        weights: One a gate, or empty for equal weights that add up to 1.
        bias: Added to the weighted sum.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "ensemble",
        "logistic combination (this package)",
        "what its gates need",
        "optional",
        "draft + judgment",
    )
    gate_fields = ("gates",)

    gates: tuple[InnerGate, ...] = Field(default_factory=_both, min_length=1)
    weights: tuple[FiniteFloat, ...] = ()
    bias: FiniteFloat = 0.0

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``ensemble:ONE,ANOTHER,…``, names or folders."""
        return cls(gates=tuple(load(name) for name in argument.split(",")), **options)

    @model_validator(mode="after")
    def _one_weight_a_gate(self) -> Self:
        if self.weights and len(self.weights) != len(self.gates):
            raise ConfigurationError(f"{len(self.gates)} gates do not match {len(self.weights)} weights.")
        return self

    @property
    def specs(self) -> Specs:
        """The scores of all gates."""
        return tuple(ScoreSpec(gate) for gate in self.gates)

    def score(self, evidence: Evidence) -> Score:
        """Score by the weighted logits of the gates."""
        scores = [evidence[ScoreSpec(gate)] for gate in self.gates]
        weights = self.weights or (1 / len(scores),) * len(scores)
        total = self.bias
        parts = []
        for gate, score, weight in zip(self.gates, scores, weights, strict=True):
            total += weight * _logit(score.p_known)
            parts.append(f"{getattr(gate, 'artifact', gate.name)} {score.p_known:.2f}")
        p = 1 / (1 + math.exp(-min(max(total, -500.0), 500.0)))
        drafts = [score.draft for score in scores if score.draft is not None]
        warnings = tuple(dict.fromkeys(warning for score in scores for warning in score.warnings))
        reason = f"Known with probability {p:.2f} ({', '.join(parts)})."
        return Score(p, reason, drafts[0] if drafts else None, warnings, _signals(scores))


def _signals(scores: Sequence[Score]) -> dict[str, float]:
    """Return the signals of all scores; of the same name, the first."""
    found: dict[str, float] = {}
    for score in scores:
        found = {**score.signals, **found}
    return found


def _logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))
