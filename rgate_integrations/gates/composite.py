"""Gates made of other gates: calibrated, tuned, and the one that weighs a partial answer against the question."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, PlainSerializer, PrivateAttr, SkipValidation, model_validator

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.gates.artifacts import MIN_LOGPROB, SavedGate, TunedArtifact
from rgate_integrations.gates.base import Gate, GateInfo, InnerGate, Score, ScoreSpec, Specs, share_with_inner
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import DraftSpec, HiddenSpec
from rgate_integrations.gates.folder import ANSWER_FIRST, CONFIG, PRIOR, read_prior, saved_folder
from rgate_integrations.gates.heads import ALWAYS_READ, HeadsGate
from rgate_integrations.gates.papers.verdicts import IKGate
from rgate_integrations.gates.probability import ProbabilityMap, logit, sigmoid
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import ProbeGate, TrainedGate
from rgate_integrations.runtime.arrays import Float64Array

TUNED_ON = " (the gate was tuned on it)"
"""Follows the LLM's name in the decisions of a tuned gate."""


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


class TunedGate(TrainedGate):
    """A gate that ``rgate tune`` has corrected for an LLM.

    The logit of P(known) is ``slope * prior + w · h + v · f + bias``. Here, prior is the logit of the uncorrected
    gate's P(known); a copy of that gate is in the subfolder ``prior``. h are hidden states of the question, and f the
    `draft_features` of a partial answer, if the gate judges one. slope, w, v and bias are fitted. A P(known) of the
    uncorrected gate clearly below that of all known questions is never raised: it may be of another kind, such as
    a private one, of which the log has none.

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
        llm = self.trained.parameters
        self._prior = make_gate(saved.method, artifact=folder, trained=saved, proxy=self.proxy, **llm)

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
        if prior.p_known < trained.least_known:
            p = min(p, prior.p_known)
        reason = f"A gate tuned on {trained.llm} reads {inputs}: known with probability {p:.2f}."
        caveat = ""
        if not trained.provenance.get("guaranteed", True) and self.threshold == trained.threshold:
            # Without a guarantee, `rgate tune` has set a threshold above or below every P(known).
            guarantee = str(trained.provenance.get("guarantee", ""))
            caveat = f"But {guarantee[:1].lower()}{guarantee[1:]}"
        llm = trained.llm + TUNED_ON
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


class AnswerGate(Gate):
    """Weighs a partial answer against the question, by the kind of the request.

    The question shows whether the LLM alone can do a task, such as writing a letter. The log-probabilities of the
    letter say nothing about that: it can begin in many ways, so any one is improbable. Whether the LLM knows a fact
    is easier to see from the answer than from the question. So:

        logit(p_known) = (1 - w) * logit(P by the question) + w * logit(P by the partial answer)
        w = weight * P(answerable if known) / (P(answerable if known) + P(always answerable))

    where a question about a fact is *answerable if known*, and a task such as the letter *always answerable*.

    ``"answer:QUESTION,ANSWER"`` names the two gates, each of which has its own proxy.

    Attributes:
        question: The heads (`HeadsGate`), which judge the question and the kind of request.
        answer: The gate that judges the partial answer.
        weight: Weight of the partial answer for a question about a fact, in [0, 1].
        proxy: The model that reads the partial answer.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "answer",
        "heads and probe, weighted by the kind of request (this package)",
        "question and partial answer",
        "optional",
        "one pass",
    )
    gate_fields = ("question", "answer")
    judges_llm = True

    question: Annotated[HeadsGate, PlainSerializer(Gate.config)] = Field(
        default_factory=lambda: HeadsGate.from_parameters({"artifact": "default"})
    )
    answer: InnerGate = Field(
        default_factory=lambda: ProbeGate.from_parameters({"artifact": "default-answer"})
    )
    weight: float = Field(default=0.7, ge=0, le=1)

    _heads: HeadsGate = PrivateAttr()

    @classmethod
    def parse_argument(cls, argument: str) -> dict[str, Any]:
        """Return the two gates of ``answer:QUESTION,ANSWER``, each as a name or folder.

        Raises:
            ConfigurationError: The argument does not name two gates.
        """
        question, _, answer = argument.partition(",")
        if not question or not answer:
            raise ConfigurationError(
                f"'answer:{argument}' does not name two gates.",
                hint="Separate them with a comma, for example answer:default,default-answer.",
            )
        return {"question": question, "answer": answer}

    @model_validator(mode="before")
    @classmethod
    def _share_proxy(cls, values: Any) -> Any:
        return share_with_inner(values, "answer", ["proxy"])

    def model_post_init(self, context: Any) -> None:
        """Widen the heads' margin, so that their second model, the reader, is used whenever it may matter.

        That is for every English request that would skip if the LLM knew the fact, and retrieve if not. With the
        usual margin, the reader is not used if the LLM is unlikely to know the fact. The extra pass costs little,
        because the shipped gate for partial answers uses the same model.
        """
        self._heads = self.question.replace(margin=ALWAYS_READ)

    def question_gate(self) -> Gate:
        """Return the gate for the question alone, the heads."""
        return self.question

    @property
    def specs(self) -> Specs:
        """Specs of the scores of the two gates inside it."""
        return (ScoreSpec(self._heads), ScoreSpec(self.answer))

    def score(self, evidence: Evidence) -> Score:
        """Combine the two gates' P(known) by the formula of `AnswerGate`; the signals are those of the heads."""
        question, answer = evidence[ScoreSpec(self._heads)], evidence[ScoreSpec(self.answer)]
        weight = self.weight * self.question.depends_on_knowledge(question)
        p = sigmoid((1 - weight) * logit(question.p_known) + weight * logit(answer.p_known))
        return replace(
            question,
            p_known=p,
            reason=f"Known with probability {p:.2f} (question {question.p_known:.2f}, partial answer "
            f"{answer.p_known:.2f}).",
            draft=answer.draft,
            warnings=tuple(dict.fromkeys((*question.warnings, *answer.warnings))),
            threshold=None,
            override=question.override or answer.override,
        )

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy whose heads judge what this LLM knows, or the gate itself if the heads do not change."""
        question = self.question.for_llm(name, name_source)
        return self if question is self.question else self.replace(question=question)
