"""Samples a corpus's passages through its retriever, with a bounded number of searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeAlias

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import ConfigurationError, ProfileError, first_line
from rgate_integrations.runtime.flow import Call, Start
from rgate_integrations.runtime.segments import segments

Search: TypeAlias = Callable[[str], Any]

_TOP_K = 10  # passages per search, if the retriever lets us set it
_SEARCH_METHODS = ("similarity_search", "retrieve", "invoke", "get_relevant_documents")
"""Search methods of LangChain's vector stores, LlamaIndex's retrievers, and LangChain's retrievers."""
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
"""First queries, which suit different kinds of corpora, such as documentation, policies or medicine."""
_WINDOW, _MIN_NEW_SHARE = 20, 0.05
"""Collection ends when less than ``_MIN_NEW_SHARE`` of what the last ``_WINDOW`` searches found is new."""
_MAX_QUERY_CHARS = 120  # a longer sentence is cut


def collect_passages(retriever: Any, searches: int = 100, timeout: float = 120.0) -> list[str]:
    """Return the distinct passages that a bounded number of searches finds.

    The first queries are shipped; each later one is a sentence of a passage found so far. Searching ends early when
    the results contain little that is new.

    Args:
        retriever: See `as_search`.
        searches: Maximum number of searches, at least 1.
        timeout: Maximum time of all searches, in seconds. Passages found by then are returned.

    Raises:
        ConfigurationError: ``retriever`` cannot be searched, its results have no text, or ``searches`` is
            below 1.
        ProfileError: A search failed, or the time ended before one found anything.
    """
    valid_count(searches, "searches")
    search = as_search(retriever)
    deadline = time.monotonic() + timeout
    passages: dict[str, None] = {}
    latest: list[tuple[int, int]] = []  # passages found and new passages, per search
    for query in _queries(passages, searches):
        texts = _search_in_time(search, query, deadline)
        if texts is None:
            break
        before = len(passages)
        passages.update(dict.fromkeys(texts))
        latest = [*latest, (len(texts), len(passages) - before)][-_WINDOW:]
        total, new = map(sum, zip(*latest, strict=True))
        if len(latest) == _WINDOW and new < _MIN_NEW_SHARE * max(total, 1):
            break
    if not passages and time.monotonic() >= deadline:
        raise ProfileError(
            f"No search found anything within {timeout:g} s.",
            hint="Check the retriever's server, or increase timeout=.",
        )
    return list(passages)


def _queries(passages: dict[str, None], most: int) -> Iterator[str]:
    """Yield distinct queries: the shipped ones, then sentences of the passages found so far."""
    asked = set(_FIRST_QUERIES)
    yield from _FIRST_QUERIES[:most]
    used = 0
    while len(asked) < most and used < len(passages):
        # Newest first, because no other search has found those.
        passage = list(passages)[-1 - used]
        unused = [
            segment[:_MAX_QUERY_CHARS]
            for segment in segments(passage[:2_000])
            if segment[:_MAX_QUERY_CHARS] not in asked
        ]
        used = 0 if unused else used + 1
        if unused:
            asked.add(unused[0])
            yield unused[0]


def _search_in_time(search: Search, query: str, deadline: float) -> list[str] | None:
    """Return the results of a search, or None after the deadline. A hanging search keeps its daemon thread.

    Raises:
        ProfileError: The search failed.
        ConfigurationError: Its results have no text.
    """
    job: Any = Start(Call(lambda: list(read_texts(search(query))), None)).run().job
    wait([job], max(deadline - time.monotonic(), 0.0))
    if not job.done():
        return None
    error = job.exception()  # a retriever may raise anything, also SystemExit
    if isinstance(error, ConfigurationError):
        raise error
    if error is not None:
        raise ProfileError(
            f"The retriever failed during profiling: {type(error).__name__}: {first_line(error)}",
            hint="Check that it can be searched, and that its server is running.",
        ) from error
    texts: list[str] = job.result()
    return texts


def as_search(retriever: Any) -> Search:
    """Return a function from a query to search results, which `read_texts` reads.

    Args:
        retriever: A retriever of LangChain or LlamaIndex, a vector store of LangChain, an index of
            LlamaIndex, a `Retriever` such as a `PassageIndex`, or a function from a query to passages.

    Raises:
        ConfigurationError: The object is none of these.
    """
    if callable(as_retriever := getattr(retriever, "as_retriever", None)) and not hasattr(
        retriever, "similarity_search"
    ):
        try:
            retriever = as_retriever(similarity_top_k=_TOP_K)  # an index of LlamaIndex
        except TypeError:  # another object, whose method takes no options
            retriever = as_retriever()
    for method in _SEARCH_METHODS:
        if callable(search := getattr(retriever, method, None)):
            return partial(search, k=_TOP_K) if method == "similarity_search" else search
    if callable(search_batch := getattr(retriever, "search", None)):
        return lambda query: search_batch([query], _TOP_K)[0]
    if callable(retriever):
        function: Search = retriever
        return function
    raise ConfigurationError(
        f"{type(retriever).__name__} cannot be searched.",
        hint="Pass a retriever, a LangChain vector store, a LlamaIndex index, a PassageIndex, or a function "
        "from a query to texts.",
    )


def read_texts(results: Any) -> Iterator[str]:
    """Yield the texts of search results that are strings, documents, nodes or hits; blank texts are skipped.

    Raises:
        ConfigurationError: The results are something else.
    """
    if not isinstance(results, Iterable) or isinstance(results, str | Mapping):
        raise ConfigurationError(
            f"A search returned {type(results).__name__} instead of a list of passages.",
            hint="Return a list of strings, documents or nodes.",
        )
    for result in results:
        inner = getattr(result, "passage", getattr(result, "node", result))
        texts = [inner, *(getattr(inner, name, None) for name in ("searchable", "page_content", "text"))]
        text = next((text for text in texts if isinstance(text, str)), None)
        if text is None:
            raise ConfigurationError(
                f"A search result is of type {type(result).__name__}, which has no text.",
                hint="Return strings, documents or nodes.",
            )
        if text.strip():
            yield text
