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
        if not isinstance(found, faiss.IndexIDMap2):
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
        faiss = import_faiss()
        return self._index is None or isinstance(faiss.downcast_index(self._index.index), faiss.IndexFlat)

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        if self._index is None:
            return np.zeros(0, np.int64)
        return np.sort(import_faiss().vector_to_array(self._index.id_map))

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

    def make_approximate(self, factory: str) -> None:
        """Move exact vectors into another index of FAISS, which is then only searched.

        Args:
            factory: What FAISS's ``index_factory`` takes, such as ``"HNSW32"``.

        Raises:
            ConfigurationError: FAISS makes nothing of it.
        """
        faiss, exact = import_faiss(), self._index
        vectors = exact.index.reconstruct_n(0, exact.ntotal)
        try:
            made = faiss.index_factory(exact.d, f"IDMap2,{factory}", exact.metric_type)
            made.train(vectors)
            made.add_with_ids(vectors, faiss.vector_to_array(exact.id_map))
        except RuntimeError as error:
            raise ConfigurationError(f"FAISS cannot make the index {factory!r}: {error}") from error
        lists = faiss.try_extract_index_ivf(made)
        if lists is not None:
            lists.make_direct_map()  # for reading vectors back
        self._index = made

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
