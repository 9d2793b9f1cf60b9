"""`FaissVectorStore`: a FAISS index as a LangChain vector store; three metrics, filters, saved without pickle."""

from __future__ import annotations

import math
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.retriever import check_k
from rgate_integrations.index.vectors import Metric, checked_vectors, normalised
from rgate_integrations.langchain.embeddings import as_embedder

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Conditions on the metadata, all of which must hold, or a function of the document; see `as_predicate`."""

Scored: TypeAlias = list[tuple[Document, float]]

# The names are those of langchain_community's DistanceStrategy, whose members are such texts.
METRICS: dict[str, Metric] = {
    "COSINE": "cosine",
    "MAX_INNER_PRODUCT": "inner_product",
    "EUCLIDEAN_DISTANCE": "l2",
}
_WIDER = 4  # by which factor more documents are searched while a filter leaves too few


class FaissVectorStore(VectorStore):
    """A vector store on FAISS: exact search, upserts by id, metadata filters, MMR, atomic saves.

    ``FaissVectorStore(embedding=e)`` is an empty store. Any number of threads and tasks may read and write: a write
    happens as a whole or, if it raises, not at all. Awaited methods run in a thread.

    Scores are cosines or inner products, of which higher is nearer, or squared Euclidean distances, of which *lower*
    is nearer. Metadata must be JSON: text, numbers, booleans, None, lists, and dicts with text as keys. A text may be
    blank; it is stored as any other. Every search takes ``filter=``, see `as_predicate`.

    Args:
        embedding: Embeds documents and queries.
        index: An index to read and write, made with the same embeddings; a new one when None.
        distance_strategy: What is searched by: ``"COSINE"``, ``"MAX_INNER_PRODUCT"`` or ``"EUCLIDEAN_DISTANCE"``;
            the index's own when None, else the cosine.
        relevance_score_fn: Maps a score to a relevance in [0, 1]. By default ``(score + 1) / 2`` of a cosine, the
            logistic function of an inner product, and ``1 / (1 + distance)``.

    Raises:
        ConfigurationError: There is no such strategy, or the index has another one.

    Example:
        >>> from langchain_core.embeddings import DeterministicFakeEmbedding
        >>> store = FaissVectorStore(embedding=DeterministicFakeEmbedding(size=8))
        >>> store.add_texts(["Paris is the capital of France."], ids=["1"])
        ['1']
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        index: PassageIndex | None = None,
        distance_strategy: str | None = None,
        relevance_score_fn: Callable[[float], float] | None = None,
    ) -> None:
        if distance_strategy is not None and distance_strategy not in METRICS:
            raise ConfigurationError(
                f"There is no distance strategy {distance_strategy!r}.",
                hint=f"Use one of {', '.join(METRICS)}.",
            )
        if index is None:
            index = PassageIndex(as_embedder(embedding), metric=METRICS[distance_strategy or "COSINE"])
        self.embedding = embedding
        self.index = index
        (self.distance_strategy,) = (name for name, metric in METRICS.items() if metric == index.metric)
        self._relevance_score_fn = relevance_score_fn or self._relevance
        if distance_strategy not in (None, self.distance_strategy):
            raise ConfigurationError(
                f"The index is searched by {self.distance_strategy}, not by {distance_strategy}.",
                hint="Leave distance_strategy out, or make a new store of the documents.",
            )

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings."""
        return self.embedding

    # --- writing -------------------------------------------------------------------------------------------

    def add_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents, or replace those with the same id; returns the ids.

        Raises:
            DataFormatError: Metadata cannot be stored as JSON. Nothing was embedded or stored.
            ConfigurationError: The ids do not match, or the embeddings fail or have another dimension. Nothing was
                stored.
        """
        return self._upsert(documents, ids)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those with the same id; returns the ids."""
        return self._upsert(_documents(texts, metadatas), ids)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id; ids that are not there are ignored. None deletes nothing."""
        self.index.delete(_names(ids or []))
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
        pairs = list(text_embeddings)
        documents = _documents([text for text, _ in pairs], metadatas)
        store._upsert(documents, ids, [vector for _, vector in pairs])
        return store

    def _upsert(
        self, documents: Sequence[Document], ids: Sequence[Any] | None, vectors: Sequence[Any] | None = None
    ) -> list[str]:
        """Write documents, with their vectors if those are there already; returns the ids."""
        if ids is None:
            ids = [document.id for document in documents]
        if len(ids) != len(documents):
            raise ConfigurationError(f"{len(ids)} ids do not match {len(documents)} documents.")
        names = [uuid.uuid4().hex if name is None else str(name) for name in ids]  # 0 and "" are ids
        # Of equal ids in one call the last one counts.
        last = {name: place for place, name in enumerate(names)}
        passages = []
        for name, place in last.items():
            document = documents[place]
            passages.append(Passage(id=name, text=document.page_content, metadata=document.metadata))
        chosen: Any = None if vectors is None else [vectors[place] for place in last.values()]
        self.index.upsert(passages, chosen, blank=True)
        return names

    # --- searching -----------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; ids that are not there are left out."""
        names = _names(ids)
        found = {passage.id: passage for passage in self.index.get(names)}
        return [_document(found[name]) for name in names if name in found]

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
        """Return documents with their score; the nearest comes first."""
        passes = as_predicate(filter)
        check_k(k)
        return self._search(self.index.embed_queries([query]), k, passes)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a vector."""
        return _without_scores(self.similarity_search_with_score_by_vector(embedding, k, filter))

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return the ``k`` documents nearest to a vector, with their score.

        Raises:
            ConfigurationError: The vector has another dimension than those of the store, or is not finite.
        """
        return self._search([embedding], k, as_predicate(filter))

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
        passes = as_predicate(filter)
        return self._diverse(self.index.embed_queries([query]), k, fetch_k, lambda_mult, passes)

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
        return self._diverse([embedding], k, fetch_k, lambda_mult, as_predicate(filter))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self._relevance_score_fn

    def _relevance(self, score: float) -> float:
        if self.distance_strategy == "EUCLIDEAN_DISTANCE":
            return 1 / (1 + math.sqrt(score))
        if self.distance_strategy == "COSINE":
            return min(1.0, max(0.0, (score + 1) / 2))  # a rounded cosine may lie just outside
        return (1 + math.tanh(score / 2)) / 2  # the logistic function, in a form that does not overflow

    def _search(self, vector: Any, k: int, passes: Callable[[Document], bool] | None) -> Scored:
        """Return the documents nearest to one vector, shape (1, dimension)."""
        check_k(k)
        wide = k if passes is None else k * _WIDER
        while True:
            (hits,) = self.index.search_vectors(vector, wide)
            kept: Scored = []
            for hit in hits:
                document = _document(hit.passage)
                if passes is None or passes(document):
                    # The index has higher scores for what is nearer, also for distances.
                    score = max(0.0, -hit.score) if self.index.metric == "l2" else hit.score
                    kept.append((document, score))
            # FAISS knows no metadata: search wider until enough passes, or all that there is was found. The size of
            # the index does not tell that: others may be writing.
            if len(kept) >= k or len(hits) < wide:
                return kept[:k]
            wide *= _WIDER

    def _diverse(
        self,
        vector: Any,
        k: int,
        fetch_k: int,
        lambda_mult: float,
        passes: Callable[[Document], bool] | None,
    ) -> list[Document]:
        with self.index.reading():  # or what is found might be gone when its vector is asked for
            near = _without_scores(self._search(vector, max(fetch_k, k), passes))
            if not near:
                return []
            theirs = self.index.vectors([str(document.id) for document in near])
        asked = normalised(checked_vectors(vector, 1, None))[0]
        chosen = maximal_marginal_relevance(asked, list(theirs), lambda_mult=lambda_mult, k=k)
        return [near[i] for i in chosen]

    # --- saving --------------------------------------------------------------------------------------------

    def save_local(self, folder_path: str | Path, index_name: str = "index") -> Path:
        """Save into a folder; a store that was there stays loadable until the new one is complete.

        Args:
            folder_path: The folder.
            index_name: Stores of several names may share a folder.
        """
        return self.index.save(_folder(folder_path, index_name))

    @classmethod
    def load_local(
        cls, folder_path: str | Path, embeddings: Embeddings, index_name: str = "index", **kwargs: Any
    ) -> Self:
        """Load a store; further arguments are those of the class.

        Raises:
            IndexNotFoundError: There is none in the folder.
            IndexCorruptError: A file is missing, truncated, changed, or does not fit to the others.
            IndexMismatchError: The embeddings are not those it was made with.
            ConfigurationError: It has another distance strategy than the one that is asked for.
        """
        # Nothing here is unpickled, so there is nothing to allow; the argument is that of other stores.
        kwargs.pop("allow_dangerous_deserialization", None)
        index = PassageIndex.load(_folder(folder_path, index_name), as_embedder(embeddings))
        return cls(embeddings, index=index, **kwargs)


def _documents(texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None) -> list[Document]:
    """Return texts with their metadata as documents."""
    given = list(texts)
    if metadatas is None:
        metadatas = [{}] * len(given)
    if len(metadatas) != len(given):
        raise ConfigurationError(f"{len(metadatas)} metadatas do not match {len(given)} texts.")
    pairs = zip(given, metadatas, strict=True)
    return [Document(page_content=text, metadata=metadata) for text, metadata in pairs]


def _document(passage: Passage) -> Document:
    """Return a passage as a document; its title is part of the metadata."""
    title = {"title": passage.title} if passage.title else {}
    return Document(id=passage.id, page_content=passage.text, metadata={**passage.metadata, **title})


def _names(ids: Sequence[Any]) -> list[str]:
    """Return ids as they are stored: as text."""
    if isinstance(ids, str):
        raise ConfigurationError(f"This takes a list of ids, not {ids!r}.", hint=f"Give [{ids!r}].")
    return [str(name) for name in ids if name is not None]


def _without_scores(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]


def _folder(folder_path: str | Path, index_name: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", index_name) or re.fullmatch(r"v-\w+", index_name):
        raise ConfigurationError(
            f"{index_name!r} cannot be an index_name.", hint="Use letters, digits and _."
        )
    root = Path(folder_path)
    return root if index_name == "index" else root / index_name


# --- filters -------------------------------------------------------------------------------------------------


_MISSING = object()
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$neq": operator.ne,  # as langchain_community's store has it
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda held, wanted: held in list(wanted),
    "$nin": lambda held, wanted: held not in list(wanted),
}


def as_predicate(given: Filter | None) -> Callable[[Document], bool] | None:
    """Return a function that says whether a document passes; None if there is no filter.

    A key with a value holds if the metadata has that value, with a list if it has one of the list's, and with a
    mapping of operators if all of them hold: ``$eq $ne $gt $gte $lt $lte $in $nin $not``. ``$and``, ``$or`` (lists)
    and ``$not`` combine whole filters. What is compared with a missing key, or a value of another type, does not
    hold; so ``$ne``, ``$nin`` and ``$not`` do.

    Raises:
        ConfigurationError: An operator is not known, or is given what it cannot take.

    Example:
        >>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
        >>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
        True
    """
    if given is None or callable(given):
        return given
    try:
        _holds(given, {})  # a wrong filter is an error now, also where there is nothing to search
    except RecursionError:
        raise ConfigurationError(
            "The filter is nested too deeply.", hint="Put conditions side by side in one $and or $or."
        ) from None
    return lambda document: _holds(given, document.metadata)


# All conditions are looked at, also behind one that does not hold: one look finds whatever is wrong with a filter.


def _holds(given: Any, metadata: Mapping[str, Any]) -> bool:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"A filter is a mapping or a function of the document, not {type(given).__name__}.",
            hint='Give, for example, {"year": {"$gte": 1990}}.',
        )
    holds = True
    for key, wanted in given.items():
        if key == "$not":
            holds &= not _holds(wanted, metadata)
        elif key in ("$and", "$or"):
            if not isinstance(wanted, list | tuple) or not wanted:
                raise ConfigurationError(f"{key} takes a list of filters, not {wanted!r}.")
            parts = [_holds(each, metadata) for each in wanted]
            holds &= all(parts) if key == "$and" else any(parts)
        elif not isinstance(key, str) or key.startswith("$"):
            raise ConfigurationError(f"A filter has no key {key!r}.", hint="Use a text, $and, $or or $not.")
        else:
            holds &= _value_passes(metadata.get(key, _MISSING), wanted)
    return holds


def _value_passes(held: Any, wanted: Any) -> bool:
    """Whether a value of the metadata is the wanted one, one of a list, or passes every operator."""
    if isinstance(wanted, list | tuple | set | frozenset):
        wanted = {"$in": wanted}
    elif not isinstance(wanted, Mapping) or not any(str(name).startswith("$") for name in wanted):
        wanted = {"$eq": wanted}
    passes = True
    for name, operand in wanted.items():
        passes &= _compare(held, name, operand)
    return passes


def _compare(held: Any, name: Any, operand: Any) -> bool:
    if name == "$not" and isinstance(operand, Mapping):
        return not _value_passes(held, operand)
    if name not in _COMPARISONS:
        known = ", ".join([*_COMPARISONS, "$not"])
        raise ConfigurationError(
            f"{name!r} with {operand!r} is no operator of filters.", hint=f"Use one of {known}."
        )
    if name in ("$in", "$nin") and not isinstance(operand, list | tuple | set | frozenset):
        raise ConfigurationError(f"{name} takes a list, not {operand!r}.")
    try:
        return bool(_COMPARISONS[name](held, operand))
    except TypeError:  # a number is neither more nor less than a text, or than what is not there
        return False
