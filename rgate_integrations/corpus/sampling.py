"""A sample of the passages of a corpus, in one pass and constant memory."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rgate_integrations.errors import ProfileError

_LONGEST = 2_000  # characters of a passage; a longer text is a document, and cut into passages
_SKETCH = 256  # smallest hashes that are remembered


@dataclass(frozen=True)
class Sample:
    """Some passages of a corpus.

    Attributes:
        texts: Different passages, each as likely as any other to be among them, in an order of their own.
        seen: How many passages were seen.
        sketch: The smallest hashes of all passages, by which two states of a corpus are compared.
    """

    texts: tuple[str, ...] = field(repr=False)
    seen: int
    sketch: tuple[int, ...] = field(repr=False)


def sample_texts(texts: Iterable[str], most: int) -> Sample:
    """Return the passages whose hashes are the smallest: a sample without duplicates, the same in whatever order.

    Args:
        texts: The passages; a longer text counts as several.
        most: How many are kept at most.

    Raises:
        ProfileError: One is no text.
    """
    kept: dict[int, str] = {}
    largest: list[int] = []  # a heap, of negative numbers
    seen = 0
    for passage in _passages(texts):
        seen += 1
        number = int.from_bytes(hashlib.blake2b(passage.encode(errors="replace"), digest_size=6).digest())
        if number in kept or (len(kept) == most and number > -largest[0]):
            continue
        kept[number] = passage
        heapq.heappush(largest, -number)
        if len(kept) > most:
            del kept[-heapq.heappop(largest)]
    numbers = sorted(kept)
    return Sample(tuple(kept[number] for number in numbers), seen, tuple(numbers[:_SKETCH]))


def likeness(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return the share of passages that two corpora have in common, of all that are in either, by their sketches."""
    smallest = sorted({*one, *other})[: max(len(one), len(other))]
    return len({*smallest} & {*one} & {*other}) / max(len(smallest), 1)


def _passages(texts: Iterable[str]) -> Iterator[str]:
    for text in [texts] if isinstance(texts, str) else texts:
        if not isinstance(text, str):
            raise ProfileError(
                f"A passage must be a string, not {type(text).__name__}.",
                hint="CorpusProfile.from_texts([document.page_content for document in documents])",
            )
        for begin in range(0, len(text), _LONGEST):
            passage = text[begin : begin + _LONGEST].strip()
            if passage:
                yield passage
