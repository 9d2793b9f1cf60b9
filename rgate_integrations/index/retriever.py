"""Passages, the hits that a search returns, the interface of retrievers, and adapters for those of frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import TypeAdapter

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.runtime.jsonl import read_jsonl
from rgate_integrations.runtime.records import first_problem
from rgate_integrations.runtime.replies import get_field

_LINE = 'Each line must be a JSON object such as {"id": "1", "title": "…", "text": "…"}.'
# Id, title, text and metadata.
_ROWS = TypeAdapter(list[tuple[str, str, str, dict[str, Any]]])


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus.

    Attributes:
        id: Unique in its index. The empty string is a valid id.
        text: The passage.
        title: Title of its document; may be empty.
        metadata: Further JSON values. Do not change the metadata of a passage that an index returned, because the
            index uses the same objects.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def searchable(self) -> str:
        """The text to embed and search: title and text."""
        return f"{self.title}. {self.text}" if self.title else self.text

    @property
    def titled_metadata(self) -> dict[str, Any]:
        """A copy of the metadata, with the title, if there is one, under ``title``."""
        return {**self.metadata, "title": self.title} if self.title else dict(self.metadata)


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a JSONL file, plain or gzipped.

    Each line needs ``text``; ``id`` and ``title`` are optional, and all other keys become metadata. If ``id`` is
    missing or null, the line number is the id.

    Raises:
        DataFormatError: The file cannot be read, or a line is not UTF-8 or not a passage. The message names the file
            and, for a line, its number.
    """
    for number, record in read_jsonl(path, hint=_LINE):
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataFormatError(f"{path}, line {number}: text is missing or not a string.", hint=_LINE)
        text = record.pop("text")
        if not text.strip():
            raise DataFormatError(f"{path}, line {number}: the text is empty.", hint="Remove the line.")
        name = record.pop("id", None)
        title = str(record.pop("title", "") or "")
        # 0 and "" are ids, too.
        yield Passage(str(number if name is None else name), text, title, metadata=record)


def check_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Check passages, and return copies with what JSON gives back: in metadata, a tuple becomes a list.

    Raises:
        DataFormatError: An id occurs twice, or a passage cannot be stored; the message
            names it.
    """
    checked: dict[str, Passage] = {}
    for passage in passages:
        try:
            (stored,) = decode_passages(encode_passages([passage]))
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            name = repr(getattr(passage, "id", passage))
            raise DataFormatError(
                f"The passage {name:.60} cannot be stored as JSON: {first_problem(error)}.",
                hint="Pass objects Passage(id, text), whose id, title and text are strings, and whose metadata are "
                "JSON values, without lone surrogates.",
            ) from None
        if stored.id in checked:
            raise DataFormatError(f"Several passages have the id {stored.id!r}.", hint="Make the ids unique.")
        checked[stored.id] = stored
    return list(checked.values())


def encode_passages(passages: Iterable[Passage]) -> bytes:
    """Return passages as JSON, as an index saves them.

    Raises:
        TypeError: JSON has no such type.
        ValueError: A value is NaN, infinite, an integer of thousands of digits, has a lone surrogate, or contains
            itself.
        RecursionError: A value is nested too deeply.
    """
    rows = [(row.id, row.title, row.text, dict(row.metadata or {})) for row in passages]
    return json.dumps(rows, ensure_ascii=False, allow_nan=False).encode()


def decode_passages(saved: bytes) -> list[Passage]:
    """Return the passages that `encode_passages` wrote.

    Raises:
        ValueError: ``saved`` is something else, or nested too deeply.
    """
    rows = _ROWS.validate_json(saved, strict=True)
    return [Passage(name, text, title, metadata) for name, title, text, metadata in rows]


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
        ConfigurationError: ``queries`` is one string or not all are strings, or ``k`` is not a positive whole number.
    """
    for query in check_list(queries):
        if not isinstance(query, str):
            raise ConfigurationError(f"Each query must be a string, but one is {query!r:.60}.")
    valid_count(k, "k")


def as_retriever(source: Any) -> Retriever:
    """Return a `Retriever` that searches an object.

    The object may be, tried in this order: a LangChain vector store, an object with ``search(queries, k)`` that is no
    framework's, a LlamaIndex retriever, a LangChain retriever or other runnable, a LlamaIndex index, or a function of
    a query. Retrievers and functions find their own number of passages, and the first ``k`` are kept.

    The object is recognised by its methods, so neither framework has to be imported.

    Raises:
        ConfigurationError: The object is none of these, or async.
    """
    hint = (
        "Pass a retriever, a LangChain vector store, a LlamaIndex index, a function of a query, or an object with "
        "search(queries, k)."
    )
    # First, because a class has the methods of its instances.
    if isinstance(source, type):
        raise ConfigurationError(
            f"The class {source.__name__} cannot search, but its instances may.", hint=hint
        )
    # A framework's retriever, which is known by its asynchronous method, may have a `search` of its own.
    is_own = _has(source, "search") and not (_has(source, "aretrieve") or _has(source, "ainvoke"))
    if iscoroutinefunction(source.search if is_own else source):
        raise ConfigurationError("An async function cannot search: searches run in threads.", hint=hint)
    # Before `search`, which LangChain's stores have with another signature.
    if _has(source, "similarity_search"):
        return SearchFunction(lambda query, k: source.similarity_search(query, k=k))
    if is_own:
        return source
    if _has(source, "retrieve"):
        return SearchFunction(lambda query, _: source.retrieve(query))
    if _has(source, "invoke"):
        return SearchFunction(lambda query, _: source.invoke(query))
    if _has(source, "as_retriever"):
        return SearchFunction(lambda query, k: source.as_retriever(similarity_top_k=k).retrieve(query))
    # Last, because runnables and stores may be callable, too.
    if callable(source):
        return SearchFunction(lambda query, _: source(query))
    raise ConfigurationError(f"An object of type {type(source).__name__} cannot search.", hint=hint)


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
