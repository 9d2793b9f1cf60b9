"""Labels: does the LLM know the answer? One small function a rule, over recorded or freshly written answers.

Whether one answer is right is `rgate_integrations.text.is_correct`'s matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rgate_integrations.gates.boundary import Normalisation, certainty
from rgate_integrations.gates.ik import ik_score
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.text import comparable, is_correct, matching_ratio

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


@dataclass(frozen=True)
class JudgeLabels:
    """What a judge made of some answers.

    Attributes:
        labels: One an answer; None where there is no label.
        refused: How many answers were refusals, which are not judged.
        unparsable: How many judgments were no probability.
    """

    labels: tuple[bool | None, ...]
    refused: int = 0
    unparsable: int = 0


def judge_answers(
    proxy: Proxy, questions: Sequence[str], gold: Sequence[Sequence[str]], answers: Sequence[str]
) -> JudgeLabels:
    """Let a model judge answers by its Yes and No logits, binarised at 0.5 (IK, section 3.1).

    Refusals and answers of nothing get no label: they are neither right nor wrong.

    Args:
        proxy: The judge.
        questions: The questions.
        gold: Gold answers of each.
        answers: The answer to each.
    """
    asked = [i for i, answer in enumerate(answers) if not _refuses(answer)]
    values = [
        {"question": questions[i], "gold": "; ".join(gold[i]), "answer": answers[i].strip()} for i in asked
    ]
    labels: list[bool | None] = [None] * len(answers)
    for i, scores in zip(asked, proxy.score(JUDGE, values, ("Yes", "No")), strict=True):
        p = ik_score(*scores.logprobs)
        if 0 <= p <= 1:  # NaN is not
            labels[i] = p >= 0.5
    unparsable = sum(labels[i] is None for i in asked)
    return JudgeLabels(tuple(labels), len(answers) - len(asked), unparsable)


def _refuses(answer: str) -> bool:
    text = answer.strip().lower()
    return not text or text.startswith(_REFUSALS)
