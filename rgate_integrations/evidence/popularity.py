"""A popularity score of the question's entity, given by the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rgate_integrations.errors import EvidenceError
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece


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
