"""ADAPT-LLM: the model itself asks for context by answering ``<RET>``."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import CompletionSpec, TargetsSpec
from rgate_integrations.gates.papers.verdict_gate import AdapterGate
from rgate_integrations.prompts import PromptTemplate

RET = "<RET>"
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"
)

PARAMETRIC_PROMPT = PromptTemplate(
    name="adapt-parametric",
    version=1,
    user=_ALPACA
    + "answer the question Q. If you need help answer <RET> to get the context\n\n"
    + "### Input:\nQ: {question}\n\n### Response:\n",
    raw=True,
    stop_at_newline=True,
)
"""The paper's parametric prompt (appendix C.1)."""

CONTEXT_PROMPT = PromptTemplate(
    name="adapt-context",
    version=1,
    user=_ALPACA
    + "answer the question Q given the context C\n\n### Input:\nQ: {question}\n\nC: {context}\n\n### Response:\n",
    cut="context",
    raw=True,
    stop_at_newline=True,
)
"""The paper's context prompt (appendix C.2), used in training and to answer after retrieval."""


class AdaptGate(AdapterGate):
    """ADAPT-LLM's ``<RET>`` gate (Labruna et al. 2024, sections 3.1 and 3.2).

    P(known) is one minus the probability of the whole ``<RET>`` sequence as the response. The answer that the
    model gives when it does not ask for context is the decision's draft, so nothing is generated twice. The
    paper trains the model for this; without an adapter the score is zero-shot.

    Attributes:
        tokens: Maximum length of the answer.
        adapter: LoRA adapter of the model trained on the two-prompt set, or None for zero-shot.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "adapt", "ADAPT-LLM (Labruna et al. 2024)", "P(<RET>) as the answer", "optional", "draft + judgment"
    )

    tokens: int = Field(default=32, ge=1, le=1024)

    @property
    def specs(self) -> Specs:
        """The probability of ``<RET>``, and the model's own response."""
        return (
            TargetsSpec(PARAMETRIC_PROMPT, (RET,), adapter=self.adapter),
            CompletionSpec(PARAMETRIC_PROMPT, self.tokens, adapter=self.adapter),
        )

    def score(self, evidence: Evidence) -> Score:
        """Score by the probability of not asking for context."""
        targets, response = self.specs
        warnings = self.check_model(evidence, targets)
        answer = evidence[response]
        if RET in answer.text:
            return Score(0.0, "The model asked for context: it answered <RET>.", warnings=warnings)
        p_ret = math.exp(evidence[targets][0])
        return Score(1 - p_ret, f"The model asks for context with probability {p_ret:.2g}.", answer, warnings)
