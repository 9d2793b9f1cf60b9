"""LangChain's decision models (``langchain_core.decisions``) as gates.

Works with both versions of the API. In langchain-core 1.8, a yes-or-no question is a `Noul` and the text to judge is
under ``state``; on its main branch, they are a `Predicate` and ``input``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core import decisions as names

from rgate_integrations.decision import Decision, Request
from rgate_integrations.engine.decider import Decider
from rgate_integrations.errors import EvidenceError
from rgate_integrations.runtime.flow import Call, Flow

_QUESTION = "Does the LLM know the answer to this question?"

if hasattr(names, "Predicate"):
    KNOWS = names.Predicate(instructions=_QUESTION)
    _STATE = "input"
else:
    KNOWS = names.Noul(instructions=_QUESTION)
    _STATE = "state"


class DecisionModelGate(Decider):
    """A gate that asks one of LangChain's decision models whether the LLM knows the answer to each question.

    Args:
        model: The decision model. If it cannot judge a question, the gate retrieves.
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
        """Return a decision or error for each question, in order; the model gets all questions in one batch."""
        inputs = [{_STATE: request.question, "questions": {"known": KNOWS}} for request in requests]
        responses = yield Call(self.model.batch, self.model.abatch, inputs, return_exceptions=True)
        return list(map(self._decide, requests, responses))

    def answer_gate(self) -> None:
        """Return None: the model reads only questions."""

    def decides_like(self, other: Decider) -> bool:
        """Return whether the other gate asks the same model."""
        return isinstance(other, DecisionModelGate) and self.model is other.model

    def _decide(self, request: Request, response: Any) -> Decision | Exception:
        if isinstance(response, Exception):
            return response
        answer = response.answers.get("known")
        p_known = getattr(answer, "probability", getattr(answer, "noul", None))
        if p_known is None:
            return EvidenceError(
                f"The decision model {self.name!r} gave {getattr(answer, 'type', None)!r} instead of a probability.",
                hint="Use a decision model that answers yes-or-no questions.",
            )
        threshold = self.threshold if request.threshold is None else request.threshold
        return Decision(
            question=request.question,
            retrieve=p_known < threshold,
            p_known=p_known,
            threshold=threshold,
            gate=self.name,
            reason=f"{self.name} says that the LLM knows the answer with probability {p_known:.2f}.",
        )
