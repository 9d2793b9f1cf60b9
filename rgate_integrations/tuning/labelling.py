"""Labels for answers: by gold answers, by a judge, or by whether both arms say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.papers.verdict_gate import ik_score
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.served import ServedProxy
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.text import contains_answer, is_correct, normalise
from rgate_integrations.tuning.arms import ModelArm
from rgate_integrations.tuning.collection import (
    JUDGE_ARM,
    SAMPLE,
    Answered,
    Answers,
    ArmName,
    Progress,
    kind_of,
    silent,
)

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

LabelKind: TypeAlias = Literal["auto", "gold", "judge", "agreement"]
"""How answers are labelled; ``"auto"`` is gold where every question has a gold answer, else agreement."""

LABEL_KINDS: tuple[LabelKind, ...] = ("auto", "gold", "judge", "agreement")

Verdicts: TypeAlias = Mapping[tuple[ArmName, str], bool | None]
"""What a judge says of the answer of an arm to a question, by `Question.key`; None where it does not tell."""

SAME_MEANING = 0.85
"""Cosine similarity from which on two answers say the same."""

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

_SHORT = 12  # words: a text that is no longer is compared as an answer, not as a paragraph
_VERDICT_TOKENS = 8  # of a judge's reply: it is asked for a word


@dataclass(frozen=True)
class Labels:
    """What the answers are worth; those without a label are left out.

    Attributes:
        kind: How they were made.
        answered: The questions that have labels.
        known: Whether the answer without retrieval is right, one each.
        rag: Whether the answer with retrieval is right, one each.
        unknown: How many questions have no label.
        judge: Name of the model that judged them; empty if none did.
        shares: Which share of a question's samples is right, in [0, 1], one each; none without samples (KBM,
            section 2.2). A question without a sample that has a label counts as its answer does.
    """

    kind: str
    answered: tuple[Answered, ...]
    known: tuple[bool, ...]
    rag: tuple[bool, ...]
    unknown: int
    judge: str = ""
    shares: tuple[float, ...] = ()

    @property
    def description(self) -> str:
        """What the labels are, and what they are not."""
        text = {
            "gold": "An answer is right if it contains a gold answer, word by word.",
            "judge": f"The model {self.judge} judged each answer against the gold ones.",
            "agreement": "No gold answers: an answer without retrieval counts as right if it says the same as the "
            "one with retrieval, which always does. That stands in for correctness and is not correctness.",
        }[self.kind]
        if not self.shares:
            return text
        most = max(each.samples for each in self.answered)
        between = float(np.mean([0 < share < 1 for share in self.shares]))
        return (
            f"{text} The gates were fitted to the share of right answers among up to {most} samples a question, "
            f"which is neither 0 nor 1 for {between:.1%} of the questions. Threshold, guarantee and all figures here "
            "are about the answer itself."
        )


def label(
    answered: Sequence[Answered],
    kind: LabelKind = "auto",
    *,
    verdicts: Verdicts | None = None,
    judge: str = "",
    embedder: Embedder | None = None,
) -> Labels:
    """Label the answers of all arms.

    Args:
        answered: Questions with their answers.
        kind: How.
        verdicts: What the judge says, for ``"judge"``; see `ask_judge`.
        judge: Name of the judge.
        embedder: Finds answers that say the same in other words, for agreement; the words alone count when None.

    Raises:
        ConfigurationError: There is no judge, or the kind is not known.
        DataFormatError: Gold answers are needed, and no question has some.
    """
    if kind == "auto":
        kind = "agreement"
        if answered and all(each.question.gold for each in answered):
            kind = "gold"
    if kind not in LABEL_KINDS:
        raise ConfigurationError(f"Labels {kind!r} are not known.", hint="gold, judge or agreement")
    usable = [each for each in answered if kind == "agreement" or each.question.gold]
    if not usable and answered:
        raise DataFormatError("No question has a gold answer.", hint="Give some, or label by agreement.")
    if kind == "judge" and verdicts is None:
        raise ConfigurationError("A judge is needed for labels by a judge.", hint="judge=, or --judge")
    right = _compare(usable, kind, embedder) if verdicts is None or kind != "judge" else verdicts
    kept: list[Answered] = []
    known: list[bool] = []
    rag: list[bool] = []
    shares: list[float] = []
    for each in usable:
        key = each.question.key
        of_direct, of_retrieve = right.get(("direct", key)), right.get(("retrieve", key))
        # A question counts only with both labels: thresholds are chosen on pairs.
        if of_direct is None or of_retrieve is None:
            continue
        kept.append(each)
        known.append(of_direct)
        rag.append(of_retrieve)
        shares.append(_share(each, right, of_direct))
    return Labels(
        kind=kind,
        answered=tuple(kept),
        known=tuple(known),
        rag=tuple(rag),
        unknown=len(answered) - len(kept),
        judge=judge if kind == "judge" else "",
        shares=tuple(shares) if any(each.samples for each in usable) else (),
    )


def _share(answered: Answered, right: Verdicts, of_direct: bool) -> float:
    """Return the share of a question's samples that is right; the answer's own label where no sample has one."""
    counted = []
    for arm in answered.answers:
        said = right.get((arm, answered.question.key))
        if kind_of(arm) == SAMPLE and said is not None:
            counted.append(said)
    return sum(counted) / len(counted) if counted else float(of_direct)


def _compare(answered: Sequence[Answered], kind: LabelKind, embedder: Embedder | None) -> Verdicts:
    """Compare every answer with the gold ones or, for agreement, with the answer with retrieval."""
    found: dict[tuple[ArmName, str], bool | None] = {}
    compared, texts, others = [], [], []
    for each in answered:
        for arm, answer in each.answers.items():
            place = (arm, each.question.key)
            if kind == "gold":
                found[place] = is_correct(answer.text, each.question.gold)
            elif arm == "retrieve":  # it is what the others agree with
                found[place] = True
            else:
                compared.append(place)
                texts.append(answer.text)
                others.append(each.retrieve.text)
    # All at once: embedding one by one would be slow.
    found.update(zip(compared, agreeing(texts, others, embedder), strict=True))
    return found


def agreeing(texts: Sequence[str], others: Sequence[str], embedder: Embedder | None) -> list[bool]:
    """Return whether each text says the same as the other one at its place.

    They do if one contains the other, both normalised and word by word, or if their embeddings are near. An answer of
    nothing agrees with none.
    """
    found = []
    unsure = []  # they differ in words, and may mean the same
    for place, (text, other) in enumerate(zip(texts, others, strict=True)):
        short, long = sorted((text, other), key=lambda each: len(normalise(each)))
        same = len(normalise(short).split()) <= _SHORT and contains_answer(long, short)
        found.append(same)
        if not same and normalise(short):
            unsure.append(place)
    if embedder is None or not unsure:
        return found
    first = embedder.embed([texts[place] for place in unsure])
    second = embedder.embed([others[place] for place in unsure])
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(axis=1) / np.maximum(lengths, 1e-12)
    for place, cosine in zip(unsure, cosines, strict=True):
        found[place] = bool(cosine >= SAME_MEANING)
    return found


@dataclass(frozen=True)
class JudgeArm(ModelArm):
    """A judge as an arm, so that its verdicts are kept as answers are (IK, section 3.1).

    A local model judges by its Yes and No logits, binarised at 0.5; a served one by what it writes.

    Attributes:
        values: What it is asked about each question: fields of `JUDGE` by the question's text.
    """

    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """Model and prompt."""
        return {"llm": self.llm.name, "weights": self.llm.fingerprint, "prompt": JUDGE.hash}

    def answer(self, questions: Sequence[str]) -> list[Draft]:
        """Judge the answers to some questions."""
        values = [self.values[question] for question in questions]
        if isinstance(self.llm, ServedProxy):
            return self.llm.generate(JUDGE, values, tokens=_VERDICT_TOKENS)
        found = []
        for scores in self.llm.score(JUDGE, values, ("Yes", "No")):
            p = ik_score(*scores.logprobs)
            text = ("Yes" if p >= 0.5 else "No") if 0 <= p <= 1 else ""  # NaN is neither
            found.append(Draft(text=text))
        return found


def ask_judge(
    answers: Answers, judge: Proxy, *, concurrency: int = 4, progress: Progress = silent
) -> Verdicts:
    """Let a model judge every answer to a question with gold answers, and keep what it says.

    Who refuses to answer ("I do not know", or nothing at all) is not right, and is not judged. A reply that is
    neither Yes nor No, and a request that fails, is no verdict.

    Args:
        answers: The answers; verdicts are kept in the same file.
        judge: The judge.
        concurrency: Calls at a time.
        progress: Told how far it is.

    Raises:
        ServerError: The judge could not be asked.
    """
    answered = [each for each in answers.whole() if each.question.gold]
    found: dict[tuple[ArmName, str], bool | None] = {}
    for arm in dict.fromkeys(arm for each in answered for arm in each.answers):
        values: dict[str, dict[str, str]] = {}
        asked = []
        for each in answered:
            question, given = each.question, each.answers.get(arm)
            if given is None:
                continue
            if refuses(given.text):
                found[arm, question.key] = False
                continue
            asked.append(question)
            values[question.text] = {
                "question": question.text,
                "gold": "; ".join(question.gold),
                "answer": given.text.strip(),
            }
        name = f"{JUDGE_ARM} {judge.name} of {arm}"
        answers.add({name: JudgeArm(judge, values=values)})
        answers.ask(asked, arms=[name], concurrency=concurrency, report=partial(progress, f"judging {arm}"))
        for question in asked:
            said = answers.answer_of(question, name)
            found[arm, question.key] = None if said is None else verdict(said.text)
    return found


def refuses(answer: str) -> bool:
    """Whether an answer is a refusal, such as "I do not know", or nothing at all."""
    text = answer.strip().lower()
    return not text or text.startswith(_REFUSALS)


def verdict(reply: str) -> bool | None:
    """Return what a judge's reply says: whether its first word is Yes or No; None for anything else."""
    found = _VERDICT.match(reply)
    return found[1].lower() == "yes" if found else None
