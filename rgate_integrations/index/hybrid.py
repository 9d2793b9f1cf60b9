"""Hybrid search: BM25 and dense results fused by rank, optionally reranked; and SlimPLM's own chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.passages import digest_of
from rgate_integrations.index.retriever import Hit, check_search, passage_id
from rgate_integrations.models.model_folder import refuse_code, refuse_pickles

Reranker: TypeAlias = Callable[[str, Sequence[str]], Sequence[float]]
"""Scores texts for a question: one score a text, higher is better."""


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, loaded on first use.

    Args:
        model: Local folder or Hub id. A folder that brings code or pickled weights raises ModelLoadError.
    """

    def __init__(self, model: str) -> None:
        self.name = model
        self._model: Any = None

    def __call__(self, question: str, texts: Sequence[str]) -> list[float]:
        """Score texts for a question in one call."""
        if self._model is None:
            self._model = self._load()
        scores = self._model.predict([(question, text) for text in texts], show_progress_bar=False)
        return [float(score) for score in scores]

    def _load(self) -> Any:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            raise missing_dependency("sentence_transformers", "local") from error
        refuse_code(self.name)
        refuse_pickles(self.name)
        return CrossEncoder(self.name, trust_remote_code=False, model_kwargs={"use_safetensors": True})


class HybridIndex:
    """Dense and BM25 search over the same passages, fused by reciprocal rank.

    BM25 follows the dense index: the first search after a change indexes the words again, which takes seconds for a
    large index.

    Args:
        dense: The dense index; its passages are those of BM25, too.
        rerank: Reorders the fused results by question and text, or None.
        pool: Results of each side that are fused, at least the ``k`` that is asked for.
    """

    def __init__(self, dense: PassageIndex, *, rerank: Reranker | None = None, pool: int = 50) -> None:
        self.dense = dense
        self.rerank = rerank
        self.pool = pool
        with dense.reading():
            self._bm25 = BM25Index(dense)
            self._changes = dense.changes  # of the dense index, when the words were indexed

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def fingerprint(self) -> str:
        """Changes when another search result may come; all passages are read for it."""
        reranker = "" if self.rerank is None else getattr(self.rerank, "name", type(self.rerank).__name__)
        return digest_of((), self.dense.fingerprint, str(self.pool), reranker)

    @property
    def bm25(self) -> BM25Index:
        """BM25 over the passages that are in the dense index now."""
        with self.dense.reading():
            if self._changes != self.dense.changes:
                self._bm25 = BM25Index(self.dense)
                self._changes = self.dense.changes
            return self._bm25

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first; one embedding call for all queries."""
        check_search(queries, k)
        if not queries or not len(self):
            return [[] for _ in queries]
        wide = max(self.pool, k)
        vectors = self.dense.embed_queries(queries)  # slow, so before others have to wait
        with self.dense.reading():
            by_meaning = self.dense.search_vectors(vectors, wide, queries)
            bm25 = self.bm25  # never changed once it is made: it can be searched outside
        by_words = bm25.search(queries, wide)
        found = []
        for query, dense, words in zip(queries, by_meaning, by_words, strict=True):
            hits = fuse([dense, words], key=passage_id, k=wide)
            if self.rerank is not None and hits:
                scores = np.asarray(self.rerank(query, [hit.passage.searchable for hit in hits]))
                hits = [hits[place] for place in np.argsort(-scores, kind="stable")]
            found.append(hits[:k])
        return found


def slimplm_search(
    index: HybridIndex,
    question: str,
    queries: Sequence[str],
    *,
    k: int = 10,
    token_budget: int = 1_000,
) -> list[Hit]:
    """Search as SlimPLM does (section 4.1): BM25 a query, dense rerank against the question, round-robin, budget.

    Args:
        index: The index.
        question: The question that passages are reranked against.
        queries: Claim queries, and the question if it is one.
        k: Passages a query.
        token_budget: Maximum length of all passages together in words, which are tokens, roughly; at least 1.

    Returns:
        The passages, each once, in round-robin order of the queries.

    Raises:
        ConfigurationError: The budget is less than 1.
    """
    if token_budget < 1:
        raise ConfigurationError(f"token_budget must be at least 1, not {token_budget}.")
    asked = index.dense.embed_queries([question])[0]
    with index.dense.reading():  # or a passage that was found might be gone when its vector is asked for
        rankings = []
        for hits in index.bm25.search(queries, k):
            similarities = index.dense.vectors([hit.passage.id for hit in hits]) @ asked
            rankings.append([hits[place] for place in np.argsort(-similarities, kind="stable")])
    chosen: list[Hit] = []
    spent = 0
    for hit in _round_robin(rankings):
        spent += len(hit.passage.searchable.split())
        if spent > token_budget:
            break
        chosen.append(hit)
    return chosen


def _round_robin(rankings: Sequence[Sequence[Hit]]) -> Iterator[Hit]:
    """Yield the first of every ranking, then the second of every ranking, and so on; each passage once."""
    seen: set[str] = set()
    for turn in zip_longest(*rankings):
        for hit in turn:
            if hit is not None and hit.passage.id not in seen:
                seen.add(hit.passage.id)
                yield hit
