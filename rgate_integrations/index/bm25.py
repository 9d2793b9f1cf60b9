"""BM25 over the passages of an index, by ``bm25s``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rgate_integrations.errors import missing_dependency
from rgate_integrations.index.passages import Passage
from rgate_integrations.index.retriever import Hit, check_search


class BM25Index:
    """Passages, searchable by words (Robertson et al. 1994; k1 = 1.5, b = 0.75, English stop words left out).

    Built in memory in seconds; it is not saved.

    Args:
        passages: The passages.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise missing_dependency("bm25s", "faiss") from error
        self.passages = list(passages)
        self._tokenize: Any = bm25s.tokenize
        self._bm25: Any = None
        tokens = self._words([passage.searchable for passage in self.passages])
        if any(tokens):  # bm25s cannot index a corpus without a single word
            self._bm25 = bm25s.BM25()
            self._bm25.index(tokens, show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first, with their BM25 score.

        Passages that share no word with the query are not found, so there may be fewer.
        """
        check_search(queries, k)
        if self._bm25 is None:
            return [[] for _ in queries]
        found = []
        for query, words in zip(queries, self._words(queries), strict=True):
            known = [word for word in words if word in self._bm25.vocab_dict]
            # bm25s cannot score a query without a single word that it knows.
            scores = self._bm25.get_scores(known) if known else np.zeros(len(self))
            best = np.argsort(-scores, kind="stable")[:k]
            hits = [Hit(self.passages[row], float(scores[row]), query) for row in best if scores[row] > 0]
            found.append(hits)
        return found

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        if not texts:
            return []
        found: list[list[str]] = self._tokenize(
            list(texts), stopwords="en", return_ids=False, show_progress=False
        )
        return found
