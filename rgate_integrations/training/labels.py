"""Labels: does the LLM know the answer? One small function a rule, over recorded or freshly written answers.

Whether one answer is right is `rgate_integrations.runtime.text.is_correct`'s matter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rgate_integrations.gates.papers.boundary import Normalisation, certainty
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.text import comparable, is_correct, matching_ratio

JUDGE = PromptTemplate(
    name="answer-judge",
    version=1,
    user=(
        "Question: {question}\nReference answers: {gold}\nAnswer to judge: {answer}\n\n"
        "Does the answer to judge agree with one of the reference answers? Reply Yes or No."
    ),
    cut="answer",
)
"""The teacher's question of the IK paper (section 3.1), for a judge that is given question, gold and answer."""

_VERDICT = re.compile(r"^\W*(yes|no)\b", re.IGNORECASE)

_REFUSALS = (
    "i do not know",
    "i don't know",
    "i cannot",
    "i can't",
    "i am not able",
    "i'm not able",
    "as an ai",
)


def match_ratio(text: str, gold: Sequence[str], threshold: float = 0.5) -> bool:
    """Label by SlimPLM's matching ratio (section 3.2): more than ``threshold`` of the gold answers are contained.

    Containment is on token boundaries; the published code's substring match finds the answer "no" in "know".
    """
    return matching_ratio(text, gold) > threshold


def sampled_accuracy(samples: Sequence[str], gold: Sequence[str]) -> float:
    """Return the share of sampled answers that are right (KBM, section 2.2): the accuracy label, in [0, 1]."""
    if not samples:
        return 0.0
    return sum(is_correct(sample, gold) for sample in samples) / len(samples)


def sampled_certainty(samples: Sequence[str], normalisation: Normalisation = "distinct") -> float:
    """Return C = 1 - H / H_max of sampled answers (KBM, equations 1 and 2): the certainty label, in [0, 1].

    Raises:
        EvidenceError: All samples are empty.
    """
    return certainty(list(Counter(comparable(samples)).values()), normalisation)


def refuses(answer: str) -> bool:
    """Whether an answer is a refusal, such as "I do not know", or nothing at all."""
    text = answer.strip().lower()
    return not text or text.startswith(_REFUSALS)


def verdict(reply: str) -> bool | None:
    """Return what a judge's reply says: whether its first word is Yes or No; None for anything else."""
    found = _VERDICT.match(reply)
    return found[1].lower() == "yes" if found else None
