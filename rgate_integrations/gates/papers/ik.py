"""The IK score: P("Yes") against P("No") after the question and the first tokens of an answer."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import GateInfo
from rgate_integrations.gates.papers.verdict_gate import VerdictGate
from rgate_integrations.prompts import ANSWER, PromptTemplate

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

IK_FOLLOW_UP = PromptTemplate(
    name="ik-follow-up",
    version=1,
    system=ANSWER.system,
    user=ANSWER.user,
    assistant="{draft}",
    follow_up="Does your answer show that you know this? Reply Yes or No.",
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
        follow_up: Ask in a further turn of the conversation in which the draft was written. Its keys and values
            are used again, so that a drafting proxy reads nothing twice, with an adapter too if it is an
            activated one (Greenewald et al. 2025). Otherwise the draft is quoted in a prompt of its own.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "ik", "IK score (Déjean 2025)", "question + first draft tokens", "optional", "draft + judgment"
    )

    tokens: int = Field(default=32, ge=0, le=128)
    follow_up: bool = False

    @model_validator(mode="after")
    def _follows_a_draft(self) -> Self:
        if self.follow_up and not self.tokens:
            raise ConfigurationError("There is no draft that a question could follow.", hint="tokens >= 1")
        return self

    @property
    def prompt(self) -> PromptTemplate:
        """The question alone, quoted with the draft, or a turn behind it."""
        if not self.tokens:
            return IK_QUESTION
        return IK_FOLLOW_UP if self.follow_up else IK_DRAFT
