"""Finds the telling words of a corpus, which are far more frequent in it than in other text, and its names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from rgate_integrations.models.encoder import Encoder
from rgate_integrations.runtime.text import MARKS, plain_text

MAX_TELLING, _MAX_NAMES = 300, 2_000
_MAX_WORD_CHARS = 40
# Scripts whose words may touch a code: Hebrew, Arabic, Thai and their neighbours, kana, Han, Hangul.
_GLUED = "\u0590-\u1dff\u3040-\ud7ff"
_TOKEN = re.compile(rf"[^\W{_GLUED}]+(?:[.\-][^\W{_GLUED}]+)*|(?:(?=[{_GLUED}])[\w{MARKS}])+")
_HYPHENS = str.maketrans("\u2010\u2212", "--")  # a hyphen and a minus that stand for "-" in codes
# Superscripts, subscripts, fractions, and signs such as ™: with plain letters, "km²" would read like a code.
_SMALL = re.compile(
    "[\u00aa\u00b2\u00b3\u00b9\u00ba\u00bc-\u00be\u2070-\u209c\u2116\u2120\u2122\u2150-\u215f]"
)
_IDENTIFIER = re.compile(r"(?=.*[^\W\d_])(?:[^\W\d].*[\d_].*|.*[a-z][A-Z].*|[^\W\d]\w*\.\w{2,})")
"""Such as ``num_cpus``, ``E-4711``, ``RayJob`` and ``ray.put``."""
_ROOT = re.compile(r"([^\W\d]\w{2,})(?:\.[^\W\d]\w+)+")
"""A dotted identifier, such as ``sklearn.svm.SVC``, whose first part may be the name of a library."""
_MIN_ROOTED = 0.05  # minimum share of passages with identifiers that begin with the name of a library
_CAPITALISED = re.compile(r"(?<=[^\W\d_A-Z] )[^\W\d_a-z]\w{2,}")
"""A capitalised word inside a sentence: a name, unless all nouns are capitalised, or all words of headings."""
_MAX_CAPITALISED = 0.15  # maximum share of words, unless the others below show that they are names
# Frequent in German, or in Luxembourgish ("vun"), which capitalise all nouns, and not in other languages.
_NOUN_CAPITALS = ("und", "mit", "ist", "wird", "für", "auf", "nicht", "zum", "vun")
_MIN_NOUN_CAPITALS = 0.005  # minimum share of these among the words of such a language
_BEFORE_WORD = re.compile(r"(\w+) (?=(\w))")  # a word, and the first character of the next
_MIN_TITLE_CASE = 0.08  # minimum share of words such as "Your" among the capitalised ones of Title Case
_ACRONYM_CHARS = range(3, 7)
_MIN_ACRONYM = 0.002  # minimum share of passages with an acronym; a large corpus mentions many in passing
_MAX_ACRONYMS = 0.2  # above this share of words, the text is written in capitals
_MIN_NAMED = 0.01  # minimum share of passages with a name; a product's name is everywhere in its docs
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th|s|%|[a-z])?", re.IGNORECASE)
# Natural logs of a word's share of all text.
_RARE = -13.0  # below this, the encoder's tokens only give a guess, so all words count as equally rare
_UNKNOWN = -15.0  # below this, a word is several tokens, so it is not a common word such as "French"
_COMMON = -10.63  # above this, a word is too common to be informative, such as "how"
_MIN_EXCESS = 1.5  # natural log of how many times more frequent than in other text a telling word must be
_REFERENCE_WORDS = 20
"""Number of the most common words, which show how rare the corpus's language is in other text."""


class Terms(NamedTuple):
    """The telling words and the names of a corpus.

    Attributes:
        telling: Words far more frequent in the corpus than in other text, the most telling first, in lower
            case.
        names: Identifiers, codes, products and other names that hardly any other text has, in lower case.
    """

    telling: tuple[str, ...]
    names: frozenset[str]


def find_terms(passages: Sequence[str], encoder: Encoder) -> Terms:
    """Return the telling words and the names of some passages.

    Args:
        passages: The passages.
        encoder: The encoder, whose tokens give the frequency of words.
    """
    counts: Counter[str] = Counter()
    identifiers: Counter[str] = Counter()
    total = 0
    passages = list(map(_plain_codes, passages))
    for passage in passages:
        words = _TOKEN.findall(passage)
        total += len(words)
        counts.update({word.lower() for word in words if _is_word(word)})
        identifiers.update({word.lower() for word in words if _is_word(word) and _IDENTIFIER.fullmatch(word)})
    frequencies = {word: max(encoder.log_frequency(word), _RARE) for word in counts}
    excess = {word: math.log(count / total) - frequencies[word] for word, count in counts.items()}
    commonest = sorted(frequencies, key=frequencies.__getitem__, reverse=True)[:_REFERENCE_WORDS]
    language_excess = float(np.median([excess[word] for word in commonest])) if commonest else 0.0
    weights = {}
    for word, count in counts.items():
        weight = excess[word] - language_excess - _MIN_EXCESS
        if weight > 0 and frequencies[word] < _COMMON and (count > 1 or len(passages) == 1):
            weights[word] = weight * math.sqrt(count)
    telling = sorted(weights, key=weights.__getitem__, reverse=True)[:MAX_TELLING]
    names = [word for word, _ in identifiers.most_common() if frequencies[word] <= _RARE][:_MAX_NAMES]
    proper = [*_proper_names(passages, counts, total, encoder), *_library_name(passages, encoder)]
    return Terms(tuple(telling), frozenset([*names, *proper, *_acronyms(passages, total, encoder)]))


def _proper_names(
    passages: Sequence[str], counts: Counter[str], total: int, encoder: Encoder
) -> Iterator[str]:
    """Yield names of products and companies: always capitalised, frequent in these passages, and rare elsewhere.

    In texts full of names, a word that is always before another capital is a title, such as "Uncle".
    """
    words = (word for passage in passages for word in _CAPITALISED.findall(passage))
    capitalised = Counter(word for word in words if word[0].isupper())  # many scripts have no capitals
    lower = Counter(word for passage in passages for word in _TOKEN.findall(passage) if word[0].islower())
    titles: set[str] = set()
    if capitalised.total() > _MAX_CAPITALISED * total:
        capitalises_nouns = sum(lower[word] for word in _NOUN_CAPITALS) >= _MIN_NOUN_CAPITALS * total
        common = sum(n for word, n in capitalised.items() if encoder.log_frequency(word.lower()) > _COMMON)
        if capitalises_nouns or common >= _MIN_TITLE_CASE * capitalised.total():
            return
        everywhere = Counter(word for passage in passages for word in _TOKEN.findall(passage))
        pairs = (pair for passage in passages for pair in _BEFORE_WORD.findall(passage))
        before = Counter(word for word, initial in pairs if initial.isupper())
        titles = {word for word in capitalised if before[word] >= everywhere[word]}
    least = max(2, _MIN_NAMED * len(passages))
    for word in capitalised.keys() - titles:
        frequency = max(encoder.log_frequency(word), encoder.log_frequency(word.lower()))
        if counts[word.lower()] >= least and word.lower() not in lower and frequency <= _UNKNOWN:
            yield word.lower()


def _acronyms(passages: Sequence[str], total: int, encoder: Encoder) -> Iterator[str]:
    """Yield acronyms such as ``FMLA``: rare elsewhere, in some of these passages, and always in capitals there."""
    counts = Counter(word for passage in passages for word in set(_TOKEN.findall(passage)))
    acronyms = {word: count for word, count in counts.items() if _is_acronym(word)}
    if sum(acronyms.values()) > _MAX_ACRONYMS * total:
        return
    for word, count in acronyms.items():
        lower = word.lower()
        if count < _MIN_ACRONYM * len(passages) or lower in counts or word.capitalize() in counts:
            continue
        if max(encoder.log_frequency(word), encoder.log_frequency(lower)) <= _UNKNOWN:
            yield lower


def _is_acronym(word: str) -> bool:
    return len(word) in _ACRONYM_CHARS and word.isalpha() and word.isupper()


def _library_name(passages: Sequence[str], encoder: Encoder) -> Iterator[str]:
    """Yield the first part of most dotted identifiers, if it is no common word: the library that they document."""
    roots: Counter[str] = Counter()
    for passage in passages:
        matches = map(_ROOT.fullmatch, _TOKEN.findall(passage))
        roots.update({match[1].lower() for match in matches if match})
    least = max(2, _MIN_ROOTED * len(passages))
    rare = (
        root
        for root, count in roots.most_common()
        if count >= least and encoder.log_frequency(root) <= _UNKNOWN
    )
    yield from islice(rare, 1)


def tokenize(text: str) -> list[str]:
    """Return the words of a text, in order and in lower case, split in the same way as for `find_terms`."""
    return [word.lower() for word in _TOKEN.findall(_plain_codes(text))]


def _plain_codes(text: str) -> str:
    """Return a text in plain letters: full-width letters and special hyphens become ASCII, and ™ a space."""
    return plain_text(_SMALL.sub(" ", text)).translate(_HYPHENS)


def _is_word(word: str) -> bool:
    return 1 < len(word) <= _MAX_WORD_CHARS and not _ORDINAL.fullmatch(word)
