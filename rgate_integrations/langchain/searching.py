"""The reading half of `FaissVectorStore`: an index searched as LangChain searches a vector store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from rgate_integrations.index import PassageIndex
from rgate_integrations.index.retriever import Hit, check_k
from rgate_integrations.index.vectors import checked_vectors, normalised
from rgate_integrations.langchain.distances import strategy_of
from rgate_integrations.langchain.documents import as_document, as_names
from rgate_integrations.langchain.filters import Filter, as_predicate
from rgate_integrations.runtime.flow import Call, Flow, arun, run

Scored: TypeAlias = list[tuple[Document, float]]
_WIDER = 4  # by which factor more documents are searched while a filter leaves too few


class SearchedIndex(VectorStore):
    """The searches of a `FaissVectorStore`.

    Args:
        index: The index.
        relevance_score_fn: Maps a score to a relevance in [0, 1]; that of the index's metric when None.

    Attributes:
        index: The index.
        distance_strategy: What is searched by, see `DistanceStrategy`.
    """

    def __init__(
        self, index: PassageIndex, relevance_score_fn: Callable[[float], float] | None = None
    ) -> None:
        self.index = index
        self.distance_strategy = strategy_of(index.metric)
        self._relevance_score_fn = relevance_score_fn or self.distance_strategy.relevance

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; ids that are not there are left out."""
        names = as_names(ids)
        found = {passage.id: passage for passage in self.index.get(names)}
        return [as_document(found[name]) for name in names if name in found]

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a query, nearest first.

        Args:
            query: The query.
            k: How many.
            filter: Conditions on the metadata, or a function of the document; see `as_predicate`.
            **kwargs: ``score_threshold``: the worst score that is returned. The rest is ignored.
        """
        return _without_scores(self.similarity_search_with_score(query, k, filter, **kwargs))

    async def asimilarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the nearest documents, see `similarity_search`."""
        return _without_scores(await self.asimilarity_search_with_score(query, k, filter, **kwargs))

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return documents with their score, see `DistanceStrategy`; the nearest comes first."""
        return run(self._searching([query], k, filter, **kwargs))[0]

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return documents with their score, see `similarity_search_with_score`."""
        return (await arun(self._searching([query], k, filter, **kwargs)))[0]

    def batch_similarity_search(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[list[Document]]:
        """Search several queries; they are embedded and searched in one call each."""
        found = self.batch_similarity_search_with_score(queries, k, filter)
        return [_without_scores(scored) for scored in found]

    async def abatch_similarity_search(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[list[Document]]:
        """Search several queries, see `batch_similarity_search`."""
        found = await self.abatch_similarity_search_with_score(queries, k, filter)
        return [_without_scores(scored) for scored in found]

    def batch_similarity_search_with_score(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[Scored]:
        """Search several queries; documents come with their score."""
        return run(self._searching(queries, k, filter))

    async def abatch_similarity_search_with_score(
        self, queries: Sequence[str], k: int = 4, filter: Filter | None = None
    ) -> list[Scored]:
        """Search several queries, see `batch_similarity_search_with_score`."""
        return await arun(self._searching(queries, k, filter))

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the ``k`` documents nearest to a vector."""
        return _without_scores(self.similarity_search_with_score_by_vector(embedding, k, filter, **kwargs))

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return the ``k`` documents nearest to a vector, with their score.

        Raises:
            ConfigurationError: The vector has another dimension than those of the store, or is not finite.
        """
        return self._search([embedding], k, as_predicate(filter), kwargs.get("score_threshold"))[0]

    async def asimilarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> Scored:
        """Return documents with their score, see `similarity_search_with_score_by_vector`."""
        return await run_in_executor(
            None, self.similarity_search_with_score_by_vector, embedding, k, filter, **kwargs
        )

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
        return run(self._choosing(query, k, fetch_k, lambda_mult, filter))

    async def amax_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return diverse documents, see `max_marginal_relevance_search`."""
        return await arun(self._choosing(query, k, fetch_k, lambda_mult, filter))

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
        return self._chosen([embedding], k, fetch_k, lambda_mult, as_predicate(filter))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self._relevance_score_fn

    def _searching(
        self,
        queries: Sequence[str],
        k: int,
        filter: Filter | None,
        score_threshold: float | None = None,
        **ignored: Any,
    ) -> Flow[list[Scored]]:
        passes = as_predicate(filter)
        check_k(k)
        if not queries:
            return []
        vectors = yield from self.index.embedding_queries(queries)
        found: list[Scored] = yield Call(self._search, None, vectors, k, passes, score_threshold)
        return found

    def _search(
        self,
        vectors: Any,
        k: int,
        passes: Callable[[Document], bool] | None,
        score_threshold: float | None = None,
    ) -> list[Scored]:
        check_k(k)
        found = self._nearest(vectors, k) if passes is None else self._nearest_passing(vectors, k, passes)
        if score_threshold is None:
            return found
        return [self._good_enough(scored, score_threshold) for scored in found]

    def _nearest(self, vectors: Any, k: int) -> list[Scored]:
        found = self.index.search_vectors(vectors, k)
        return [[(as_document(hit.passage), self._score(hit)) for hit in hits] for hits in found]

    def _nearest_passing(self, vectors: Any, k: int, passes: Callable[[Document], bool]) -> list[Scored]:
        # FAISS knows no metadata: search wider until each query has enough that passes, or found all that there is.
        # The size of the index does not tell that: others may be writing.
        wanted = k
        while True:
            wanted *= _WIDER
            found = self._nearest(vectors, wanted)
            kept = [[each for each in scored if passes(each[0])][:k] for scored in found]
            if all(len(some) == k or len(scored) < wanted for some, scored in zip(kept, found, strict=True)):
                return kept

    def _score(self, hit: Hit) -> float:
        return self.distance_strategy.score(hit.score)

    def _good_enough(self, scored: Scored, threshold: float) -> Scored:
        if self.distance_strategy.lower_is_nearer:
            return [(document, score) for document, score in scored if score <= threshold]
        return [(document, score) for document, score in scored if score >= threshold]

    def _choosing(
        self, query: str, k: int, fetch_k: int, lambda_mult: float, filter: Filter | None
    ) -> Flow[list[Document]]:
        passes = as_predicate(filter)
        vectors = yield from self.index.embedding_queries([query])
        found: list[Document] = yield Call(self._chosen, None, vectors, k, fetch_k, lambda_mult, passes)
        return found

    def _chosen(
        self,
        vectors: Any,
        k: int,
        fetch_k: int,
        lambda_mult: float,
        passes: Callable[[Document], bool] | None,
    ) -> list[Document]:
        with self.index.reading():  # or what is found might be gone when its vector is asked for
            (scored,) = self._search(vectors, max(fetch_k, k), passes)
            near = _without_scores(scored)
            if not near:
                return []
            theirs = self.index.vectors([str(document.id) for document in near])
        asked = normalised(checked_vectors(vectors, 1, None))[0]
        chosen = maximal_marginal_relevance(asked, list(theirs), lambda_mult=lambda_mult, k=k)
        return [near[i] for i in chosen]


def _without_scores(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]
