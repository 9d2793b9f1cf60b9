"""Search by words with BM25, and hybrid search, which fuses BM25 and dense results by reciprocal rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from rgate_integrations.errors import needs_extra
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.retriever import Hit, Passage, check_search, passage_id
from rgate_integrations.runtime.text import IDEOGRAPHS, MARKS, plain_text


class BM25Index:
    """Passages, searchable by words (Robertson et al. 1994; k1 = 1.5, b = 0.75, without English stop words).

    In Chinese and Japanese, each character is a word; in other scripts, words of one character are ignored. The index
    is built in memory, in seconds, and cannot be saved.

    Args:
        passages: The passages.

    Raises:
        MissingDependencyError: bm25s is not installed.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        with needs_extra("faiss"):
            import bm25s
        self.passages = tuple(passages)
        self._bm25: Any = bm25s.BM25()
        words = _tokenize([passage.searchable for passage in self.passages])
        self._vocabulary = frozenset(chain.from_iterable(words))
        if self._vocabulary:  # bm25s cannot index a corpus without any words
            self._bm25.index(words, show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return the ``k`` best passages for each query, best first, with their BM25 scores.

        It may return fewer, because a passage must share a word with the query.

        Raises:
            ConfigurationError: ``queries`` is one string, or ``k`` is not a positive whole number.
        """
        check_search(queries, k)
        results: list[list[Hit]] = [[] for _ in queries]
        for query, words, hits in zip(queries, _tokenize(queries), results, strict=True):
            known = [word for word in words if word in self._vocabulary]
            if known:  # bm25s cannot score a query without any word of its vocabulary
                scores = self._bm25.get_scores(known)
                # A stable sort keeps ties in the order of the passages.
                for row in np.argsort(-scores, kind="stable")[:k]:
                    if scores[row] > 0:
                        hits.append(Hit(self.passages[row], float(scores[row]), query))
        return results


def _tokenize(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    return bm25s.tokenize(
        list(map(plain_text, texts)),  # text from PDF files has ligatures, soft hyphens and separate accents
        token_pattern=rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}](?:[^\W{IDEOGRAPHS}]+|[{MARKS}]+)+",
        stopwords="en",
        return_ids=False,
        show_progress=False,
    )


class HybridIndex:
    """Dense and BM25 search over the same passages, fused by reciprocal rank.

    BM25 follows changes of the dense index: the first search after a change rebuilds it, which takes seconds for a
    large index.

    Args:
        dense: The dense index; BM25 indexes its passages.
        pool: Number of results of each search to fuse. If a search asks for a larger ``k``, that many are fused.

    Raises:
        MissingDependencyError: bm25s is not installed.
    """

    def __init__(self, dense: PassageIndex, *, pool: int = 50) -> None:
        self.dense = dense
        self.pool = pool
        self._bm25 = BM25Index(dense.passages)

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def fingerprint(self) -> str:
        """The dense index's fingerprint and ``pool``, because the results depend on both."""
        return f"{self.dense.fingerprint}-{self.pool}"

    @property
    def bm25(self) -> BM25Index:
        """BM25 over the current passages of the dense index."""
        passages = self.dense.passages
        if self._bm25.passages is not passages:  # every change of the index makes a new tuple
            self._bm25 = BM25Index(passages)
        return self._bm25

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return the ``k`` best passages for each query, best first, or fewer if the index has fewer.

        All queries are embedded in one call.

        Raises:
            ConfigurationError: ``queries`` is one string, or ``k`` is not a positive whole number.
            RGateError: The queries cannot be embedded; see `PassageIndex.search`.
        """
        check_search(queries, k)
        # A passage that one side ranks below k can still be best after fusion.
        pool = max(self.pool, k)
        rankings = zip(self.dense.search(queries, pool), self.bm25.search(queries, pool), strict=True)
        return [fuse(pair, key=passage_id, k=k) for pair in rankings]


_Item = TypeVar("_Item")


def fuse(
    rankings: Sequence[Sequence[_Item]],
    key: Callable[[_Item], Hashable],
    *,
    k: int | None = None,
) -> list[_Item]:
    """Merge rankings by reciprocal rank (Cormack et al. 2009): each item scores the sum of 1 / (60 + rank).

    Args:
        rankings: Result lists, best first.
        key: Function that returns an item's key. Of items with the same key, only the best-ranked one is returned.
        k: Maximum number of items to return; all when None.

    Returns:
        The items, best first; ties keep the order of first appearance.
    """
    scores: dict[Hashable, float] = {}
    best: dict[Hashable, tuple[int, _Item]] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            name = key(item)
            scores[name] = scores.get(name, 0.0) + 1 / (60 + rank)
            if name not in best or rank < best[name][0]:
                best[name] = (rank, item)
    # Dictionaries keep insertion order and `sorted` is stable, so ties stay in the order of first appearance.
    return [best[name][1] for name in sorted(scores, key=lambda name: -scores[name])[:k]]
