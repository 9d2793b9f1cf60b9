"""Gates made of gates: a cascade that drafts only when unsure, and a logistic ensemble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, FiniteFloat, PlainSerializer, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.evidence import Evidence, EvidenceSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Threshold
from rgate_integrations.gates.collector import Collector
from rgate_integrations.gates.ik import IKGate


def _as_gate(value: Any) -> Any:
    from rgate_integrations.gates import gate_from_config, load_gate

    if isinstance(value, str):
        return load_gate(value)
    return gate_from_config(value) if isinstance(value, dict) else value


InnerGate = Annotated[Gate, BeforeValidator(_as_gate), PlainSerializer(lambda g: g.config())]
"""A gate inside another one: a `Gate`, a name for `load_gate`, or a config. It uses the outer gate's proxy."""


class WrappingGate(Gate):
    """A gate around another one, whose evidence it needs.

    Attributes:
        inner: The other gate.
    """

    inner: InnerGate = Field(default_factory=IKGate)

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """What the inner gate needs."""
        return self.inner.specs

    @property
    def all_specs(self) -> tuple[EvidenceSpec, ...]:
        """Everything the inner gate may need."""
        return self.inner.all_specs


class CascadeGate(Gate):
    """Early exit: a cheap gate decides the clear cases, a second one those inside an undecided band.

    P(known) is the first gate's outside the band and the second gate's inside. Keep the threshold inside the
    band, or the second gate is never needed. `rgate_integrations.calibration.calibrate_band` sets the band.

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

    first: InnerGate = Field(default_factory=lambda: IKGate(tokens=0))
    second: InnerGate = Field(default_factory=lambda: IKGate(tokens=32))
    low: Threshold = 0.25
    high: Threshold = 0.75

    @classmethod
    def from_argument(cls, argument: str, **options: Any) -> Self:
        """Read ``cascade:FIRST,SECOND``, names or folders; threshold and proxy are the second's unless given.

        A probe that is second does not look at the question alone again.
        """
        from rgate_integrations.gates import load_gate

        first, _, name = argument.partition(",")
        if not first or not name:
            raise ConfigurationError(f"{argument!r} does not name two gates.", hint="cascade:FIRST,SECOND")
        second = load_gate(name)
        if "early_exit" in type(second).model_fields:
            second = second.with_options(early_exit=False)
        given = {"threshold": second.threshold, "proxy": second.proxy, **options}
        return cls(first=load_gate(first), second=second, **given)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ConfigurationError(f"The band from {self.low} to {self.high} is empty.", hint="low <= high")
        return self

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """What the first gate needs."""
        return self.first.all_specs

    @property
    def all_specs(self) -> tuple[EvidenceSpec, ...]:
        """What both gates may need."""
        return (*self.first.all_specs, *self.second.all_specs)

    def score(self, evidence: Evidence) -> Score:
        """Score by the first gate; `scores` adds the second where it is needed."""
        return self.first.score(evidence)

    def scores(self, collector: Collector, indices: Sequence[int]) -> dict[int, Score | Exception]:
        """Run the first gate on all, the second on those inside the band."""
        found = self.first.scores(collector, indices)
        unsure = [
            i for i, s in found.items() if isinstance(s, Exception) or self.low <= s.p_known < self.high
        ]
        for i, second in self.second.scores(collector, unsure).items():
            if isinstance(second, Score):
                second = replace(second, cost=collector.cost(self.all_specs, i))
            found[i] = second
        return found


class EnsembleGate(Gate):
    """Logistic combination of several gates: sigmoid(bias + sum of weight * logit(p_known)).

    Without weights it is the mean of the logits. Training fits weights and bias.

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

    gates: tuple[InnerGate, ...] = Field(
        default_factory=lambda: (IKGate(tokens=0), IKGate(tokens=32)), min_length=1
    )
    weights: tuple[FiniteFloat, ...] = ()
    bias: FiniteFloat = 0.0

    @model_validator(mode="after")
    def _one_weight_a_gate(self) -> Self:
        if self.weights and len(self.weights) != len(self.gates):
            raise ConfigurationError(f"{len(self.gates)} gates do not match {len(self.weights)} weights.")
        return self

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """What all gates need."""
        return tuple(spec for g in self.gates for spec in g.all_specs)

    def score(self, evidence: Evidence) -> Score:
        """Score by the weighted logits of the gates."""
        return self._combined([g.score(evidence) for g in self.gates])

    def scores(self, collector: Collector, indices: Sequence[int]) -> dict[int, Score | Exception]:
        """Run every gate on all and combine; a question that one gate cannot score has no score."""
        each = [g.scores(collector, indices) for g in self.gates]
        combined: dict[int, Score | Exception] = {}
        for i in indices:
            scores = [found[i] for found in each]
            failed = next((s for s in scores if isinstance(s, Exception)), None)
            if failed is None:
                score = self._combined([s for s in scores if isinstance(s, Score)])
                combined[i] = replace(score, cost=collector.cost(self.specs, i))
            else:
                combined[i] = failed
        return combined

    def _combined(self, scores: Sequence[Score]) -> Score:
        weights = self.weights or (1 / len(scores),) * len(scores)
        total = self.bias + sum(w * _logit(s.p_known) for w, s in zip(weights, scores, strict=True))
        p = 1 / (1 + math.exp(-min(max(total, -500.0), 500.0)))
        draft = next((s.draft for s in scores if s.draft is not None), None)
        parts = ", ".join(f"{g.info.name} {s.p_known:.2f}" for g, s in zip(self.gates, scores, strict=True))
        return Score(p, f"Combined from {parts}.", draft)


def _logit(p: float) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    return math.log(p / (1 - p))
