"""A linear probe on the proxy's hidden states: one weight vector a layer, and one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.artifacts.folder import TrainedOn, check_fingerprint
from rgate_integrations.artifacts.probe import EarlyExit, ProbeArtifact, read_probe
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.evidence.base import Evidence, Inputs
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.evidence.hidden import HiddenSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.prompts import PromptTemplate, answering


class ProbeGate(Gate):
    """A trained linear probe on pooled hidden states of the middle layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``: h are the pooled states of the artefact's layers,
    slope and intercept its calibration. Trained by ``rgate train --gate probe``; the shipped gates are probes.

    Some probes also read the log-probabilities that the draft's writer gives. Without them they judge the words
    alone. The reason says what was read.

    A probe of the question alone may come first (early exit): what it finds clearly known needs no draft. It is
    not asked where a draft is given.

    Attributes:
        artifact: Folder of a trained probe, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
        early_exit: Whether clearly known questions are decided without a draft, if the artefact can.
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
    trained: SkipValidation[ProbeArtifact] = Field(
        default=cast(ProbeArtifact, None), exclude=True, repr=False
    )  # never None: it is read with the other parameters
    early_exit: bool = True

    @model_validator(mode="before")
    @classmethod
    def _from_artifact(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("artifact"), str):
            return values
        trained = values.get("trained") or read_probe(values["artifact"])
        return {"threshold": trained.threshold, "proxy": trained.base_model, **values, "trained": trained}

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``probe:FOLDER``."""
        return cls.model_validate({"artifact": argument, **options})

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact reads it."""
        if "artifact" in parameters:
            parameters = {"trained": None, **parameters}
        return super().changed(**parameters)

    @property
    def _prompt(self) -> PromptTemplate:
        return answering(self.trained.system)

    @property
    def _draft_spec(self) -> DraftSpec | None:
        trained = self.trained
        return DraftSpec(trained.tokens, trained.source, self._prompt) if trained.tokens else None

    @property
    def _hidden(self) -> HiddenSpec:
        return HiddenSpec(self.trained.layers, self._draft_spec, self._prompt)

    @property
    def _question_alone(self) -> HiddenSpec | None:
        early = self.trained.early_exit
        if not self.early_exit or early is None:
            return None
        return HiddenSpec(self.trained.question_layers, prompt=self._prompt)

    @property
    def _second_look(self) -> Specs:
        return (self._hidden,) if self._draft_spec is None else (self._draft_spec, self._hidden)

    @property
    def specs(self) -> Specs:
        """The pooled hidden states and the draft they are read over; for a first look, those of the question."""
        if self._question_alone is None:
            return self._second_look
        return (self._question_alone, *self._second_look)

    def looks(self, inputs: Inputs) -> Sequence[Specs]:
        """Look at the question alone, then draft; at the draft at once where one is given."""
        if self._question_alone is None or inputs.draft is not None:
            return (self._second_look,)
        return ((self._question_alone,), self._second_look)

    def score(self, evidence: Evidence) -> Score | None:
        """Score by the calibrated probe; None if the question alone is not clearly known.

        Raises:
            ModelLoadError: The states are not those of the model that the probe was trained on.
        """
        trained, early, first = self.trained, self.trained.early_exit, self._question_alone
        if early is not None and first is not None and self._hidden not in evidence:
            return self._first_score(evidence, first, early)
        warnings = self._check(evidence, self._hidden, trained.weight.shape)
        logit = float(np.sum(trained.weight * evidence[self._hidden])) + trained.bias
        logit = trained.slope * logit + trained.intercept
        if self._draft_spec is None:
            p = _sigmoid(logit)
            return Score(p, self._reason("question", p), warnings=warnings)
        draft = evidence[self._draft_spec]
        read = "question and draft"
        # What another model thinks of the draft (`scored_by`) is not what its writer thought.
        if trained.logprobs is not None and draft.logprobs and not draft.scored_by:
            logit = trained.logprobs.logit(logit, draft.logprobs)
            read = "question, draft and its log-probabilities"
        p = _sigmoid(logit)
        return Score(p, self._reason(read, p), draft, warnings)

    def _first_score(self, evidence: Evidence, spec: HiddenSpec, early: EarlyExit) -> Score | None:
        warnings = self._check(evidence, spec, early.weight.shape)
        p = _sigmoid(float(np.sum(early.weight * evidence[spec])) + early.bias)
        clear = p >= max(early.p_known, self.threshold)
        return Score(p, self._reason("question", p), warnings=warnings) if clear else None

    def _check(self, evidence: Evidence, spec: HiddenSpec, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Check that states are of the model that the probe was trained on; returns warnings."""
        trained, used = self.trained, evidence.made_by(spec)
        base = TrainedOn(trained.base_model, trained.fingerprint)
        warnings = check_fingerprint(self.artifact, base, used.model, used.fingerprint)
        if evidence[spec].shape != shape:
            raise ModelLoadError(
                f"The probe {self.artifact!r} was trained on {trained.base_model!r} (states of shape {shape}), but "
                f"{used.model!r} gives {evidence[spec].shape}.",
                hint=f"Load it with proxy={trained.base_model!r}, or train a probe for this model.",
            )
        return warnings

    def _reason(self, read: str, p: float) -> str:
        return f"A probe trained on {self.trained.llm} reads {read}: known with probability {p:.2f}."


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))
