"""A gate with its P(known) calibrated and a threshold that was chosen on paired data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rgate_integrations.gates.base import Gate, GateInfo, Score
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.papers.ik import IKGate
from rgate_integrations.gates.probability import ProbabilityMap
from rgate_integrations.gates.scoring import GateOfGates, InnerGate, ScoreSpec
from rgate_integrations.gates.trained import check_model


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

    def score(self, evidence: Evidence) -> Score:
        """Map the inner gate's score.

        Raises:
            ModelLoadError: The score comes from another model than the one that it was calibrated with.
        """
        spec = ScoreSpec(self.inner)
        score, used = evidence[spec], evidence.made_by(spec)
        warnings = score.warnings
        if used.model:  # nothing was read by a model where all evidence was given
            warnings += check_model(self.name, self.proxy, self.fingerprint, used)
        distinct = tuple(dict.fromkeys(warnings))
        return replace(score, p_known=self.probability(score.p_known), warnings=distinct)
