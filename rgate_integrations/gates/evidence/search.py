"""Evidence of a search: how well what was found covers the question.

It is read from words alone, so it means the same on any corpus, and any retriever will do. Scores are not read: each
retriever has its own scale, and beside the words those of BM25 told nothing new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rgate_integrations.runtime.arrays import Float64Array

READ = 5
"""How many of the passages that were found, from the best on, are read."""

FEATURES = ("cover_first", "cover_best", "cover_all", "titles", "linked")
"""Names of what `search_features` returns, in order."""

_WORD = re.compile(r"[^\W_]+")
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
    """

    text: str
    title: str = ""


def search_features(question: str, passages: Sequence[FoundPassage]) -> Float64Array:
    """Return how well passages cover a question, shape (`FEATURES`,).

    Words count by how rare they are in English: a name that no passage has tells more than a verb.

    Args:
        question: The question.
        passages: What was found, best first; the first `READ` are read.

    Returns:
        The share of the question's words, by weight, in the first passage, in the one that has most, and in all
        together; the share of passages whose title the question names, and of those whose title another passage names
        and the question does not. All in [0, 1].
    """
    asked = words_of(question)
    weights = {word: weight_of(word) for word in asked - _SAY_NOTHING}
    texts: list[frozenset[str]] = []
    titles: list[frozenset[str]] = []
    for passage in passages[:READ]:
        title = words_of(passage.title)
        texts.append(words_of(passage.text[:_LONGEST]) | title)
        titles.append(title - _SAY_NOTHING)
    covered = [_share(weights, words) for words in texts] or [0.0]
    named = linked = 0
    for title in titles:
        named += bool(title) and title <= asked
        if (
            not title <= asked
        ):  # a bridge: "Titanic" leads to "James Cameron", whom the question does not name
            others = [words for words, other in zip(texts, titles, strict=True) if other != title]
            linked += any(title <= words for words in others)
    everything = frozenset[str]().union(*texts)
    return np.array([covered[0], max(covered), _share(weights, everything), named / READ, linked / READ])


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, lower case, without a plural's s."""
    return frozenset(_singular(word) for word in _WORD.findall(text.casefold()))


def weight_of(word: str) -> float:
    """Return how much a word tells, from 0 for the most common of English to 1 for the rare."""
    return _common().get(word, 1.0)


@lru_cache(maxsize=1)
def _common() -> dict[str, float]:
    """Return the weights of common words: the logarithm of their rank, as a share of the last rank's."""
    ranked = _COMMON.read_text(encoding="utf-8").split()
    last = math.log(len(ranked) + 1)
    return {word: math.log(rank) / last for rank, word in enumerate(ranked, start=1)}


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _share(weights: Mapping[str, float], words: frozenset[str]) -> float:
    """Return the weight of those of the question's words that are among some words, as a share of all; 0 for none."""
    total = sum(weights.values())
    return sum(weight for word, weight in weights.items() if word in words) / total if total else 0.0
