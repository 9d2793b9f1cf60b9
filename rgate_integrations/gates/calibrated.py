"""A gate with its P(known) calibrated and a threshold that was chosen on paired data."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rgate_integrations.artifacts.folder import TrainedOn, check_fingerprint
from rgate_integrations.decision import Frozen
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.gate_of_gates import GateOfGates, InnerGate
from rgate_integrations.gates.papers.ik import IKGate
from rgate_integrations.gates.scoring import ScoreSpec
from rgate_integrations.runtime.arrays import Float64Array

Method = Literal["platt", "temperature", "isotonic", "none"]
_EDGE = 1e-6


class ProbabilityMap(Frozen):
    """A monotone map from scores to probabilities.

    Attributes:
        method: How it was fitted.
        slope: Of the logit (Platt, temperature).
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
        if self.method == "none" or np.isnan(p):
            return p
        if self.method == "isotonic":
            return float(np.interp(p, self.x, self.y))
        logit = self.slope * float(logits(np.array([p]))[0]) + self.intercept
        return float(1 / (1 + np.exp(-np.clip(logit, -500, 500))))


def logits(p: Float64Array) -> Float64Array:
    """Return the logits of probabilities, clipped away from 0 and 1."""
    clipped = np.clip(p, _EDGE, 1 - _EDGE)
    found: Float64Array = np.log(clipped) - np.log1p(-clipped)
    return found


class CalibratedGate(GateOfGates):
    """Another gate whose scores are mapped to probabilities; made by ``rgate calibrate``.

    It decides by the other gate's threshold unless it has its own.

    Attributes:
        inner: The gate whose scores are mapped.
        probability: The map.
        fingerprint: `Proxy.fingerprint` of the model that it was calibrated with; empty if
            unknown, or if no model reads the question.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "calibrated", "Platt 1999; Learn then Test (2021)", "what its gate needs", "yes", "draft + judgment"
    )
    gate_fields = ("inner",)

    inner: InnerGate = Field(default_factory=IKGate)
    probability: ProbabilityMap = Field(default_factory=ProbabilityMap)
    fingerprint: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_its_threshold(cls, values: Any) -> Any:
        inner = values.get("inner") if isinstance(values, dict) else None
        return {"threshold": inner.threshold, **values} if isinstance(inner, Gate) else values

    def for_llm(self, name: str, known_by: str = "") -> Self:
        """Return the gate itself: its map holds for the LLM that it was calibrated with."""
        return self

    @property
    def specs(self) -> Specs:
        """The inner gate's score."""
        return (ScoreSpec(self.inner),)

    def score(self, evidence: Evidence) -> Score:
        """Map the inner gate's score.

        Raises:
            ModelLoadError: The score comes from another model than the one that it was calibrated with.
        """
        spec = ScoreSpec(self.inner)
        score, used = evidence[spec], evidence.made_by(spec)
        warnings: tuple[str, ...] = ()
        if used.model:  # nothing was read by a model where all evidence was given
            base = TrainedOn(self.proxy, self.fingerprint)
            warnings = check_fingerprint(self.name, base, used.model, used.fingerprint)
        distinct = tuple(dict.fromkeys((*score.warnings, *warnings)))
        return replace(score, p_known=self.probability(score.p_known), warnings=distinct)
