"""`FaissVectorStore`: a passage index as a vector store, with filters and MMR; `RGateEmbeddings`, and users' own."""

from __future__ import annotations

import hashlib
import operator
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
)
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.passage_index import check_vectors
from rgate_integrations.index.retriever import check_list
from rgate_integrations.runtime.arrays import Float32Array, unit
from rgate_integrations.runtime.threads import cached_property

Scored: TypeAlias = list[tuple[Document, float]]

_GROWTH = 4  # factor by which to increase the number of hits while too few of them pass a filter


class FaissVectorStore(VectorStore):
    """A vector store on FAISS: exact search, upserts by id, metadata filters, MMR, atomic saves.

    ``FaissVectorStore(embedding=e)`` is an empty store. Any number of threads and tasks may read and write. A write
    is atomic: if it raises, nothing has changed. Async methods run in a thread.

    Scores are cosines; the relevance score is ``(cosine + 1) / 2``. Metadata must be JSON: strings, numbers,
    booleans, None, lists, and dicts with string keys. Blank texts are stored like any other. Every search takes
    ``filter=``; see `as_predicate`.

    Args:
        embedding: Embeds documents and queries.
        index: An index to read and write, made with the same embeddings; a new one when None.

    Raises:
        ConfigurationError: Without ``index``: ``embedding`` is not LangChain embeddings.
        MissingDependencyError: FAISS is not installed.

    Examples:
        >>> from langchain_core.embeddings import DeterministicFakeEmbedding
        >>> store = FaissVectorStore(embedding=DeterministicFakeEmbedding(size=8))
        >>> store.add_texts(["Paris is the capital of France."], ids=["1"])
        ['1']
    """

    def __init__(self, embedding: Embeddings, *, index: PassageIndex | None = None) -> None:
        if index is None:
            index = PassageIndex(as_embedder(embedding))
        self.embedding = embedding
        self.index = index

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings for documents and queries."""
        return self.embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those with the same id, and return the ids. For duplicate ids, the last text wins.

        A text without an id gets a random one.

        Raises:
            DataFormatError: Metadata cannot be stored as JSON, or a text is not a string or has lone surrogates.
                Nothing was embedded or stored.
            ConfigurationError: The numbers of ids, metadatas and texts differ, the embeddings failed, or the
                vectors are invalid or have another dimension; or ``texts`` or ``ids`` is a string. Nothing was
                stored.
            RGateError: The model of `RGateEmbeddings` cannot be loaded. Nothing was stored.
        """
        return self._upsert(list(check_list(texts)), metadatas, ids)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, or all of them with None, and return True; unknown ids are ignored.

        Raises:
            ConfigurationError: ``ids`` is a string.
        """
        if ids is None:
            ids = [passage.id for passage in self.index]
        self.index.delete(ids)
        return True

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a new store with texts; see `add_texts`. Further arguments are passed to the class."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @classmethod
    def from_embeddings(
        cls,
        text_embeddings: Iterable[tuple[str, list[float]]],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a new store with texts and their vectors, without embedding the texts; see `from_texts`."""
        store = cls(embedding, **kwargs)
        pairs = list(text_embeddings)
        store._upsert([text for text, _ in pairs], metadatas, ids, [vector for _, vector in pairs])
        return store

    def _upsert(
        self,
        texts: Sequence[str],
        metadatas: Sequence[Mapping[str, Any]] | None,
        ids: Sequence[Any] | None,
        vectors: Any = None,
    ) -> list[str]:
        """Write texts, with their vectors if given, and return their ids; see `add_texts`."""
        metadatas = [{}] * len(texts) if metadatas is None else metadatas
        ids = [None] * len(texts) if ids is None else check_list(ids)
        for argument, values in (("metadatas=", metadatas), ("ids=", ids)):
            if len(values) != len(texts):
                raise ConfigurationError(
                    f"{argument} has the length {len(values)}, but there are {len(texts)} texts.",
                    hint=f"Give one per text, or leave {argument} out.",
                )
        names = [uuid.uuid4().hex if id is None else str(id) for id in ids]  # 0 and "" are ids
        row_of = {name: row for row, name in enumerate(names)}
        passages = [Passage(name, texts[row], metadata=metadatas[row]) for name, row in row_of.items()]
        kept: Any = None if vectors is None else [vectors[row] for row in row_of.values()]
        self.index.upsert(passages, kept)
        return names

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in this order; unknown ids are skipped.

        Raises:
            ConfigurationError: ``ids`` is a string.
        """
        return list(map(_document, self.index.get(ids)))

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a query, nearest first.

        Args:
            query: The query.
            k: Maximum number of documents, at least 1.
            filter: Conditions on the metadata, or a function of the document; see `as_predicate`.
            **kwargs: Ignored.

        Raises:
            ConfigurationError: ``k`` is below 1, the filter is invalid, or the embeddings returned an invalid vector.
            Exception: The embeddings raised it.
        """
        return _without_scores(self.similarity_search_with_score(query, k, filter))

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return the ``k`` nearest documents with their cosines; see `similarity_search`."""
        return _search(self.index, self.index.embed_queries([query]), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a vector; see `similarity_search`.

        Raises:
            ConfigurationError: The vector is not finite, or its dimension differs from the store's.
        """
        return _without_scores(_search(self.index, [embedding], k, filter))

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return ``k`` of the ``fetch_k`` nearest documents, chosen to be near the query but unlike each other.

        With ``lambda_mult=1``, only nearness to the query counts; with 0, only variety.
        """
        vector: Any = self.index.embed_queries([query])[0]
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return ``k`` of the ``fetch_k`` documents nearest to a vector; see `max_marginal_relevance_search`."""
        # Use a snapshot (which copies no vectors), because other threads may delete a document before its lookup.
        index = copy(self.index)
        nearest = _search(index, [embedding], max(fetch_k, valid_count(k, "k")), filter)
        vectors = index.vectors(str(document.id) for document, _ in nearest)
        gains = cosines = np.array([cosine for _, cosine in nearest])
        chosen: list[int] = []
        # Not by LangChain's function, which raises an error if vectors have only zeros.
        for _ in nearest[:k]:
            chosen.append(int(np.argmax(gains)))
            likeness = (vectors @ vectors[chosen].T).max(axis=1)
            gains = lambda_mult * cosines - (1 - lambda_mult) * likeness
            gains[chosen] = -np.inf
        return [nearest[position][0] for position in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        # Rounding may put a cosine just outside [-1, 1].
        return lambda cosine: min(1.0, max(0.0, (cosine + 1) / 2))

    def save_local(self, folder_path: str | Path) -> Path:
        """Save into a folder, and return its path. An earlier store can be loaded until the new one is complete.

        Raises:
            ConfigurationError: ``folder_path`` is a file, or has files but no store.
            WriteError: The file cannot be written; an earlier store is unchanged.
            Exception: The embeddings raised it: a fixed text is embedded, to recognise them when the store is loaded.
                An earlier store is unchanged.
        """
        return self.index.save(folder_path)

    @classmethod
    def load_local(cls, folder_path: str | Path, embeddings: Embeddings) -> Self:
        """Load a store that `save_local` wrote.

        Raises:
            IndexNotFoundError: The folder contains no store.
            IndexCorruptError: Its file cannot be read, is truncated, was changed, or contains something else.
            IndexMismatchError: The store was made with other embeddings, or has another format.
            ConfigurationError: ``embeddings`` is not LangChain embeddings.
            Exception: The embeddings raised it: a fixed text is embedded, to check that they are the same.
        """
        embedder = as_embedder(embeddings)
        try:
            return cls(embeddings, index=PassageIndex.load(folder_path, embedder))
        except (IndexNotFoundError, IndexCorruptError, IndexMismatchError) as error:
            # The index's own hint names a command, which does not help here.
            raise type(error)(
                error.message,
                hint="Check the folder and the embeddings. If both are right, rebuild the store and call "
                "save_local(…) again.",
            ) from error


def _search(index: PassageIndex, vector: Any, k: int, filter: Filter | None) -> Scored:
    """Return at most ``k`` documents that pass a filter, nearest first; ``vector`` has shape (1, dimension)."""
    passes = as_predicate(filter)
    count = k
    while True:
        (hits,) = index.search_vectors(vector, count)
        scored = [(_document(hit.passage), hit.score) for hit in hits]
        scored = [(document, score) for document, score in scored if passes(document)]
        # FAISS cannot filter by metadata, so we search for more until enough pass. Fewer hits than requested means
        # that there are no more. The index's size is not a reliable sign, because other threads may be writing.
        if len(scored) >= k or len(hits) < count:
            return scored[:k]
        count *= _GROWTH


def _document(passage: Passage) -> Document:
    """Return a passage as a new document; a title becomes the metadata's ``title``."""
    # A copy: a caller that changes a document must not change the store.
    return Document(id=passage.id, page_content=passage.text, metadata=deepcopy(passage.titled_metadata))


def _without_scores(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]


# --- embeddings -------------------------------------------------------------------------------------------


class RGateEmbeddings(SentenceEmbedder, Embeddings):
    """The embedder of this package's indexes and gates, as LangChain embeddings.

    The model is loaded on first use and shared within the process. The vectors of the latest 1,024 queries are kept,
    so several indexes and stores embed a question only once. Vectors are normalised.

    Args:
        model: Catalogue name, local folder, or Hub id.

    Raises:
        RGateError: Raised by a call: the model cannot be loaded; see `SentenceEmbedder.embed`.

    Examples:
        >>> vector = RGateEmbeddings().embed_query("Who wrote Hamlet?")  # doctest: +SKIP
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each document; one call of the model embeds all."""
        return self.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return self.embed_queries([text])[0].tolist()


class EmbeddingsAdapter:
    """LangChain embeddings as the embedder of a `PassageIndex`.

    Its `identity` is saved with an index, so that the index is not opened with another model. It is a hash of a fixed
    text's vector, because not every model has a name, and a name may stand for several versions.

    Args:
        embeddings: The embeddings.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings

    @property
    def name(self) -> str:
        """The name of the model, or else of the class."""
        name = getattr(self.embeddings, "model_name", None) or getattr(self.embeddings, "model", None)
        return name if isinstance(name, str) else type(self.embeddings).__name__

    @cached_property
    def identity(self) -> str:
        """Hash of the normalised vector of a fixed text, each number rounded to two decimals."""
        vector = unit(self.embed(["What is the identity of this embedder?"]))
        # Rounded, because hardware and batch size change the last digits.
        return hashlib.sha256(np.round(vector, 2).tobytes()).hexdigest()[:16]

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return the vectors of documents, shape (texts, dimension), made in one call.

        Raises:
            ConfigurationError: The vectors are not numbers, are not finite, or have the wrong shape.
            Exception: The embeddings raised it.
        """
        return check_vectors(self.embeddings.embed_documents(list(texts)), len(texts))

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        """Return the vectors of queries, shape (texts, dimension), made one by one: LangChain has no batch call.

        Raises the errors of `embed`.
        """
        # Not `embed_documents`, because many models embed queries and documents differently.
        return check_vectors([self.embeddings.embed_query(text) for text in texts], len(texts))


def as_embedder(embeddings: Embeddings) -> Embedder:
    """Return LangChain embeddings as the embedder of an index.

    Raises:
        ConfigurationError: The object is not LangChain embeddings.
    """
    if type(embeddings) is RGateEmbeddings:
        return embeddings  # not wrapped, because the command line opens only indexes of this embedder
    if not isinstance(embeddings, Embeddings):
        raise ConfigurationError(
            f"A vector store needs LangChain embeddings, not {type(embeddings).__name__}.",
            hint="Pass an instance of a subclass of langchain_core.embeddings.Embeddings.",
        )
    return EmbeddingsAdapter(embeddings)


# --- metadata filters --------------------------------------------------------------------------------------

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Conditions on the metadata, all of which must hold, or a function of the document; see `as_predicate`."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda value, operand: value in list(operand),
    "$nin": lambda value, operand: value not in list(operand),
}
_MISSING = object()  # the value of a key that a document does not have


def as_predicate(filter: Filter | None) -> Callable[[Document], bool]:
    """Return a function that tests whether a document passes a filter.

    A function is returned unchanged, and None passes every document. Any other filter maps keys of the
    metadata to conditions, all of which must hold. A condition is a value that the key must have, a list that
    must contain the key's value, or a mapping of operators or nested keys. The operators are
    ``$eq $ne $gt $gte $lt $lte $in $nin``; ``$not``, which takes a condition or a whole filter; and ``$and`` and
    ``$or``, which take a list of these. If a document lacks the key, or its value cannot be compared with the
    operand, the comparison is false, except that ``$ne`` and ``$nin`` are true.

    Raises:
        ConfigurationError: The filter is neither a mapping nor a function, an operator is unknown or has an
            invalid operand, or an operator such as ``$eq`` is not under a key. The returned function
            raises it for a key such as ``"a.b"`` that means ``{"a": {"b": …}}``.

    Examples:
        >>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
        >>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
        True
    """
    if callable(filter):
        return filter
    if not isinstance(filter, Mapping | None):
        raise ConfigurationError(
            f"A filter must be a mapping or a function of the document, not {type(filter).__name__}.",
            hint='Pass a mapping such as {"year": {"$gte": 1990}}.',
        )
    conditions = filter or {}
    _meets({}, conditions, has_key=False)  # raises if the filter is invalid, whatever the documents are
    return lambda document: _meets(document.metadata, conditions, has_key=False)


def _meets(value: Any, condition: Any, *, has_key: bool) -> bool:
    """Return whether a value meets a condition.

    Args:
        value: The metadata, or the value of a key in it.
        condition: A value to equal, a list of such values, or a mapping of operators and keys.
        has_key: Whether the condition tests the value of a key; if not, it tests the metadata as a whole.
    """
    if isinstance(condition, list | tuple | set):
        condition = {"$in": condition}
    elif not isinstance(condition, Mapping):
        condition = {"$eq": condition}
    # A list, not a generator: all parts are evaluated, so an invalid one raises wherever it is in the filter.
    return all([_meets_part(value, name, operand, has_key) for name, operand in condition.items()])


def _meets_part(value: Any, name: Any, operand: Any, has_key: bool) -> bool:
    """Return whether a value meets one entry of a condition: an operator with its operand, or a key."""
    if name in ("$in", "$nin", "$and", "$or") and not isinstance(operand, list | tuple | set):
        raise ConfigurationError(
            f"The filter operator {name} takes a list, not {operand!r}.",
            hint=f'Use {{"{name}": [{operand!r}]}}.',
        )
    if name in ("$and", "$or"):
        combine = all if name == "$and" else any
        return combine([_meets(value, part, has_key=has_key) for part in operand])
    if name == "$not":
        return not _meets(value, operand, has_key=has_key)
    if name in _COMPARISONS:
        if not has_key:
            raise ConfigurationError(
                f'The filter condition {{"{name}": {operand!r}}} does not say which key of the metadata it tests.',
                hint=f'Put it under that key, as in {{"year": {{"{name}": …}}}}.',
            )
        try:
            return bool(_COMPARISONS[name](value, operand))
        except TypeError:  # values of different types, or a missing one, cannot be ordered
            return False
    if str(name).startswith("$"):
        raise ConfigurationError(
            f"Unknown filter operator {name!r}.",
            hint=f"Use one of {', '.join([*_COMPARISONS, '$not', '$and', '$or'])}.",
        )
    return _meets(_get(value, name), operand, has_key=True)


def _get(value: Any, key: Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISSING
    outer, dot, rest = str(key).partition(".")
    if key not in value and dot and isinstance(value.get(outer), Mapping):
        raise ConfigurationError(
            f"The metadata has no key {key!r}, and filters do not accept dotted paths.",
            hint=f"Use {{{outer!r}: {{{rest!r}: …}}}}.",
        )
    return value.get(key, _MISSING)
