"""The vectors of an index, by row number, in FAISS; and what is checked before they get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.arrays import Float32Array, PositionArray
from rgate_integrations.errors import ConfigurationError, IndexCorruptError, missing_dependency
from rgate_integrations.index.approximate import Tuned, approximate


class VectorTable:
    """Vectors by row number, searched by inner product. The index that owns it lets in one thread at a time.

    Args:
        flat: A FAISS index with ids; None for an empty table, which gets its dimension from the first vectors.
        writable: Whether it may be changed. FAISS crashes the process when a mapped file is.
    """

    def __init__(self, flat: Any = None, *, writable: bool = True) -> None:
        self._faiss = flat
        self._writable = writable

    def __len__(self) -> int:
        return 0 if self._faiss is None else int(self._faiss.ntotal)

    @classmethod
    def read(cls, path: Path, *, mmap: bool = False) -> VectorTable:
        """Read a file that `write` made; a mapped one cannot be changed."""
        faiss = import_faiss()
        flags = faiss.IO_FLAG_MMAP_IFC if mmap else 0
        return cls(faiss.read_index(str(path), flags), writable=not mmap)

    def write(self, path: Path) -> None:
        """Write into a file; an empty table is written with a dimension of 1."""
        import_faiss().write_index(self._or_empty(1), str(path))

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None while there never was one."""
        return None if self._faiss is None else int(self._faiss.d)

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

        An approximate table fills up with row -1 when the lists it looks into hold fewer than k vectors.
        """
        scores, rows = self._faiss.search(vectors, min(k, len(self)))
        return scores, rows

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
        return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


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


def read_vectors(path: str | Path) -> Float32Array:
    """Return the vectors of a FAISS file that keeps them, shape (n, dimension).

    Raises:
        IndexCorruptError: It cannot be read, or keeps no vectors.
    """
    try:
        stored = import_faiss().read_index(str(path))
        return np.asarray(stored.reconstruct_n(0, stored.ntotal), dtype=np.float32)
    except RuntimeError as error:
        raise IndexCorruptError(f"The FAISS file {str(path)!r} cannot be read back: {error}") from error


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
