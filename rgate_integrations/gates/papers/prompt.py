"""Ask the model whether it needs to search."""

from __future__ import annotations

from typing import ClassVar

from rgate_integrations.gates.base import GateInfo
from rgate_integrations.gates.papers.verdict_gate import VerdictGate
from rgate_integrations.prompts import PromptTemplate

NEED_SEARCH = PromptTemplate(
    name="need-search",
    version=1,
    system="You decide whether a question needs a search engine.",
    user="{question}\n\nDo you need to search for more information to answer this question? Reply Yes or No.",
)


class PromptGate(VerdictGate):
    """The prompt baseline of the Knowledge Boundary Model (section 3.2): the model says whether it must search.

    P(known) is the softmax over the Yes and No logits, taken at No.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "prompt", "KBM's prompt baseline (2024)", "question", "no", "one pass"
    )

    verdicts = ("No", "Yes")
    question = NEED_SEARCH
