"""Cuts passages into the pieces that a profile reads, and says which of their sentences resemble questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from os.path import commonprefix
from unicodedata import category

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array, PositionArray

_PIECE = 300  # maximum characters of a piece; with 150, similar corpora are ranked slightly worse
_MAX_PIECES = 4  # per passage
_MIN_LATER = 60  # minimum characters of a later piece
_SUBJECT = 80
"""Number of characters from a passage's beginning, which often names its subject, to put before its later pieces."""
_MAX_LIKENESS = 0.62  # maximum cosine of pieces of one passage; others say nothing new
_SENTENCE_ENDS = (". ", "? ", "! ", "。", "\n")
_MIN_SENTENCE, _MAX_SENTENCE, _MAX_SYMBOLS = 20, 200, 0.2
"""For `is_prose`: minimum and maximum length in characters; maximum share of digits, punctuation and the like."""
_MIN_TEXTS, _MIN_SHARED = 5, 20
"""Minimum number of passages and of characters for `drop_shared_beginning`."""


def embed_pieces(
    texts: Sequence[str], most: int, embed: Callable[[list[str]], Float32Array]
) -> tuple[Float32Array, PositionArray]:
    """Return the vectors of the first piece of each passage, and of later ones about something else.

    Args:
        texts: The passages.
        most: Maximum number of pieces, at least the number of passages.
        embed: Returns the vectors, of length 1, of pieces.

    Returns:
        The vectors, shape (pieces, 256), and the index of each one's passage, ascending, shape (pieces,).
    """
    each = min(most // len(texts), _MAX_PIECES)
    pieces = [(row, piece) for row, text in enumerate(texts) for piece in islice(_cut(text), each)]
    vectors = embed([piece for _, piece in pieces])
    kept: list[int] = []
    for number, (row, _) in enumerate(pieces):
        own = [before for before in kept[-each:] if pieces[before][0] == row]
        if not (vectors[own] @ vectors[number] >= _MAX_LIKENESS).any():
            kept.append(number)
    return vectors[kept], np.array([pieces[number][0] for number in kept])


def _cut(text: str) -> Iterator[str]:
    """Yield the pieces of a passage, which begin where a sentence or word does, if one does in time."""
    begin = 0
    while begin == 0 or len(text) - begin >= _MIN_LATER:
        piece = text[begin : begin + _PIECE]
        yield f"{text[:_SUBJECT].rpartition(' ')[0]} {piece}" if begin else piece
        ends = [piece.rfind(end, _PIECE // 2) + 1 for end in _SENTENCE_ENDS]
        begin += max(ends) or piece.rfind(" ", _PIECE // 2) + 1 or _PIECE


def drop_shared_beginning(texts: Sequence[str]) -> list[str]:
    """Return passages without the words with which most of them begin, such as a header.

    They are unchanged if there are fewer than five passages, or these words have fewer than 20 characters.
    """
    middle = sorted(texts)[len(texts) // 2]  # if most begin alike, so does this one
    lengths = sorted(len(commonprefix([middle, text])) for text in texts)  # noqa: RUF071  # not of paths
    shared = middle[: lengths[(len(texts) - 1) // 2]]
    header = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if len(texts) < _MIN_TEXTS or len(header) < _MIN_SHARED:
        return list(texts)
    return [text.removeprefix(header) for text in texts]


def is_prose(segment: str) -> bool:
    """Return whether a segment may be a sentence, unlike a log line or a row of a table, which has many symbols."""
    if not _MIN_SENTENCE <= len(segment) <= _MAX_SENTENCE:
        return False
    return sum(category(char)[0] in "NPS" for char in segment) <= _MAX_SYMBOLS * len(segment)
