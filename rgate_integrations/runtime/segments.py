"""Splits a request into segments, which are judged one by one: sentences, lines, items of a list."""

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
"""The ends of questions, in all scripts."""

_CLOSERS = "\"')]*_”’»」』）"
_OPENERS = "\"'([*_“‘«「『（¿¡"
_ENDS = (*QUESTION_MARKS, "!", "！")
_STOPS = (".", "．", "…", "。", "।", "۔")
_UNSPACED = re.compile(rf"(?<=[。！？])(?=[^\s。！？{re.escape(_CLOSERS)}])")
"""Ends of sentences in scripts without spaces."""
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff]")
_LABEL = re.compile(r"[A-Z][a-z]+:$")  # such as "Hint:"
_ABBREVIATION = re.compile(r"(?:[A-Z][a-z]{0,2}|[a-z]|\w(?:\.\w)+|vs|etc|approx|incl|no)\.$")
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_MAX_WORDS = 60  # a sentence without an end is cut here: a mean over more words says little about any of them


@dataclass(frozen=True)
class Segmented:
    """A request and its segments.

    Attributes:
        lines: Its segments by line; at least one.
        history: The earlier turns, a line feed after each; may be empty.
    """

    lines: tuple[tuple[str, ...], ...]
    history: str = ""

    @classmethod
    def from_text(cls, text: str, history: Sequence[str] = ()) -> Segmented:
        """Split a request."""
        return cls(tuple(map(tuple, split_lines(text))), "".join(f"{turn}\n" for turn in history))

    @property
    def segments(self) -> tuple[str, ...]:
        """All segments in order."""
        return tuple(chain.from_iterable(self.lines))


def segments(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[str]:
    r"""Return the segments of a text in order, each run of white space as one space.

    A full stop after an abbreviation ends none. By default any capitalised word of up to three letters may be one: in
    a request, one segment too many costs more than one too few.

    >>> segments("Hi Anna, it rained. When is my bill due?\nThanks!")
    ['Hi Anna, it rained.', 'When is my bill due?', 'Thanks!']
    """
    return [segment for line in split_lines(text, abbreviation) for segment in line]


def split_lines(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[list[str]]:
    """Return the segments of each line that is not empty; see `segments`."""
    lines = []
    for line in text.splitlines():
        words = _UNSPACED.sub(" ", line).split()
        line_segments, begin = [], 0
        for i, word in enumerate(words[:-1], start=1):
            if _ends(word, words[i], abbreviation) or i - begin >= _MAX_WORDS:
                line_segments.append(" ".join(words[begin:i]))
                begin = i
        if words:
            lines.append([*line_segments, " ".join(words[begin:])])
    return lines


def _ends(word: str, following: str, abbreviation: re.Pattern[str]) -> bool:
    """Return whether a sentence ends between two words."""
    bare = word.rstrip(_CLOSERS)
    if bare.endswith(_ENDS) or _LABEL.match(following):
        return True
    if not bare.endswith(_STOPS) or abbreviation.match(bare.lstrip(_OPENERS)):
        return False
    first = following.lstrip(_OPENERS)[:1]
    # Not lower case, instead of upper case: many scripts have no capitals.
    return first.isalnum() and not first.islower()


def count_words(text: str) -> int:
    """Return the number of words; in scripts without spaces, as Chinese, two characters count as one."""
    return len(text.split()) + len(_IDEOGRAPH.findall(text)) // 2


def layout(text: str) -> Float32Array:
    """Return features of the layout and look of each segment, shape (segments, 11).

    Pasted material stands in blocks of lines, and looks unlike a question beside it. The columns are: lines of
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
    features = np.array(rows, np.float32).reshape(-1, LAYOUT)
    if len(features):
        features[0, 2] = features[-1, 3] = 1.0
        features[:, 9] = np.log1p(len(features))
    return features
