"""SlimPLM's retrieval necessity judgment: is the proxy's heuristic answer good enough?"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field

from rgate_integrations.errors import ScoreError
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import CompletionSpec
from rgate_integrations.gates.papers.verdict_gate import VerdictGate
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


class SlimPLMGate(VerdictGate):
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

    verdicts = TARGETS
    question = JUDGMENT

    tokens: int = Field(default=64, ge=1, le=1024)
    mode: Literal["score", "generate"] = "score"

    @property
    def specs(self) -> Specs:
        """The heuristic answer and the verdict on it."""
        if self.mode == "score":
            return super().specs
        draft = DraftSpec(self.tokens, self.source)
        return (draft, CompletionSpec(JUDGMENT, 12, draft, self.adapter))

    def score(self, evidence: Evidence) -> Score:
        """Score by the verdicts' log-probabilities, or 1 and 0 by the written verdict.

        Raises:
            ScoreError: In mode ``"generate"``, when the model wrote neither verdict.
        """
        if self.mode == "score":
            return super().score(evidence)
        draft, written = self.specs
        warnings, text = self.check_model(evidence, written), evidence[written].text
        verdict = _VERDICT.match(text)
        if verdict is None:
            raise ScoreError(
                f"The judgment {text[:60]!r} is neither Known(True) nor Known(False).",
                hint='An untrained proxy seldom keeps to the format: use mode="score", or train an adapter.',
            )
        reason = f"The judgment model wrote Known({verdict[1]})."
        return Score(float(verdict[1] == "True"), reason, evidence[draft], warnings)
