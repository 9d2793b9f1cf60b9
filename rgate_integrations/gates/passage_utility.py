"""Estimates P(helps), the probability that the LLM answers correctly with the passages that a search found.

The estimate combines P(known) with features of words: which words of the question occur in the passages, and which
titles of passages are named by the question or by other passages. So it works the same for any corpus and retriever.
Retrievers' scores are ignored, because each retriever has its own scale, and BM25's scores did not improve the
estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from rgate_integrations.decision import Finite, Frozen, Probability
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.text import IDEOGRAPHS, MARKS

FILE = "helps.json"
"""Name of the model's file in its folder."""

READ = 5
"""Maximum number of passages to read, best first."""

SEARCH_FEATURES = ("cover_first", "cover_best", "cover_all", "titles", "linked")
"""Names of the features that `search_features` returns, in order."""

# A Han character is a word, and so is a run of katakana; hiragana are mostly particles and endings.
_WORD = re.compile(
    rf"[\u3400-\u9fff]|[\u30a1-\u30fa][\u30a1-\u30fa\u30fc]*|[^\W_{IDEOGRAPHS}]+(?:[{MARKS}]+[^\W_{IDEOGRAPHS}]*)*"
)
_PLURAL = re.compile(r"(?<=..[^s])s$")
_STOPWORDS = frozenset(
    _WORD.findall(
        """
        who whom whose what which when where why how do does did done is are was were am be been being can could would
        should will shall may might must have has had a an the of in on at to for from by with and or s t it its this
        that these those there i you he she they we me my your his her their our as not no 的 是 了 在 有 和
        """
    )
)
_MAX_CHARACTERS = 4_000  # characters of a passage to read


@dataclass(frozen=True)
class FoundPassage:
    """A passage that a search found.

    Attributes:
        text: The passage.
        title: Its title; may be empty.
    """

    text: str
    title: str = ""

    @classmethod
    def from_metadata(cls, text: str, metadata: Mapping[str, Any] | None) -> FoundPassage:
        """Return a passage whose title is in its metadata, under ``title``; some stores have None as metadata."""
        return cls(text, str((metadata or {}).get("title") or ""))


class PassageUtilityModel(Frozen):
    """Computes P(helps), the probability of a right answer with the passages, from `search_features` and P(known).

    A logistic model of the features gives the probability that the passages contain the answer. If they do, the LLM
    finds it with the probability ``reading``. If not, it answers from its own knowledge, a share of which is lost to
    ``distraction``:

        p_helps = p_contains_answer * reading + (1 - p_contains_answer) * (1 - distraction) * p_known

    Attributes:
        weights: Weights of the features, in the order of `SEARCH_FEATURES`.
        bias: Added to the weighted sum; the result is the logit of P(the passages contain the answer).
        reading: P(correct) in [0, 1] if the passages contain the answer.
        distraction: Share in [0, 1] of its knowledge that the LLM loses if they do not.
        provenance: The model's origin, as JSON values.
    """

    weights: tuple[Finite, Finite, Finite, Finite, Finite]
    bias: Finite
    reading: Probability
    distraction: Probability
    provenance: dict[str, Any] = Field(default_factory=dict)

    def p_contains_answer(self, features: Float64Array) -> Float64Array:
        """Return P(the passages contain the answer), shape (n,).

        Args:
            features: `search_features` of each of n questions, shape (n, 5).
        """
        return sigmoids(features @ np.array(self.weights) + self.bias)

    def p_helps(self, p_contains_answer: Float64Array, p_known: Float64Array) -> Float64Array:
        """Return P(the LLM answers correctly with the passages), shape (n,).

        Args:
            p_contains_answer: P(the passages contain the answer), shape (n,).
            p_known: P(the LLM answers correctly without them), shape (n,).
        """
        return p_contains_answer * self.reading + (1 - p_contains_answer) * (1 - self.distraction) * p_known


@cache
def read_utility_model() -> PassageUtilityModel:
    """Return the shipped model of P(helps); cached."""
    return PassageUtilityModel.model_validate_json((SHIPPED / "look-first" / FILE).read_bytes())


def search_features(question: str, passages: Sequence[FoundPassage]) -> Float64Array:
    """Return features that show how well passages cover a question, shape (5,): see `SEARCH_FEATURES`.

    Words are weighted by their rarity in English, because a missing name says more than a missing verb. The
    most common words, such as "the", are ignored.

    Args:
        question: The question.
        passages: The passages, best first; the first `READ` are read.

    Returns:
        Numbers in [0, 1]. The first three are the weighted share of the question's words that occur in the
        first passage, in the passage with most of them, and in all passages together. The last two are counts
        divided by `READ`: passages whose title the question names, and passages whose title another passage
        names but the question does not.
    """
    asked = tokenize(question)
    weights = {word: word_weights().get(word, 1.0) for word in asked - _STOPWORDS}
    texts: list[frozenset[str]] = []
    titles: list[frozenset[str]] = []
    for passage in passages[:READ]:
        title = tokenize(passage.title)
        texts.append(tokenize(passage.text[:_MAX_CHARACTERS]) | title)
        titles.append(title - _STOPWORDS)
    covered = [_share(weights, words) for words in texts] or [0.0]
    named = linked = 0
    for title in titles:
        named += bool(title) and title <= asked
        if not title <= asked:
            # A bridge to another passage: the one on Titanic mentions James Cameron, whom the question does not.
            others = [words for words, other in zip(texts, titles, strict=True) if other != title]
            linked += any(title <= words for words in others)
    everything = frozenset[str]().union(*texts)
    return np.array([covered[0], max(covered), _share(weights, everything), named / READ, linked / READ])


def tokenize(text: str) -> frozenset[str]:
    """Return the words of a text in lower case. Words of four or more letters lose a final s, unless they end in ss.

    In Chinese and Japanese, each Han character and each run of katakana is a word; hiragana are left out.
    """
    return frozenset(_PLURAL.sub("", word) for word in _WORD.findall(text.casefold()))


@cache
def word_weights() -> dict[str, float]:
    """Return the weights of common English words, from 0 for the most common one; all are below 1.

    The weight is log(rank) / log(number of words + 1). Rarer words are not in the mapping, and have the weight 1.
    """
    ranked = (Path(__file__).parent / "common_words.txt").read_text(encoding="utf-8").split()
    last = math.log(len(ranked) + 1)
    return {word: math.log(rank) / last for rank, word in enumerate(ranked, start=1)}


def _share(weights: Mapping[str, float], words: frozenset[str]) -> float:
    """Return the share of the total weight that belongs to these words; 0 without weights."""
    covered = sum(weight for word, weight in weights.items() if word in words)
    return covered / (sum(weights.values()) or 1.0)
