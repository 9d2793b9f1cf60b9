"""The event that tells listeners of LangChain's custom events about a decision."""

from __future__ import annotations

from typing import Any

from rgate_integrations.decision import Decision

EVENT = "retrieval_gate"

_SHOWN = {"question", "retrieve", "p_known", "threshold", "reason", "gate"}


def event_of(decision: Decision) -> dict[str, Any]:
    """Return what the event says about a decision, as JSON values."""
    return decision.model_dump(mode="json", include=_SHOWN)
