"""Self-evaluation: is the proposed answer true? Few-shot, on the model's own answer."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rgate_integrations.gates.base import GateInfo
from rgate_integrations.gates.papers.verdict_gate import VerdictGate
from rgate_integrations.prompts import PromptTemplate

_ASK = "Question: {question}\nProposed answer: {draft}\nIs the proposed answer true or false?"

SELF_EVAL = PromptTemplate(
    name="self-eval",
    version=1,
    system="You check whether proposed answers are true or false.",
    user=_ASK,
    examples=(
        (
            _ASK.format(question="What is the capital of Italy?", draft="The capital of Italy is Rome."),
            "True",
        ),
        (
            _ASK.format(
                question="Who wrote War and Peace?", draft="War and Peace was written by Mark Twain."
            ),
            "False",
        ),
        (_ASK.format(question="how many legs does a spider have", draft="A spider has eight legs."), "True"),
        (
            _ASK.format(question="In which year did the Titanic sink?", draft="The Titanic sank in 1937."),
            "False",
        ),
    ),
    cut="draft",
)


class SelfEvalGate(VerdictGate):
    """Self-Eval, P(True) (Kadavath et al. 2022; a baseline of SlimPLM, section 4.3).

    Attributes:
        tokens: Maximum length of the answer that is evaluated.
        source: Who writes it.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "self_eval", "P(True) (Kadavath et al. 2022)", "question + own answer", "no", "draft + judgment"
    )

    verdicts = ("True", "False")
    question = SELF_EVAL

    tokens: int = Field(default=32, ge=1, le=1024)
