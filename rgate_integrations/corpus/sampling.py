"""Samples a corpus's passages in one pass and constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rgate_integrations.errors import ProfileError

_MAX_CHARS = 2_000  # characters of a passage; a longer text is a document, which is split
_SKETCH_SIZE = 256  # number of hashes in a sketch


@dataclass(frozen=True)
class Sample:
    """A sample of a corpus's passages.

    Attributes:
        texts: A uniform sample of the distinct passages, ordered by their hashes.
        seen: Number of passages read; one that occurs twice counts twice.
        sketch: The hashes of the first 256 texts of the sample. Two states of a corpus are compared by them.
    """

    texts: tuple[str, ...] = field(repr=False)
    seen: int
    sketch: tuple[int, ...] = field(repr=False)


def sample_texts(texts: Iterable[str], most: int) -> Sample:
    """Return a sample: the distinct passages with the smallest hashes, whatever the order of the texts.

    Args:
        texts: The passages; texts over 2,000 characters are split.
        most: Maximum sample size.

    Raises:
        ProfileError: A passage is not a string.
    """
    sampled: dict[int, str] = {}
    seen = 0
    for passage in _passages(texts):
        seen += 1
        number = int.from_bytes(hashlib.blake2b(passage.encode(errors="replace"), digest_size=6).digest())
        sampled[number] = passage
        if len(sampled) == 4 * most:  # not at every passage, because sorting takes time
            sampled = {number: sampled[number] for number in sorted(sampled)[:most]}
    numbers = sorted(sampled)[:most]
    return Sample(tuple(sampled[number] for number in numbers), seen, tuple(numbers[:_SKETCH_SIZE]))


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Estimate, from two sketches, which share of two corpora's passages is in both, in [0, 1] (Jaccard index)."""
    smallest = sorted({*one, *other})[: max(len(one), len(other))]
    return len({*smallest} & {*one} & {*other}) / max(len(smallest), 1)


def _passages(texts: Iterable[str]) -> Iterator[str]:
    several = hasattr(texts, "__iter__") or hasattr(texts, "__getitem__")  # `iter` could read a database
    for text in texts if several and not isinstance(texts, str) else [texts]:
        if not isinstance(text, str):
            raise ProfileError(
                f"A passage or description must be a string, not {type(text).__name__}.",
                hint="For LangChain documents, use from_texts([document.page_content for document in documents]).",
            )
        for begin in range(0, len(text), _MAX_CHARS):
            passage = text[begin : begin + _MAX_CHARS].strip()
            if passage:
                yield passage
