"""BM25 over the passages of an index, by ``bm25s``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.index.passage_index import Hit
from rgate_integrations.index.passages import Passage


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
        if self.passages:
            tokens = self._tokenized([p.searchable for p in self.passages])
            if any(tokens):
                self._bm25 = bm25s.BM25()
                self._bm25.index(tokens, show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first, with their BM25 score.

        Passages that share no word with the query are not found, so there may be fewer.
        """
        if isinstance(queries, str):
            raise ConfigurationError("search takes a list of queries.", hint="Use search([query])[0].")
        if k < 1:
            raise ConfigurationError(f"k must be at least 1, not {k}.")
        return [self._one(q, tokens, k) for q, tokens in zip(queries, self._tokenized(queries), strict=True)]

    def _one(self, query: str, tokens: list[str], k: int) -> list[Hit]:
        if self._bm25 is None:
            return []
        known = [t for t in tokens if t in self._bm25.vocab_dict]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:k]
        return [Hit(self.passages[int(i)], float(scores[i]), query) for i in best if scores[i] > 0]

    def _tokenized(self, texts: Sequence[str]) -> list[list[str]]:
        if not texts:
            return []
        found = self._tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
        return [list(tokens) for tokens in found]
