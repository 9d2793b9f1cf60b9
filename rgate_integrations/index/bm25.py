"""BM25 over passages, by ``bm25s``."""

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
        self.passages = tuple(passages)
        self._bm25: Any = None
        words = _words_of([passage.searchable for passage in self.passages])
        if any(words):  # bm25s cannot index a corpus without a single word
            self._bm25 = bm25s.BM25()
            self._bm25.index(words, show_progress=False)

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
        for query, words in zip(queries, _words_of(queries), strict=True):
            known = [word for word in words if word in self._bm25.vocab_dict]
            # bm25s cannot score a query without a single word that it knows.
            scores = self._bm25.get_scores(known) if known else np.zeros(len(self))
            best = np.argsort(-scores, kind="stable")[:k]
            found.append(
                [Hit(self.passages[row], float(scores[row]), query) for row in best if scores[row] > 0]
            )
        return found


def _words_of(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    if not texts:
        return []
    options = {"stopwords": "en", "return_ids": False, "show_progress": False}
    words: list[list[str]] = bm25s.tokenize(list(texts), **options)
    return words
