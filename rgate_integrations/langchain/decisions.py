"""A gate as one of LangChain's decision models, ``langchain_core.decisions``; needs langchain-core 1.8."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rgate_integrations.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError, MissingDependencyError
from rgate_integrations.langchain.questions import question_of

try:
    from langchain_core.decisions import BaseDecisionModel, Choice, ChoiceAnswer, ClassifierResponse, Noul
    from langchain_core.decisions import NoulAnswer as _NoulAnswer
except ImportError as error:
    raise MissingDependencyError(
        "This langchain-core has no decision models.",
        hint='Install a newer one: pip install "langchain-core>=1.8".',
    ) from error

KNOWS = Noul(instructions="Does the LLM know the answer to this question?")
ROUTE = Choice(
    instructions="Should this question be answered with retrieved passages or by the LLM alone?",
    criteria={"retrieve": "The LLM does not know the answer.", "direct": "The LLM knows the answer."},
)


class GateDecisionModel(BaseDecisionModel):  # type: ignore[misc]
    """Answers `KNOWS` with P(the LLM knows), and `ROUTE` with the gate's choice at its threshold.

    The state is the user's question: a string, messages, or a mapping as `RetrievalGate` takes it. A gate can
    judge nothing else, so other questions are refused. A failing gate answers 0, ``retrieve``.

    Attributes:
        gate: A `Gate`, what `load_gate` takes, or None for the default gate.
        model: The name that responses and traces carry.

    Example:
        >>> model = GateDecisionModel(gate="constant:never")
        >>> model.invoke({"state": "who wrote hamlet?", "questions": {"route": ROUTE}}).choices["route"].choice
        'direct'
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    gate: Any = Field(default=None, validate_default=True)
    model: str = "rgate"

    @field_validator("gate", mode="before")
    @classmethod
    def _loaded(cls, gate: DecidesBatches | str | None) -> DecidesBatches:
        return as_gate(gate)

    @property
    def _provider(self) -> str:
        return "rgate"

    def _classify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        asked = _checked(questions)
        return self._response(decide_safely(self.gate, [question_of(state)])[0], asked)

    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        asked = _checked(questions)
        return self._response((await adecide_safely(self.gate, [question_of(state)]))[0], asked)

    def _response(self, decision: Decision, questions: dict[str, Any]) -> ClassifierResponse:
        known = decision.p_known
        answers: dict[str, Any] = {}
        for name, question in questions.items():
            if isinstance(question, Noul):
                answers[name] = _NoulAnswer(type="noul", noul=known)
            else:
                answers[name] = ChoiceAnswer(
                    type="choice",
                    choice="retrieve" if decision.retrieve else "direct",
                    probabilities={"retrieve": 1 - known, "direct": known},
                    confidence=1 - known if decision.retrieve else known,
                )
        return ClassifierResponse(model=self.model, answers=answers)


def _checked(questions: dict[str, Any]) -> dict[str, Any]:
    for name, question in questions.items():
        if question not in (KNOWS, ROUTE):
            raise ConfigurationError(
                f"The question {name!r} is not one that a retrieval gate can answer.",
                hint="Ask KNOWS or ROUTE of rgate_integrations.langchain.decisions.",
            )
    return questions
