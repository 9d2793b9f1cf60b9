"""The words that are telling for a corpus: those that it has far oftener than other text, and its names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rgate_integrations.models.encoder import Encoder

TELLING = 300
"""How many words are kept for reasons."""
_NAMES = 2_000
_TOKEN = re.compile(r"\w+(?:[.\-]\w+)*")
_LONGEST = 40  # characters
_IDENTIFIER = re.compile(r"(?=.*[^\W\d_])(?:[^\W\d].*[\d_].*|.*[a-z][A-Z].*|[^\W\d]\w*\.\w{2,})")
"""Such as ``num_cpus``, ``E-4711``, ``RayJob`` and ``ray.put``."""
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th|s|%|[a-z])?", re.IGNORECASE)
_RARE = -13.0
"""Natural log of a word's share of all text, below which all words are alike: it is a guess from its parts."""
_USUAL = -10.5
"""The same from which on a word tells nothing: those of a language that most text has."""
_OFTENER = 1.5
"""Natural log of how many times oftener than other text a corpus has a word that is telling, at least."""
_COMMON_WORDS = 20
"""The commonest words of a corpus: by them it is known how much of the text that all is compared with is in its
language."""


class Terms(NamedTuple):
    """The words of a corpus.

    Attributes:
        telling: What it has far oftener than text does, the most telling first, in lower case.
        names: Identifiers, codes and other names that hardly any other text has, in lower case.
    """

    telling: tuple[str, ...]
    names: frozenset[str]


def find_terms(passages: Sequence[str], encoder: Encoder) -> Terms:
    """Return the telling words of some passages.

    Args:
        passages: The passages.
        encoder: Its tokens know how frequent words are.
    """
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    words = 0
    for passage in passages:
        found = _TOKEN.findall(passage)
        words += len(found)
        counts.update({word.lower() for word in found if _is_word(word)})
        names.update({word.lower() for word in found if _is_name(word)})
    usual = {word: max(encoder.log_frequency(word), _RARE) for word in counts}
    excess = {word: math.log(count / words) - usual[word] for word, count in counts.items()}
    commonest = sorted(usual, key=usual.__getitem__, reverse=True)[:_COMMON_WORDS]
    language = float(np.median([excess[word] for word in commonest])) if commonest else 0.0
    telling = {}
    for word, count in counts.items():
        more = excess[word] - language - _OFTENER
        if more > 0 and usual[word] < _USUAL and (count > 1 or len(passages) == 1):
            telling[word] = more * math.sqrt(count)
    ranked = sorted(telling, key=telling.__getitem__, reverse=True)
    rare = [word for word, _ in names.most_common() if usual.get(word, 0.0) <= _RARE]
    return Terms(tuple(ranked[:TELLING]), frozenset(rare[:_NAMES]))


def words_of(text: str) -> list[str]:
    """Return the words of a text as terms are written, in order."""
    return [word.lower() for word in _TOKEN.findall(text)]


def _is_word(word: str) -> bool:
    return 1 < len(word) <= _LONGEST and not _ORDINAL.fullmatch(word)


def _is_name(word: str) -> bool:
    return _is_word(word) and _IDENTIFIER.fullmatch(word) is not None
