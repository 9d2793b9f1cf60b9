"""A gate made by ``rgate tune``: another gate's logit, with a correction fitted to the LLM's answers."""

from __future__ import annotations

import math
import os
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr, SkipValidation

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.artifacts import ANSWER_FIRST, MIN_LOGPROB, PRIOR, TunedArtifact
from rgate_integrations.gates.base import Gate, GateInfo, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec
from rgate_integrations.gates.folder import CONFIG, read_prior, saved_folder
from rgate_integrations.gates.probability import logit, sigmoid
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import Float64Array


class TunedGate(TrainedGate):
    """A gate that ``rgate tune`` has corrected for an LLM.

    The logit of P(known) is ``slope * prior + w · h + v · f + bias``. Here, prior is the logit of the uncorrected
    gate's P(known); a copy of that gate is in the subfolder ``prior``. h are hidden states of the question, and f the
    `draft_features` of a partial answer, if the gate judges one. slope, w, v and bias are fitted.

    Attributes:
        artifact: Folder made by ``rgate tune``, or a Hub id. The gate for partial answers, if any, is in the
            subfolder ``answer-first``, which can also be loaded by itself.
        trained: Content of the artefact, read once.
        threshold: The threshold; by default the artefact's.
        proxy: The model that computes its evidence; by default the one it was fitted with.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "tuned", "rgate tune", "hidden states of the question, log-probabilities", "yes", "one pass"
    )
    kind = TunedArtifact
    judges_llm = True  # it judges the LLM that it was tuned on

    trained: SkipValidation[TunedArtifact] = Field(exclude=True, repr=False)

    _prior: Gate = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Load the gate that this one corrects, from the subfolder ``prior``."""
        # As an absolute path, because a missing "my-gate/prior" would be taken for a Hub id.
        folder = str(saved_folder(self.artifact).resolve() / PRIOR)
        saved = read_prior(folder)
        self._prior = make_gate(saved.method, artifact=folder, trained=saved, proxy=self.proxy)

    def answer_gate(self) -> Gate | None:
        """Return this gate if it judges partial answers, or else the gate in its subfolder ``answer-first``.

        Without that subfolder, return None.
        """
        return self if self.reads_drafts else self._load_relative(ANSWER_FIRST)

    def question_gate(self) -> Gate | None:
        """Return this gate if it judges questions alone, or else the gate in its parent folder.

        If the parent folder has no gate, return None.
        """
        return self._load_relative(os.pardir) if self.reads_drafts else self

    def _load_relative(self, folder: str) -> Gate | None:
        path = (saved_folder(self.artifact).resolve() / folder).resolve()
        return make_gate(str(path), proxy=self.proxy) if os.path.isfile(path / CONFIG) else None

    @property
    def specs(self) -> Specs:
        """Specs of the uncorrected gate's score, of the question's hidden states and of the partial answer.

        The last one is missing if this gate judges questions alone.
        """
        question = (ScoreSpec(self._prior), HiddenSpec(self.trained.layers, model=self.proxy))
        tokens = self.trained.tokens
        return (*question, DraftSpec(tokens, "llm", model=self.proxy)) if tokens else question

    def score(self, evidence: Evidence) -> Score:
        """Score by the corrected logit.

        Raises:
            EvidenceError: The partial answer has no log-probabilities.
            ModelLoadError: The states are not from the model that the gate was trained on.
        """
        trained = self.trained
        prior, states, *drafts = [evidence[spec] for spec in self.specs]
        self.check_states(states, trained.weight.shape[-1])
        corrected = trained.slope * logit(prior.p_known) + trained.bias
        corrected += float(np.sum(trained.weight.astype(np.float64) * states))
        draft, inputs = (
            (drafts[0], "the question and the partial answer") if drafts else (None, "the question")
        )
        if draft is not None:
            corrected += float(draft_features(draft) @ trained.head)
        p = sigmoid(corrected)
        reason = f"A gate tuned on {trained.llm} reads {inputs}: known with probability {p:.2f}."
        caveat = ""
        if not trained.provenance.get("guaranteed", True) and self.threshold == trained.threshold:
            # Without a guarantee, `rgate tune` has set a threshold above or below every P(known).
            guarantee = str(trained.provenance.get("guarantee", ""))
            caveat = f"But {guarantee[:1].lower()}{guarantee[1:]}"
        llm = f"{trained.llm} (the gate was tuned on it)"
        return Score(
            p, reason, draft, prior.warnings, prior.signals, llm, override=prior.override, caveat=caveat
        )


def draft_features(draft: Draft) -> Float64Array:
    """Return the features of the log-probabilities of a partial answer, shape (5,).

    Log-probabilities are first clipped to [-20, 0]. The features are the first of them, their mean, minimum and sum,
    and the logarithm of their number. An empty answer counts as one token with the log-probability -20.

    Raises:
        EvidenceError: The answer has no log-probabilities.
    """
    if draft.logprobs is None:
        raise EvidenceError(
            "The partial answer has no log-probabilities, which this gate needs.",
            hint="Request them from the server (LangChain: logprobs=True), or omit answer_first= (--answer-first).",
        )
    logprobs = np.clip(np.array(draft.logprobs or (MIN_LOGPROB,), dtype=float), MIN_LOGPROB, 0.0)
    return np.array([logprobs[0], logprobs.mean(), logprobs.min(), logprobs.sum(), math.log(len(logprobs))])
