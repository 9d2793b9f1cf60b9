"""The interface of retrievers, the hits that they return, and adapters for the retrievers of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.passages import Passage
from rgate_integrations.runtime.replies import get_field


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
    """Return texts, queries or ids unchanged; a single one is an error, because each letter would count as one.

    Raises:
        ConfigurationError: The value is a string.
    """
    if isinstance(values, str):
        raise ConfigurationError(
            f"Texts, queries and ids must be in a list, but got the string {values!r:.60}.",
            hint="Put it into a list.",
        )
    return values


def check_search(queries: Sequence[str], k: int) -> None:
    """Check the arguments of a search.

    Raises:
        ConfigurationError: ``queries`` is one string, or ``k`` is not a positive whole number.
    """
    check_list(queries)
    valid_count(k, "k")


def as_retriever(source: Any) -> Retriever:
    """Return a `Retriever` that searches an object.

    The object may be, tried in this order: a LangChain vector store, an object with ``search(queries, k)`` that is no
    framework's, a LlamaIndex retriever, a LangChain retriever or other runnable, a LlamaIndex index, or a function of
    a query. Retrievers and functions find their own number of passages, and the first ``k`` are kept.

    The object is recognised by its methods, so neither framework has to be imported.

    Raises:
        ConfigurationError: The object is none of these.
    """
    # Before `search`, which LangChain's stores have with another signature.
    if _has(source, "similarity_search"):
        return SearchFunction(lambda query, k: source.similarity_search(query, k=k))
    # A framework's retriever, which is known by its asynchronous method, may have a `search` of its own.
    if _has(source, "search") and not (_has(source, "aretrieve") or _has(source, "ainvoke")):
        return source
    if _has(source, "retrieve"):
        return SearchFunction(lambda query, _: source.retrieve(query))
    if _has(source, "invoke"):
        return SearchFunction(lambda query, _: source.invoke(query))
    if _has(source, "as_retriever"):
        return SearchFunction(lambda query, k: source.as_retriever(similarity_top_k=k).retrieve(query))
    # Last, because runnables and stores may be callable, too. A class is a mistake: its instance was meant.
    if callable(source) and not isinstance(source, type):
        return SearchFunction(lambda query, _: source(query))
    raise ConfigurationError(
        f"The class {source.__name__} cannot search, but its instances may."
        if isinstance(source, type)
        else f"An object of type {type(source).__name__} cannot search.",
        hint="Pass a retriever, a LangChain vector store, a LlamaIndex index, a function of a query, or an "
        "object with search(queries, k).",
    )


@dataclass(frozen=True)
class SearchFunction:
    """A retriever that calls a function for each query.

    Attributes:
        function: Takes a query and a number of passages. It returns documents, nodes, texts, mappings with a
            ``text``, or hits, best first.
    """

    function: Callable[[str, int], Iterable[Any]]

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return the best ``k`` passages for each query; raises the errors of `find`."""
        return [self.find(query, k)[:k] for query in queries]

    def find(self, query: str, k: int) -> list[Hit]:
        """Return what the function finds, which may be more than ``k`` passages.

        Raises:
            TypeError: The function returned a string, a mapping or something that cannot be iterated over, or one of
                the results has no text.
        """
        results = self.function(query, k)
        # A string or a mapping may be a chain's answer.
        if not isinstance(results, Iterable) or isinstance(results, str | Mapping):
            raise TypeError(
                f"The search returned an object of type {type(results).__name__}, not a list of passages."
            )
        return [as_hit(result, query) for result in results]


def as_hit(result: Any, query: str) -> Hit:
    """Convert a search result, such as a document, a node or a text, to a hit.

    Without an id ("" counts as none), the text is the passage's id. Without a score, the score is 0.

    Raises:
        TypeError: The result has no text.
    """
    if isinstance(result, Hit):
        return result
    if isinstance(result, str):
        result = {"text": result}
    record = getattr(result, "node", result)  # LlamaIndex wraps nodes with a score
    text = get_field(record, "text")
    if text is None:
        text = get_field(record, "page_content")
    if not isinstance(text, str):
        raise TypeError(
            f"A result of the search, of type {type(result).__name__}, has no string in text or page_content."
        )
    ids = [get_field(record, name) for name in ("id", "node_id")]
    identity = next((given for given in ids if given not in (None, "")), text)
    metadata = get_field(record, "metadata") or {}
    title = get_field(record, "title") or metadata.get("title") or ""
    # LangChain's documents have no score, and fusion only needs the order.
    score = get_field(result, "score") or 0.0
    return Hit(Passage(str(identity), text, str(title), metadata), float(score), query)


def _has(source: Any, method: str) -> bool:
    return callable(getattr(source, method, None))
