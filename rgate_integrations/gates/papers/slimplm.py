"""SlimPLM's retrieval necessity judgment: is the proxy's heuristic answer good enough?"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field

from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import ScoreError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.completion import CompletionSpec
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.evidence.targets import TargetsSpec
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.papers.adapter_gate import AdapterGate
from rgate_integrations.gates.papers.ik import ik_score
from rgate_integrations.prompts import PromptTemplate

JUDGMENT = PromptTemplate(
    name="slimplm-judgment",
    version=1,
    system=(
        "You are a helpful assistant. Your task is to parse user input into structured formats and accomplish "
        "the task according to the heuristic answer."
    ),
    user="Heuristic answer: {draft}\nQuestion: {question}\nRetrieval Necessity Judgment Output:",
    cut="draft",
)
"""The paper's prompt, section 3.2. When it is too long the heuristic answer is cut, never the question."""

TARGETS = ("Known(True)", "Known(False)")
_VERDICT = re.compile(r"^\s*Known\s*\(\s*(True|False)\s*\)")


class SlimPLMGate(AdapterGate):
    """SlimPLM's judgment model (Tan et al. 2024, section 3.2) on question and heuristic answer.

    Attributes:
        tokens: Maximum length of the heuristic answer.
        source: Who writes it; the paper's is the proxy.
        adapter: LoRA adapter of the fine-tuned judgment model, or None for zero-shot.
        mode: ``"score"`` compares the log-probabilities of the two verdicts, which gives a threshold a
            meaning; ``"generate"`` lets the model write its verdict, as the paper does, and reads it strictly.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "slimplm", "SlimPLM (Tan et al. 2024)", "question + heuristic answer", "optional", "draft + judgment"
    )

    tokens: int = Field(default=64, ge=1, le=1024)
    source: DraftSource = "proxy"
    mode: Literal["score", "generate"] = "score"

    @property
    def _draft_spec(self) -> DraftSpec:
        return DraftSpec(self.tokens, self.source)

    @property
    def _targets(self) -> TargetsSpec:
        return TargetsSpec(JUDGMENT, TARGETS, self._draft_spec, self.adapter)

    @property
    def _verdict(self) -> CompletionSpec:
        return CompletionSpec(JUDGMENT, 12, self._draft_spec, self.adapter)

    @property
    def specs(self) -> Specs:
        """The heuristic answer and the verdict on it."""
        return (self._draft_spec, self._targets if self.mode == "score" else self._verdict)

    def score(self, evidence: Evidence) -> Score:
        """Score by the verdicts' log-probabilities, or 1 and 0 by the written verdict.

        Raises:
            ScoreError: In mode ``"generate"``, when the model wrote neither verdict.
        """
        draft, judgment = self.specs
        warnings = self.check_model(evidence, judgment)
        if self.mode == "score":
            p = ik_score(*evidence[self._targets])
            reason = f"Known(True) against Known(False) is {p:.2f} for the heuristic answer."
            return Score(p, reason, evidence[draft], warnings)
        text = evidence[self._verdict].text
        verdict = _VERDICT.match(text)
        if verdict is None:
            raise ScoreError(
                f"The judgment {text[:60]!r} is neither Known(True) nor Known(False).",
                hint='An untrained proxy seldom keeps to the format: use mode="score", or train an adapter.',
            )
        reason = f"The judgment model wrote Known({verdict[1]})."
        return Score(float(verdict[1] == "True"), reason, evidence[draft], warnings)
