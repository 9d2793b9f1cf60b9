"""An index of passages: FAISS over their embeddings, passages beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexMismatchError, RGateError
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.folder import EmbedderId, read_index, write_index
from rgate_integrations.index.passages import (
    Passage,
    PassageStore,
    Record,
    as_id,
    as_records,
    digest_of,
    in_batches,
    known_id,
)
from rgate_integrations.index.retriever import Hit, check_search
from rgate_integrations.index.vectors import METRICS, Metric, VectorTable, checked_vectors, normalised
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.threads import ForkSafeLock

_BATCH = 1_024  # embedded together, sorted by length: less padding than in small batches


class PassageIndex:
    """Passages, searchable by meaning.

    Search is exact: a batch of 1,000 queries takes 0.5 s in 100,000 passages. See `approximate` for millions.

    Any number of threads may read and write. A write happens as a whole or, if it raises, not at all, and no reader
    sees half of one. Texts are embedded outside of the lock, for that is slow. A fork waits for what is under way, so
    that the child has a whole index.

    Args:
        embedder: Embeds passages and queries.
        metric: How near two vectors are: ``"cosine"``, for which vectors are normalised here; ``"inner_product"``; or
            ``"l2"``, the squared Euclidean distance, whose scores are negative so that higher is nearer.

    Raises:
        ConfigurationError: There is no such metric.

    Attributes:
        approximation: What FAISS made an approximate index of; None if it is exact.
        changes: How often passages were changed. What is derived from them is up to date while this is the same.
    """

    def __init__(self, embedder: Embedder | None = None, *, metric: Metric = "cosine") -> None:
        if metric not in METRICS:
            raise ConfigurationError(
                f"There is no metric {metric!r}.", hint=f"Use one of {', '.join(METRICS)}."
            )
        self.embedder: Embedder = embedder or SentenceEmbedder()
        self.metric: Metric = metric
        self.approximation: str | None = None
        self.changes = 0
        self._store = PassageStore()
        self._vectors = VectorTable(metric)
        self._next_row = 0
        # Guards all of the above. Re-entrant, so that a reader may take several looks in one `reading`.
        self._lock = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        # Copied within the lock, so that no other thread writes between the vectors and the passages.
        with self._lock:
            state = dict(self.__dict__, _store=deepcopy(self._store), _vectors=copy(self._vectors))
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ForkSafeLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._vectors)

    def __iter__(self) -> Iterator[Passage]:
        with self._lock:
            return iter(self._store)

    @property
    def fingerprint(self) -> str:
        """Changes when another search result may come: with any passage, the embedder or the metric.

        All passages are read for it.
        """
        return digest_of(self, self.embedder.identity, self.metric)

    def reading(self) -> ForkSafeLock:
        """Return a context in which no other thread changes the index, so that several looks at it fit together."""
        return self._lock

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        embedder: Embedder | None = None,
        *,
        report: Callable[[int], None] | None = None,
    ) -> PassageIndex:
        """Build an index.

        Args:
            passages: The passages; their ids must differ.
            embedder: Embeds passages and queries; MiniLM by default.
            report: Told how many passages are done, after each batch.

        Raises:
            ConfigurationError: The embedder failed, or its vectors cannot be used.
            DataFormatError: Two passages have the same id, a text is empty, or a value cannot be stored.
        """
        index = cls(embedder)
        for batch in in_batches(passages, _BATCH):
            index.add(batch)
            if report is not None:
                report(len(index))
        return index

    def approximate(self, factory: str) -> None:
        """Make an exact index approximate, so that a search is faster and misses some; it takes no writes any more.

        Args:
            factory: Which index of FAISS, as its ``index_factory`` takes it, such as ``"HNSW32"``.

        Raises:
            ConfigurationError: The index is empty or approximate already, or FAISS knows no such index.
        """
        with self._lock:
            if not len(self) or self.approximation is not None:
                raise ConfigurationError("Only an exact index with passages in it can be made approximate.")
            self._vectors.make_approximate(factory)
            self.approximation = factory

    def add(self, passages: Sequence[Passage], vectors: Float32Array | None = None) -> None:
        """Add passages: all of them or, with an error, none.

        Args:
            passages: The passages.
            vectors: Their vectors, where the embedder has computed them already; shape (passages, dimension).

        Raises:
            ConfigurationError: The embedder failed, or the vectors cannot be used.
            DataFormatError: An id is there already or twice in the batch, a text is empty, or a value of the metadata
                cannot be stored as JSON.
        """
        self._embed_and_write(passages, vectors, replace=False)

    def upsert(
        self, passages: Sequence[Passage], vectors: Float32Array | None = None, *, blank: bool = False
    ) -> None:
        """Add passages; those whose id is there already take its place. All of it happens or, with an error, nothing.

        Args:
            passages: The passages.
            vectors: Their vectors, where the embedder has computed them already; shape (passages, dimension).
            blank: Whether a text may be empty.

        Raises:
            ConfigurationError: The embedder failed, or the vectors cannot be used.
            DataFormatError: An id is twice in the batch, a text is empty, or a value of the metadata cannot be stored
                as JSON.
        """
        self._embed_and_write(passages, vectors, blank=blank)

    def _embed_and_write(
        self,
        passages: Sequence[Passage],
        vectors: Float32Array | None,
        *,
        replace: bool = True,
        blank: bool = False,
    ) -> None:
        if not passages:
            return
        records = as_records(passages, blank=blank)  # before the long work of embedding
        if vectors is None:
            vectors = self._embed(passages)
        with self._lock:
            known = self._store.rows_of(name for name, *_ in records)
            if known and not replace:
                raise known_id(next(iter(known)))
            self._replace(list(known.values()), records, vectors)

    def get(self, ids: Iterable[str]) -> list[Passage]:
        """Return the passages with these ids; ids that are not there are left out."""
        with self._lock:
            return list(self._store.get(self._store.rows_of(ids).values()).values())

    def vectors(self, ids: Sequence[str]) -> Float32Array:
        """Return the vectors of passages that are there, shape (ids, dimension)."""
        with self._lock:
            rows = self._store.rows_of(ids)
            return self._vectors.take([rows[as_id(name)] for name in ids])

    def delete(self, ids: Iterable[str]) -> int:
        """Remove passages by id; ids that are not there are ignored. Returns how many were removed."""
        with self._lock:
            rows = list(self._store.rows_of(ids).values())
            if rows:
                self._replace(rows, [], np.zeros((0, 0), np.float32))
            return len(rows)

    def _embed(self, passages: Sequence[Passage]) -> Float32Array:
        """Return the embedder's vectors; whatever it raises becomes an error of ours, with its own as the cause."""
        try:
            return self.embedder.embed([passage.searchable for passage in passages])
        except RGateError:
            raise
        except Exception as error:
            # Only the type: the message of a served model may hold a key or an address.
            raise ConfigurationError(
                f"The embedder {self.embedder.name!r} failed with {type(error).__name__}; the index is as it was.",
                hint="See the error's cause, then add the passages again.",
            ) from error

    def _replace(self, old_rows: Sequence[int], records: Sequence[Record], vectors: Float32Array) -> None:
        """Put records and vectors in the place of some rows, or leave all as it was. The caller holds the lock."""
        checked = self._scaled(checked_vectors(vectors, len(records), self._vectors.dimension))
        if self.approximation is not None:
            raise ConfigurationError("An approximate index takes no writes.", hint="Build it again.")
        kept, old = self._vectors.take(old_rows), self._store.take(old_rows)
        new_rows = range(self._next_row, self._next_row + len(records))
        # Row numbers are never used again, not even those of a write that failed: a passage can never be found under
        # the vector of another one.
        self._next_row += len(records)
        try:
            self._store.replace(old_rows, new_rows, records)
            self._vectors.replace(old_rows, new_rows, checked)
        except BaseException:  # also Ctrl-C
            # However far they came: what is not there is not removed, and what is there is put there again.
            self._store.replace(new_rows, old_rows, old)
            self._vectors.restore(old_rows, new_rows, kept)
            raise
        self.changes += 1

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` nearest passages, nearest first; one embedding call for all queries.

        Fewer are returned when the index holds fewer.
        """
        check_search(queries, k)
        if not queries or not len(self):
            return [[] for _ in queries]
        return self.search_vectors(self.embed_queries(queries), k, queries)

    def embed_queries(self, queries: Sequence[str]) -> Float32Array:
        """Return the vectors of queries, shape (queries, dimension), by the embedder's own way if it has one."""
        embed: Callable[[Sequence[str]], Float32Array]
        embed = getattr(self.embedder, "embed_queries", self.embedder.embed)
        return embed(queries)

    def search_vectors(
        self, vectors: Float32Array, k: int, queries: Sequence[str] | None = None
    ) -> list[list[Hit]]:
        """Search with vectors of shape (queries, dimension) in place of texts.

        Raises:
            ConfigurationError: The vectors have another dimension than those of the index, or are not finite.
        """
        with self._lock:
            if not len(self):
                return [[] for _ in vectors]
            asked = self._scaled(checked_vectors(vectors, len(vectors), self._vectors.dimension))
            scores, rows = self._vectors.search(asked, k)
            passages = self._store.get({int(row) for row in rows.ravel() if row >= 0})
        names = queries or [""] * len(vectors)
        found = []
        for own_rows, own_scores, name in zip(rows, scores, names, strict=True):
            hits = []
            for row, score in zip(own_rows, own_scores, strict=True):
                if row >= 0:  # -1 fills up what an approximate search did not find
                    hits.append(Hit(passages[int(row)], float(score), name))
            found.append(hits)
        return found

    def _scaled(self, vectors: Float32Array) -> Float32Array:
        return normalised(vectors) if self.metric == "cosine" else vectors

    def save(self, folder: str | Path) -> Path:
        """Save into a folder. An index that was there stays loadable until the new one is complete.

        A process that dies at any moment leaves the old index or the new one. Writers wait meanwhile.
        """
        root = Path(folder)
        embedder = EmbedderId(name=self.embedder.name, identity=self.embedder.identity)
        with self._lock:
            write_index(
                root,
                self._vectors,
                self._store,
                next_row=self._next_row,
                approximation=self.approximation,
                embedder=embedder,
            )
        return root

    @classmethod
    def load(cls, folder: str | Path, embedder: Embedder | None = None) -> PassageIndex:
        """Load an index.

        Args:
            folder: Where `save` put it.
            embedder: The embedder it was built with; by default the one it names.

        Raises:
            IndexNotFoundError: There is no index in the folder.
            IndexCorruptError: A file is missing, truncated, changed, or does not fit to the others.
            IndexMismatchError: The embedder is not the one it was built with, or the format is newer.
        """
        root = Path(folder)
        manifest, vectors, store = read_index(root)
        built_with = manifest.embedder
        index = cls(embedder or SentenceEmbedder(built_with.name), metric=manifest.metric)
        if index.embedder.identity != built_with.identity:
            raise IndexMismatchError(
                f"The index {str(root)!r} was built with the embedder {built_with.name!r} "
                f"({built_with.identity}), not with {index.embedder.name!r} ({index.embedder.identity}).",
                hint=f"Open it with {built_with.name!r}, or build it again with {index.embedder.name!r}.",
            )
        index._vectors = vectors
        index._store = store
        index._next_row = manifest.next_row
        index.approximation = manifest.approximation
        return index
