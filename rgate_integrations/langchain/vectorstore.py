"""`FaissVectorStore`: a passage index as a LangChain vector store; filters, MMR, saved without pickle."""

from __future__ import annotations

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
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from rgate_integrations.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
)
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.langchain.embeddings import as_embedder

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Conditions on the metadata, all of which must hold, or a function of the document; see `as_predicate`."""

Scored: TypeAlias = list[tuple[Document, float]]

_WIDER = 4  # by which factor more documents are searched while a filter leaves too few


class FaissVectorStore(VectorStore):
    """A vector store on FAISS: exact search, upserts by id, metadata filters, MMR, atomic saves.

    ``FaissVectorStore(embedding=e)`` is an empty store. Any number of threads and tasks may read and write: a write
    happens as a whole or, if it raises, not at all. Awaited methods run in a thread.

    Scores are cosines; their relevance is ``(cosine + 1) / 2``. Metadata must be JSON: text, numbers, booleans, None,
    lists, and dicts with text as keys. A text may be blank; it is stored as any other. Every search takes
    ``filter=``, see `as_predicate`.

    Args:
        embedding: Embeds documents and queries.
        index: An index to read and write, made with the same embeddings; a new one when None.

    Example:
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
        """The embeddings."""
        return self.embedding

    # --- writing -------------------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those with the same id; returns the ids. Of equal ids the last one counts.

        Raises:
            DataFormatError: Metadata cannot be stored as JSON. Nothing was embedded or stored.
            ConfigurationError: The ids do not match, or the embeddings fail or have another dimension. Nothing was
                stored.
        """
        return self._upsert(list(texts), metadatas, ids)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, or all of them with None; ids that are not there are ignored."""
        if ids is None:
            ids = [passage.id for passage in self.index]
        self.index.delete(_list_of_ids(ids))
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
        """Make a store of texts; further arguments are those of the class."""
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
        """Make a store of texts whose vectors are there already; further arguments are those of the class."""
        store = cls(embedding, **kwargs)
        texts = []
        vectors = []
        for text, vector in text_embeddings:
            texts.append(text)
            vectors.append(vector)
        store._upsert(texts, metadatas, ids, vectors)
        return store

    def _upsert(
        self,
        texts: Sequence[str],
        metadatas: Sequence[Mapping[str, Any]] | None,
        ids: Sequence[Any] | None,
        vectors: Any = None,
    ) -> list[str]:
        """Write texts, with their vectors if those are there already; returns their ids."""
        if metadatas is None:
            metadatas = [{}] * len(texts)
        if ids is None:
            ids = [None] * len(texts)
        if not len(ids) == len(metadatas) == len(texts):
            raise ConfigurationError(
                f"{len(ids)} ids and {len(metadatas)} metadatas do not match {len(texts)} texts."
            )
        names = []
        passages = {}
        for text, metadata, given in zip(texts, metadatas, ids, strict=True):
            name = str(given)  # 0 and "" are ids
            if given is None:
                name = uuid.uuid4().hex
            names.append(name)
            passages[name] = Passage(name, text, metadata=metadata)  # of equal ids the last one counts
        self.index.upsert(list(passages.values()), vectors)
        return names

    # --- searching -----------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; ids that are not there are left out."""
        return list(map(_document, self.index.get(_list_of_ids(ids))))

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a query, nearest first.

        Args:
            query: The query.
            k: How many.
            filter: Conditions on the metadata, or a function of the document; see `as_predicate`.
            **kwargs: Ignored.
        """
        return _without_scores(self.similarity_search_with_score(query, k, filter))

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return documents with their cosine; the nearest comes first."""
        return _search(self.index, self.index.embed_queries([query]), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a vector.

        Raises:
            ConfigurationError: The vector has another dimension than those of the store, or is not finite.
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
        """Return ``k`` of the ``fetch_k`` nearest documents that are near the query and unlike each other."""
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
        """Return ``k`` of the ``fetch_k`` nearest documents, see `max_marginal_relevance_search`."""
        # A copy, which copies no vectors: what is found in it is still there when its vector is asked for.
        index = copy(self.index)
        near = _without_scores(_search(index, [embedding], max(fetch_k, k), filter))
        theirs = index.vectors(str(document.id) for document in near)
        chosen = maximal_marginal_relevance(np.asarray(embedding), list(theirs), lambda_mult=lambda_mult, k=k)
        return [near[i] for i in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(1.0, max(0.0, (cosine + 1) / 2))  # a rounded cosine may lie just outside

    # --- saving --------------------------------------------------------------------------------------------

    def save_local(self, folder_path: str | Path) -> Path:
        """Save into a folder; a store that was there stays loadable until the new one is complete."""
        return self.index.save(folder_path)

    @classmethod
    def load_local(cls, folder_path: str | Path, embeddings: Embeddings) -> Self:
        """Load a store.

        Raises:
            IndexNotFoundError: There is none in the folder.
            IndexCorruptError: Its file is truncated or changed, or holds something else.
            IndexMismatchError: The embeddings are not those it was made with.
        """
        embedder = as_embedder(embeddings)
        try:
            return cls(embeddings, index=PassageIndex.load(folder_path, embedder))
        except (IndexNotFoundError, IndexCorruptError, IndexMismatchError) as error:
            # The index knows only the command that makes one for the command line.
            raise type(error)(
                error.message, hint="Make it with save_local, from a store with these embeddings."
            ) from error


def _search(index: PassageIndex, vector: Any, k: int, given: Filter | None) -> Scored:
    """Return the documents nearest to one vector, shape (1, dimension), that pass a filter."""
    passes = as_predicate(given)
    wide = k
    while True:
        (hits,) = index.search_vectors(vector, wide)
        kept = []
        for hit in hits:
            document = _document(hit.passage)
            if passes(document):
                kept.append((document, hit.score))
        # FAISS knows no metadata: search wider until enough passes, or all that there is was found. The size of the
        # index does not tell that: others may be writing.
        if len(kept) >= k or len(hits) < wide:
            return kept[:k]
        wide *= _WIDER


def _document(passage: Passage) -> Document:
    """Return a passage as a document of the caller's own; its title is part of the metadata."""
    metadata = deepcopy(dict(passage.metadata))
    if passage.title:
        metadata["title"] = passage.title
    return Document(id=passage.id, page_content=passage.text, metadata=metadata)


def _list_of_ids(ids: Sequence[Any]) -> Sequence[Any]:
    """Refuse one id instead of a list: its letters would be taken for ids."""
    if isinstance(ids, str):
        raise ConfigurationError(f"This takes a list of ids, not {ids!r}.", hint=f"Give [{ids!r}].")
    return ids


def _without_scores(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]


# --- filters -------------------------------------------------------------------------------------------------


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda held, wanted: held in list(wanted),
    "$nin": lambda held, wanted: held not in list(wanted),
}
_MISSING = object()
_DEEPEST = 64  # mappings and lists within each other


def as_predicate(given: Filter | None) -> Callable[[Document], bool]:
    """Return a function that says whether a document passes.

    A key with a value holds if the metadata has that value, with a list if it has one of the list's, and with a
    mapping if all in it hold: operators of the value, or keys within it. The operators are
    ``$eq $ne $gt $gte $lt $lte $in $nin``, and ``$not``, ``$and``, ``$or`` around conditions and whole filters. What
    is compared with a missing key, or a value of another type, does not hold; so ``$ne``, ``$nin`` and ``$not`` do.

    Raises:
        ConfigurationError: An operator is not known, or is given what it cannot take; or the filter is nested too
            deeply. Raised by the function: a key such as ``"a.b"`` stands for a key within the document's ``"a"``.

    Example:
        >>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
        >>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
        True
    """
    if callable(given):
        return given
    if not isinstance(given, Mapping | None):
        raise ConfigurationError(
            f"A filter is a mapping or a function of the document, not {type(given).__name__}.",
            hint='Give, for example, {"year": {"$gte": 1990}}.',
        )
    wanted = given or {}
    _check_depth(wanted, _DEEPEST)
    _check_keys(wanted)
    _holds(wanted, {})  # a wrong filter is an error now, also where there is nothing to search
    return lambda document: _holds(wanted, document.metadata)


def _check_depth(given: Any, deepest: int) -> None:
    """Refuse a filter in which more mappings and lists stand within each other than Python can follow."""
    if not isinstance(given, Mapping | list | tuple | set):
        return
    if deepest == 0:
        raise ConfigurationError(
            f"The filter is nested more than {_DEEPEST} deep.", hint="Give conditions beside each other."
        )
    for each in given.values() if isinstance(given, Mapping) else given:
        _check_depth(each, deepest - 1)


def _check_keys(given: Any) -> None:
    """Refuse a value, or a comparison, of the whole metadata: it stands under a key."""
    if not isinstance(given, Mapping) or not _COMPARISONS.keys().isdisjoint(given):
        raise ConfigurationError(
            f"{given!r} has to stand under a key of the metadata.", hint='Give, for example, {"year": 1990}.'
        )
    for name, operand in given.items():
        if name == "$not":
            _check_keys(operand)
        elif name in ("$and", "$or") and isinstance(operand, list | tuple | set):
            for each in operand:
                _check_keys(each)


def _holds(wanted: Any, held: Any) -> bool:
    """Whether a value is the wanted one, one of a list, or all in a mapping holds of it.

    All conditions are looked at, also behind one that does not hold: one look finds whatever is wrong with a filter.
    """
    if isinstance(wanted, list | tuple | set):
        wanted = {"$in": wanted}
    elif not isinstance(wanted, Mapping):
        wanted = {"$eq": wanted}
    return all([_condition(name, operand, held) for name, operand in wanted.items()])


def _condition(name: Any, operand: Any, held: Any) -> bool:
    """Whether one condition holds of a value: an operator's, or that of a key within it."""
    if name in ("$in", "$nin", "$and", "$or") and not isinstance(operand, list | tuple | set):
        raise ConfigurationError(f"{name} takes a list, not {operand!r}.")
    if name == "$and":
        return all([_holds(each, held) for each in operand])
    if name == "$or":
        return any([_holds(each, held) for each in operand])
    if name == "$not":
        return not _holds(operand, held)
    if name in _COMPARISONS:
        try:
            return bool(_COMPARISONS[name](held, operand))
        except TypeError:  # a number is neither more nor less than a text, or than what is not there
            return False
    if str(name).startswith("$"):
        raise ConfigurationError(
            f"{name!r} is no operator of filters.",
            hint=f"Use one of {', '.join([*_COMPARISONS, '$not', '$and', '$or'])}.",
        )
    inner = _MISSING
    if isinstance(held, Mapping):
        inner = held.get(name, _MISSING)
        outer, dot, rest = str(name).partition(".")
        if inner is _MISSING and dot and isinstance(held.get(outer), Mapping):
            raise ConfigurationError(
                f"{name!r} is no path into the metadata.", hint=f"Give {{{outer!r}: {{{rest!r}: …}}}}."
            )
    return _holds(operand, inner)
