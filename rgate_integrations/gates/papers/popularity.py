"""Popularity threshold: well-known entities need no search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece


class PopularityGate(Gate):
    """Adaptive retrieval by popularity (Mallen et al. 2023; ADAPT-LLM, section 4.7).

    P(known) is ``score / (score + cutoff)``: at least 0.5 from the cutoff on. The score is the user's, one a
    question, on any scale that begins at 0.

    Attributes:
        cutoff: Popularity from which a question is known.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "popularity", "Popularity threshold (Mallen et al. 2023)", "a popularity score", "optional", "none"
    )
    argument = "cutoff"

    cutoff: float = Field(default=1000.0, gt=0, allow_inf_nan=False)

    @property
    def specs(self) -> Specs:
        """The popularity score."""
        return (PopularitySpec(),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the popularity against the cutoff."""
        value = evidence[PopularitySpec()]
        if not value >= 0:
            raise EvidenceError(f"A popularity score must be at least 0, not {value}.")
        side = "at or above" if value >= self.cutoff else "below"
        share = 1.0 if value == float("inf") else value / (value + self.cutoff)
        return Score(share, f"The popularity {value:g} is {side} the cutoff {self.cutoff:g}.")


@dataclass(frozen=True)
class PopularitySpec(EvidenceSpec[float]):
    """The popularity score that came with the question."""

    reads_model: ClassVar[bool] = False

    def compute(self, context: Context) -> list[Piece[float] | Exception]:
        """Take what was given."""
        pieces: list[Piece[float] | Exception] = []
        for each in context.inputs:
            if each.popularity is None:
                missing = EvidenceError(
                    "No popularity score was given for this question.",
                    hint="Pass popularity=[...], one number a question, to decide_batch.",
                )
                pieces.append(missing)
            else:
                pieces.append(Piece(float(each.popularity)))
        return pieces
