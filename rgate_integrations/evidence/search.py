"""Evidence of a search: how well what was found covers the question, in numbers that mean the same on any corpus.

Texts give most of it, so that any retriever will do. Scores add to it where they are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rgate_integrations.arrays import Float64Array

READ = 5
"""How many of the passages that were found, from the best on, are read."""

TEXT_FEATURES = (
    "cover_best",
    "cover_all",
    "cover_mean",
    "rare_best",
    "rare_all",
    "rare_words",
    "words",
    "titles",
    "linked",
    "alike",
    "number_missing",
)
"""Names of what `text_features` returns, in order."""

SCORE_FEATURES = ("similar_best", "similar_gap", "similar_decay", "bm25_best", "bm25_gap", "agreement")
"""Names of what `score_features` returns, in order."""

_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+")
_ASKS_NUMBER = re.compile(r"\b(when|(what|which) (year|date|day)|how (many|much|old|long|tall|far|high))\b")
_COMMON = Path(__file__).parent / "common_words.txt"
_SAY_NOTHING = frozenset(
    _WORD.findall(
        """
        who whom whose what which when where why how do does did done is are was were am be been being can could would
        should will shall may might must have has had a an the of in on at to for from by with and or s t it its this
        that these those there i you he she they we me my your his her their our as not no
        """
    )
)
_LONGEST = 4_000  # characters of a passage that are read


@dataclass(frozen=True)
class FoundPassage:
    """A passage that a search found, as this evidence reads it.

    Attributes:
        text: The passage.
        title: Its title; may be empty.
        similarity: Cosine similarity of its vector and the question's, in [-1, 1]; None if unknown.
        bm25: Share in [0, 1] of the highest BM25 score that any passage could have for the question; None if unknown.
    """

    text: str
    title: str = ""
    similarity: float | None = None
    bm25: float | None = None


@dataclass(frozen=True)
class Background:
    """What similarity is usual in a corpus.

    Attributes:
        mean: Mean of the best similarity that unrelated questions find.
        deviation: Its standard deviation, above 0.
    """

    mean: float
    deviation: float


def text_features(question: str, passages: Sequence[FoundPassage]) -> Float64Array:
    """Return how well texts cover a question, shape (`TEXT_FEATURES`,).

    Words count by how rare they are in English: a name that no passage has tells more than a verb.

    Args:
        question: The question.
        passages: What was found, best first.
    """
    weights = {word: weight_of(word) for word in words_of(question) if word not in _SAY_NOTHING}
    rare = {word for word, weight in weights.items() if weight == 1.0}
    read = [_Read.of(passage) for passage in passages[:READ]]
    everything = frozenset().union(*(each.words for each in read))
    covered = [_share(weights, each.words) for each in read] or [0.0]
    return np.array(
        [
            max(covered),
            _share(weights, everything),
            sum(covered) / len(covered),
            max((_share_of(rare, each.words) for each in read), default=0.0),
            _share_of(rare, everything),
            math.log1p(len(rare)),
            math.log1p(len(weights)),
            _titles_named(read, words_of(question)),
            _linked(read, weights),
            _alike(read),
            _number_missing(question, read),
        ]
    )


def score_features(passages: Sequence[FoundPassage], background: Background) -> Float64Array:
    """Return what the scores of a search say, shape (`SCORE_FEATURES`,).

    Args:
        passages: What was found; each with both scores.
        background: Of the corpus.
    """
    similar = np.sort([passage.similarity or 0.0 for passage in passages[:READ]])[::-1]
    by_words = np.sort([passage.bm25 or 0.0 for passage in passages[:READ]])[::-1]
    if not len(similar):
        return np.zeros(len(SCORE_FEATURES))
    scaled = (similar - background.mean) / background.deviation
    return np.array(
        [
            scaled[0],
            scaled[0] - scaled[1:].mean() if len(scaled) > 1 else 0.0,
            scaled[0] - scaled[-1],
            by_words[0],
            by_words[0] - by_words[1:].mean() if len(by_words) > 1 else 0.0,
            _agreement(passages[:READ]),
        ]
    )


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, lower case, without a plural's s."""
    return frozenset(_singular(word) for word in _WORD.findall(text.casefold()))


def weight_of(word: str) -> float:
    """Return how much a word tells, from 0 for the most common of English to 1 for one of the rare."""
    return _common().get(word, 1.0)


@dataclass(frozen=True)
class _Read:
    """A passage with its words."""

    passage: FoundPassage
    words: frozenset[str]
    title: frozenset[str]

    @classmethod
    def of(cls, passage: FoundPassage) -> _Read:
        title = words_of(passage.title)
        return cls(passage, words_of(passage.text[:_LONGEST]) | title, title - _SAY_NOTHING)


@lru_cache(maxsize=1)
def _common() -> dict[str, float]:
    """Return the weights of common words: the logarithm of their rank, as a share of the last rank's."""
    ranked = _COMMON.read_text(encoding="utf-8").split()
    last = math.log(len(ranked) + 1)
    return {word: math.log(rank) / last for rank, word in enumerate(ranked, start=1)}


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _share(weights: dict[str, float], words: frozenset[str]) -> float:
    """Return the weight of those of the question's words that are among some words, as a share of all; 0 for none."""
    total = sum(weights.values())
    return sum(weight for word, weight in weights.items() if word in words) / total if total else 0.0


def _share_of(wanted: set[str], words: frozenset[str]) -> float:
    """Return the share of wanted words that are there; 1 if none is wanted."""
    return len(wanted & words) / len(wanted) if wanted else 1.0


def _titles_named(read: Sequence[_Read], asked: frozenset[str]) -> float:
    """Return the share of passages whose whole title the question names."""
    named = [each for each in read if each.title and each.title <= asked]
    return len(named) / READ


def _linked(read: Sequence[_Read], weights: dict[str, float]) -> float:
    """Return the share of passages whose title another passage names, though the question does not."""
    linked = 0
    for each in read:
        new = each.title - set(weights)
        others = (other for other in read if other.title != each.title)
        linked += bool(new) and any(each.title <= other.words for other in others)
    return linked / READ


def _alike(read: Sequence[_Read]) -> float:
    """Return the mean overlap of the rare words of the best passage and the others, in [0, 1]."""
    if len(read) < 2:
        return 0.0
    first, *others = [{word for word in each.words if weight_of(word) == 1.0} for each in read]
    overlaps = [len(first & other) / max(1, len(first | other)) for other in others]
    return sum(overlaps) / len(overlaps)


def _number_missing(question: str, read: Sequence[_Read]) -> float:
    """Return 1 if a number is asked for, and no passage has one that the question has not; else 0."""
    if not _ASKS_NUMBER.search(question.casefold()):
        return 0.0
    given = set(_NUMBER.findall(question))
    return float(all(given.issuperset(_NUMBER.findall(each.passage.text[:_LONGEST])) for each in read))


def _agreement(passages: Sequence[FoundPassage]) -> float:
    """Return the rank correlation of both scores, in [-1, 1]; 0 for fewer than two passages."""
    if len(passages) < 2:
        return 0.0
    similar = np.argsort(np.argsort([passage.similarity or 0.0 for passage in passages]))
    by_words = np.argsort(np.argsort([passage.bm25 or 0.0 for passage in passages]))
    return float(np.corrcoef(similar, by_words)[0, 1])
