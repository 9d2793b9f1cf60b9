"""Token probabilities of a draft: FLARE's trigger, its weak sentence and its masked query."""

from __future__ import annotations

import math
import re
from typing import ClassVar, Literal

from pydantic import Field

from rgate_integrations.decision import Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs

Statistic = Literal["min", "mean", "first"]
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s*$")


def token_probability(logprobs: tuple[float, ...], statistic: Statistic = "min") -> float:
    """Reduce token log-probabilities to one probability in [0, 1].

    A NaN among them gives NaN.

    Args:
        logprobs: Natural log-probabilities, at least one.
        statistic: ``"min"`` is the least probable token (FLARE), ``"mean"`` the geometric mean of the token
            probabilities (one over the perplexity), ``"first"`` the first token.
    """
    if any(map(math.isnan, logprobs)):  # min() would pass over it
        return math.nan
    reduce: dict[Statistic, float] = {
        "min": min(logprobs),
        "mean": sum(logprobs) / len(logprobs),
        "first": logprobs[0],
    }
    return math.exp(min(reduce[statistic], 0.0))


def sentences(draft: Draft) -> list[range]:
    """Split a draft's tokens into sentences; returns their half-open token ranges."""
    found, start = [], 0
    for i, token in enumerate(draft.tokens):
        following = draft.tokens[i + 1] if i + 1 < len(draft.tokens) else " "
        if _SENTENCE_END.search(token) and following[:1].isspace():
            found.append(range(start, i + 1))
            start = i + 1
    if start < len(draft.tokens):
        found.append(range(start, len(draft.tokens)))
    return found


def first_weak_sentence(draft: Draft, theta: float) -> range | None:
    """Return the token range of the earliest sentence that has a token of probability below ``theta``.

    FLARE (Jiang et al. 2023, section 3.2) regenerates that sentence after retrieval. None if all are strong.
    """
    if draft.logprobs is None or len(draft.logprobs) != len(draft.tokens):
        raise EvidenceError("This draft has no tokens with log-probabilities.")
    weak = math.log(theta) if theta > 0 else -math.inf
    return next((s for s in sentences(draft) if min(draft.logprobs[i] for i in s) < weak), None)


def masked_query(draft: Draft, theta: float, beta: float = 0.4) -> str | None:
    """Return FLARE's implicit query: the earliest weak sentence without its tokens of probability below ``beta``.

    None if there is no weak sentence, or nothing of it is left.
    """
    weak = first_weak_sentence(draft, theta)
    if weak is None or draft.logprobs is None:
        return None
    kept = "".join(draft.tokens[i] if math.exp(draft.logprobs[i]) >= beta else " " for i in weak)
    return " ".join(kept.split()) or None


class TokenProbabilityGate(Gate):
    """FLARE's trigger (Jiang et al. 2023, section 3.2): a threshold on token *probability*, not on logits.

    Works on drafts of any source. When the source gives no log-probabilities, the proxy reads the text and
    its own stand in for them; the reason says so.

    Attributes:
        threshold: FLARE's theta.
        tokens: Maximum length of the draft.
        source: Who writes it.
        statistic: See `token_probability`.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "token_probability", "FLARE (Jiang et al. 2023)", "draft's token probabilities", "no", "draft"
    )

    tokens: int = Field(default=32, ge=1, le=1024)
    source: DraftSource = "proxy"
    statistic: Statistic = "min"

    @property
    def _draft_spec(self) -> DraftSpec:
        return DraftSpec(self.tokens, self.source, logprobs=True)

    @property
    def specs(self) -> Specs:
        """A draft with log-probabilities."""
        return (self._draft_spec,)

    def score(self, evidence: Evidence) -> Score:
        """Score by the statistic of the token probabilities."""
        draft = evidence[self._draft_spec]
        if not draft.logprobs:
            raise EvidenceError("The draft is empty, so it has no token probabilities.")
        p = token_probability(draft.logprobs, self.statistic)
        names = {"min": "weakest token", "mean": "average token", "first": "first token"}
        reader = f" (as read by {draft.scored_by}; its source gave none)" if draft.scored_by else ""
        return Score(p, f"The draft's {names[self.statistic]} has probability {p:.2f}{reader}.", draft)
