"""LangChain's decision models (``langchain_core.decisions``): a gate as a decision model, and the reverse.

Works with both versions of the API: `Noul`, ``_classify`` and ``state`` in langchain-core 1.8; `Predicate`,
``_decide`` and ``input`` on its main branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rgate_integrations.decision import Decision, Request
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError, EvidenceError, MissingDependencyError
from rgate_integrations.langchain.questions import parse_question
from rgate_integrations.runtime.flow import Call, Flow, arun, run

try:
    from langchain_core import decisions as names
except ImportError as error:
    raise MissingDependencyError(
        "This langchain-core has no decision models.",
        hint='Install a newer one: pip install "langchain-core>=1.8".',
    ) from error

_QUESTION = "Does the LLM know the answer to this question?"
_ROUTE = "Should this question be answered with retrieved passages or by the LLM alone?"
_ARMS = {"retrieve": "The LLM does not know the answer.", "direct": "The LLM knows the answer."}

if hasattr(names, "Predicate"):
    KNOWS = names.Predicate(instructions=_QUESTION)
    ROUTE = names.Choice(instructions=_ROUTE, choices=_ARMS)
    _STATE = "input"
else:
    KNOWS = names.Noul(instructions=_QUESTION)
    ROUTE = names.Choice(instructions=_ROUTE, criteria=_ARMS)
    _STATE = "state"


class GateDecisionModel(names.BaseDecisionModel):  # type: ignore[misc]  # Any to mypy
    """Answers `KNOWS` with P(the LLM knows), and `ROUTE` with the gate's choice at its threshold.

    The state is the user's question: a string, messages, or a mapping as for `RetrievalGate`. Any other typed
    question is rejected. A gate that fails, or cannot read the turns before a follow-up, answers 0 and ``retrieve``.

    Attributes:
        gate: A `Gate`, an argument for `load_gate`, or None for the default gate.
        model: The name in responses and traces.

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
    def _loaded(cls, gate: GateLike | str | None) -> Decider:
        return resolve_gate(gate)

    @property
    def _provider(self) -> str:
        return "rgate"

    def _classify(self, state: Any, questions: dict[str, Any]) -> Any:
        return run(self._answer_questions(state, questions))

    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> Any:
        return await arun(self._answer_questions(state, questions))

    def _decide(self, request: Mapping[str, Any]) -> Any:
        return run(self._answer_questions(request[_STATE], request["questions"]))

    async def _adecide(self, request: Mapping[str, Any]) -> Any:
        return await arun(self._answer_questions(request[_STATE], request["questions"]))

    def _answer_questions(self, state: Any, questions: Mapping[str, Any]) -> Flow[Any]:
        for name, question in questions.items():
            # A gate cannot answer free questions, and an answer to another one would be misleading.
            if question not in (KNOWS, ROUTE):
                raise ConfigurationError(
                    f"A retrieval gate cannot answer the question {name!r}.",
                    hint="Ask KNOWS or ROUTE of rgate_integrations.langchain.decisions.",
                )
        turn = parse_question(state)
        (decision,) = yield from self.gate.flow([Request(turn.question, history=turn.lines)])
        p = decision.effective_p_known
        choice = "retrieve" if decision.retrieve else "direct"
        probabilities = {"retrieve": 1 - p, "direct": p}
        if hasattr(names, "PredicateAnswer"):
            known = names.PredicateAnswer(type="predicate", probability=p)
        else:
            known = names.NoulAnswer(type="noul", noul=p)
        route = names.ChoiceAnswer(
            type="choice", choice=choice, probabilities=probabilities, confidence=probabilities[choice]
        )
        answers = {name: known if question == KNOWS else route for name, question in questions.items()}
        response = getattr(names, "DecisionResponse", None) or names.ClassifierResponse
        return response(model=self.model, answers=answers)


class DecisionModelGate(Decider):
    """A gate that asks one of LangChain's decision models `KNOWS` about each question.

    Args:
        model: The decision model. If it cannot answer about a question, the gate retrieves.
    """

    threshold = 0.5
    reads_history = False

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.model.model)

    def judge(self, requests: Sequence[Request]) -> Flow[list[Decision | Exception]]:
        """Ask the model about all questions in one batch."""
        inputs = [{_STATE: request.question, "questions": {"known": KNOWS}} for request in requests]
        responses = yield Call(self.model.batch, self.model.abatch, inputs, return_exceptions=True)
        return list(map(self._decide, requests, responses))

    def answer_gate(self) -> None:
        """Return None: the model reads only questions."""

    def question_gate(self) -> None:
        """Return None: this gate judges questions itself."""

    def decides_like(self, other: Decider) -> bool:
        """Return whether the same model is asked."""
        return isinstance(other, DecisionModelGate) and self.model is other.model

    def _decide(self, request: Request, response: Any) -> Decision | Exception:
        if isinstance(response, Exception):
            return response
        answer = response.answers.get("known")
        p_known = getattr(answer, "probability", getattr(answer, "noul", None))
        if p_known is None:
            return EvidenceError(
                f"The decision model answered {getattr(answer, 'type', 'nothing')!r} instead of a probability.",
                hint="Use a decision model that answers yes-or-no questions.",
            )
        threshold = self.threshold if request.threshold is None else request.threshold
        return Decision(
            question=request.question,
            retrieve=p_known < threshold,
            p_known=p_known,
            threshold=threshold,
            gate=self.name,
            reason=f"{self.name} says that the LLM knows with probability {p_known:.2f}.",
        )
