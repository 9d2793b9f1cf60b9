"""`FaissVectorStore`: a FAISS index as a LangChain vector store; three metrics, filters, saved without pickle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor

from rgate_integrations.errors import ConfigurationError, IndexMismatchError, IndexNotFoundError
from rgate_integrations.index import PassageIndex
from rgate_integrations.index.vectors import read_vectors
from rgate_integrations.langchain.community import has_community_folder, read_community_folder
from rgate_integrations.langchain.distances import DistanceStrategy, as_strategy, strategy_of
from rgate_integrations.langchain.documents import as_names, as_passage, documents_of, ids_of, last_of_each
from rgate_integrations.langchain.embeddings import as_embedder
from rgate_integrations.langchain.searching import SearchedIndex
from rgate_integrations.runtime.flow import Flow, arun, run


class FaissVectorStore(SearchedIndex):
    """A vector store on FAISS: exact search, upserts by id, metadata filters, MMR, atomic saves.

    ``FaissVectorStore(embedding=e)`` is an empty store. A batch of queries is embedded and searched in one call
    (`batch_similarity_search`). Any number of threads and tasks may read and write: a write happens as a whole or, if
    it raises, not at all. Every method has its awaitable, which awaits the embeddings' own.

    Metadata must be JSON: text, numbers, booleans, None, lists, and dicts with text as keys. A text may be blank; it
    is stored as any other.

    Args:
        embedding: Embeds documents and queries.
        index: An index to read and write, made with the same embeddings; a new one when None.
        distance_strategy: What is searched by, see `DistanceStrategy`; the index's own when None, else the cosine.
        relevance_score_fn: Maps a score to a relevance in [0, 1]; that of the strategy when None.

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
        asked = None if distance_strategy is None else as_strategy(distance_strategy)
        if index is None:
            metric = (asked or DistanceStrategy.COSINE).metric
            index = PassageIndex(as_embedder(embedding), metric=metric)
        super().__init__(index, relevance_score_fn)
        self.embedding = embedding
        if asked not in (None, self.distance_strategy):
            raise ConfigurationError(
                f"The index is searched by {self.distance_strategy}, not by {asked}.",
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
        return run(self._adding(documents, ids))

    async def aadd_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add documents, see `add_documents`."""
        return await arun(self._adding(documents, ids))

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those with the same id; returns the ids."""
        return run(self._adding(documents_of(texts, metadatas), ids))

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, see `add_texts`."""
        return await arun(self._adding(documents_of(texts, metadatas), ids))

    def add_embeddings(
        self,
        text_embeddings: Iterable[tuple[str, list[float]]],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts whose vectors are there already, or replace those with the same id; returns the ids."""
        pairs = list(text_embeddings)
        documents = documents_of([text for text, _ in pairs], metadatas)
        self._add_vectors(documents, names := ids_of(documents, ids), [vector for _, vector in pairs])
        return names

    def merge_from(self, target: FaissVectorStore) -> None:
        """Take over the documents of another store with their vectors; of equal ids the other store's stays.

        Raises:
            ConfigurationError: The other one is no such store, or has another distance strategy or dimension.
            IndexMismatchError: It has other embeddings.
        """
        if not isinstance(target, FaissVectorStore):
            raise ConfigurationError(f"Only a FaissVectorStore can be merged, not {type(target).__name__}.")
        if target.distance_strategy != self.distance_strategy:
            raise ConfigurationError(
                f"A store that is searched by {target.distance_strategy} cannot be merged into one that is "
                f"searched by {self.distance_strategy}.",
                hint="Add its documents instead.",
            )
        same = target.embedding is self.embedding
        if not same and target.index.embedder.identity != self.index.embedder.identity:
            raise IndexMismatchError(
                "The stores have different embeddings.", hint="Add the documents instead."
            )
        with target.index.reading():
            passages = list(target.index)
            vectors = target.index.vectors([passage.id for passage in passages])
        self.index.upsert_vectors(passages, vectors, blank=True)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id; ids that are not there are ignored. None deletes nothing."""
        self.index.delete(as_names(ids or []))
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
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a store of texts, see `from_texts`."""
        store = cls(embedding, **kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids)
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
        store.add_embeddings(text_embeddings, metadatas, ids)
        return store

    @classmethod
    async def afrom_embeddings(
        cls,
        text_embeddings: Iterable[tuple[str, list[float]]],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a store of texts whose vectors are there already, see `from_embeddings`."""
        return await run_in_executor(
            None, cls.from_embeddings, text_embeddings, embedding, metadatas, ids, **kwargs
        )

    def _adding(self, documents: Sequence[Document], ids: Sequence[Any] | None) -> Flow[list[str]]:
        names = ids_of(documents, ids)
        passages = [as_passage(names[i], documents[i]) for i in last_of_each(names)]
        yield from self.index.upserting(passages, blank=True)
        return names

    def _add_vectors(self, documents: Sequence[Document], names: Sequence[str], vectors: Any) -> None:
        kept = last_of_each(names)
        passages = [as_passage(names[i], documents[i]) for i in kept]
        chosen: Any = [vectors[i] for i in kept]  # the index checks them
        self.index.upsert_vectors(passages, chosen, blank=True)

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
        try:
            index = PassageIndex.load(_folder(folder_path, index_name), as_embedder(embeddings))
        except IndexNotFoundError as error:
            if has_community_folder(folder_path, index_name):
                error.hint = "langchain_community saved it: use FaissVectorStore.from_community_folder."
            raise
        return cls(embeddings, index=index, **kwargs)

    @classmethod
    def from_community_folder(
        cls, folder_path: str | Path, embeddings: Embeddings, index_name: str = "index", **kwargs: Any
    ) -> Self:
        """Take over what ``langchain_community``'s FAISS store saved, without running what its pickle names.

        Vectors are not computed again. The distance strategy is that of the folder, unless another is given.

        Args:
            folder_path: The folder.
            embeddings: The embeddings it was made with.
            index_name: Name of the two files.
            **kwargs: Arguments of the class.

        Raises:
            IndexNotFoundError: There are no such files.
            IndexCorruptError: The vectors cannot be read.
            DataFormatError: The pickle holds anything else than documents with JSON metadata.
        """
        saved = read_community_folder(folder_path, index_name)
        kwargs.setdefault("distance_strategy", strategy_of(saved.metric))
        store = cls(embeddings, **kwargs)
        store._add_vectors(saved.documents, ids_of(saved.documents, None), saved.vectors)
        return store

    @classmethod
    def from_community_index(
        cls, index_file: str | Path, documents: Sequence[Document], embedding: Embeddings, **kwargs: Any
    ) -> Self:
        """Take over the vectors of a ``langchain_community`` FAISS folder, with documents that are given again.

        For folders whose documents `from_community_folder` refuses to read. Vectors are not computed again.

        Args:
            index_file: Its ``index.faiss``.
            documents: The documents, one a vector, in the order in which they were added.
            embedding: The embeddings it was made with.
            **kwargs: Arguments of the class; the distance strategy is that of the file, unless another is given.

        Raises:
            ConfigurationError: The number of documents is not that of the vectors.
            IndexCorruptError: The file cannot be read, or keeps no vectors.
        """
        vectors, metric = read_vectors(index_file)
        if len(vectors) != len(documents):
            raise ConfigurationError(f"{len(vectors)} vectors do not match {len(documents)} documents.")
        kwargs.setdefault("distance_strategy", strategy_of(metric))
        store = cls(embedding, **kwargs)
        store._add_vectors(documents, ids_of(documents, None), vectors)
        return store


def _folder(folder_path: str | Path, index_name: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", index_name) or re.fullmatch(r"v-\w+", index_name):
        raise ConfigurationError(
            f"{index_name!r} cannot be an index_name.", hint="Use letters, digits and _."
        )
    root = Path(folder_path)
    return root if index_name == "index" else root / index_name
