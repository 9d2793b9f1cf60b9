"""An index of passages: FAISS inner product over normalised embeddings, passages beside it in SQLite."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.arrays import Float32Array
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexCorruptError,
    IndexMismatchError,
    missing_dependency,
)
from rgate_integrations.files import json_text, write_atomically
from rgate_integrations.index.approximate import approximate
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.manifest import FORMAT, MANIFEST, describe_file, read_manifest
from rgate_integrations.index.passages import Passage, PassageStore
from rgate_integrations.index.retriever import Hit, check_search

EXACT_UP_TO = 100_000
_VECTORS, _PASSAGES = "vectors.faiss", "passages.sqlite"
_BATCH = 1_024  # embedded together, sorted by length: less padding than in small batches


class PassageIndex:
    """Passages, searchable by meaning.

    Search is exact up to 100,000 passages. A larger index is turned into inverted lists by `build` or `optimise`.

    Args:
        embedder: Embeds passages and queries.

    Attributes:
        approximation: ``lists``, ``probes`` and the measured ``recall`` of an approximate index; None if exact.
    """

    def __init__(self, embedder: Embedder | None = None) -> None:
        self.embedder: Embedder = embedder or SentenceEmbedder()
        self._store = PassageStore()
        self._faiss: Any = None
        self._next_row = 0
        self.approximation: dict[str, Any] | None = None

    def __len__(self) -> int:
        return int(self._faiss.ntotal) if self._faiss is not None else 0

    def __iter__(self) -> Iterator[Passage]:
        return (passage for _, passage in self._store)

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
            DataFormatError: Two passages have the same id, or a text is empty.
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
        if self.approximation is not None or len(self) <= exact_up_to:
            return
        tuned = approximate(self._faiss, _faiss(), target=recall)
        self._faiss = tuned.index
        self.approximation = {
            "lists": tuned.lists,
            "probes": tuned.probes,
            "recall": round(tuned.recall, 4),
        }

    def add(self, passages: Sequence[Passage]) -> None:
        """Add passages.

        Raises:
            DataFormatError: An id is there already or twice in the batch, or a text is empty.
        """
        if not passages:
            return
        self._check(passages, self._store.rows_of([p.id for p in passages]))
        self._put(passages, self.embedder.embed([p.searchable for p in passages]))

    def upsert(self, passages: Sequence[Passage]) -> None:
        """Add passages; those whose id is there already take its place.

        Raises:
            DataFormatError: An id is twice in the batch, or a text is empty.
        """
        if not passages:
            return
        self._check(passages, ())
        # Embedded before anything is deleted: if that fails, the index is as it was.
        vectors = self.embedder.embed([p.searchable for p in passages])
        self.delete([p.id for p in passages])
        self._put(passages, vectors)

    def add_vectors(self, passages: Sequence[Passage], vectors: Float32Array) -> None:
        """Add passages with vectors that were computed elsewhere, by the same embedder.

        Args:
            passages: The passages.
            vectors: Shape (passages, dimension); normalised here.

        Raises:
            ConfigurationError: The numbers differ.
            DataFormatError: An id is there already or twice, or a text is empty.
        """
        if len(passages) != len(vectors):
            raise ConfigurationError(f"{len(vectors)} vectors do not match {len(passages)} passages.")
        if not passages:
            return
        self._check(passages, self._store.rows_of([p.id for p in passages]))
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised = vectors / np.maximum(norms, 1e-12)
        self._put(passages, np.ascontiguousarray(normalised, dtype=np.float32))

    @staticmethod
    def read_vectors(path: str | Path) -> Float32Array:
        """Return the vectors of a FAISS file that keeps them, shape (n, dimension).

        Raises:
            IndexCorruptError: It cannot be read, or keeps no vectors.
        """
        try:
            stored = _faiss().read_index(str(path))
            return np.asarray(stored.reconstruct_n(0, stored.ntotal), dtype=np.float32)
        except RuntimeError as error:
            raise IndexCorruptError(f"The FAISS file {str(path)!r} cannot be read back: {error}") from error

    def get(self, ids: Iterable[str]) -> list[Passage]:
        """Return the passages with these ids; ids that are not there are left out."""
        return list(self._store.get(self._store.rows_of(ids).values()).values())

    def vectors(self, ids: Sequence[str]) -> Float32Array:
        """Return the vectors of passages that are there, shape (ids, dimension)."""
        rows = self._store.rows_of(ids)
        return np.stack([self._faiss.reconstruct(int(rows[name])) for name in ids])

    @staticmethod
    def _check(passages: Sequence[Passage], there: Iterable[str]) -> None:
        """Refuse passages whose ids are not new, or without text, before anything is changed."""
        seen = set(there)
        for passage in passages:
            if passage.id in seen:
                raise DataFormatError(
                    f"The id {passage.id!r} is there twice.", hint="Ids of passages must differ."
                )
            seen.add(passage.id)
            if not passage.text.strip():
                raise DataFormatError(f"The passage {passage.id!r} has no text.", hint="Leave it out.")

    def _put(self, passages: Sequence[Passage], vectors: Float32Array) -> None:
        rows = np.arange(self._next_row, self._next_row + len(passages))
        if self._faiss is None:
            faiss = _faiss()
            self._faiss = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        # Row numbers are never used again, so that a deleted passage cannot be found under a new one's vector.
        self._faiss.add_with_ids(vectors, rows)
        self._store.add([int(row) for row in rows], passages)
        self._next_row += len(passages)

    def delete(self, ids: Iterable[str]) -> int:
        """Remove passages by id; ids that are not there are ignored. Returns how many were removed."""
        rows = list(self._store.rows_of(ids).values())
        if rows:
            self._faiss.remove_ids(np.asarray(rows, dtype=np.int64))
            self._store.delete(rows)
        return len(rows)

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
        embed: Callable[[Sequence[str]], Float32Array] = getattr(
            self.embedder, "embed_queries", self.embedder.embed
        )
        return embed(queries)

    def search_vectors(
        self, vectors: Float32Array, k: int, queries: Sequence[str] | None = None
    ) -> list[list[Hit]]:
        """Search with normalised vectors of shape (queries, dimension) in place of texts."""
        contiguous = np.ascontiguousarray(vectors, dtype=np.float32)
        scores, rows = self._faiss.search(contiguous, min(k, len(self)))
        # An approximate index fills up with -1 when the lists it looks into hold fewer than k passages.
        passages = self._store.get({int(row) for row in rows.ravel() if row >= 0})
        names = queries or [""] * len(vectors)
        found = []
        for own_rows, own_scores, name in zip(rows, scores, names, strict=True):
            hits = []
            for row, score in zip(own_rows, own_scores, strict=True):
                if row >= 0:
                    hits.append(Hit(passages[int(row)], float(score), name))
            found.append(hits)
        return found

    def save(self, folder: str | Path) -> Path:
        """Save into a folder. An index that was there stays loadable until the new one is complete.

        The files of each save have a folder of their own; a small manifest, replaced in one step, says which
        is current. So a process that dies at any moment leaves the old index or the new one.
        """
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        version = root / f"v-{uuid.uuid4().hex[:12]}"
        version.mkdir()
        faiss = _faiss()
        flat = self._faiss if self._faiss is not None else faiss.IndexIDMap2(faiss.IndexFlatIP(1))
        faiss.write_index(flat, str(version / _VECTORS))
        self._store.save(version / _PASSAGES)
        manifest = {
            "format": FORMAT,
            "version": version.name,
            "passages": len(self),
            "next_row": self._next_row,
            "dimension": int(flat.d),
            "approximation": self.approximation,
            "embedder": {"name": self.embedder.name, "identity": self.embedder.identity},
            "files": {name: describe_file(version / name) for name in (_VECTORS, _PASSAGES)},
        }
        write_atomically(root / MANIFEST, json_text(manifest))
        for old in [*root.glob("v-*"), *root.glob(f".{MANIFEST}-*")]:
            if old.name != version.name:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
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
            IndexCorruptError: A file is missing, truncated or changed.
            IndexMismatchError: The embedder is not the one it was built with, or the format is newer.
        """
        root = Path(folder)
        manifest = read_manifest(root)
        version = root / manifest["version"]
        built_with = manifest["embedder"]
        index = cls(embedder or SentenceEmbedder(built_with["name"]))
        if index.embedder.identity != built_with["identity"]:
            raise IndexMismatchError(
                f"The index {str(root)!r} was built with the embedder {built_with['name']!r} "
                f"({built_with['identity']}), not with {index.embedder.name!r} ({index.embedder.identity}).",
                hint=f"Open it with {built_with['name']!r}, or build it again with {index.embedder.name!r}.",
            )
        faiss = _faiss()
        flags = faiss.IO_FLAG_MMAP_IFC if mmap else 0
        if manifest["passages"]:  # what is saved of an empty index has no dimension
            index._faiss = faiss.read_index(str(version / _VECTORS), flags)
        index.approximation = manifest.get("approximation")
        index._store = PassageStore(version / _PASSAGES).writable()
        index._next_row = manifest["next_row"]
        return index


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise missing_dependency("faiss", "faiss") from error
    return faiss
