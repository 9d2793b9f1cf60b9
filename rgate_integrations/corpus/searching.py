"""Collects passages from anything that searches, with a bounded number of searches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rgate_integrations.errors import ConfigurationError

Search: TypeAlias = Callable[[str], Any]

_PASSAGES = 10  # a search, where its number can be chosen
_FIRST_QUERIES = (
    "overview",
    "how to",
    "what is",
    "settings",
    "policy",
    "error",
    "history",
    "people",
    "price",
)
_WORD = re.compile(r"\w[\w.-]{2,}")


def collect_passages(retriever: Any, searches: int = 100) -> list[str]:
    """Return the passages that a bounded number of searches finds, each once.

    The first queries are shipped words; the next are words of what was found.

    Args:
        retriever: See `as_search`.
        searches: How many searches at most.
    """
    search = as_search(retriever)
    found: dict[str, None] = {}
    words: Counter[str] = Counter()
    queries = list(_FIRST_QUERIES)
    asked: set[str] = set()
    while len(asked) < searches:
        if not queries:
            queries = [word for word, _ in words.most_common() if word not in asked][:5]
        if not queries:
            break
        query = queries.pop(0)
        asked.add(query)
        for text in read_texts(search(query)):
            if text not in found:
                found[text] = None
                words.update({word.lower() for word in _WORD.findall(text)})
    return list(found)


def as_search(retriever: Any) -> Search:
    """Return how to search: a function of a query that returns passages.

    Args:
        retriever: A retriever or vector store of LangChain or LlamaIndex, a `PassageIndex`, or such a function.

    Raises:
        ConfigurationError: It is none of these.
    """
    for method in ("similarity_search", "retrieve", "invoke"):
        if callable(found := getattr(retriever, method, None)):
            return found  # type: ignore[no-any-return]  # whatever it returns is read by `read_texts`
    if callable(batch := getattr(retriever, "search", None)):
        return lambda query: batch([query], _PASSAGES)[0]
    if callable(retriever):
        return retriever  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"{type(retriever).__name__} cannot be searched.",
        hint="Give a retriever, a vector store, a PassageIndex, or a function from a query to texts.",
    )


def read_texts(results: Any) -> Iterable[str]:
    """Yield the texts of what a search returned: strings, documents, nodes or hits.

    Raises:
        ConfigurationError: It returned something else.
    """
    if not isinstance(results, Sequence) or isinstance(results, str):
        raise ConfigurationError(f"A search returned {type(results).__name__} and no list.")
    for result in results:
        yield read_text(result)


def read_text(result: Any) -> str:
    """Return the text of one result of a search.

    Raises:
        ConfigurationError: It has none.
    """
    result = getattr(result, "passage", getattr(result, "node", result))
    if isinstance(result, str):
        return result
    for name in ("searchable", "page_content", "text"):
        text = getattr(result, name, None)
        if isinstance(text, str):
            return text
    raise ConfigurationError(f"A result of a search is {type(result).__name__}, which has no text.")
