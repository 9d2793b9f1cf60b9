"""The vectors of an index, by row number, in FAISS; and what is checked before they get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, missing_dependency
from rgate_integrations.index.approximate import Tuned, approximate
from rgate_integrations.runtime.arrays import Float32Array, PositionArray

Metric: TypeAlias = Literal["cosine", "inner_product", "l2"]
"""How near two vectors are. Under ``cosine`` vectors are normalised when they are stored and searched."""

METRICS: tuple[Metric, ...] = ("cosine", "inner_product", "l2")


class VectorTable:
    """Vectors by row number. The index that owns it lets in one thread at a time.

    Args:
        flat: A FAISS index with ids; None for an empty table, which gets its dimension from the first vectors.
        metric: By what it is searched; that of ``flat``.
        writable: Whether it may be changed. FAISS crashes the process when a mapped file is.
    """

    def __init__(self, flat: Any = None, *, metric: Metric = "cosine", writable: bool = True) -> None:
        self._faiss = flat
        self._metric = metric
        self._writable = writable

    def __len__(self) -> int:
        return 0 if self._faiss is None else int(self._faiss.ntotal)

    def __getstate__(self) -> dict[str, Any]:
        written = None if self._faiss is None else import_faiss().serialize_index(self._faiss)
        return {"faiss": written, "metric": self._metric}

    def __setstate__(self, state: dict[str, Any]) -> None:
        written = state["faiss"]
        flat = None if written is None else import_faiss().deserialize_index(written)
        VectorTable.__init__(self, flat, metric=state["metric"])

    @classmethod
    def read(cls, path: Path, metric: Metric, *, mmap: bool = False) -> VectorTable:
        """Read a file that `write` made; a mapped one cannot be changed.

        Raises:
            IndexCorruptError: It cannot be read, or is a FAISS file of another kind or metric.
        """
        faiss = import_faiss()
        try:
            found = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
        except (RuntimeError, MemoryError) as error:
            raise _unreadable(path, error) from error
        exact = isinstance(found, faiss.IndexIDMap2) and isinstance(
            faiss.downcast_index(found.index), faiss.IndexFlat
        )
        if not exact and not isinstance(found, faiss.IndexIVFFlat):
            raise _unreadable(path, f"it is of the kind {type(found).__name__}")
        if found.metric_type != _faiss_metric(metric):
            raise _unreadable(path, f"its metric is not {metric}")
        return cls(found, metric=metric, writable=not mmap)

    def write(self, path: Path) -> None:
        """Write into a file; an empty table is written with a dimension of 1."""
        import_faiss().write_index(self._or_empty(1), str(path))

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None while there never was one."""
        return None if self._faiss is None else int(self._faiss.d)

    @property
    def exact(self) -> bool:
        """Whether a search looks at all vectors."""
        return self._faiss is None or hasattr(self._faiss, "id_map")

    def rows(self) -> PositionArray:
        """Return the numbers of all rows, in ascending order."""
        faiss = import_faiss()
        if self._faiss is None:
            found = np.zeros(0, np.int64)
        elif self.exact:
            found = faiss.vector_to_array(self._faiss.id_map)
        else:
            lists = self._faiss.invlists
            sizes = [lists.list_size(i) for i in range(lists.nlist)]
            parts = [faiss.rev_swig_ptr(lists.get_ids(i), n) for i, n in enumerate(sizes) if n]
            found = np.concatenate([np.zeros(0, np.int64), *parts])
        return np.sort(found)

    def check_writable(self) -> None:
        """Refuse to change a mapped table.

        Raises:
            ConfigurationError: It is mapped.
        """
        if not self._writable:
            raise ConfigurationError(
                "The index was loaded with mmap=True and cannot be changed.", hint="Load it without mmap."
            )

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
        taken: Float32Array = self._faiss.reconstruct_batch(np.asarray(rows, dtype=np.int64))
        return taken

    def search(self, vectors: Float32Array, k: int) -> tuple[Float32Array, PositionArray]:
        """Return the scores and rows of the nearest vectors, nearest first, shape (queries, at most k).

        A score is the inner product, or minus the squared distance: higher is nearer. An approximate table fills up
        with row -1 when the lists it looks into hold fewer than k vectors.
        """
        scores, rows = self._faiss.search(vectors, min(k, len(self)))
        return (-scores if self._metric == "l2" else scores), rows

    def approximated(self, recall: float) -> Tuned:
        """Return the same vectors in inverted lists, see `rgate_integrations.index.approximate`."""
        return approximate(self._faiss, import_faiss(), target=recall)

    def _add(self, rows: Sequence[int], vectors: Float32Array) -> None:
        if len(rows):
            table = self._or_empty(vectors.shape[1])
            table.add_with_ids(vectors, np.asarray(rows, dtype=np.int64))
            self._faiss = table  # only now: a first write that fails must not set the dimension

    def _remove(self, rows: Sequence[int]) -> None:
        if len(rows) and self._faiss is not None:
            self._faiss.remove_ids(np.asarray(rows, dtype=np.int64))

    def _or_empty(self, dimension: int) -> Any:
        if self._faiss is not None:
            return self._faiss
        faiss = import_faiss()
        return faiss.IndexIDMap2(faiss.IndexFlat(dimension, _faiss_metric(self._metric)))


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


def _unreadable(path: Path, why: object) -> IndexCorruptError:
    return IndexCorruptError(f"The FAISS file {str(path)!r} cannot be read back: {why}")


def _faiss_metric(metric: Metric) -> int:
    faiss = import_faiss()
    return int(faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)


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
