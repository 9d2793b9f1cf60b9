"""Labels for answers: by gold answers, by a judge, or by whether both arms say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.text import contains_answer, is_correct, normalise
from rgate_integrations.training.labels import judge_answers, refuses
from rgate_integrations.tuning.asking import Answered

LabelKind: TypeAlias = Literal["auto", "gold", "judge", "agreement"]
"""How answers are labelled; ``"auto"`` is gold where every question has a gold answer, else agreement."""

LABEL_KINDS: tuple[LabelKind, ...] = ("auto", "gold", "judge", "agreement")

SAME_MEANING = 0.85
"""Cosine similarity from which on two answers say the same."""

_SHORT = 12  # words: a text that is no longer is compared as an answer, not as a paragraph


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
        shares: Which share of a question's samples is right, in [0, 1], one each; none without samples.
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
        return f"{self._of_answers} {self._of_samples}".strip()

    @property
    def _of_answers(self) -> str:
        return {
            "gold": "An answer is right if it contains a gold answer, word by word.",
            "judge": f"The model {self.judge} judged each answer against the gold ones.",
            "agreement": "No gold answers: an answer without retrieval counts as right if it says the same as the "
            "one with retrieval, which always does. That stands in for correctness and is not correctness.",
        }[self.kind]

    @property
    def _of_samples(self) -> str:
        if not self.shares:
            return ""
        most = max(len(each.samples) for each in self.answered)
        between = float(np.mean([0 < share < 1 for share in self.shares]))
        return (
            f"The gates were fitted to the share of right answers among up to {most} samples a question, which is "
            f"neither 0 nor 1 for {between:.1%} of the questions. Threshold, promise and every figure here are about "
            "the answer itself."
        )


def label(
    answered: Sequence[Answered],
    kind: LabelKind = "auto",
    *,
    judge: Proxy | None = None,
    embedder: Embedder | None = None,
) -> Labels:
    """Label the answers of both arms.

    Args:
        answered: Questions with both answers.
        kind: How.
        judge: The model that judges, for ``"judge"``.
        embedder: Finds answers that say the same in other words, for agreement; the words alone count when None.

    Raises:
        ConfigurationError: There is no judge, or the kind is not known.
        DataFormatError: Gold answers are needed, and no question has some.
    """
    has_gold = [bool(each.question.gold) for each in answered]
    if kind == "auto":
        kind = "gold" if answered and all(has_gold) else "agreement"
    if kind not in ("agreement", "gold", "judge"):
        raise ConfigurationError(f"Labels {kind!r} are not known.", hint="gold, judge or agreement")
    usable = [each for each in answered if kind == "agreement" or each.question.gold]
    if not usable and answered:
        raise DataFormatError("No question has a gold answer.", hint="Give some, or label by agreement.")
    if kind == "judge" and judge is None:
        raise ConfigurationError("A judge is needed for labels by a judge.", hint="judge=, or --judge")
    rule = _Rule(kind, judge, embedder)
    return _labelled(usable, rule, len(answered) - len(usable))


@dataclass(frozen=True)
class _Rule:
    """Says of some texts whether each is a right answer to its question; None where it cannot tell."""

    kind: str
    judge: Proxy | None
    embedder: Embedder | None

    def __call__(self, answered: Sequence[Answered], texts: Sequence[str]) -> list[bool | None]:
        if self.judge is not None and self.kind == "judge":
            return _verdicts(answered, texts, self.judge)
        if self.kind == "gold":
            return [is_correct(text, each.question.gold) for each, text in zip(answered, texts, strict=True)]
        return [*agreeing(texts, [each.retrieve.text for each in answered], self.embedder)]


def _labelled(answered: Sequence[Answered], rule: _Rule, unknown: int) -> Labels:
    direct = rule(answered, [each.direct.text for each in answered])
    retrieve: list[bool | None] = [True] * len(answered)  # for agreement, it is what the others agree with
    if rule.kind != "agreement":
        retrieve = rule(answered, [each.retrieve.text for each in answered])
    kept: list[Answered] = []
    known: list[bool] = []
    rag: list[bool] = []
    for each, of_direct, of_retrieve in zip(answered, direct, retrieve, strict=True):
        if of_direct is not None and of_retrieve is not None:
            kept.append(each)
            known.append(of_direct)
            rag.append(of_retrieve)
    unknown += len(answered) - len(kept)
    judge = rule.judge.name if rule.kind == "judge" and rule.judge is not None else ""
    shares = _shares(kept, known, rule)
    return Labels(rule.kind, tuple(kept), tuple(known), tuple(rag), unknown, judge, shares)


def _shares(answered: Sequence[Answered], known: Sequence[bool], rule: _Rule) -> tuple[float, ...]:
    """Return which share of each question's samples is right (KBM, section 2.2); none if nothing was sampled.

    A question without a sample that has a label counts as its answer does.
    """
    owners: list[int] = []
    texts: list[str] = []
    for place, each in enumerate(answered):
        for sample in each.samples:
            owners.append(place)
            texts.append(sample.text)
    if not owners:
        return ()
    right: list[list[bool]] = [[] for _ in answered]
    verdicts = rule([answered[place] for place in owners], texts)
    for place, said in zip(owners, verdicts, strict=True):
        if said is not None:
            right[place].append(said)
    shares = []
    for of_samples, of_answer in zip(right, known, strict=True):
        counted = of_samples or [of_answer]
        shares.append(sum(counted) / len(counted))
    return tuple(shares)


def agreeing(texts: Sequence[str], others: Sequence[str], embedder: Embedder | None) -> list[bool]:
    """Return whether each text says the same as the other one at its place.

    They do if one contains the other, both normalised and word by word, or if their embeddings are near. An answer of
    nothing agrees with none.
    """
    pairs = list(zip(texts, others, strict=True))
    found = [_same_words(text, other) for text, other in pairs]
    open_ones = []
    for place, (text, other) in enumerate(pairs):
        if not found[place] and normalise(text) and normalise(other):
            open_ones.append(place)
    if embedder is None or not open_ones:
        return found
    first = embedder.embed([texts[place] for place in open_ones])
    second = embedder.embed([others[place] for place in open_ones])
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    nearness = (first * second).sum(axis=1) / np.maximum(lengths, 1e-12)
    for place, near in zip(open_ones, nearness, strict=True):
        found[place] = bool(near >= SAME_MEANING)
    return found


def _same_words(first: str, second: str) -> bool:
    short, long = sorted((first, second), key=lambda text: len(normalise(text)))
    return len(normalise(short).split()) <= _SHORT and contains_answer(long, short)


def _verdicts(answered: Sequence[Answered], texts: Sequence[str], judge: Proxy) -> list[bool | None]:
    """Return whether each text is right; None where the judge does not say. Who refuses to answer is not right."""
    questions = [each.question.text for each in answered]
    gold = [each.question.gold for each in answered]
    judged = judge_answers(judge, questions, gold, texts).labels
    return [False if refuses(text) else label for text, label in zip(texts, judged, strict=True)]
