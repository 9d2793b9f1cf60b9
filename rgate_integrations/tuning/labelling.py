"""Labels for answers: by gold answers, by a judge, or by whether both arms say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.text import contains_answer, is_correct, normalise
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
    """

    kind: str
    answered: tuple[Answered, ...]
    known: tuple[bool, ...]
    rag: tuple[bool, ...]
    unknown: int
    judge: str = ""

    @property
    def description(self) -> str:
        """What the labels are, and what they are not, in a sentence."""
        return {
            "gold": "An answer is right if it contains a gold answer, word by word.",
            "judge": f"The model {self.judge} judged each answer against the gold ones.",
            "agreement": "No gold answers: an answer without retrieval counts as right if it says the same as the "
            "one with retrieval, which always does. That stands in for correctness and is not correctness.",
        }[self.kind]


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
    if kind == "agreement":
        agree = agreeing(answered, embedder)
        return Labels("agreement", tuple(answered), tuple(agree), (True,) * len(answered), 0)
    if kind not in ("gold", "judge"):
        raise ConfigurationError(f"Labels {kind!r} are not known.", hint="gold, judge or agreement")
    with_gold = [each for each in answered if each.question.gold]
    if not with_gold:
        raise DataFormatError("No question has a gold answer.", hint="Give some, or label by agreement.")
    if kind == "gold":
        known = [is_correct(each.direct.text, each.question.gold) for each in with_gold]
        rag = [is_correct(each.retrieve.text, each.question.gold) for each in with_gold]
        return Labels("gold", tuple(with_gold), tuple(known), tuple(rag), len(answered) - len(with_gold))
    if judge is None:
        raise ConfigurationError("A judge is needed for labels by a judge.", hint="judge=, or --judge")
    return _judged(with_gold, judge, len(answered) - len(with_gold))


def agreeing(answered: Sequence[Answered], embedder: Embedder | None) -> list[bool]:
    """Return whether the two answers to each question say the same.

    They do if one contains the other, both normalised and word by word, or if their embeddings are near. An answer of
    nothing agrees with none.
    """
    found = [_same_words(each.direct.text, each.retrieve.text) for each in answered]
    open_ones = [
        place for place, same in enumerate(found) if not same and _both_say_something(answered[place])
    ]
    if embedder is None or not open_ones:
        return found
    direct = embedder.embed([answered[place].direct.text for place in open_ones])
    retrieve = embedder.embed([answered[place].retrieve.text for place in open_ones])
    lengths = np.linalg.norm(direct, axis=1) * np.linalg.norm(retrieve, axis=1)
    nearness = (direct * retrieve).sum(axis=1) / np.maximum(lengths, 1e-12)
    for place, near in zip(open_ones, nearness, strict=True):
        found[place] = bool(near >= SAME_MEANING)
    return found


def _same_words(first: str, second: str) -> bool:
    short, long = sorted((first, second), key=lambda text: len(normalise(text)))
    return len(normalise(short).split()) <= _SHORT and contains_answer(long, short)


def _both_say_something(each: Answered) -> bool:
    return bool(normalise(each.direct.text) and normalise(each.retrieve.text))


def _judged(answered: Sequence[Answered], judge: Proxy, unknown: int) -> Labels:
    direct = _verdicts(answered, [each.direct.text for each in answered], judge)
    retrieve = _verdicts(answered, [each.retrieve.text for each in answered], judge)
    kept: list[Answered] = []
    known: list[bool] = []
    rag: list[bool] = []
    for each, of_direct, of_retrieve in zip(answered, direct, retrieve, strict=True):
        if of_direct is not None and of_retrieve is not None:
            kept.append(each)
            known.append(of_direct)
            rag.append(of_retrieve)
    unknown += len(answered) - len(kept)
    return Labels("judge", tuple(kept), tuple(known), tuple(rag), unknown, judge.name)


def _verdicts(answered: Sequence[Answered], texts: Sequence[str], judge: Proxy) -> list[bool | None]:
    """Return whether each text is right; None where the judge does not say. Who refuses to answer is not right."""
    questions = [each.question.text for each in answered]
    gold = [each.question.gold for each in answered]
    judged = judge_answers(judge, questions, gold, texts).labels
    return [False if refuses(text) else label for text, label in zip(texts, judged, strict=True)]
