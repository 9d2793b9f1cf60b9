"""How listeners learn of a decision: LangChain's custom events, and LangGraph's custom stream."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import RunnableConfig

from rgate_integrations.decision import Decision
from rgate_integrations.runtime.flow import Call, Flow

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
    write = _stream_writer()
    if write is not None:
        write({EVENT: shown})


def _stream_writer() -> Callable[[Any], None] | None:
    """Return the writer of the custom stream of the graph that this runs in, if it runs in one."""
    if "langgraph" not in sys.modules:  # no graph can be running, and langgraph may not be installed
        return None
    from langgraph.config import get_stream_writer

    try:
        return get_stream_writer()
    except (RuntimeError, KeyError):
        return None
