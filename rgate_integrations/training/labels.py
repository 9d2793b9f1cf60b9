"""Labels: does the LLM know the answer? One small function a rule, over recorded or freshly written answers."""

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
    return matching_ratio(text, list(gold)) > threshold


def sampled_accuracy(samples: Sequence[str], gold: Sequence[str]) -> float:
    """Return the share of sampled answers that are correct (KBM, section 2.2): the accuracy label, in [0, 1]."""
    return sum(is_correct(s, gold) for s in samples) / len(samples) if samples else 0.0


def sampled_certainty(samples: Sequence[str], normalisation: Normalisation = "distinct") -> float:
    """Return C = 1 - H / H_max of sampled answers (KBM, equations 1 and 2): the certainty label, in [0, 1].

    Raises:
        EvidenceError: All samples are empty.
    """
    return certainty(list(Counter(comparable(list(samples))).values()), normalisation)


@dataclass(frozen=True)
class Judged:
    """What a judge made of some answers.

    Attributes:
        labels: One an answer; None where there is no label.
        refused: How many answers were refusals, which are not judged.
        unparsable: How many judgments were no probability.
    """

    labels: tuple[bool | None, ...]
    refused: int = 0
    unparsable: int = 0


def judge(
    proxy: Proxy, questions: Sequence[str], gold: Sequence[Sequence[str]], answers: Sequence[str]
) -> Judged:
    """Let a model judge answers by its Yes and No logits, binarised at 0.5 (IK, section 3.1).

    Refusals and answers of nothing get no label: they are neither right nor wrong.

    Args:
        proxy: The judge.
        questions: The questions.
        gold: Gold answers of each.
        answers: The answer to each.
    """
    asked = [i for i, a in enumerate(answers) if a.strip() and not a.lower().lstrip().startswith(_REFUSALS)]
    values = [
        {"question": questions[i], "gold": "; ".join(gold[i]), "answer": answers[i].strip()} for i in asked
    ]
    labels: list[bool | None] = [None] * len(answers)
    for i, scores in zip(asked, proxy.score(JUDGE, values, ("Yes", "No")), strict=True):
        p = ik_score(*scores.logprobs)
        labels[i] = p >= 0.5 if 0 <= p <= 1 else None
    unparsable = sum(labels[i] is None for i in asked)
    return Judged(tuple(labels), len(answers) - len(asked), unparsable)


def balanced(known: Sequence[bool], ids: Sequence[str], seed: int = 0) -> list[int]:
    """Return the positions of as many known as unknown examples, in order.

    Which ones of the greater class stay depends on their ids and the seed, not on the order of the file.
    """
    import hashlib

    def rank(i: int) -> str:
        return hashlib.sha256(f"{seed}|{ids[i]}".encode()).hexdigest()

    classes = [[i for i, k in enumerate(known) if k is label] for label in (True, False)]
    size = min(map(len, classes))
    return sorted(i for members in classes for i in sorted(members, key=rank)[:size])
