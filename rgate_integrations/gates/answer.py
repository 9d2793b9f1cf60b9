"""Question and begun answer together, weighed by the kind of the request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainSerializer, PrivateAttr, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, GateInfo, InnerGate, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.heads import ALWAYS_READ, HeadsGate
from rgate_integrations.gates.probability import logit, sigmoid
from rgate_integrations.gates.probe import ProbeGate


class AnswerGate(Gate):
    """Weighs what the begun answer says against what the question says, by the kind of the request.

    Whether an LLM may write a letter alone is told by the question. Its words and log-probabilities tell nothing of
    it: a letter can be begun in many ways, so each of them is improbable. Whether the LLM knows a fact is told by
    the answer rather than by the question. So ::

        logit(p_known) = (1 - w) * logit(P by the question) + w * logit(P by the begun answer)
        w = weight * P(answerable if known) / (P(answerable if known) + P(always answerable))

    ``"answer:QUESTION,ANSWER"`` names the two gates, each of which has a proxy of its own.

    Attributes:
        question: Heads, which know the kind of a request.
        answer: Judges the begun answer.
        weight: How much the begun answer counts for a question of knowledge, in [0, 1].
        proxy: The model that reads the begun answer.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "answer",
        "heads and probe, weighed by the kind of request (this package)",
        "question and begun answer",
        "optional",
        "one pass",
    )
    gate_fields = ("question", "answer")
    judges_llm = True

    question: Annotated[HeadsGate, PlainSerializer(Gate.config)] = Field(
        default_factory=lambda: HeadsGate.of({"artifact": "default"})
    )
    answer: InnerGate = Field(default_factory=lambda: ProbeGate.of({"artifact": "default-answer"}))
    weight: float = Field(default=0.7, ge=0, le=1)

    _heads: HeadsGate = PrivateAttr()

    @classmethod
    def parse_argument(cls, argument: str) -> dict[str, Any]:
        """Read ``answer:QUESTION,ANSWER``, names or folders."""
        question, _, answer = argument.partition(",")
        if not question or not answer:
            raise ConfigurationError(f"{argument!r} does not name two gates.", hint="answer:QUESTION,ANSWER")
        return {"question": question, "answer": answer}

    @model_validator(mode="before")
    @classmethod
    def _on_its_model(cls, values: Any) -> Any:
        match values:
            case {"answer": Gate() as answer, "proxy": str(proxy)}:
                return {**values, "answer": answer.replace(proxy=proxy)}
            case {"answer": Gate() as answer}:
                return {**values, "proxy": answer.proxy}
        return values

    def model_post_init(self, context: Any) -> None:
        """Have the reader, which reads the begun answer anyway, asked about every fact: what it says is weighed."""
        self._heads = self.question.replace(margin=ALWAYS_READ)

    def question_gate(self) -> Gate:
        """Return the heads."""
        return self.question

    @property
    def specs(self) -> Specs:
        """The scores of both gates."""
        return (ScoreSpec(self._heads), ScoreSpec(self.answer))

    def score(self, evidence: Evidence) -> Score:
        """Score by both gates; the signals are those of the question."""
        question, answer = [evidence[spec] for spec in self.specs]
        weight = self.weight * self.question.depends_on_knowledge(question)
        p = sigmoid((1 - weight) * logit(question.p_known) + weight * logit(answer.p_known))
        warnings = tuple(dict.fromkeys((*question.warnings, *answer.warnings)))
        said = f"question {question.p_known:.2f}, begun answer {answer.p_known:.2f}"
        reason = f"Known with probability {p:.2f} ({said})."
        override = question.override or answer.override
        return Score(p, reason, answer.draft, warnings, question.signals, question.llm, override=override)

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy whose heads judge what this LLM knows; itself where they do not change."""
        question = self.question.for_llm(name, name_source)
        return self if question is self.question else self.replace(question=question)
