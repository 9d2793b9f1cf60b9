"""An index of passages: FAISS over their embeddings, passages beside it in SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexMismatchError, RGateError
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.folder import Contents, read_index, write_index
from rgate_integrations.index.passages import (
    Passage,
    PassageStore,
    Record,
    as_id,
    as_records,
    digest_of,
    known_id,
)
from rgate_integrations.index.retriever import Hit, check_search
from rgate_integrations.index.vectors import METRICS, Metric, VectorTable, checked_vectors, normalised
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.flow import Call, Flow, run
from rgate_integrations.runtime.threads import ForkSafeLock

EXACT_UP_TO = 100_000
_BATCH = 1_024  # embedded together, sorted by length: less padding than in small batches


class PassageIndex:
    """Passages, searchable by meaning.

    Search is exact up to 100,000 passages. A larger index is turned into inverted lists by `build` or `optimise`.

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
        approximation: ``lists``, ``probes`` and the measured ``recall`` of an approximate index; None if exact.
        changes: How often passages were changed. What is derived from them is up to date while this is the same.
    """

    def __init__(self, embedder: Embedder | None = None, *, metric: Metric = "cosine") -> None:
        if metric not in METRICS:
            raise ConfigurationError(
                f"There is no metric {metric!r}.", hint=f"Use one of {', '.join(METRICS)}."
            )
        self.embedder: Embedder = embedder or SentenceEmbedder()
        self.metric: Metric = metric
        self._store = PassageStore()
        self._vectors = VectorTable(metric=metric)
        self._next_row = 0
        self.approximation: dict[str, Any] | None = None
        self.changes = 0
        # Guards all of the above. Re-entrant, so that a reader may take several looks in one `reading`.
        self._lock = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled within the lock, so that no other thread writes between the vectors and the passages.
        with self._lock:
            state = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            state["_store"], state["_vectors"] = copy(self._store), copy(self._vectors)
            return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ForkSafeLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._vectors)

    def __iter__(self) -> Iterator[Passage]:
        with self._lock:
            return (passage for _, passage in iter(self._store))

    @property
    def fingerprint(self) -> str:
        """Changes when another search result may come: with any passage, the embedder or the metric.

        All passages are read for it.
        """
        with self._lock:
            return digest_of(self, self.embedder.identity, self.metric)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep other threads from changing the index, so that several looks at it fit together."""
        with self._lock:
            yield

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
        batch: list[Passage] = []
        for passage in passages:
            batch.append(passage)
            if len(batch) == _BATCH:
                index.add(batch)
                batch = []
                if report:
                    report(len(index))
        index.add(batch)
        if report:
            report(len(index))
        index.optimise()
        return index

    def optimise(self, *, exact_up_to: int = EXACT_UP_TO, recall: float = 0.95) -> None:
        """Make a large exact index approximate: inverted lists, probed until the recall is reached.

        Args:
            exact_up_to: Maximum number of passages that stay exact.
            recall: Share of the exact ten nearest neighbours to find, measured on noisy stored vectors.
        """
        with self._lock:
            if self.approximation is not None or len(self) <= exact_up_to:
                return
            tuned = self._vectors.approximated(recall)
            self._vectors = VectorTable(tuned.index, metric=self.metric)
            self.approximation = {
                "lists": tuned.lists,
                "probes": tuned.probes,
                "recall": round(tuned.recall, 4),
            }

    def add(self, passages: Sequence[Passage]) -> None:
        """Add passages: all of them or, with an error, none.

        Raises:
            ConfigurationError: The embedder failed, or its vectors cannot be used.
            DataFormatError: An id is there already or twice in the batch, a text is empty, or a value of the metadata
                cannot be stored as JSON.
        """
        if not passages:
            return
        records = as_records(passages)
        self._refuse_known(records)  # before the long work of embedding; again when they are written
        self._write_new(records, run(self._embedding(passages)))

    def upsert(self, passages: Sequence[Passage]) -> None:
        """Add passages; those whose id is there already take its place. All of it happens or, with an error, nothing.

        Raises:
            ConfigurationError: The embedder failed, or its vectors cannot be used.
            DataFormatError: An id is twice in the batch, a text is empty, or a value of the metadata cannot be stored
                as JSON.
        """
        run(self.upserting(passages))

    def upserting(self, passages: Sequence[Passage], *, blank: bool = False) -> Flow[None]:
        """Do what `upsert` does, as a flow.

        Args:
            passages: The passages.
            blank: Whether a text may be empty.
        """
        if not passages:
            return
        records = as_records(passages, blank=blank)
        vectors = yield from self._embedding(passages)
        yield Call(self._write, None, records, vectors)

    def upsert_vectors(
        self, passages: Sequence[Passage], vectors: Float32Array, *, blank: bool = False
    ) -> None:
        """Upsert passages with vectors that were computed elsewhere, by the same embedder: all of them or none.

        Args:
            passages: The passages.
            vectors: Shape (passages, dimension).
            blank: Whether a text may be empty.

        Raises:
            ConfigurationError: The numbers or the dimensions differ, or a vector is not finite.
            DataFormatError: An id is twice in the batch, a text is empty, or a value of the metadata cannot be stored
                as JSON.
        """
        if passages:
            self._write(as_records(passages, blank=blank), vectors)

    def add_vectors(self, passages: Sequence[Passage], vectors: Float32Array) -> None:
        """Add passages with vectors that were computed elsewhere, by the same embedder: all of them or none.

        Args:
            passages: The passages.
            vectors: Shape (passages, dimension).

        Raises:
            ConfigurationError: The numbers or the dimensions differ, or a vector is not finite.
            DataFormatError: An id is there already or twice, a text is empty, or a value of the metadata cannot be
                stored as JSON.
        """
        if len(passages) != len(vectors):
            raise ConfigurationError(f"{len(vectors)} vectors do not match {len(passages)} passages.")
        if passages:
            self._write_new(as_records(passages), vectors)

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

    def _embedding(self, passages: Sequence[Passage]) -> Flow[Float32Array]:
        """Return the embedder's vectors; whatever it raises becomes an error of ours, with its own as the cause."""
        self._vectors.check_writable()
        awaitable = getattr(self.embedder, "aembed", None)
        texts = [passage.searchable for passage in passages]
        try:
            vectors: Float32Array = yield Call(self.embedder.embed, awaitable, texts)
            return vectors
        except RGateError:
            raise
        except Exception as error:
            # Only the type: the message of a served model may hold a key or an address.
            raise ConfigurationError(
                f"The embedder {self.embedder.name!r} failed with {type(error).__name__}; the index is as it was.",
                hint="See the error's cause, then add the passages again.",
            ) from error

    def _refuse_known(self, records: Sequence[Record]) -> None:
        with self._lock:
            known = self._store.rows_of([record.id for record in records])
        if known:
            raise known_id(next(iter(known)))

    def _write_new(self, records: Sequence[Record], vectors: Float32Array) -> None:
        with self._lock:
            self._refuse_known(records)
            self._replace([], records, vectors)

    def _write(self, records: Sequence[Record], vectors: Float32Array) -> None:
        with self._lock:
            old = self._store.rows_of([record.id for record in records])
            self._replace(list(old.values()), records, vectors)

    def _replace(self, old_rows: Sequence[int], records: Sequence[Record], vectors: Float32Array) -> None:
        """Put records and vectors in the place of some rows, or leave all as it was. The caller holds the lock."""
        self._vectors.check_writable()
        checked = self._scaled(checked_vectors(vectors, len(records), self._vectors.dimension))
        kept = self._vectors.take(old_rows)
        new_rows = range(self._next_row, self._next_row + len(records))
        # Row numbers are never used again, not even those of a write that failed: a passage can never be found under
        # the vector of another one.
        self._next_row += len(records)
        try:
            self._store.replace(old_rows, new_rows, records)
            self._vectors.replace(old_rows, new_rows, checked)
            self._store.commit()
        except BaseException:  # also Ctrl-C
            self._store.rollback()
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
        return run(self.embedding_queries(queries))

    def embedding_queries(self, queries: Sequence[str]) -> Flow[Float32Array]:
        """Do what `embed_queries` does, as a flow."""
        embedder: Any = self.embedder
        if hasattr(embedder, "embed_queries"):
            step = Call(embedder.embed_queries, getattr(embedder, "aembed_queries", None), queries)
        else:
            step = Call(embedder.embed, getattr(embedder, "aembed", None), queries)
        vectors: Float32Array = yield step
        return vectors

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
        embedder = {"name": self.embedder.name, "identity": self.embedder.identity}
        with self._lock:
            contents = Contents(
                self._vectors, self._store, self._next_row, self.metric, self.approximation, embedder
            )
            write_index(root, contents)
        return root

    @classmethod
    def load(
        cls, folder: str | Path, embedder: Embedder | None = None, *, mmap: bool = False
    ) -> PassageIndex:
        """Load an index.

        Args:
            folder: Where `save` put it.
            embedder: The embedder it was built with; by default the one it names.
            mmap: Leave the vectors on disk and map them into memory; such an index is for reading.

        Raises:
            IndexNotFoundError: There is no index in the folder.
            IndexCorruptError: A file is missing, truncated, changed, or does not fit to the others.
            IndexMismatchError: The embedder is not the one it was built with, or the format is newer.
        """
        root = Path(folder)
        saved = read_index(root, mmap=mmap)
        built_with = saved.embedder
        index = cls(embedder or SentenceEmbedder(built_with["name"]), metric=saved.metric)
        if index.embedder.identity != built_with["identity"]:
            raise IndexMismatchError(
                f"The index {str(root)!r} was built with the embedder {built_with['name']!r} "
                f"({built_with['identity']}), not with {index.embedder.name!r} ({index.embedder.identity}).",
                hint=f"Open it with {built_with['name']!r}, or build it again with {index.embedder.name!r}.",
            )
        index._vectors = saved.vectors
        index._store = saved.passages
        index._next_row = saved.next_row
        index.approximation = saved.approximation
        return index
