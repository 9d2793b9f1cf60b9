"""A gate that lets the pipeline's own LLM begin to answer, and judges what it has written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.requests import AnswerRequest, write_answers
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.engine.gate_like import GateLike, answer_first_gates, decide, for_llm
from rgate_integrations.engine.loading import DEFAULT_GATES, load_gate
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.flow import Call, Flow, arun, run

FIRST_LOOK = "first_look"
"""The signal of a decision that has the first look's P(known)."""

_KNOWN_BY = "the model that answers"


@dataclass(frozen=True)
class AnswerFirstGate:
    """Answer first for a `rgate_integrations.answering.pipeline.Pipeline`, whose LLM is a `Proxy` and not a chain.

    A first look at the question sends what is clearly unknown to retrieval, and lets the LLM answer what is clearly
    known. For the others it writes the beginning of its answer, which is judged. The decision carries it as
    ``draft``, so that the pipeline goes on with it where the question is known, and as
    ``partial_answer`` what became of it.

    Attributes:
        llm: The LLM that answers.
        judge: Judges begun answers: the gate that was given, or the one for begun answers that belongs to it.
        options: How many tokens are begun (the last checkpoint), for which P(known) the first look is clear, and
            which gate takes it.
        first_look: That gate; None begins every answer.
    """

    llm: Proxy
    judge: GateLike = field(default_factory=lambda: load_gate(DEFAULT_GATES["llm"]))
    options: AnswerFirst = AnswerFirst()  # noqa: RUF009  it is frozen
    first_look: GateLike | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Each knows whose knowledge it judges, and the judge is the one that belongs to a gate for questions.
        judge, first_look = answer_first_gates(self.judge, self.options.question_gate)
        look = None if first_look is None else for_llm(first_look, self.llm.name, _KNOWN_BY)
        object.__setattr__(self, "judge", for_llm(judge, self.llm.name, _KNOWN_BY))
        object.__setattr__(self, "first_look", look)

    @property
    def threshold(self) -> float:
        """The judge's."""
        return float(getattr(self.judge, "threshold", 0.5))

    def decide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | None = None,
        drafts: Sequence[Draft | None] | None = None,
    ) -> list[Decision]:
        """Decide for a batch; where ``drafts`` are given, such as claims, they are judged and nothing is begun."""
        return run(self._deciding(questions, threshold, drafts))

    async def adecide_batch(self, questions: Sequence[str], **options: Any) -> list[Decision]:
        """Decide for a batch; see `decide_batch`."""
        return await arun(self._deciding(questions, options.get("threshold"), options.get("drafts")))

    def _deciding(
        self, questions: Sequence[str], threshold: float | None, drafts: Sequence[Draft | None] | None
    ) -> Flow[list[Decision]]:
        if drafts is not None:
            return (yield from decide(self.judge, questions, threshold=threshold, drafts=drafts))
        began = time.perf_counter()
        decisions = yield from self._looking(questions)
        looked = _milliseconds(began) / max(len(questions), 1)
        low = self.options.retrieve_below
        known_from = self.options.known_from(self.threshold if threshold is None else threshold)
        open_places = []
        for place, decision in enumerate(decisions):
            if decision.error is not None:
                continue
            if self.first_look is None or low <= decision.p_known < known_from:
                open_places.append(place)
            else:
                decisions[place] = _clear(decision, looked, retrieve=decision.p_known < low)
        asked = [questions[place] for place in open_places]
        begun = yield Call(self._begin, None, asked)
        began = time.perf_counter()
        judged = yield from decide(self.judge, asked, threshold=threshold, drafts=begun)
        judging = _milliseconds(began) / max(len(asked), 1)
        for place, draft, decision in zip(open_places, begun, judged, strict=True):
            look = None if self.first_look is None else decisions[place].p_known
            decisions[place] = _told(
                decision, draft, look, PartialAnswerInfo(first_look=looked, judging=judging)
            )
        return decisions

    def _looking(self, questions: Sequence[str]) -> Flow[list[Decision]]:
        """Return the decisions of the first look; without one, whatever can be read is open."""
        if self.first_look is None:
            return [Decision(question=question, retrieve=True, p_known=0.0) for question in questions]
        return (yield from decide(self.first_look, questions))

    def _begin(self, questions: Sequence[str]) -> list[Draft]:
        """Let the LLM write the beginning of its answers, as one batch."""
        tokens = self.options.checkpoints[-1]
        requests = [AnswerRequest.closed_book(question, tokens) for question in questions]
        written = write_answers(self.llm, requests)
        return [draft.model_copy(update={"source": "llm"}) for draft in written]


def _clear(decision: Decision, looked: float, *, retrieve: bool) -> Decision:
    """Return the decision of a first look that was clear: no begun answer is judged, whatever the threshold."""
    told = {"retrieve": retrieve, "partial_answer": PartialAnswerInfo(first_look=looked)}
    return decision.model_copy(update=told | {"signals": {**decision.signals, FIRST_LOOK: decision.p_known}})


def _told(decision: Decision, draft: Draft, first_look: float | None, times: PartialAnswerInfo) -> Decision:
    """Add to a decision what was begun, and what it costs if it is dropped."""
    if not draft.text.strip():
        nothing = EvidenceError("The LLM wrote nothing that could be judged.")
        decision = fallback_decision(nothing, question=decision.question, gate=decision.gate)
    held = len(draft.tokens) or len(draft.text.split())
    dropped = held if decision.retrieve else 0
    spent = Cost()
    if decision.retrieve:
        spent = Cost(model_calls=1, tokens_in=draft.prompt_tokens, tokens_out=dropped)
    partial_answer = times.model_copy(update={"tokens_held": held, "tokens_dropped": dropped})
    signals = dict(decision.signals)
    if first_look is not None:
        signals[FIRST_LOOK] = first_look
    update = {
        "draft": draft,
        "partial_answer": partial_answer,
        "cost": decision.cost + spent,
        "signals": signals,
    }
    return decision.model_copy(update=update)


def _milliseconds(began: float) -> float:
    return (time.perf_counter() - began) * 1_000
