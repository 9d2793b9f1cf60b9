"""A linear probe on the proxy's hidden states: one weight vector a layer, and one forward pass."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field, SkipValidation

from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec
from rgate_integrations.gates.probability import sigmoid
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.prompts import answer_prompt


class ProbeGate(TrainedGate):
    """A trained linear probe on pooled hidden states of the middle layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``: h are the pooled states of the artefact's layers,
    slope and intercept its calibration. Trained by ``rgate train --gate probe``.

    Some probes also read the log-probabilities that the draft's writer gives. Without them they judge the words
    alone. The reason says what was read.

    Attributes:
        artifact: Folder of a trained probe, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
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

    @property
    def _hidden(self) -> HiddenSpec:
        trained = self.trained
        prompt = answer_prompt(trained.system)
        draft = DraftSpec(trained.tokens, trained.source, prompt, self.proxy) if trained.tokens else None
        return HiddenSpec(trained.layers, draft, prompt, self.proxy)

    @property
    def specs(self) -> Specs:
        """The pooled hidden states, and the draft that they are read over."""
        return (*self._hidden.needs, self._hidden)

    def score(self, evidence: Evidence) -> Score:
        """Score by the calibrated probe.

        Raises:
            ModelLoadError: The states are not those of the model that the probe was trained on.
        """
        trained, hidden = self.trained, self._hidden
        states = evidence[hidden]
        self.check_states(states, trained.weight.shape)
        logit = float(np.sum(trained.weight * states)) + trained.bias
        logit = trained.slope * logit + trained.intercept
        draft = None
        read = "question"
        if hidden.draft is not None:
            draft = evidence[hidden.draft]
            read = "question and draft"
            if trained.logprobs is not None and draft.logprobs:
                logit = trained.logprobs.logit(logit, draft.logprobs)
                read = "question, draft and its log-probabilities"
        p = sigmoid(logit)
        reason = f"A probe trained on {trained.llm} reads {read}: known with probability {p:.2f}."
        return Score(p, reason, draft)
