"""How the adapters decide: the gate, with the LLM's own drafts if there is an LLM for them, and an event."""

from __future__ import annotations

from llama_index.core.llms import LLM

from rgate_integrations.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.decision import Decision
from rgate_integrations.llama_index.drafts import LLMDrafter
from rgate_integrations.llama_index.events import announce
from rgate_integrations.loading import DEFAULT_GATES


class Decider:
    """Decides for one question and announces the decision.

    Args:
        gate: A gate, or what `load_gate` takes; when None the shipped default for the source of the draft.
        llm: Writes the drafts; None leaves them to the gate.
        tokens: How many tokens it writes.
    """

    def __init__(self, gate: DecidesBatches | str | None, llm: LLM | None = None, tokens: int = 32) -> None:
        self.gate = as_gate(DEFAULT_GATES["llm"] if gate is None and llm is not None else gate)
        self.drafter = LLMDrafter(llm, tokens) if llm is not None else None

    def __call__(self, question: str) -> Decision:
        """Decide."""
        drafts = self.drafter.draft([question]) if self.drafter is not None else None
        decision = decide_safely(self.gate, [question], drafts=drafts)[0]
        announce(decision)
        return decision

    async def decide(self, question: str) -> Decision:
        """Decide without blocking the event loop."""
        drafts = await self.drafter.adraft([question]) if self.drafter is not None else None
        decision = (await adecide_safely(self.gate, [question], drafts=drafts))[0]
        announce(decision)
        return decision
