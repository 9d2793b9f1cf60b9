"""Combines the scores of the question and of a partial answer, weighted by the kind of the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainSerializer, PrivateAttr, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, GateInfo, InnerGate, Score, ScoreSpec, Specs, share_with_inner
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.heads import ALWAYS_READ, HeadsGate
from rgate_integrations.gates.probability import logit, sigmoid
from rgate_integrations.gates.probe import ProbeGate


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
