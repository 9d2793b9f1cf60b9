"""Within a run: its decision is bound to the config, so that nothing decides again, and told to listeners."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase

from rgate_integrations.decision import Decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain.questions import question_of
from rgate_integrations.runtime.flow import Call, Flow

# LangChain and LangGraph keep keys with two underscores out of traces and checkpoints.
KEY = "__rgate_decided"


@dataclass(frozen=True)
class BoundDecision:
    """A decision, and whose it is.

    Attributes:
        question: The question as the user put it; the decision has it as it was judged, perhaps condensed.
        decision: What was decided.
        gate: What decided: the object that `RetrievalGate.origin` is.
        llm: The LLM that wrote the draft; None without one.
    """

    question: str
    decision: Decision
    gate: Any
    llm: Any = None


def bind(
    config: RunnableConfig, gate: Runnable[Any, Decision], value: Any, decision: Decision
) -> RunnableConfig:
    """Return a config that has what a gate decided for an input."""
    while isinstance(gate, RunnableBindingBase | RunnableSequence):
        gate = gate.bound if isinstance(gate, RunnableBindingBase) else gate.last
    try:
        question = question_of(value, getattr(gate, "input_key", None))
    except InvalidQuestionError:  # a runnable of the user's own reads its inputs in its own way
        question = decision.question
    bound = BoundDecision(
        question=question,
        decision=decision,
        gate=getattr(gate, "origin", gate),
        llm=getattr(gate, "llm", None),
    )
    return {**config, "configurable": {**config.get("configurable", {}), KEY: bound}}


def bound_decision(
    config: RunnableConfig, question: str, *, gate: Any, llm: Any = None, threshold: float | None = None
) -> Decision | None:
    """Return what this gate has decided for this question in the request that a config belongs to, or None.

    Args:
        config: The config of a call.
        question: The question that the call is about.
        gate: What is to decide; the decision of another gate does not count.
        llm: What is to write the draft; a decision on another LLM's draft does not count either.
        threshold: The threshold of the call, if it has one of its own.
    """
    bound = config.get("configurable", {}).get(KEY)
    if not isinstance(bound, BoundDecision) or bound.gate is not gate or bound.llm is not llm:
        return None
    if question.strip() not in (bound.question.strip(), bound.decision.question.strip()):
        return None
    if threshold is not None and threshold != bound.decision.threshold:
        return None
    return bound.decision


def is_bound(config: RunnableConfig, decision: Decision) -> bool:
    """Whether this decision was made above in the request that a config belongs to."""
    bound = config.get("configurable", {}).get(KEY)
    return isinstance(bound, BoundDecision) and bound.decision is decision


EVENT = "retrieval_gate"

EVENT_VERSION = 1
"""Version of what `event_of` returns: a key may be added at any time, a change of one makes a new version."""

_SHOWN = {
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "outcome",
    "llm",
}


def event_of(decision: Decision) -> dict[str, Any]:
    """Return what the event says about a decision, as JSON values; it has every key, whatever was decided how."""
    return {"version": EVENT_VERSION, **decision.model_dump(mode="json", include=_SHOWN)}


def announcing(decision: Decision, config: RunnableConfig | None = None) -> Flow[None]:
    """Tell listeners of a decision: a custom event `EVENT`, and in a graph ``{EVENT: ...}`` in its custom stream.

    Args:
        decision: The decision.
        config: The config of the run in which it was made; the surrounding run when None.
    """
    shown = event_of(decision)
    with contextlib.suppress(RuntimeError):  # outside of a run there is nobody to tell
        yield Call(dispatch_custom_event, adispatch_custom_event, EVENT, shown, config=config)
    if "langgraph" in sys.modules:  # else no graph can be running, and langgraph may not be installed
        from langgraph.config import get_stream_writer

        with contextlib.suppress(RuntimeError, KeyError):
            get_stream_writer()({EVENT: shown})
