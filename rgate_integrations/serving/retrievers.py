"""What users search with, as the gateway searches: LangChain's and LlamaIndex' retrievers and stores, and functions.

They are told by their methods, so that neither framework is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.passages import Passage
from rgate_integrations.index.retriever import Hit, Retriever

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_retriever(found: Any) -> Retriever:
    """Return an object of the user's as a retriever.

    It may be, in this order: a vector store of LangChain, an object with ``search(queries, k)``, a retriever of
    LlamaIndex, an index of LlamaIndex, a retriever or another runnable of LangChain, or a function of a query, or of
    a query and ``k``. A retriever finds as many passages as it was made to.

    Raises:
        ConfigurationError: It is none of them.
    """
    if _has(found, "similarity_search"):
        return SearchFunction(lambda query, k: found.similarity_search(query, k=k))
    if _has(found, "search"):
        retriever: Retriever = found
        return retriever
    if _has(found, "retrieve"):
        return SearchFunction(lambda query, _: found.retrieve(query))
    if _has(found, "as_retriever"):
        return SearchFunction(lambda query, k: found.as_retriever(similarity_top_k=k).retrieve(query))
    if _has(found, "invoke"):
        return SearchFunction(lambda query, _: found.invoke(query))
    if callable(found) and not isinstance(found, type):
        return SearchFunction(lambda query, k: found(query, k) if _takes_k(found) else found(query))
    raise ConfigurationError(
        f"A {type(found).__name__} cannot search.",
        hint="A retriever, a vector store, a function of a query, or an object with search(queries, k).",
    )


class SearchFunction:
    """A function of one query, as a retriever.

    Args:
        function: Returns what it finds for a query and a number of passages, best first: documents, nodes, texts,
            mappings with a ``text``, or hits.
    """

    def __init__(self, function: Callable[[str, int], Iterable[Any]]) -> None:
        self._function = function

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return for each query its best passages.

        Raises:
            TypeError: Something else was found.
        """
        hits = []
        for query in queries:
            results = self._function(query, k)
            if isinstance(results, str | Mapping):  # such as the answer of a chain
                raise TypeError(f"The search returned a {type(results).__name__}, not a list.")
            hits.append([as_hit(result, query) for result in results][:k])
        return hits


def as_hit(result: Any, query: str) -> Hit:
    """Return what was found as a hit.

    Raises:
        TypeError: It has no text.
    """
    if isinstance(result, Hit):
        return result
    score = getattr(result, "score", None)
    record = getattr(result, "node", result)  # LlamaIndex has nodes in what it finds
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        text = getattr(record, "page_content", None) or getattr(record, "text", None)
        identity = getattr(record, "id", None) or getattr(record, "node_id", None)
        record = {"text": text, "id": identity, "metadata": getattr(record, "metadata", None)}
    metadata = record.get("metadata") or {}
    text = record.get("text") or record.get("page_content")
    if not isinstance(text, str):
        raise TypeError(f"The search returned a {type(result).__name__} without a text.")
    title = record.get("title") or metadata.get("title") or ""
    passage = Passage(str(record.get("id") or text), text, str(title), metadata)
    return Hit(passage, float(score or record.get("score") or 0.0), query)


def _has(found: Any, method: str) -> bool:
    return callable(getattr(found, method, None))


def _takes_k(function: Callable[..., Any]) -> bool:
    """Return whether a function takes a second argument that must be given, or is called ``k``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (ValueError, TypeError):  # of some functions in C nothing is known
        return False
    return any(
        each.name == "k" or each.default is each.empty for each in parameters if each.kind in _POSITIONAL
    )
