"""Hybrid search: BM25 and dense results fused by rank, optionally reranked; and SlimPLM's own chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.passage_index import Hit, PassageIndex


class Reranker(Protocol):
    """Scores passages for a question; higher is better."""

    def __call__(self, question: str, texts: Sequence[str]) -> Sequence[float]:
        """Return one score a text."""


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, loaded on first use.

    Args:
        model: Local folder or Hub id.
    """

    def __init__(self, model: str) -> None:
        self.name = model
        self._model: Any = None

    def __call__(self, question: str, texts: Sequence[str]) -> list[float]:
        """Score texts for a question in one call."""
        if self._model is None:
            try:
                from sentence_transformers import CrossEncoder
            except ImportError as error:
                raise missing_dependency("sentence_transformers", "local") from error
            self._model = CrossEncoder(self.name, trust_remote_code=False)
        pairs = [(question, text) for text in texts]
        scores = self._model.predict(pairs, show_progress_bar=False)
        return [float(s) for s in scores]


class HybridIndex:
    """Dense and BM25 search over the same passages, fused by reciprocal rank.

    Args:
        dense: The dense index; its passages are those of BM25, too.
        rerank: Reorders the fused results by question and text, or None.
        pool: Results of each side that are fused, at least the ``k`` that is asked for.
    """

    def __init__(self, dense: PassageIndex, *, rerank: Reranker | None = None, pool: int = 50) -> None:
        self.dense = dense
        self.bm25 = BM25Index(dense)
        self.rerank = rerank
        self.pool = pool

    def __len__(self) -> int:
        return len(self.dense)

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first; one embedding call for all queries."""
        wide = max(self.pool, k)
        by_meaning, by_words = self.dense.search(queries, wide), self.bm25.search(queries, wide)
        found = []
        for query, dense, words in zip(queries, by_meaning, by_words, strict=True):
            fused = fuse([dense, words], key=_key, k=k if self.rerank is None else wide)
            found.append(self._reranked(query, fused)[:k])
        return found

    def _reranked(self, query: str, hits: list[Hit]) -> list[Hit]:
        if self.rerank is None or not hits:
            return hits
        scores = np.asarray(self.rerank(query, [h.passage.searchable for h in hits]))
        return [hits[int(i)] for i in np.argsort(-scores, kind="stable")]


def slimplm_search(
    index: HybridIndex,
    question: str,
    queries: Sequence[str],
    *,
    k: int = 10,
    token_budget: int = 1_000,
    count: Callable[[str], int] = lambda text: len(text.split()),
) -> list[Hit]:
    """Search as SlimPLM does (section 4.1): BM25 a query, dense rerank against the question, round-robin, budget.

    Args:
        index: The index.
        question: The question that passages are reranked against.
        queries: Claim queries, and the question if it is one.
        k: Passages a query.
        token_budget: Greatest length of all passages together.
        count: Counts the tokens of a text; words by default.

    Returns:
        The passages, each once, in round-robin order of the queries.
    """
    if token_budget < 1:
        raise ConfigurationError(f"token_budget must be at least 1, not {token_budget}.")
    lists = index.bm25.search(queries, k)
    ids = list(dict.fromkeys(h.passage.id for hits in lists for h in hits))
    if not ids:
        return []
    asked = index.dense.embed_queries([question])[0]
    nearness = dict(zip(ids, index.dense.vectors(ids) @ asked, strict=True))
    ranked = [sorted(hits, key=lambda h: -nearness[h.passage.id]) for hits in lists]
    chosen: dict[str, Hit] = {}
    spent = 0
    for turn in range(max(map(len, ranked))):
        for hits in ranked:
            if turn >= len(hits) or hits[turn].passage.id in chosen:
                continue
            length = count(hits[turn].passage.searchable)
            if spent + length > token_budget:
                return list(chosen.values())
            spent += length
            chosen[hits[turn].passage.id] = hits[turn]
    return list(chosen.values())


def _key(hit: Hit) -> str:
    return hit.passage.id
