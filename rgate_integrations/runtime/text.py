"""Text as the field compares it: normalised answers, which of them are right."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from rgate_integrations.errors import EvidenceError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case a text and drop punctuation, English articles and extra white space (SQuAD's normalisation).

    >>> normalise("The  Beatles, (band)")
    'beatles band'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which have no bytes in UTF-8 and which tokenizers refuse, by ``?``."""
    return text.encode("utf-8", errors="replace").decode()


def comparable(answers: Sequence[str]) -> list[str]:
    """Normalise answers that will be compared with each other.

    Each empty answer is made different from all others: two LLM samples that say nothing do not agree.

    Raises:
        EvidenceError: No answer says anything.
    """
    texts = [normalise(a) for a in answers]
    if not any(texts):
        raise EvidenceError(f"All {len(texts)} sampled answers are empty.")
    return [text or f"\0{i}" for i, text in enumerate(texts)]


def contains_answer(text: str, answer: str) -> bool:
    """Whether a normalised answer occurs in a normalised text, on token boundaries.

    An answer that normalises to nothing is never contained.

    >>> contains_answer("I do not know", "no"), contains_answer("No, it is not.", "no")
    (False, True)
    """
    inner = normalise(answer)
    return bool(inner) and f" {inner} " in f" {normalise(text)} "


def is_correct(answer: str, gold: Sequence[str]) -> bool:
    """Whether an answer contains a gold answer. Every label of this package that is not given is made here.

    Gold answers that normalise to nothing never match.

    >>> is_correct("I do not know.", ["no"]), is_correct("No, it is not.", ["no", "never"])
    (False, True)
    """
    return any(contains_answer(answer, each) for each in gold)


def matching_ratio(text: str, answers: Sequence[str]) -> float:
    """Return the share of gold answers that a text contains (SlimPLM, equation 2), on token boundaries.

    Answers that normalise to nothing do not count. 0.0 when none is left.
    """
    contained = [contains_answer(text, answer) for answer in answers if normalise(answer)]
    return sum(contained) / max(len(contained), 1)
