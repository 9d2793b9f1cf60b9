"""The IK score: P("Yes") against P("No") after the question and the first tokens of an answer."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rgate_integrations.gates.base import GateInfo
from rgate_integrations.gates.papers.verdict_gate import VerdictGate
from rgate_integrations.prompts import PromptTemplate

IK_QUESTION = PromptTemplate(
    name="ik-question",
    version=1,
    user="{question}\n\nDo you know the answer to this question? Reply Yes or No.",
)
IK_DRAFT = PromptTemplate(
    name="ik-draft",
    version=1,
    user=(
        "Question: {question}\nBeginning of an answer: {draft}\n\n"
        "Does the answer show that its author knows this? Reply Yes or No."
    ),
    cut="draft",
)


class IKGate(VerdictGate):
    """IK score (Déjean 2025, "Let your LLM generate a few tokens", sections 3.2 and 4.3).

    The softmax is taken over the Yes and No logits only. The paper trains the answering LLM with a LoRA
    adapter to make this call; without an adapter the score is zero-shot.

    Attributes:
        tokens: Draft tokens to read, 0 to 128; the paper finds 32 or more best, 0 is the question alone.
        source: Who writes the draft. ``"llm"`` is the paper's own setting and by far the strongest.
        adapter: LoRA adapter of the proxy, or None for zero-shot.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "ik", "IK score (Déjean 2025)", "question + first draft tokens", "optional", "draft + judgment"
    )

    tokens: int = Field(default=32, ge=0, le=128)

    @property
    def prompt(self) -> PromptTemplate:
        """The question alone, or quoted with the draft."""
        return IK_DRAFT if self.tokens else IK_QUESTION
