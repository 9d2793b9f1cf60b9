"""A linear probe on the proxy's hidden states: one weight vector a layer, and one forward pass."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.evidence import DraftSpec, Evidence, EvidenceSpec, HiddenSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score
from rgate_integrations.training.artifact import ProbeArtifact, read_artifact


class ProbeGate(Gate):
    """A trained linear probe on pooled hidden states of the middle layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``: h are the pooled states of the artefact's blocks,
    slope and intercept its calibration. Trained by ``rgate train --gate probe``; the shipped gates are probes.

    Attributes:
        artifact: Folder of a trained probe, or the name of a shipped one.
        threshold: The artefact's, unless given.
        proxy: The model it was trained on, unless given: the same model may have another name or folder here.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "probe",
        "linear probe (Azaria & Mitchell 2023)",
        "hidden states of question and draft",
        "yes",
        "draft",
    )

    artifact: str

    @model_validator(mode="before")
    @classmethod
    def _from_artifact(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("artifact"), str):
            trained = read_artifact(values["artifact"])
            return {"threshold": trained.threshold, "proxy": trained.base_model, **values}
        return values

    @classmethod
    def from_argument(cls, argument: str, **options: Any) -> Self:
        """Read ``probe:FOLDER``."""
        return cls(artifact=argument, **options)

    @property
    def trained(self) -> ProbeArtifact:
        """The trained probe."""
        return read_artifact(self.artifact)

    @property
    def _draft_spec(self) -> DraftSpec | None:
        trained = self.trained
        return DraftSpec(trained.tokens, trained.source) if trained.tokens else None

    @property
    def _hidden(self) -> HiddenSpec:
        return HiddenSpec(self.trained.blocks, self._draft_spec)

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """The pooled hidden states, and the draft they are read over."""
        return (*((self._draft_spec,) if self._draft_spec else ()), self._hidden)

    def score(self, evidence: Evidence) -> Score:
        """Score by the calibrated probe.

        Raises:
            ModelLoadError: The proxy's hidden size is not that of the model the probe was trained on.
        """
        trained, states = self.trained, evidence.hidden(self._hidden)
        if states.shape != trained.weight.shape:
            raise ModelLoadError(
                f"The probe {self.artifact!r} was trained on {trained.base_model!r} (states of shape "
                f"{trained.weight.shape}), but {self.proxy!r} gives {states.shape}.",
                hint=f"Load it with proxy={trained.base_model!r}, or train a probe for this model.",
            )
        logit = trained.slope * (float(np.sum(trained.weight * states)) + trained.bias) + trained.intercept
        p = 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))
        draft = evidence.draft(self._draft_spec) if self._draft_spec else None
        read = "question and draft" if draft is not None else "question"
        return Score(
            p, f"A probe trained on {trained.llm} reads {read}: known with probability {p:.2f}.", draft
        )
