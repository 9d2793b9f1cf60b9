"""A linear probe on the proxy's hidden states, with one weight vector per layer."""

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
    """A trained linear probe on pooled hidden states of a few layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``, where h are the pooled states of the artefact's layers;
    ``rgate train --gate probe`` trains w and b. Some probes then combine this logit with the draft's
    log-probabilities, if it has any; the reason says what was read.

    Attributes:
        artifact: Folder or Hub id of a trained probe, or the name of a shipped one.
        trained: Content of the artefact, read once.
        threshold: The threshold; by default the artefact's.
        proxy: The model that reads the question; by default the one that the gate was trained on. Set it if that
            model has another name or path here.
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
    def specs(self) -> Specs:
        """Specs of the pooled hidden states and of the draft that is read after the question, if any."""
        trained, prompt = self.trained, answer_prompt(self.trained.system)
        if not trained.tokens:
            return (HiddenSpec(trained.layers, None, prompt, self.proxy),)
        draft = DraftSpec(trained.tokens, trained.source, prompt, self.proxy)
        return (HiddenSpec(trained.layers, draft, prompt, self.proxy), draft)

    def score(self, evidence: Evidence) -> Score:
        """Score by the calibrated probe and, if it uses them, the draft's log-probabilities.

        Raises:
            ModelLoadError: The states are not from the model that the gate was trained on.
        """
        trained = self.trained
        states, *drafts = [evidence[spec] for spec in self.specs]
        self.check_states(states, trained.weight.shape[-1])
        logit = float(np.sum(trained.weight * states)) + trained.bias
        logit = trained.slope * logit + trained.intercept
        draft, inputs = (drafts[0], "question and draft") if drafts else (None, "question")
        if draft is not None and trained.logprobs is not None and draft.logprobs:
            logit = trained.logprobs.logit(logit, draft.logprobs)
            inputs = "question, draft and its log-probabilities"
        p = sigmoid(logit)
        reason = f"A probe trained on {trained.llm} reads {inputs}: known with probability {p:.2f}."
        return Score(p, reason, draft)
