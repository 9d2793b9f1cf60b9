"""Question and begun answer together, weighed by the kind of the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

from pydantic import Field, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, GateInfo, Score
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.probability import logit, sigmoid
from rgate_integrations.gates.probe import ProbeGate
from rgate_integrations.gates.scoring import GateOfGates, InnerGate, ScoreSpec


def _shipped_question() -> Gate:
    return HeadsGate.model_validate({"artifact": "default"})


def _shipped_answer() -> Gate:
    return ProbeGate.model_validate({"artifact": "default-answer"})


class AnswerGate(GateOfGates):
    """Weighs what the begun answer says against what the question says, by the kind of the request.

    Whether an LLM may write a letter alone is told by the question. Its words and log-probabilities tell nothing of
    it: a letter can be begun in many ways, so each of them is improbable. Whether the LLM knows a fact is told by
    the answer rather than by the question. So ::

        logit(p_known) = (1 - w) * logit(P by the question) + w * logit(P by the begun answer)
        w = weight * P(answerable if known) / (P(answerable if known) + P(always answerable))

    ``"answer:QUESTION,ANSWER"`` names the two gates.

    Attributes:
        question: Heads, which know the kind of a request.
        answer: Judges the begun answer.
        weight: How much the begun answer counts for a question of knowledge, in [0, 1].
    """

    info: ClassVar[GateInfo] = GateInfo(
        "answer",
        "heads and probe, weighed by the kind of request (this package)",
        "question and begun answer",
        "optional",
        "one pass",
    )
    gate_fields = ("question", "answer")

    question: InnerGate = Field(default_factory=_shipped_question)
    answer: InnerGate = Field(default_factory=_shipped_answer)
    weight: float = Field(default=0.7, ge=0, le=1)

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``answer:QUESTION,ANSWER``, names or folders."""
        question, _, answer = argument.partition(",")
        if not question or not answer:
            raise ConfigurationError(f"{argument!r} does not name two gates.", hint="answer:QUESTION,ANSWER")
        return cls(question=load(question), answer=load(answer), **options)

    @model_validator(mode="after")
    def _knows_kinds(self) -> Self:
        if not isinstance(self.question, HeadsGate):
            raise ConfigurationError(
                f"The gate {self.question.name!r} does not know the kind of a request.",
                hint="question= takes heads, such as the default gate.",
            )
        return self

    def score(self, evidence: Evidence) -> Score:
        """Score by both gates; the signals are those of the question."""
        question, answer = evidence[ScoreSpec(self.question)], evidence[ScoreSpec(self.answer)]
        heads = cast(HeadsGate, self.question)  # `_knows_kinds` has seen to that
        weight = self.weight * heads.depends_on_knowledge(question)
        p = sigmoid((1 - weight) * logit(question.p_known) + weight * logit(answer.p_known))
        said = f"question {question.p_known:.2f}, begun answer {answer.p_known:.2f}"
        warnings = tuple(dict.fromkeys((*question.warnings, *answer.warnings)))
        reason = f"Known with probability {p:.2f} ({said})."
        return Score(p, reason, answer.draft, warnings, question.signals, question.llm)
