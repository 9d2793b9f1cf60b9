"""The decision as an event beside LlamaIndex's own."""

from __future__ import annotations

from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from rgate_integrations.decision import Decision

_dispatcher = get_dispatcher(__name__)

DRAFT_TAG = "rgate_draft"
"""In the ``tags`` of every LlamaIndex event of a drafting call: what the LLM writes there is not the answer."""


class RetrievalGateEvent(BaseEvent):
    """A gate has decided.

    Attributes:
        decision: The decision.
    """

    decision: Decision

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which the event is sent."""
        return "RetrievalGateEvent"


def announce(decision: Decision) -> None:
    """Send the decision through the dispatcher."""
    _dispatcher.event(RetrievalGateEvent(decision=decision))
