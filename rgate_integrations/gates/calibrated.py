"""A gate with a calibrated P(known) and a new threshold, from questions answered with and without retrieval."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, InnerGate, Score, ScoreSpec, Specs, share_with_inner
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.papers.verdicts import IKGate
from rgate_integrations.gates.probability import ProbabilityMap


class CalibratedGate(Gate):
    """Maps another gate's scores to probabilities; made by ``rgate calibrate``.

    Proxy and threshold default to those of the given inner gate.

    Attributes:
        inner: The gate whose scores are mapped.
        probability: The map from the inner gate's scores to probabilities.
        fingerprint: Hash of the weights of the model with which it was calibrated (`Proxy.fingerprint`); empty if
            unknown, or if no model reads the question.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "calibrated", "Platt 1999; Learn then Test (2021)", "what its gate needs", "yes", "draft + judgment"
    )
    gate_fields = ("inner",)
    judges_llm = True  # its threshold was chosen for one LLM

    inner: InnerGate = Field(default_factory=IKGate)
    probability: ProbabilityMap = Field(default_factory=ProbabilityMap)
    fingerprint: str = ""

    @model_validator(mode="before")
    @classmethod
    def _share_parameters(cls, values: Any) -> Any:
        return share_with_inner(values, "inner", ["proxy"], "threshold")

    @property
    def specs(self) -> Specs:
        """The spec of the inner gate's score."""
        return (ScoreSpec(self.inner),)

    @property
    def trained(self) -> SavedGate:
        """A `SavedGate` with this gate's `fingerprint`, which is compared with the proxy's fingerprint."""
        return SavedGate(method=self.name, base_model=self.proxy, fingerprint=self.fingerprint)

    def score(self, evidence: Evidence) -> Score:
        """Return the inner gate's score with its P(known) mapped by `probability`."""
        score = evidence[ScoreSpec(self.inner)]
        p = self.probability(score.p_known)
        # The inner gate's threshold, and what it says of it, do not apply to the mapped probability.
        reason = f"{score.reason} Calibrated, P(known) is {p:.2f}.".strip()
        return replace(score, p_known=p, threshold=None, reason=reason, caveat="")
