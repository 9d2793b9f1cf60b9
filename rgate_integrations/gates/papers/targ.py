"""TARG: how sure an LLM is of the first tokens of its answer, by their margins or entropies. Needs no training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from rgate_integrations.decision import Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs


def margin_uncertainty(margins: Sequence[float], beta: float = 1.0) -> float:
    """Return U, the mean of ``exp(-margin / beta)`` (TARG, equation 2), in [0, 1]; 1 is unsure.

    Args:
        margins: How far the likeliest token is ahead of the second at each token, in logits; at least one.
        beta: The temperature, > 0.
    """
    return sum(math.exp(-margin / beta) for margin in margins) / len(margins)


class TargGate(Gate):
    """TARG's gate on a short draft without passages (Wang et al. 2025, arXiv 2511.09803, section 3.1).

    P(known) is 1 - U with the margins of the two likeliest tokens, and exp(-U) with the mean entropy in nats. The
    paper retrieves where U is above a threshold tau, so `threshold` is 1 - tau or exp(-tau). It is to be tuned: for
    margins, the paper's tau lies between 0.15 and 0.7.

    Margins and entropies come from a local model; a draft without them is refused, and the gate retrieves.

    Attributes:
        tokens: Length of the draft; the paper's is 20.
        source: Who writes it. In the paper the answering LLM does: ``source="llm"``, or a local LLM that answers
            first.
        signal: ``"margin"``, the paper's default, or ``"entropy"``.
        beta: Temperature of the margins.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "targ", "TARG (Wang et al. 2025)", "margins or entropies of a draft", "no", "draft"
    )

    tokens: int = Field(default=20, ge=1, le=1024)
    source: DraftSource = "proxy"
    signal: Literal["margin", "entropy"] = "margin"
    beta: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def _draft_spec(self) -> DraftSpec:
        return DraftSpec(self.tokens, self.source, logprobs=True)

    @property
    def specs(self) -> Specs:
        """A draft with the distributions of its tokens."""
        return (self._draft_spec,)

    def score(self, evidence: Evidence) -> Score:
        """Score by the uncertainty of the draft's tokens.

        Raises:
            EvidenceError: The draft is empty, or its source gives neither margins nor entropies.
        """
        draft = evidence[self._draft_spec]
        values = self._values(draft)
        if self.signal == "margin":
            unsure = margin_uncertainty(values, self.beta)
            p_known = 1 - unsure
        else:
            unsure = max(sum(values) / len(values), 0.0)
            p_known = math.exp(-unsure)
        reason = (
            f"The {self.signal} of the draft's {len(values)} tokens gives an uncertainty of {unsure:.2f}."
        )
        return Score(p_known, reason, draft)

    def _values(self, draft: Draft) -> Sequence[float]:
        values = draft.margins if self.signal == "margin" else draft.entropies
        if not values:
            raise EvidenceError(
                f"The draft is empty, or its source gives no {self.signal} of its tokens.",
                hint="Use a local model, or the gate token_probability.",
            )
        return values
