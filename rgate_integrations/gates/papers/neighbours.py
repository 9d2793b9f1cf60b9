"""SKR-kNN: labelled questions near this one vote."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.neighbours import NeighboursSpec


class NeighboursGate(Gate):
    """SKR-kNN (Wang et al. 2023; a baseline of SlimPLM, section 4.3): the k nearest labelled questions vote.

    Attributes:
        examples: JSONL file of labelled questions: which ones the LLM answered rightly by itself.
        k: How many vote.
        embedder: Sentence embedder.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "neighbours", "SKR-kNN (Wang et al. 2023)", "labelled questions nearby", "yes", "search"
    )
    argument = "examples"

    examples: str
    k: int = Field(default=5, ge=1)
    embedder: str = "all-minilm-l6-v2"

    @property
    def specs(self) -> Specs:
        """The nearest labelled questions."""
        return (NeighboursSpec(self.k, self.examples, self.embedder),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the votes for known over one more than the number of voters."""
        near = evidence[self.specs[0]]
        known = sum(each.known for each in near)
        # The extra voter says unknown: a strict majority is at least 0.5, a tie is below it, so ties retrieve.
        p = known / (len(near) + 1)
        return Score(p, f"{known} of the {len(near)} nearest labelled questions were known.")
