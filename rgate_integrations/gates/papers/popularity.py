"""Popularity threshold: well-known entities need no search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.popularity import PopularitySpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs


def fit_cutoff(
    popularity: Sequence[float], closed_book_correct: Sequence[bool], rag_correct: Sequence[bool]
) -> float:
    """Find the cutoff that answers most development questions rightly (Mallen et al. 2023, section 5).

    Questions at or above the cutoff are answered closed book, the others with retrieval.

    Args:
        popularity: One score a question, >= 0.
        closed_book_correct: Whether the answer without retrieval was right.
        rag_correct: Whether the answer with retrieval was right.

    Returns:
        The lowest best cutoff; infinity is never returned: above all scores it is the greatest plus one.
    """
    scores = np.asarray(popularity, dtype=float)
    closed, rag = np.asarray(closed_book_correct, dtype=bool), np.asarray(rag_correct, dtype=bool)
    if not scores.size or not scores.shape == closed.shape == rag.shape:
        raise ConfigurationError(f"{scores.size} scores do not match {closed.size} and {rag.size} labels.")
    cutoffs = np.append(np.unique(scores), scores.max() + 1)
    right = [np.where(scores >= c, closed, rag).sum() for c in cutoffs]
    return float(cutoffs[int(np.argmax(right))])


class PopularityGate(Gate):
    """Adaptive retrieval by popularity (Mallen et al. 2023; ADAPT-LLM, section 4.7).

    P(known) is ``score / (score + cutoff)``: at least 0.5 from the cutoff on. The score is the user's, one a
    question, on any scale that begins at 0.

    Attributes:
        cutoff: Popularity from which a question is known; `fit_cutoff` finds it.
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
