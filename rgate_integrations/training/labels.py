"""Labels: does the LLM know the answer? One small function a rule, over recorded or freshly written answers.

Whether one answer is right is `rgate_integrations.runtime.text.is_correct`'s matter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rgate_integrations.errors import RGateError
from rgate_integrations.gates.papers.boundary import Normalisation, certainty
from rgate_integrations.gates.papers.verdict_gate import ik_score
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.served import ServedProxy
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
_REPLY = 8  # tokens of a judge's reply: it is asked for a word
_TOGETHER = 10  # replies that are waited for at a time; if all of them fail, there is no use in asking on

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
        unparsable: How many judgments were neither Yes nor No, or could not be had.
    """

    labels: tuple[bool | None, ...]
    refused: int = 0
    unparsable: int = 0


def judge_answers(
    proxy: Proxy, questions: Sequence[str], gold: Sequence[Sequence[str]], answers: Sequence[str]
) -> JudgeLabels:
    """Let a model judge answers (IK, section 3.1): a local one by its Yes and No logits, binarised at 0.5.

    A served model judges by what it writes, which must begin with Yes or No. Anything else, and a request that fails,
    is no label and is counted. Refusals and answers of nothing get no label either: they are neither right nor wrong.

    Args:
        proxy: The judge.
        questions: The questions.
        gold: Gold answers of each.
        answers: The answer to each.

    Raises:
        RGateError: The judge could not be asked: ten requests in a row failed, or all did.
    """
    asked = [i for i, answer in enumerate(answers) if not refuses(answer)]
    values = [
        {"question": questions[i], "gold": "; ".join(gold[i]), "answer": answers[i].strip()} for i in asked
    ]
    judged = _by_text(proxy, values) if isinstance(proxy, ServedProxy) else _by_score(proxy, values)
    labels: list[bool | None] = [None] * len(answers)
    for i, label in zip(asked, judged, strict=True):
        labels[i] = label
    unparsable = sum(labels[i] is None for i in asked)
    return JudgeLabels(tuple(labels), len(answers) - len(asked), unparsable)


def refuses(answer: str) -> bool:
    """Whether an answer is a refusal, such as "I do not know", or nothing at all."""
    text = answer.strip().lower()
    return not text or text.startswith(_REFUSALS)


def verdict(reply: str) -> bool | None:
    """Return what a judge's reply says: whether its first word is Yes or No; None for anything else."""
    found = _VERDICT.match(reply)
    return found[1].lower() == "yes" if found else None


def _by_score(judge: Proxy, values: Sequence[Mapping[str, str]]) -> list[bool | None]:
    found: list[bool | None] = []
    for scores in judge.score(JUDGE, values, ("Yes", "No")):
        p = ik_score(*scores.logprobs)
        found.append(p >= 0.5 if 0 <= p <= 1 else None)  # NaN is not
    return found


def _by_text(judge: Proxy, values: Sequence[Mapping[str, str]]) -> list[bool | None]:
    found: list[bool | None] = []
    with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="rgate-judge") as pool:
        for start in range(0, len(values), _TOGETHER):
            replies = list(pool.map(partial(_reply, judge), values[start : start + _TOGETHER]))
            errors = [reply for reply in replies if isinstance(reply, RGateError)]
            if len(errors) in (_TOGETHER, len(values)):
                raise errors[0]
            found += [None if isinstance(reply, RGateError) else verdict(reply) for reply in replies]
    return found


def _reply(judge: Proxy, values: Mapping[str, str]) -> str | RGateError:
    try:
        return judge.generate(JUDGE, [values], tokens=_REPLY)[0].text
    except RGateError as error:
        return error
