"""A gate that `rgate tune` made: another gate's logit, corrected by what your LLM's answers showed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.artifacts.folder import TrainedOn, check_fingerprint, saved_folder
from rgate_integrations.artifacts.tuned import PRIOR, TunedArtifact, read_tuned
from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError, ModelLoadError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.evidence.hidden import HiddenSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.calibrated import logits
from rgate_integrations.gates.scoring import ScoreSpec
from rgate_integrations.runtime.arrays import Float64Array

FEATURES = ("first", "mean", "least", "sum", "length")
"""What is read of a begun answer's log-probabilities, in this order; see `features_of`."""

_LEAST = -20.0  # of one token: what is less likely says no more


class TunedGate(Gate):
    """A shipped gate, corrected for another LLM by ``rgate tune``.

    The logit is ``slope * prior + w · h + v · f + bias``: the prior is the shipped gate's logit, which is kept in the
    same folder; h are hidden states of the question; f, for the gate that judges a begun answer, are
    `features_of` its log-probabilities.

    Attributes:
        artifact: Folder that ``rgate tune`` made; its sub-folder ``answer-first`` has the gate for begun answers.
        trained: What is in it; read once, when the gate is made.
        prior: The gate that is corrected; read from the folder.
        threshold: The artefact's, unless given.
        proxy: The model it was fitted with, unless given.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "tuned", "rgate tune", "hidden states of the question, log-probabilities", "yes", "one pass"
    )

    artifact: str
    trained: SkipValidation[TunedArtifact] = Field(
        default=cast(TunedArtifact, None), exclude=True, repr=False
    )  # never None: it is read with the other parameters
    prior: SkipValidation[Gate] = Field(default=cast(Gate, None), exclude=True, repr=False)  # likewise

    @model_validator(mode="before")
    @classmethod
    def _from_artifact(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("artifact"), str):
            return values
        from rgate_integrations.gates.registry import make_gate  # it knows this class

        trained = values.get("trained") or read_tuned(values["artifact"])
        proxy = values.get("proxy", trained.base_model)
        # By its whole path: "my-gate/prior" would be looked for on the Hub if it were missing.
        folder = saved_folder(values["artifact"]).resolve()
        prior = make_gate(str(folder / PRIOR), proxy=proxy)
        return {"threshold": trained.threshold, **values, "proxy": proxy, "trained": trained, "prior": prior}

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``tuned:FOLDER``."""
        return cls.model_validate({"artifact": argument, **options})

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact reads it."""
        if "artifact" in parameters:
            parameters = {"trained": None, **parameters}
        return super().changed(**parameters)

    @property
    def _prior_score(self) -> ScoreSpec:
        return ScoreSpec(self.prior)

    @property
    def _hidden(self) -> HiddenSpec:
        return HiddenSpec(self.trained.layers)

    @property
    def _caveat(self) -> str:
        """What it could not promise: then its threshold is above every P(known), or below."""
        about = self.trained.provenance
        if about.get("kept", True) or self.threshold != self.trained.threshold:
            return ""
        promise = str(about.get("promise", ""))
        return f" But {promise[:1].lower()}{promise[1:]}"

    @property
    def _draft(self) -> DraftSpec | None:
        return DraftSpec(self.trained.tokens, "llm") if self.trained.tokens else None

    @property
    def specs(self) -> Specs:
        """The prior's score, hidden states of the question and, if it judges one, the begun answer."""
        question: Specs = (self._prior_score, self._hidden)
        return question if self._draft is None else (*question, self._draft)

    def score(self, evidence: Evidence) -> Score:
        """Score by the corrected logit.

        Raises:
            EvidenceError: The begun answer has no log-probabilities.
            ModelLoadError: The states are not those of the model that the gate was fitted with.
        """
        trained, used = self.trained, evidence.made_by(self._hidden)
        base = TrainedOn(trained.base_model, trained.fingerprint)
        warnings = check_fingerprint(self.artifact, base, used.model, used.fingerprint)
        states = evidence[self._hidden]
        if states.shape != trained.weight.shape:
            raise ModelLoadError(
                f"The gate {self.artifact!r} reads states of shape {trained.weight.shape}, not {states.shape}.",
                hint=f"Load it with proxy={trained.base_model!r}.",
            )
        prior = evidence[self._prior_score]
        logit = trained.slope * float(logits(np.array([prior.p_known]))[0]) + trained.bias
        logit += float(np.sum(trained.weight.astype(np.float64) * states))
        draft, read = None, "the question"
        if self._draft is not None:
            draft, read = evidence[self._draft], "the question and the begun answer"
            logit += float(features_of(draft) @ trained.head)
        p = 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))
        reason = f"A gate tuned on {trained.llm} reads {read}: known with probability {p:.2f}.{self._caveat}"
        distinct = tuple(dict.fromkeys((*prior.warnings, *warnings)))
        return Score(p, reason, draft, distinct, prior.signals, f"{trained.llm} (the gate was tuned on it)")


def features_of(draft: Draft) -> Float64Array:
    """Return what the log-probabilities of a begun answer say, shape (5,): see `FEATURES`.

    They are the first token's, the mean, the least and the sum of the log-probabilities, and the logarithm of the
    number of tokens. An answer that says nothing has those of the least likely token.

    Raises:
        EvidenceError: It has no log-probabilities of its own.
    """
    if draft.logprobs is None or draft.scored_by:
        raise EvidenceError(
            "The begun answer has no log-probabilities, which this gate reads.",
            hint="Ask the server for them (LangChain: logprobs=True), or use the gate for the question alone.",
        )
    given = np.clip(np.array(draft.logprobs or (_LEAST,), dtype=float), _LEAST, 0.0)
    return np.array([given[0], given.mean(), given.min(), given.sum(), math.log(len(given))])
