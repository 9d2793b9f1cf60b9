"""`FaissVectorStore`: a FAISS index as a LangChain vector store; cosine similarity, saved without pickle."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from rgate_integrations.arrays import Float32Array
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.retriever import Hit

Filter = Mapping[str, Any] | Callable[[Document], bool]
_WIDER = 4  # by which factor more documents are searched while a filter leaves too few


class EmbeddingsAdapter:
    """LangChain embeddings as the embedder of a `PassageIndex`.

    Vectors are normalised, so inner products are cosine similarities. The identity is a hash of the vector of a
    fixed text: it changes when the vectors do, whatever the model is called.

    Args:
        embeddings: The embeddings.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings
        self._identity: str | None = None
        self._symmetric: bool | None = None

    @property
    def name(self) -> str:
        """The model's name, or the class's."""
        for attribute in ("model_name", "model"):
            value = getattr(self.embeddings, attribute, None)
            if isinstance(value, str):
                return value
        return type(self.embeddings).__name__

    @property
    def identity(self) -> str:
        """Hash of a fixed text's vector, to two decimals."""
        if self._identity is None:
            vector = self.embed(["What is the identity of this embedder?"])[0]
            self._identity = hashlib.sha256(np.round(vector, 2).astype(np.float32).tobytes()).hexdigest()[:16]
        return self._identity

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Embed texts as documents, in one call."""
        return _normalised(self.embeddings.embed_documents(list(texts)))

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        """Embed queries: a batch in one call, if the embeddings treat queries as they treat documents.

        LangChain's interface has no call for several queries. Whether the one for documents does is found out
        once, with the first query of the first batch.
        """
        if len(texts) == 1 or self._symmetric is False:
            return _normalised([self.embeddings.embed_query(text) for text in texts])
        vectors = self.embed(texts)
        if self._symmetric is None:
            alone = _normalised([self.embeddings.embed_query(texts[0])])[0]
            self._symmetric = bool(np.allclose(alone, vectors[0], atol=1e-3))
            if not self._symmetric:
                return self.embed_queries(texts)
        return vectors


class FaissVectorStore(VectorStore):
    """A vector store on FAISS: exact cosine similarity, upserts by id, metadata filters, MMR, atomic saves.

    ``FaissVectorStore(embedding=e)`` is an empty store. A batch of queries is embedded and searched in one call
    (`batch_similarity_search`). Similarities are cosines in [-1, 1]; higher is nearer.

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
        self.embedding = embedding
        self._adapter = EmbeddingsAdapter(embedding)
        self.index = index if index is not None else PassageIndex(self._adapter)

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings."""
        return self.embedding

    # --- writing -------------------------------------------------------------------------------------------

    def add_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents, or replace those with the same id; returns the ids."""
        names = _ids_of(documents, ids)
        # Of equal ids in one call the last one counts.
        last = {name: position for position, name in enumerate(names)}
        self.index.upsert([_passage(names[i], documents[i]) for i in sorted(last.values())])
        return names

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those with the same id; returns the ids."""
        given = list(texts)
        if metadatas is not None and len(metadatas) != len(given):
            raise ConfigurationError(f"{len(metadatas)} metadatas do not match {len(given)} texts.")
        described = metadatas or [{} for _ in given]
        documents = [
            Document(page_content=text, metadata=metadata)
            for text, metadata in zip(given, described, strict=True)
        ]
        return self.add_documents(documents, ids=ids)

    async def aadd_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents without blocking the event loop."""
        return await run_in_executor(None, self.add_documents, documents, ids=ids)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id; ids that are not there are ignored. None deletes nothing."""
        self.index.delete(ids or [])
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
        """Make a store of texts."""
        store = cls(embedding)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # --- reading -------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; ids that are not there are left out."""
        found = {passage.id: passage for passage in self.index.get(ids)}
        return [_document(found[name]) for name in ids if name in found]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids without blocking the event loop."""
        return await run_in_executor(None, self.get_by_ids, ids)

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a query, nearest first.

        Args:
            query: The query.
            k: How many.
            filter: Metadata that must be equal, or a function of the document.
            **kwargs: Ignored.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return documents with their cosine similarity, in [-1, 1]; higher is nearer."""
        return self.batch_similarity_search_with_score([query], k, filter)[0]

    def batch_similarity_search(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[list[Document]]:
        """Search several queries; they are embedded and searched in one call each."""
        found = self.batch_similarity_search_with_score(queries, k, filter)
        return [[document for document, _ in each] for each in found]

    def batch_similarity_search_with_score(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[list[tuple[Document, float]]]:
        """Search several queries; documents come with their cosine similarity."""
        if not queries:
            return []
        return self._search(self._adapter.embed_queries(queries), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a vector."""
        found = self._search(_normalised([embedding]), k, filter)[0]
        return [document for document, _ in found]

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
        vector = self._adapter.embed_queries([query])[0]
        return self.max_marginal_relevance_search_by_vector(vector.tolist(), k, fetch_k, lambda_mult, filter)

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
        vector = _normalised([embedding])
        near = [document for document, _ in self._search(vector, max(fetch_k, k), filter)[0]]
        if not near:
            return []
        vectors = self.index.vectors([str(d.id) for d in near])
        chosen = maximal_marginal_relevance(vector[0], list(vectors), lambda_mult=lambda_mult, k=k)
        return [near[i] for i in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return _relevance

    # --- saving --------------------------------------------------------------------------------------------

    def save_local(self, folder: str | Path) -> Path:
        """Save into a folder; one that was there stays loadable until the new one is complete."""
        return self.index.save(folder)

    @classmethod
    def load_local(cls, folder: str | Path, embedding: Embeddings) -> Self:
        """Load a store.

        Raises:
            IndexNotFoundError: There is none in the folder.
            IndexCorruptError: A file is missing, truncated or changed.
            IndexMismatchError: The embeddings are not those it was made with.
        """
        return cls(embedding, index=PassageIndex.load(folder, EmbeddingsAdapter(embedding)))

    @classmethod
    def from_community_index(
        cls, index_file: str | Path, documents: Sequence[Document], embedding: Embeddings
    ) -> Self:
        """Take over the vectors of a ``langchain_community`` FAISS folder, without reading its pickle.

        The documents lie in that folder's pickle, which may run any code when it is read; so they are given
        again, in the order in which they were added. Their vectors are not computed again.

        Args:
            index_file: Its ``index.faiss``.
            documents: The documents, one a vector, in order.
            embedding: The embeddings it was made with.

        Raises:
            ConfigurationError: The number of documents is not that of the vectors, or the index keeps none.
        """
        store = cls(embedding)
        names = _ids_of(documents, None)
        passages = [_passage(name, document) for name, document in zip(names, documents, strict=True)]
        store.index.add_vectors(passages, PassageIndex.read_vectors(index_file))
        return store

    def _search(
        self, vectors: Float32Array, k: int, filter: Filter | None
    ) -> list[list[tuple[Document, float]]]:
        if k < 1:
            raise ConfigurationError(f"k must be at least 1, not {k}.")
        size = len(self.index)
        if not size:
            return [[] for _ in vectors]
        passes = _predicate(filter)
        if passes is None:
            return [_documents(hits) for hits in self.index.search_vectors(vectors, k)]
        # FAISS knows no metadata: search wider until each query has enough that passes, or all were searched.
        wanted = k
        while True:
            wanted = min(size, wanted * _WIDER)
            kept = [
                _passing(_documents(hits), passes, k) for hits in self.index.search_vectors(vectors, wanted)
            ]
            if wanted >= size or all(len(each) == k for each in kept):
                return kept


def _ids_of(documents: Sequence[Document], ids: Sequence[str] | None) -> list[str]:
    """Return the ids that are given beside the documents or in them, and new ones where there are none."""
    if ids is not None and len(ids) != len(documents):
        raise ConfigurationError(f"{len(ids)} ids do not match {len(documents)} documents.")
    given = ids if ids is not None else [document.id for document in documents]
    return [uuid.uuid4().hex if name is None else str(name) for name in given]  # 0 and "" are ids


def _passage(name: str, document: Document) -> Passage:
    return Passage(id=name, text=document.page_content, metadata=dict(document.metadata))


def _passing(
    found: Sequence[tuple[Document, float]], passes: Callable[[Document], bool], k: int
) -> list[tuple[Document, float]]:
    """Return the first ``k`` that pass a filter."""
    kept = [(document, score) for document, score in found if passes(document)]
    return kept[:k]


def _documents(hits: Sequence[Hit]) -> list[tuple[Document, float]]:
    return [(_document(hit.passage), hit.score) for hit in hits]


def _document(passage: Passage) -> Document:
    title = {"title": passage.title} if passage.title else {}
    return Document(id=passage.id, page_content=passage.text, metadata={**passage.metadata, **title})


def _predicate(filter: Filter | None) -> Callable[[Document], bool] | None:
    if filter is None or callable(filter):
        return filter
    return partial(_has_metadata, dict(filter))


def _has_metadata(wanted: Mapping[str, Any], document: Document) -> bool:
    held = document.metadata
    return all(name in held and held[name] == value for name, value in wanted.items())


def _relevance(cosine: float) -> float:
    """Map a cosine to LangChain's relevance in [0, 1]."""
    return (cosine + 1) / 2


def _normalised(vectors: Sequence[Sequence[float]]) -> Float32Array:
    array = np.asarray(vectors, dtype=np.float32)
    norms = np.linalg.norm(array, axis=-1, keepdims=True)
    return np.ascontiguousarray(array / np.maximum(norms, 1e-12), dtype=np.float32)
