"""A gate that `rgate tune` made: another gate's logit, corrected by what your LLM's answers showed."""

from __future__ import annotations

import math
import os
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr, SkipValidation

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.artifacts import ANSWER_FIRST, PRIOR, TunedArtifact
from rgate_integrations.gates.base import Gate, GateInfo, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec
from rgate_integrations.gates.folder import CONFIG, read_prior, saved_folder
from rgate_integrations.gates.probability import logit, sigmoid
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import Float64Array

DRAFT_FEATURES = ("first", "mean", "least", "sum", "length")
"""What is read of a begun answer's log-probabilities, in this order; see `features_of`."""

_LEAST = -20.0  # of one token: what is less likely says no more


class TunedGate(TrainedGate):
    """A shipped gate, corrected for another LLM by ``rgate tune``.

    The logit is ``slope * prior + w · h + v · f + bias``: the prior is the shipped gate's logit, which is kept in the
    same folder; h are hidden states of the question; f, for the gate that judges a begun answer, are
    `features_of` its log-probabilities.

    Attributes:
        artifact: Folder that ``rgate tune`` made; its sub-folder ``answer-first`` has the gate for begun answers.
        trained: What is in it; read once, when the gate is made.
        threshold: The artefact's, unless given.
        proxy: The model it was fitted with, unless given.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "tuned", "rgate tune", "hidden states of the question, log-probabilities", "yes", "one pass"
    )
    kind = TunedArtifact
    judges_llm = True  # the one that it was tuned on

    trained: SkipValidation[TunedArtifact] = Field(exclude=True, repr=False)

    _prior: Gate = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Read the prior, too."""
        # By its whole path: "my-gate/prior" would be looked for on the Hub if it were missing.
        folder = str(saved_folder(self.artifact).resolve() / PRIOR)
        saved = read_prior(folder)
        self._prior = make_gate(saved.method, artifact=folder, trained=saved, proxy=self.proxy)

    def answer_gate(self) -> Gate | None:
        """Return the gate in its sub-folder; itself if it is that one."""
        return self if self.reads_drafts else self._gate_in(ANSWER_FIRST)

    def question_gate(self) -> Gate | None:
        """Return the gate in the folder above, if it is the one for begun answers; or else itself."""
        return self._gate_in(os.pardir) if self.reads_drafts else self

    def _gate_in(self, folder: str) -> Gate | None:
        path = (saved_folder(self.artifact).resolve() / folder).resolve()
        return make_gate(str(path), proxy=self.proxy) if os.path.isfile(path / CONFIG) else None

    @property
    def specs(self) -> Specs:
        """The prior's score, hidden states of the question and, if it judges one, the begun answer."""
        question = (ScoreSpec(self._prior), HiddenSpec(self.trained.layers, model=self.proxy))
        tokens = self.trained.tokens
        return (*question, DraftSpec(tokens, "llm", model=self.proxy)) if tokens else question

    def score(self, evidence: Evidence) -> Score:
        """Score by the corrected logit.

        Raises:
            EvidenceError: The begun answer has no log-probabilities.
            ModelLoadError: The states are not those of the model that the gate was fitted with.
        """
        trained = self.trained
        prior, states, *drafts = [evidence[spec] for spec in self.specs]
        self.check_states(states, trained.weight.shape)
        corrected = trained.slope * logit(prior.p_known) + trained.bias
        corrected += float(np.sum(trained.weight.astype(np.float64) * states))
        draft, read = None, "the question"
        if drafts:
            draft, read = drafts[0], "the question and the begun answer"
            corrected += float(features_of(draft) @ trained.head)
        p = sigmoid(corrected)
        reason = f"A gate tuned on {trained.llm} reads {read}: known with probability {p:.2f}.{self._caveat}"
        llm = f"{trained.llm} (the gate was tuned on it)"
        return Score(p, reason, draft, prior.warnings, prior.signals, llm, override=prior.override)

    @property
    def _caveat(self) -> str:
        """What could not be guaranteed: then its threshold is above every P(known), or below."""
        about = self.trained.provenance
        if about.get("guaranteed", True) or self.threshold != self.trained.threshold:
            return ""
        guarantee = str(about.get("guarantee", ""))
        return f" But {guarantee[:1].lower()}{guarantee[1:]}"


def features_of(draft: Draft) -> Float64Array:
    """Return what the log-probabilities of a begun answer say, shape (5,): see `DRAFT_FEATURES`.

    They are the first token's, the mean, the least and the sum of the log-probabilities, and the logarithm of the
    number of tokens. An answer that says nothing has those of the least likely token.

    Raises:
        EvidenceError: It has no log-probabilities.
    """
    if draft.logprobs is None:
        raise EvidenceError(
            "The begun answer has no log-probabilities, which this gate reads.",
            hint="Ask the server for them (LangChain: logprobs=True), or use the gate for the question alone.",
        )
    given = np.clip(np.array(draft.logprobs or (_LEAST,), dtype=float), _LEAST, 0.0)
    return np.array([given[0], given.mean(), given.min(), given.sum(), math.log(len(given))])
