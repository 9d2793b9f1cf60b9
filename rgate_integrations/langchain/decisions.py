"""A gate as one of LangChain's decision models, ``langchain_core.decisions``; needs langchain-core 1.8."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike, decide_messages, resolve_gate
from rgate_integrations.errors import ConfigurationError, MissingDependencyError
from rgate_integrations.langchain.questions import Questions
from rgate_integrations.langchain.runnable import only
from rgate_integrations.runtime.flow import Flow, arun, run

try:
    from langchain_core.decisions import (
        BaseDecisionModel,
        Choice,
        ChoiceAnswer,
        ClassifierResponse,
        Noul,
        NoulAnswer,
    )
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


class GateDecisionModel(BaseDecisionModel):  # type: ignore[misc]  # Any to mypy, which reads an older langchain-core
    """Answers `KNOWS` with P(the LLM knows), and `ROUTE` with the gate's choice at its threshold.

    The state is the user's question: a string, messages, or a mapping as `RetrievalGate` takes it. A gate can
    judge nothing else, so other questions are refused. A failing gate answers 0, ``retrieve``, and so does one
    that does not read the earlier turns for a follow-up.

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
    def _loaded(cls, gate: GateLike | str | None) -> GateLike:
        return resolve_gate(gate)

    @property
    def _provider(self) -> str:
        return "rgate"

    def _classify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        return run(self._classifying(state, questions))

    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        return await arun(self._classifying(state, questions))

    def _classifying(self, state: Any, questions: dict[str, Any]) -> Flow[ClassifierResponse]:
        for name, question in questions.items():
            if question not in (KNOWS, ROUTE):
                raise ConfigurationError(
                    f"The question {name!r} is not one that a retrieval gate can answer.",
                    hint="Ask KNOWS or ROUTE of rgate_integrations.langchain.decisions.",
                )
        read = Questions.read([state])
        judged = yield from decide_messages(self.gate, list(read.texts.values()), read.lines)
        decision = only(read.results(judged))
        answers = {name: _answer(decision, question) for name, question in questions.items()}
        return ClassifierResponse(model=self.model, answers=answers)


def _answer(decision: Decision, question: Any) -> Any:
    known = decision.p_known
    if isinstance(question, Noul):
        return NoulAnswer(type="noul", noul=known)
    return ChoiceAnswer(
        type="choice",
        choice="retrieve" if decision.retrieve else "direct",
        probabilities={"retrieve": 1 - known, "direct": known},
        confidence=1 - known if decision.retrieve else known,
    )
