"""How sure a writer was of its draft, by the log-probabilities of the tokens."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.draft import DraftSpec


class DraftTokensGate(Gate):
    """Base of the gates that read the tokens of a draft.

    They work on drafts of any source that gives log-probabilities.

    Attributes:
        tokens: Maximum length of the draft.
        source: Who writes it.
    """

    tokens: int = Field(default=32, ge=1, le=1024)
    source: DraftSource = "proxy"

    @property
    def specs(self) -> Specs:
        """The draft."""
        return (DraftSpec(self.tokens, self.source),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the draft's tokens.

        Raises:
            EvidenceError: The draft is empty, or its source gives no log-probabilities.
        """
        draft = evidence[self.specs[0]]
        if draft.logprobs is None:
            raise EvidenceError(
                "The draft has no log-probabilities, which this gate reads.",
                hint="Ask its writer for them (LangChain: logprobs=True), or use a gate that judges text.",
            )
        if not draft.logprobs:
            raise EvidenceError("The draft is empty, so it has no token probabilities.")
        p, reason = self.certainty(draft.logprobs)
        return Score(p, f"{reason}.", draft)

    def certainty(self, logprobs: tuple[float, ...]) -> tuple[float, str]:
        """Return P(known), and the beginning of a sentence that says why."""
        raise NotImplementedError


class TokenProbabilityGate(DraftTokensGate):
    """FLARE's trigger (Jiang et al. 2023, section 3.2): a threshold on token *probability*, not on logits.

    Attributes:
        threshold: FLARE's theta.
        statistic: ``"min"`` is the least probable token (FLARE), ``"mean"`` the geometric mean of the token
            probabilities (one over the perplexity), ``"first"`` the first token.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "token_probability", "FLARE (Jiang et al. 2023)", "draft's token probabilities", "no", "draft"
    )

    statistic: Literal["min", "mean", "first"] = "min"

    def certainty(self, logprobs: tuple[float, ...]) -> tuple[float, str]:
        """Return the statistic of the token probabilities."""
        statistics = {
            "min": (min(logprobs), "weakest token"),
            "mean": (sum(logprobs) / len(logprobs), "average token"),
            "first": (logprobs[0], "first token"),
        }
        logprob, name = statistics[self.statistic]
        p = math.exp(logprob)
        return p, f"The draft's {name} has probability {p:.2f}"


class PerplexityGate(DraftTokensGate):
    """One over the perplexity of the draft: the geometric mean of its token probabilities."""

    info: ClassVar[GateInfo] = GateInfo("perplexity", "perplexity (LM-Polygraph)", "draft", "no", "draft")

    def certainty(self, logprobs: tuple[float, ...]) -> tuple[float, str]:
        """Return one over the perplexity."""
        p = math.exp(sum(logprobs) / len(logprobs))
        return p, f"The draft's perplexity is {1 / max(p, 1e-12):.2f}"
