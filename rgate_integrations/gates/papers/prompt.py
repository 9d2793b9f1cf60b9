"""Ask the model whether it needs to search."""

from __future__ import annotations

from typing import ClassVar

from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.targets import TargetsSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.papers.ik import ik_score
from rgate_integrations.prompts import PromptTemplate

NEED_SEARCH = PromptTemplate(
    name="need-search",
    version=1,
    system="You decide whether a question needs a search engine.",
    user="{question}\n\nDo you need to search for more information to answer this question? Reply Yes or No.",
)


class PromptGate(Gate):
    """The prompt baseline of the Knowledge Boundary Model (section 3.2): the model says whether it must search.

    P(known) is the softmax over the Yes and No logits, taken at No.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "prompt", "KBM's prompt baseline (2024)", "question", "no", "one pass"
    )

    @property
    def _targets(self) -> TargetsSpec:
        return TargetsSpec(NEED_SEARCH, ("No", "Yes"))

    @property
    def specs(self) -> Specs:
        """The Yes and No scores after the question."""
        return (self._targets,)

    def score(self, evidence: Evidence) -> Score:
        """Score by the probability of No, it need not search."""
        p = ik_score(*evidence[self._targets])
        return Score(p, f"Asked whether it must search, the model says no with {p:.2f}.")
