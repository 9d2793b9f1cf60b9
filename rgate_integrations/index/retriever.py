"""The interface of retrievers, and the hits that they return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.passages import Passage


@dataclass(frozen=True)
class Hit:
    """A search result.

    Attributes:
        passage: The passage.
        score: The score; higher is better. For a `PassageIndex`, the cosine similarity in [-1, 1]; for a `BM25Index`,
            the BM25 score; for a `HybridIndex`, one or the other, so that only the order of its hits counts.
        query: The query that found it; may be empty.
    """

    passage: Passage
    score: float
    query: str = ""


@runtime_checkable
class Retriever(Protocol):
    """Anything that runs a batch of search queries: a `PassageIndex`, for example, or a class of your own."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return at most ``k`` hits for each query, best first."""


def describe_index(index: Retriever) -> str:
    """Return an index's type and, if it has them, size and ``fingerprint``, to record which one was used."""
    size = f"{len(index)} passages" if isinstance(index, Sized) else ""
    parts = (type(index).__name__, size, str(getattr(index, "fingerprint", "") or ""))
    return ", ".join(filter(None, parts))


def passage_id(hit: Hit) -> str:
    """Return the id of a hit's passage, as a key for `fuse`."""
    return hit.passage.id


_Values = TypeVar("_Values", bound=Iterable[Any])


def check_list(values: _Values) -> _Values:
    """Return texts or ids unchanged; a single one is an error, because each letter would count as one.

    Raises:
        ConfigurationError: The value is a string.
    """
    if isinstance(values, str):
        raise ConfigurationError(
            f"Texts and ids must be in a list, but got the string {values!r:.60}.", hint="Put it into a list."
        )
    return values


def check_search(queries: Sequence[str], k: int) -> None:
    """Check the arguments of a search.

    Raises:
        ConfigurationError: ``queries`` is one string, a query is not a string, or ``k`` is not a positive whole
            number.
    """
    if isinstance(queries, str):
        raise ConfigurationError(
            f"search needs a list of queries, not a single string: {queries[:60]!r}.",
            hint="Use search([query])[0].",
        )
    for query in queries:
        if not isinstance(query, str):
            raise ConfigurationError(f"A query must be a string, not {type(query).__name__}.")
    valid_count(k, "k")
