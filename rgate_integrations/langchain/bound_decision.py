"""What the config of a call carries, a threshold or a decision; and the event that reports a decision."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase

from rgate_integrations.decision import Decision, valid_threshold
from rgate_integrations.engine.decider import Decider
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain.questions import parse_question
from rgate_integrations.runtime.flow import Call, Flow

THRESHOLD_KEY = "retrieval_threshold"


def read_threshold(gate: Runnable[Any, Decision], config: RunnableConfig) -> float | None:
    """Return the threshold that a caller gave, for one input or for the gate; None for the gate's own.

    Raises:
        ConfigurationError: The one in the config is not a number of at least 0.
    """
    given = config.get("configurable", {}).get(THRESHOLD_KEY)
    return getattr(gate, "threshold", None) if given is None else valid_threshold(given)


# LangChain and LangGraph keep keys with two underscores out of traces and checkpoints.
DECISION_KEY = "__rgate_decided"


@dataclass(frozen=True)
class BoundDecision:
    """A decision that the config of a request carries, so that nothing in the request decides it again.

    Attributes:
        question: The question as the user put it; the decision has it as it was judged, perhaps condensed.
        decision: What was decided.
        gate: What decided; see `RetrievalGate.origin`.
        llm: The LLM that wrote the draft; None without one.
    """

    question: str
    decision: Decision
    gate: Any
    llm: Any = None


def bind_decision(
    config: RunnableConfig, gate: Runnable[Any, Decision], value: Any, decision: Decision
) -> RunnableConfig:
    """Return a config that carries what a gate decided for an input."""
    while isinstance(gate, RunnableBindingBase | RunnableSequence):
        gate = gate.bound if isinstance(gate, RunnableBindingBase) else gate.last
    question = decision.question
    # A runnable of the user's own reads inputs in its own way.
    with contextlib.suppress(InvalidQuestionError):
        question = parse_question(value, getattr(gate, "input_key", None)).question
    bound = BoundDecision(question, decision, getattr(gate, "origin", gate), getattr(gate, "llm", None))
    return {**config, "configurable": {**config.get("configurable", {}), DECISION_KEY: bound}}


def reusable_decision(
    config: RunnableConfig, question: str, *, gate: Decider, llm: Any = None, threshold: float | None = None
) -> Decision | None:
    """Return what this gate has decided for this question in the request that a config belongs to, or None.

    Args:
        config: The config of a call.
        question: The question that the call is about.
        gate: What is to decide; the decision of a gate that decides otherwise does not count.
        llm: What is to write the draft; a decision on another LLM's draft does not count either.
        threshold: The threshold of the call, if it has one of its own.
    """
    bound: BoundDecision | None = config.get("configurable", {}).get(DECISION_KEY)
    if bound is None or bound.llm is not llm:
        return None
    if not isinstance(bound.gate, Decider) or not gate.decides_like(bound.gate):
        return None
    is_same = question.strip() in (bound.question.strip(), bound.decision.question.strip())
    if is_same and threshold in (None, bound.decision.threshold):
        return bound.decision
    return None


EVENT = "retrieval_gate"

_EMITTED = {
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "override",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "outcome",
    "llm",
}


def emit_decision_event(decision: Decision, config: RunnableConfig | None = None) -> Flow[None]:
    """Emit a decision to listeners: a custom event `EVENT`, and in a graph ``{EVENT: ...}`` in its custom stream.

    Args:
        decision: The decision.
        config: The config of the run in which it was made; the surrounding run when None.
    """
    # A key may be added at any time; one that changes its meaning makes a new version.
    emitted = {"version": 1, **decision.model_dump(mode="json", include=_EMITTED)}
    with contextlib.suppress(RuntimeError):  # outside of a run there are no listeners
        yield Call(dispatch_custom_event, adispatch_custom_event, EVENT, emitted, config=config)
    if "langgraph" in sys.modules:  # else no graph can be running, and langgraph may not be installed
        from langgraph.config import get_stream_writer

        with contextlib.suppress(RuntimeError, KeyError):
            get_stream_writer()({EVENT: emitted})
