"""A linear probe on the proxy's hidden states: one weight vector a layer, and one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, SkipValidation

from rgate_integrations.gates.artifacts.probe import ProbeArtifact
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence, Inputs
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec
from rgate_integrations.gates.probability import sigmoid
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.prompts import PromptTemplate, answering


class ProbeGate(TrainedGate):
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
    kind = ProbeArtifact

    trained: SkipValidation[ProbeArtifact] = Field(exclude=True, repr=False)
    early_exit: bool = True

    @property
    def _prompt(self) -> PromptTemplate:
        return answering(self.trained.system)

    @property
    def _draft(self) -> DraftSpec | None:
        trained = self.trained
        return DraftSpec(trained.tokens, trained.source, self._prompt) if trained.tokens else None

    @property
    def _hidden(self) -> HiddenSpec:
        return HiddenSpec(self.trained.layers, self._draft, self._prompt)

    @property
    def _question_alone(self) -> HiddenSpec:
        return HiddenSpec(self.trained.question_layers, prompt=self._prompt)

    @property
    def specs(self) -> Specs:
        """The pooled hidden states and the draft they are read over; for a first look, those of the question."""
        look: Specs = (self._hidden,) if self._draft is None else (self._draft, self._hidden)
        looks_first = self.early_exit and self.trained.early_exit is not None
        return (self._question_alone, *look) if looks_first else look

    def looks(self, inputs: Inputs) -> Sequence[Specs]:
        """Look at the question alone, then draft; at the draft at once where one is given."""
        first, *others = self.specs
        if not others or first != self._question_alone:
            return (self.specs,)
        second = tuple(others)
        return ((first,), second) if inputs.draft is None else (second,)

    def score(self, evidence: Evidence) -> Score | None:
        """Score by the calibrated probe; None if the question alone is not clearly known.

        Raises:
            ModelLoadError: The states are not those of the model that the probe was trained on.
        """
        trained, draft, read = self.trained, None, "question"
        if self._hidden not in evidence:
            return self._first_score(evidence)
        states = evidence[self._hidden]
        warnings = self.check_states(evidence, self._hidden, states, trained.weight.shape)
        logit = float(np.sum(trained.weight * states)) + trained.bias
        logit = trained.slope * logit + trained.intercept
        if self._draft is not None:
            draft, read = evidence[self._draft], "question and draft"
            if trained.logprobs is not None and draft.logprobs:
                logit = trained.logprobs.logit(logit, draft.logprobs)
                read = "question, draft and its log-probabilities"
        p = sigmoid(logit)
        return Score(p, self._reason(read, p), draft, warnings)

    def _first_score(self, evidence: Evidence) -> Score | None:
        early, spec = self.trained.early_exit, self._question_alone
        if early is None:
            return None
        states = evidence[spec]
        warnings = self.check_states(evidence, spec, states, early.weight.shape)
        p = sigmoid(float(np.sum(early.weight * states)) + early.bias)
        if p < max(early.p_known, self.threshold):
            return None
        return Score(p, self._reason("question", p), warnings=warnings)

    def _reason(self, read: str, p: float) -> str:
        return f"A probe trained on {self.trained.llm} reads {read}: known with probability {p:.2f}."
