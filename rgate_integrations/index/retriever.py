"""What searches, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.passages import Passage


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
        passage: The passage.
        score: How well it fits, higher is better: the cosine similarity in [-1, 1] for a `PassageIndex`, the BM25
            score for a `BM25Index`.
        query: The query that found it.
    """

    passage: Passage
    score: float
    query: str = ""


@runtime_checkable
class Retriever(Protocol):
    """Whatever searches a batch of queries: a `PassageIndex`, a `HybridIndex`, or the user's own."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first."""


def describe_index(index: Retriever) -> str:
    """Return what tells an index apart from others: kind, size and ``fingerprint``, as far as it has them.

    Answers that are given with passages of one index are not to be mixed with those of another.
    """
    size = f"{len(index)} passages" if isinstance(index, Sized) else ""
    parts = (type(index).__name__, size, str(getattr(index, "fingerprint", "") or ""))
    return ", ".join(filter(None, parts))


def passage_id(hit: Hit) -> str:
    """Return the id of the passage that was found: what `fuse` takes for the same."""
    return hit.passage.id


def check_search(queries: Sequence[str], k: int) -> None:
    """Refuse arguments of a search that cannot be meant.

    Raises:
        ConfigurationError: ``queries`` is one string, or ``k`` is no number of at least 1.
    """
    if isinstance(queries, str):
        raise ConfigurationError("search takes a list of queries.", hint="Use search([query])[0].")
    check_k(k)


def check_k(k: int) -> None:
    """Refuse a number of results that cannot be meant.

    Raises:
        ConfigurationError: It is no whole number of at least 1.
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigurationError(f"k must be a whole number, at least 1, not {k!r}.")
