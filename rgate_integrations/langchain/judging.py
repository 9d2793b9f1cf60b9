"""How a batch of LangChain inputs becomes decisions: read, condensed, drafted, judged; each at most once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from langchain_core.runnables import Runnable

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.gate_like import GateLike, decide_messages
from rgate_integrations.langchain.decision_context import bound_decision
from rgate_integrations.langchain.drafts import CONDENSE_TAG, ChatDrafter, tagged
from rgate_integrations.langchain.questions import Questions
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.runtime.flow import Flow


class Judge(Protocol):
    """What `RetrievalGate` is made of; it describes each of these."""

    gate: GateLike
    drafter: ChatDrafter | None
    condense: Runnable[Any, Any] | None
    input_key: str | None
    history_key: str | None

    @property
    def origin(self) -> GateLike: ...  # noqa: D102


def judging(
    judge: Judge,
    batch: RunBatch,
    thresholds: Sequence[float | None],
    *,
    drafts: Sequence[Draft | None] | None = None,
) -> Flow[list[Decision | Exception]]:
    """Decide for a batch in one call of the gate.

    Args:
        judge: Who decides, and how inputs are read.
        batch: The inputs and their runs.
        thresholds: The threshold of each input; None for the gate's own.
        drafts: What the LLM has begun to answer to each input, with the earlier turns in view: it is judged, and no
            draft is written.

    Returns:
        One result an input: its decision, or the error of an input without a question.
    """
    questions = Questions.read(batch.inputs, judge.input_key, judge.history_key)
    if drafts is None:
        _take_bound(judge, questions, batch, thresholds)
    yield from _condensing(judge, questions, batch)
    places = list(questions.texts)
    if not places:
        return questions.results([])
    asked = list(questions.texts.values())
    drafting = None
    if drafts is None and judge.drafter is not None:
        children = batch.children()
        histories = [questions.histories.get(place, []) for place in places]
        drafting = judge.drafter.drafting(asked, [children[place] for place in places], histories)
    decisions = yield from decide_messages(
        judge.gate,
        asked,
        questions.lines,
        drafting=drafting,
        drafts=None if drafts is None else [drafts[place] for place in places],
        threshold=[thresholds[place] for place in places],
        metadata=[batch.configs[place].get("metadata") for place in places],
    )
    return questions.results(decisions)


def _take_bound(
    judge: Judge, questions: Questions, batch: RunBatch, thresholds: Sequence[float | None]
) -> None:
    """Take what was decided above in the same request."""
    llm = None if judge.drafter is None else judge.drafter.llm
    for place, question in list(questions.texts.items()):
        decision = bound_decision(
            batch.configs[place], question, gate=judge.origin, llm=llm, threshold=thresholds[place]
        )
        if decision is not None:
            questions.decide(place, decision)


def _condensing(judge: Judge, questions: Questions, batch: RunBatch) -> Flow[None]:
    """Condense the follow-ups as one batch."""
    if judge.condense is None or not questions.histories:
        return
    children = batch.children()
    conversations = questions.conversations
    configs = [tagged(children[place], CONDENSE_TAG) for place in conversations]
    rewritten = yield BatchCall(judge.condense, list(conversations.values()), configs)
    questions.condense(rewritten, on_error=getattr(judge.gate, "on_error", "retrieve"))
