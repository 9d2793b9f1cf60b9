"""Search for the demo: BM25 retrieves and an embedder reranks. It needs no index beforehand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.index.retriever import Hit
from rgate_integrations.runtime.files import write_atomically


class RerankedBM25:
    """BM25's best passages, reranked by their similarity to the question.

    A passage is embedded when BM25 first finds it. A file keeps its vector for the next run.

    Args:
        passages: The corpus.
        embedder: Embeds questions and passages.
        file: Where the vectors are saved.
        pool: How many passages of BM25 are reranked.
    """

    def __init__(
        self, passages: Sequence[Passage], embedder: SentenceEmbedder, file: Path, *, pool: int = 100
    ) -> None:
        self._bm25 = BM25Index(passages)
        self._embedder = embedder
        self._file = file
        self._pool = pool
        self._vectors = dict(load(file.read_bytes())) if file.exists() else {}

    def embed_candidates(self, question: str) -> None:
        """Embed the passages that BM25 finds for a question, ahead of the search."""
        (hits,) = self._bm25.search([question], self._pool)
        new = [hit.passage for hit in hits if hit.passage.id not in self._vectors]
        if not new:
            return
        vectors = self._embedder.embed([passage.searchable for passage in new])
        for passage, vector in zip(new, vectors, strict=True):
            self._vectors[passage.id] = vector
        write_atomically(self._file, save(self._vectors))

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` best passages, best first, with their cosine similarity."""
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        self.embed_candidates(query)
        query_vector = self._embedder.embed_queries([query])[0]
        (candidates,) = self._bm25.search([query], self._pool)
        hits = []
        for hit in candidates:
            similarity = float(np.dot(self._vectors[hit.passage.id], query_vector))
            hits.append(Hit(hit.passage, similarity, query))
        return sorted(hits, key=lambda hit: -hit.score)[:k]
