"""Collects passages from anything that searches, with a bounded number of searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from rgate_integrations.errors import ConfigurationError, ProfileError
from rgate_integrations.runtime.segments import segments
from rgate_integrations.runtime.threads import start_thread

Search: TypeAlias = Callable[[str], Any]

_PASSAGES = 10  # a search, where the number can be chosen
_METHODS = ("similarity_search", "retrieve", "invoke", "get_relevant_documents")
"""How a query is searched for: LangChain's vector stores, LlamaIndex's retrievers, LangChain's retrievers."""
_FIRST_QUERIES = (
    "overview introduction",
    "how to get started",
    "error problem solution",
    "policy rules requirements",
    "price cost payment",
    "history people places",
    "example function parameter",
    "symptoms treatment",
    "law contract rights",
    "customer product service",
    "date schedule report",
    "security access account",
)
"""Words of all kinds of corpora: each finds something in some."""
_IN_A_ROW, _SHARE_NEW = 20, 0.05
"""It ends when so many searches in a row brought less than this share of new passages."""
_LONGEST_QUERY = 120  # characters


def collect_passages(retriever: Any, searches: int = 100, timeout: float = 120.0) -> list[str]:
    """Return the passages that a bounded number of searches finds, each once.

    The first queries are shipped words. Each of the next is a sentence of a passage that was found. It ends early
    when little that is new comes back.

    Args:
        retriever: See `as_search`.
        searches: How many searches at most, at least 1.
        timeout: How long all of it may take, in seconds. What was found by then is enough, if anything was.

    Raises:
        ConfigurationError: It cannot be searched, or ``searches`` is below 1.
        ProfileError: A search failed, or none ended in time.
    """
    if searches < 1:
        raise ConfigurationError(f"searches must be at least 1, not {searches}.")
    search = as_search(retriever)
    ends = time.monotonic() + timeout
    found: dict[str, None] = {}
    latest: list[tuple[int, int]] = []  # how many passages each search found, and how many of them were new
    for query in _queries(found, searches):
        texts = _search_in_time(search, query, ends)
        if texts is None:
            break
        before = len(found)
        found.update(dict.fromkeys(texts))
        latest = [*latest, (len(texts), len(found) - before)][-_IN_A_ROW:]
        total, new = map(sum, zip(*latest, strict=True))
        if len(latest) == _IN_A_ROW and found and new < _SHARE_NEW * max(total, 1):
            break
    if not found and time.monotonic() >= ends:
        raise ProfileError(f"No search ended within {timeout:g} s.", hint="Is the retriever's server up?")
    return list(found)


def _queries(found: dict[str, None], most: int) -> Iterator[str]:
    """Yield queries, each once: the first ones, then the beginnings of passages that were found meanwhile."""
    asked = set(_FIRST_QUERIES)
    yield from _FIRST_QUERIES[:most]
    used = 0
    while len(asked) < most and used < len(found):
        # The newest first: what a search found that nothing found before leads elsewhere.
        passage = list(found)[-1 - used]
        unused = [
            each[:_LONGEST_QUERY] for each in segments(passage[:2_000]) if each[:_LONGEST_QUERY] not in asked
        ]
        used = 0 if unused else used + 1
        if unused:
            asked.add(unused[0])
            yield unused[0]


def _search_in_time(search: Search, query: str, ends: float) -> list[str] | None:
    """Return what a search finds, or None if it does not end in time: its thread is left to itself.

    Raises:
        ProfileError: It failed.
    """
    results: SimpleQueue[list[str] | Exception] = SimpleQueue()

    def work() -> None:
        try:
            results.put(list(read_texts(search(query))))
        except Exception as error:  # a retriever may raise anything
            results.put(error)

    start_thread(work, "rgate-profile-search")
    try:
        found = results.get(timeout=max(ends - time.monotonic(), 0.0))
    except Empty:
        return None
    if isinstance(found, ConfigurationError):
        raise found
    if isinstance(found, Exception):
        raise ProfileError(
            f"A search for a profile failed with {type(found).__name__}.", hint="See the error's cause."
        ) from found
    return found


def as_search(retriever: Any) -> Search:
    """Return how to search: a function of a query that returns passages.

    Args:
        retriever: A retriever or vector store of LangChain or LlamaIndex, whatever has our `Retriever`'s ``search``,
            or a function from a query to passages.

    Raises:
        ConfigurationError: It is none of these.
    """
    if callable(as_retriever := getattr(retriever, "as_retriever", None)) and not hasattr(
        retriever, "similarity_search"
    ):
        retriever = as_retriever()  # an index of LlamaIndex
    for method in _METHODS:
        if callable(search := getattr(retriever, method, None)):
            return partial(search, k=_PASSAGES) if method == "similarity_search" else search
    if callable(search_batch := getattr(retriever, "search", None)):
        return lambda query: search_batch([query], _PASSAGES)[0]
    if callable(retriever):
        found: Search = retriever
        return found
    raise ConfigurationError(
        f"{type(retriever).__name__} cannot be searched.",
        hint="Give a retriever, a vector store, a PassageIndex, or a function from a query to texts.",
    )


def read_texts(results: Any) -> Iterator[str]:
    """Yield the texts of what a search returned: strings, documents, nodes or hits.

    Raises:
        ConfigurationError: It returned something else.
    """
    if not isinstance(results, Iterable) or isinstance(results, str):
        raise ConfigurationError(f"A search returned {type(results).__name__} and no list of passages.")
    for result in results:
        inner = getattr(result, "passage", getattr(result, "node", result))
        texts = [inner, *(getattr(inner, name, None) for name in ("searchable", "page_content", "text"))]
        text = next((each for each in texts if isinstance(each, str)), None)
        if text is None:
            raise ConfigurationError(f"A search returned {type(result).__name__}, which has no text.")
        if text.strip():
            yield text
