"""The vectors of an index, by row number, in FAISS; and what is checked before they get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, missing_dependency
from rgate_integrations.runtime.arrays import Float32Array, PositionArray

Metric: TypeAlias = Literal["cosine", "inner_product", "l2"]
"""How near two vectors are. Under ``cosine`` vectors are normalised when they are stored and searched."""

METRICS: tuple[Metric, ...] = get_args(Metric)

_RECALL_QUERIES = 200  # sampled to measure the recall of an approximate search
_RECALL_K = 10  # neighbours of each that count
_STEP = 50_000  # vectors copied at a time


class VectorTable:
    """Vectors by row number. The index that owns it lets in one thread at a time.

    Args:
        metric: By what it is searched.
        index: A FAISS index with ids; None for an empty table, which gets its dimension from the first vectors.
    """

    def __init__(self, metric: Metric, index: Any = None) -> None:
        self.metric = metric
        self._index = index

    def __len__(self) -> int:
        return 0 if self._index is None else int(self._index.ntotal)

    def __getstate__(self) -> dict[str, Any]:
        written = None if self._index is None else import_faiss().serialize_index(self._index)
        return {"metric": self.metric, "index": written}

    def __setstate__(self, state: dict[str, Any]) -> None:
        written = state["index"]
        index = None if written is None else import_faiss().deserialize_index(written)
        VectorTable.__init__(self, state["metric"], index)

    @classmethod
    def read(cls, path: Path, metric: Metric) -> VectorTable:
        """Read a file that `write` made.

        Raises:
            IndexCorruptError: It cannot be read, or is a FAISS file of another kind or metric.
        """
        faiss = import_faiss()
        try:
            found = faiss.read_index(str(path))
        except (RuntimeError, MemoryError) as error:
            raise _unreadable(path, error) from error
        is_exact = isinstance(found, faiss.IndexIDMap2)
        if is_exact:
            is_exact = isinstance(faiss.downcast_index(found.index), faiss.IndexFlat)
        if not is_exact and not isinstance(found, faiss.IndexIVFFlat):
            raise _unreadable(path, f"it is of the kind {type(found).__name__}")
        if found.metric_type != _faiss_metric(metric):
            raise _unreadable(path, f"its metric is not {metric}")
        return cls(metric, found)

    def write(self, path: Path) -> None:
        """Write into a file; an empty table is written with a dimension of 1."""
        import_faiss().write_index(self._or_empty(1), str(path))

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None while there never was one."""
        return None if self._index is None else int(self._index.d)

    @property
    def exact(self) -> bool:
        """Whether a search looks at all vectors."""
        return self._index is None or hasattr(self._index, "id_map")

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        faiss = import_faiss()
        parts = [np.zeros(0, np.int64)]
        if self._index is not None and self.exact:
            parts.append(faiss.vector_to_array(self._index.id_map))
        elif self._index is not None:
            lists = self._index.invlists
            for number in range(lists.nlist):
                size = lists.list_size(number)
                if size:
                    parts.append(faiss.rev_swig_ptr(lists.get_ids(number), size))
        return np.sort(np.concatenate(parts))

    def replace(self, old_rows: Sequence[int], new_rows: Sequence[int], vectors: Float32Array) -> None:
        """Add some rows and remove others. If it raises, `restore` undoes what it did.

        Args:
            old_rows: Rows to remove; all must be there.
            new_rows: Rows to add; none may be there.
            vectors: Checked vectors, one for each new row.
        """
        self._add(new_rows, vectors)
        self._remove(old_rows)

    def restore(self, old_rows: Sequence[int], new_rows: Sequence[int], kept: Float32Array) -> None:
        """Undo `replace`, however far it came.

        Args:
            old_rows: The rows that it removed, or was about to.
            new_rows: The rows that it added, or was about to.
            kept: What `take` returned for the old rows before.
        """
        # Without looking at what is there: an interrupt may have come between any two steps.
        self._remove([*old_rows, *new_rows])
        self._add(old_rows, kept)

    def take(self, rows: Sequence[int]) -> Float32Array:
        """Return the vectors of some rows that are there, shape (rows, dimension)."""
        if not len(rows):
            return np.zeros((0, self.dimension or 0), np.float32)
        taken: Float32Array = self._index.reconstruct_batch(np.asarray(rows, dtype=np.int64))
        return taken

    def search(self, vectors: Float32Array, k: int) -> tuple[Float32Array, PositionArray]:
        """Return the scores and rows of the nearest vectors, nearest first, shape (queries, at most k).

        A score is the inner product, or minus the squared distance: higher is nearer. An approximate table fills up
        with row -1 when the lists it looks into hold fewer than k vectors.
        """
        scores, rows = self._index.search(vectors, min(k, len(self)))
        return (-scores if self.metric == "l2" else scores), rows

    def make_approximate(self, target: float) -> dict[str, Any]:
        """Turn exact vectors into inverted lists, looking into as many of them as a recall needs.

        The queries that it is measured with are stored vectors with noise, for there are no others.

        Args:
            target: Share of the exact ten nearest neighbours to find, in (0, 1].

        Returns:
            ``lists``, ``probes`` (lists that a search looks into) and the measured ``recall``.
        """
        rng = np.random.default_rng(0)
        exact, n = self._index, len(self)
        # FAISS advises about 4 sqrt(n) lists, and at least 39 vectors a list to train them.
        lists = max(1, min(int(4 * np.sqrt(n)), n // 40))
        training = np.sort(rng.choice(n, min(n, 50 * lists), replace=False))
        index = _inverted_lists(exact, lists, training)
        queries = exact.index.reconstruct_batch(rng.choice(n, min(n, _RECALL_QUERIES), replace=False))
        # Without noise each would be its own nearest neighbour.
        queries += rng.normal(scale=0.5 / np.sqrt(exact.d), size=queries.shape).astype(np.float32)
        k = min(_RECALL_K, n)
        wanted = exact.search(queries, k)[1]
        probes, recall = 1, 0.0
        while True:
            index.nprobe = probes
            found = index.search(queries, k)[1]
            recall = float(np.mean((wanted[:, :, None] == found[:, None, :]).any(axis=2)))
            if recall >= target or probes >= lists:
                break
            probes = min(probes * 2, lists)
        self._index = index
        return {"lists": lists, "probes": probes, "recall": round(recall, 4)}

    def _add(self, rows: Sequence[int], vectors: Float32Array) -> None:
        if len(rows):
            table = self._or_empty(vectors.shape[1])
            table.add_with_ids(vectors, np.asarray(rows, dtype=np.int64))
            self._index = table  # only now: a first write that fails must not set the dimension

    def _remove(self, rows: Sequence[int]) -> None:
        if len(rows) and self._index is not None:
            self._index.remove_ids(np.asarray(rows, dtype=np.int64))

    def _or_empty(self, dimension: int) -> Any:
        if self._index is not None:
            return self._index
        faiss = import_faiss()
        return faiss.IndexIDMap2(faiss.IndexFlat(dimension, _faiss_metric(self.metric)))


def _inverted_lists(exact: Any, lists: int, training: PositionArray) -> Any:
    """Return an index of inverted lists over the vectors of an exact one, trained on some of them."""
    faiss = import_faiss()
    quantiser = faiss.IndexFlat(exact.d, exact.metric_type)
    index = faiss.IndexIVFFlat(quantiser, exact.d, lists, exact.metric_type)
    index.cp.niter = 8
    index.cp.seed = 1
    index.train(exact.index.reconstruct_batch(training))
    index.set_direct_map_type(faiss.DirectMap.Hashtable)  # for deleting and for reading vectors back
    ids = faiss.vector_to_array(exact.id_map)
    for start in range(0, len(ids), _STEP):  # in steps, so that the vectors are not in memory a third time
        some = ids[start : start + _STEP]
        index.add_with_ids(exact.index.reconstruct_n(start, len(some)), some)
    return index


def checked_vectors(vectors: Any, count: int, dimension: int | None) -> Float32Array:
    """Return vectors as FAISS takes them.

    Args:
        vectors: What an embedder gave.
        count: How many there must be.
        dimension: How long they must be; None if any length will do.

    Raises:
        ConfigurationError: They have another shape, are no numbers, or are not finite.
    """
    try:
        array = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "The embedder's vectors are no array of numbers.", hint="Return shape (texts, dimension)."
        ) from error
    if array.ndim != 2 or len(array) != count:
        raise ConfigurationError(
            f"Vectors of shape {array.shape} do not match {count} texts.",
            hint="An embedder returns shape (texts, dimension).",
        )
    if count and (not array.shape[1] or dimension not in (None, array.shape[1])):
        raise ConfigurationError(
            f"Vectors of dimension {array.shape[1]} do not fit an index of dimension {dimension}.",
            hint="Use the embedder that the index was built with, or build it again.",
        )
    if not np.isfinite(array).all():
        raise ConfigurationError(
            "A vector holds NaN or infinity; it is near to nothing.", hint="Check the embedder."
        )
    return array


def normalised(vectors: Float32Array) -> Float32Array:
    """Return vectors of length 1; those of length 0 stay so."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(norms, 1e-12), dtype=np.float32)


def import_faiss() -> Any:
    """Import FAISS.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise missing_dependency("faiss", "faiss") from error
    return faiss


def _unreadable(path: Path, why: object) -> IndexCorruptError:
    return IndexCorruptError(f"The FAISS file {str(path)!r} cannot be read back: {why}")


def _faiss_metric(metric: Metric) -> int:
    faiss = import_faiss()
    return int(faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
