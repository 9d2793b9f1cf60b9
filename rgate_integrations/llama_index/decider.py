"""How everything in this folder decides: by the gate, on the LLM's own draft where there is an LLM for it."""

from __future__ import annotations

from llama_index.core.llms import LLM

from rgate_integrations.calling import DecidesBatches, as_gate, deciding
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.flow import Flow
from rgate_integrations.llama_index.drafts import LLMDrafter
from rgate_integrations.llama_index.events import announce
from rgate_integrations.loading import DEFAULT_GATES


class Decider:
    """Decides for one question and announces the decision.

    Args:
        gate: A gate, or what `load_gate` takes; when None the shipped default for the source of the draft.
        llm: Writes the drafts; None leaves them to the gate.
        tokens: Maximum number of tokens that it writes, at least 1.
    """

    def __init__(self, gate: DecidesBatches | str | None, llm: LLM | None = None, tokens: int = 32) -> None:
        if gate is None and llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.gate = as_gate(gate)
        self.drafter = LLMDrafter(llm, tokens) if llm is not None else None

    def deciding(self, question: str) -> Flow[Decision]:
        """Decide, as a flow; a failing gate or LLM retrieves, unless the gate has ``on_error="raise"``."""
        drafting = _one_draft(self.drafter, question) if self.drafter is not None else None
        (decision,) = yield from deciding(self.gate, [question], drafting=drafting)
        announce(decision)
        return decision


def _one_draft(drafter: LLMDrafter, question: str) -> Flow[list[Draft | None]]:
    """Draft for a batch of one, as gates take drafts."""
    draft = yield from drafter.drafting(question)
    return [draft]
