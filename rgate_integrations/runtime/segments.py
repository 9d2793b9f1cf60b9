"""Splits a request into segments, each of which is judged: sentences, lines, items of a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array

LAYOUT = 11
"""Columns of `layout`."""

QUESTION_MARKS = ("?", "？", "؟")
"""How a question ends, in all scripts."""

_CLOSERS = "\"')]*_”’»」』）"
_OPENERS = "\"'([*_“‘«「『（¿¡"
_ENDS = (*QUESTION_MARKS, "!", "！")
_STOPS = (".", "．", "…", "。", "।", "۔")
_UNSPACED = re.compile(rf"(?<=[。！？])(?=[^\s。！？{re.escape(_CLOSERS)}])")
"""Where a sentence ends in scripts that have no spaces."""
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff]")
_LABEL = re.compile(r"[A-Z][a-z]+:$")  # such as "Hint:"
_ABBREVIATION = re.compile(r"(?:[A-Z][a-z]{0,2}|[a-z]|\w(?:\.\w)+|vs|etc|approx|incl|no)\.$")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_MOST_WORDS = 60
"""A sentence without an end is cut after so many words: the mean of more says little of any of them."""


@dataclass(frozen=True)
class Segmented:
    """A request and its segments.

    Attributes:
        lines: Its segments by line; at least one.
        history: What was said before it, a line feed behind each turn; may be empty.
    """

    lines: tuple[tuple[str, ...], ...]
    history: str = ""

    @classmethod
    def from_text(cls, text: str, history: Sequence[str] = ()) -> Segmented:
        """Split a request."""
        return cls(tuple(map(tuple, split_lines(text))), "".join(f"{turn}\n" for turn in history))

    @property
    def segments(self) -> tuple[str, ...]:
        """All of them in order."""
        return tuple(chain.from_iterable(self.lines))


def segments(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[str]:
    r"""Return the segments of a text in order, each run of white space as one space.

    A full stop behind an abbreviation ends none. By default any word of up to three letters with a capital may be
    one: of a request, a segment too many costs more than one too few.

    >>> segments("Hi Anna, it rained. When is my bill due?\nThanks!")
    ['Hi Anna, it rained.', 'When is my bill due?', 'Thanks!']
    """
    return [segment for line in split_lines(text, abbreviation) for segment in line]


def split_lines(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[list[str]]:
    """Return the segments of each line that is not empty; see `segments`. One walk over the words of the text."""
    lines = []
    for line in text.splitlines():
        words = _UNSPACED.sub(" ", line).split()
        found, begin = [], 0
        for i, word in enumerate(words[:-1], start=1):
            if _ends(word, words[i], abbreviation) or i - begin >= _MOST_WORDS:
                found.append(" ".join(words[begin:i]))
                begin = i
        if words:
            lines.append([*found, " ".join(words[begin:])])
    return lines


def _ends(word: str, following: str, abbreviation: re.Pattern[str]) -> bool:
    """Return whether a sentence ends between two words."""
    bare = word.rstrip(_CLOSERS)
    if bare.endswith(_ENDS) or _LABEL.match(following):
        return True
    if not bare.endswith(_STOPS) or abbreviation.match(bare.lstrip(_OPENERS)):
        return False
    first = following.lstrip(_OPENERS)[:1]
    # Many scripts have no capitals.
    return first.isalnum() and not first.islower()


def count_words(text: str) -> int:
    """Return the number of words; where none are marked, as in Chinese, two characters count as one."""
    return len(text.split()) + len(_IDEOGRAPH.findall(text)) // 2


def layout(text: str) -> Float32Array:
    """Return how each segment stands in a text, and what it looks like, shape (segments, 11).

    What was pasted stands in blocks of lines, and looks unlike what is asked beside it. The columns are: lines of
    its paragraph and segments of its line (logarithms), whether it is the first or the last of all, ends in a
    question mark, its words (logarithm), the share of letters and spaces, whether it begins with a capital or with
    no letter, all segments (logarithm), and whether its paragraph is one line.
    """
    rows = []
    paragraphs = [split_lines(paragraph) for paragraph in BLANK_LINE.split(text)]
    for paragraph in paragraphs:
        for line in paragraph:
            for segment in line:
                plain = sum(character.isalpha() or character == " " for character in segment)
                first = segment[:1]
                rows.append(
                    (
                        np.log1p(len(paragraph)),
                        np.log1p(len(line)),
                        0.0,
                        0.0,
                        segment.endswith(QUESTION_MARKS),
                        np.log1p(count_words(segment)),
                        plain / len(segment),
                        first.isupper(),
                        not first.isalpha(),
                        0.0,
                        len(paragraph) == 1,
                    )
                )
    found = np.array(rows, np.float32).reshape(-1, LAYOUT)
    if len(found):
        found[0, 2] = found[-1, 3] = 1.0
        found[:, 9] = np.log1p(len(found))
    return found
