"""An index of passages and their vectors: in memory, searched by FAISS, and saved in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.decision import valid_count
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
    first_line,
    needs_extra,
)
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.retriever import (
    Hit,
    Passage,
    check_list,
    check_passages,
    check_search,
    decode_passages,
    encode_passages,
)
from rgate_integrations.runtime.arrays import Float32Array, unit
from rgate_integrations.runtime.files import check_replaceable, expand, locked, write_atomically
from rgate_integrations.runtime.threads import ForkSafeLock, cached_property

FILE = "index.safetensors"
FORMAT = "4"
_BATCH = 1_024  # the embedder sorts a batch by length, so a large one needs less padding
_BUILD = "rgate index build --corpus FILE.jsonl --out DIR"


@dataclass(frozen=True)
class _State:
    """The content of an index at one moment. It is immutable: a write makes a new one.

    Attributes:
        passages: The passages.
        vectors: Their normalised vectors, shape (passages, dimension).
    """

    passages: tuple[Passage, ...] = ()
    vectors: Float32Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        """The row of each id."""
        return {passage.id: row for row, passage in enumerate(self.passages)}


class PassageIndex:
    """Passages, searchable by the cosine of their vectors, which the index normalises.

    Search is exact: a batch of 1,000 queries takes 0.5 s in 100,000 passages. For millions, use a vector database.

    Any number of threads may read and write. A write is atomic: if it raises, nothing has changed, and no reader sees
    half of it. A forked process has its own copy of the index.

    Args:
        embedder: Embeds passages and queries; multilingual-e5-small by default.

    Raises:
        MissingDependencyError: FAISS is not installed.

    Attributes:
        folder: The folder from which it was loaded, or to which it was last saved; None without one. The index's
            profile is cached there, see `rgate_integrations.corpus.profile.profile_index`.
    """

    def __init__(self, embedder: Embedder | None = None) -> None:
        with needs_extra("faiss"):
            # Imported early, because a child that is forked during an import could never import it.
            import faiss
        self._faiss = faiss
        self.embedder: Embedder = embedder or SentenceEmbedder()
        self.folder: Path | None = None
        self._state = _State()
        # Only writers take the lock. Readers take one reference to the state, which is immutable.
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PassageIndex._from_state, (self.embedder, self._state)

    @classmethod
    def _from_state(cls, embedder: Embedder, state: _State) -> PassageIndex:
        index = cls(embedder)
        index._state = state
        return index

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self.passages)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The current passages; the same tuple object until they change."""
        return self._state.passages

    @property
    def fingerprint(self) -> str:
        """A hash of the embedder's identity and of the passages' ids, titles and texts, in their order.

        Metadata, and vectors passed to `add`, do not change it.
        """
        digest = hashlib.sha256(self.embedder.identity.encode())
        for passage in self.passages:
            digest.update(repr((passage.id, passage.title, passage.text)).encode())
        return digest.hexdigest()[:16]

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        embedder: Embedder | None = None,
        *,
        report: Callable[[int], None] | None = None,
    ) -> PassageIndex:
        """Embed passages, and return an index of them.

        Args:
            passages: The passages; their ids must differ.
            embedder: Embeds passages and queries; multilingual-e5-small by default.
            report: Called after each batch with the number of passages done.

        Raises:
            ConfigurationError: The embedder's vectors cannot be used.
            DataFormatError: Two passages have the same id, or a value cannot be stored.
            RGateError: The embedder's model cannot be loaded; see `SentenceEmbedder.embed`. Errors of your own
                embedder are raised unchanged.
            MissingDependencyError: FAISS is not installed.
        """
        index = cls(embedder)
        rows = check_passages(passages)  # all of them, before embedding, which takes long
        for start in range(0, len(rows), _BATCH):
            index.add(rows[start : start + _BATCH])
            if report is not None:
                report(len(index))
        return index

    def add(
        self, passages: Sequence[Passage], vectors: Float32Array | None = None, *, replace: bool = False
    ) -> None:
        """Add passages; on an error, none of them is added.

        Args:
            passages: The passages.
            vectors: Their vectors, if they are already known; shape (passages, dimension).
            replace: Whether a passage replaces an earlier one with the same id.

        Raises:
            ConfigurationError: The vectors cannot be used.
            DataFormatError: Two of the passages have the same id, a value cannot be stored, or the index already has
                one of the ids and ``replace`` is false.
            RGateError: The embedder's model cannot be loaded; see `SentenceEmbedder.embed`. Errors of your own
                embedder are raised unchanged.
        """
        if not passages:
            return
        new = check_passages(passages)  # check before embedding, which takes long and needs no lock
        if vectors is None:
            vectors = self.embedder.embed([passage.searchable for passage in new])
        with self._lock:
            old = self._state
            existing = old.row_of.keys() & {passage.id for passage in new}
            if existing and not replace:
                raise DataFormatError(
                    f"The index already has a passage with the id {min(existing)!r}.",
                    hint="Use another id, or replace the passage with upsert.",
                )
            self._replace(existing, new, unit(check_vectors(vectors, len(new), old.vectors.shape[1])))

    def upsert(self, passages: Sequence[Passage], vectors: Float32Array | None = None) -> None:
        """Add passages, replacing those with the same ids; see `add`."""
        self.add(passages, vectors, replace=True)

    def delete(self, ids: Iterable[str]) -> int:
        """Remove passages by id, ignoring unknown ids, and return the number removed.

        Raises:
            ConfigurationError: ``ids`` is one string.
        """
        with self._lock:
            gone = self._state.row_of.keys() & set(map(str, check_list(ids)))
            if gone:
                self._replace(gone, [], self._state.vectors[:0])
            return len(gone)

    def _replace(self, gone: Collection[str], passages: Sequence[Passage], vectors: Float32Array) -> None:
        """Remove the passages with the ids in ``gone``, and add passages with their normalised vectors.

        Only the last statement has an effect: an interrupt before it changes nothing.
        """
        old = self._state
        rest = [passage for passage in old.passages if passage.id not in gone]
        if rest:  # an empty index has no dimension yet
            others = np.delete(old.vectors, [old.row_of[name] for name in gone], axis=0)
            vectors = np.concatenate([others, vectors])
        self._state = _State((*rest, *passages), vectors)

    def get(self, ids: Iterable[str]) -> list[Passage]:
        """Return the passages with these ids, in the order of ``ids``; unknown ids are skipped.

        Raises:
            ConfigurationError: ``ids`` is one string.
        """
        # Read once, because another thread may replace it meanwhile.
        state = self._state
        return [
            state.passages[state.row_of[name]] for name in map(str, check_list(ids)) if name in state.row_of
        ]

    def vectors(self, ids: Iterable[str]) -> Float32Array:
        """Return the normalised vectors of passages, in the order of ``ids``, shape (ids, dimension).

        Raises:
            ConfigurationError: ``ids`` is one string.
            KeyError: An id is unknown.
        """
        state = self._state
        return state.vectors[[state.row_of[name] for name in map(str, check_list(ids))]]

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return the ``k`` nearest passages for each query, nearest first, or fewer if the index has fewer.

        All queries are embedded in one call.

        Raises:
            ConfigurationError: ``queries`` is one string, ``k`` is not a positive whole number, or the embedder
                returned vectors that are not finite, or of the wrong number or dimension.
            RGateError: The embedder's model cannot be loaded; see `SentenceEmbedder.embed`. Errors of your own
                embedder are raised unchanged.
        """
        check_search(queries, k)
        if not queries or not self.passages:
            return [[] for _ in queries]
        return self.search_vectors(self.embed_queries(queries), k, queries)

    def embed_queries(self, queries: Sequence[str]) -> Float32Array:
        """Return the vectors of queries, shape (queries, dimension); raises what the embedder raises."""
        return getattr(self.embedder, "embed_queries", self.embedder.embed)(queries)

    def search_vectors(
        self, vectors: Float32Array, k: int, queries: Sequence[str] | None = None
    ) -> list[list[Hit]]:
        """Return the ``k`` nearest passages for each query vector, nearest first; fewer if the index has fewer.

        Args:
            vectors: The query vectors, shape (queries, dimension).
            k: Maximum number of passages per query.
            queries: The texts of the queries, one per vector, for `Hit.query`; when None, `Hit.query` is empty.

        Raises:
            ConfigurationError: The vectors are not finite, their dimension differs from the index's, their number
                differs from that of the queries, or ``k`` is not a positive whole number.
        """
        k = valid_count(k, "k")
        # Read once, because another thread may replace it meanwhile.
        state = self._state
        if not state.passages:
            return [[] for _ in vectors]
        normalised = unit(check_vectors(vectors, len(queries or vectors), state.vectors.shape[1]))
        # FAISS pads the results with row -1 if k exceeds the number of vectors.
        k = min(k, len(state.passages))
        nearest = self._faiss.knn(normalised, state.vectors, k, metric=self._faiss.METRIC_INNER_PRODUCT)
        results = []
        for query, cosines, rows in zip(queries or [""] * len(normalised), *nearest, strict=True):
            results.append(
                [
                    Hit(state.passages[row], float(score), query)
                    for row, score in zip(rows, cosines, strict=True)
                ]
            )
        return results

    def save(self, folder: str | Path) -> Path:
        """Save into a folder, as one file that replaces an earlier one atomically, and return the folder.

        Whenever the process dies, the folder has the old or the new index. Other writers wait until it is saved.

        Raises:
            ConfigurationError: ``folder`` is a file, or has files but no index.
            WriteError: The file could not be written, for example because the disk is full; an earlier index is
                unchanged.
            RGateError: The embedder's model cannot be found; see `SentenceEmbedder.embed`.
        """
        from safetensors.numpy import save

        root = expand(folder)
        check_replaceable(root, (FILE,))  # it may be the current folder, which stays
        facts = {"format": FORMAT, "embedder": self.embedder.name, "identity": self.embedder.identity}
        # While we hold the lock, files of unfinished saves can only belong to killed processes.
        with locked(root / FILE, waiting=lambda: None), self._lock:
            for unfinished in root.glob(f".{FILE}-*"):
                unfinished.unlink()
            vectors = self._state.vectors
            passages = encode_passages(self.passages)
            facts["checksum"] = checksum(facts, passages, vectors)
            tensors = {"passages": np.frombuffer(passages, np.uint8), "vectors": vectors}
            write_atomically(root / FILE, save(tensors, metadata=facts))
        self.folder = root
        return root

    @classmethod
    def load(cls, folder: str | Path, embedder: Embedder | None = None) -> PassageIndex:
        """Load an index that `save` wrote.

        Args:
            folder: The folder.
            embedder: The embedder with which the index was built; by default the one that the index names.

        Raises:
            IndexNotFoundError: The folder has no index.
            IndexCorruptError: The file of the index is unreadable, truncated or changed, or is not an index.
            IndexMismatchError: The index was built with another embedder or has another format.
            RGateError: The embedder's model cannot be found; see `SentenceEmbedder.embed`.
            MissingDependencyError: FAISS is not installed.
        """
        path = expand(folder) / FILE
        try:
            if not path.is_file():
                raise IndexNotFoundError(f"{str(folder)!r} contains no index.", hint=f"Build one: {_BUILD}")
            path.open("rb").close()  # safetensors calls a file missing that this user may not read
            name, identity, state = _read(path)
        except (IndexNotFoundError, IndexMismatchError):
            raise
        except Exception as error:  # the file may hold anything, so anything may be raised
            raise IndexCorruptError(
                f"The index {str(path)!r} cannot be read: {first_line(error)}",
                hint=f"Check its permissions, or build the index again: {_BUILD}",
            ) from error
        index = cls._from_state(embedder or SentenceEmbedder(name), state)
        index.folder = path.parent
        if index.embedder.identity != identity:
            raise IndexMismatchError(
                f"The index {str(folder)!r} was built with the embedder {name!r} ({identity}), not with "
                f"{index.embedder.name!r} ({index.embedder.identity}).",
                hint=f"Open it with the embedder {name!r}, or build it again with {index.embedder.name!r}."
                if name != index.embedder.name
                else "The embedder has changed. Restore it, or build the index again.",
            )
        return index


def _read(path: Path) -> tuple[str, str, _State]:
    """Return the embedder's name and identity, and the content, from a saved file. May raise any exception."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        facts: dict[str, str] = dict(file.metadata())
        if facts["format"] != FORMAT:
            raise IndexMismatchError(
                f"The index {str(path)!r} has format {facts['format']}, not {FORMAT}.",
                hint=f"Build it again ({_BUILD}), or upgrade rgate-integrations if the format is newer.",
            )
        vectors = file.get_tensor("vectors")
        saved = file.get_tensor("passages").tobytes()
    if facts.pop("checksum") != checksum(facts, saved, vectors):
        raise ValueError("its checksum does not match, so it was changed after it was saved")
    passages = decode_passages(saved)
    state = _State(tuple(passages), check_vectors(vectors, len(passages)))
    if len(state.row_of) != len(passages):
        raise ValueError("an id occurs twice")
    return facts["embedder"], facts["identity"], state


def checksum(facts: Mapping[str, str], passages: bytes, vectors: Float32Array) -> str:
    """Return a hash of the whole content of a saved index."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(passages)
    digest.update(vectors.tobytes())
    return digest.hexdigest()


def check_vectors(vectors: Any, count: int, dimension: int = 0) -> Float32Array:
    """Check vectors, and return them as a contiguous float32 array, shape (count, dimension), as FAISS needs it.

    Args:
        vectors: The vectors, from an embedder, a caller or a file.
        count: The expected number of vectors.
        dimension: The expected dimension; 0 for any.

    Raises:
        ConfigurationError: The vectors have the wrong shape, are not numbers, or are not finite.
    """
    try:
        array = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The vectors are not an array of numbers: {first_line(error)}",
            hint="They must have shape (texts, dimension). Check the embedder.",
        ) from error
    if array.ndim != 2 or array.shape != (count, dimension or array.shape[1]) or (count and not array.size):
        raise ConfigurationError(
            f"Vectors of shape {array.shape} do not match {count} texts and "
            f"dimension {dimension or '1 or more'}.",
            hint="An embedder must return shape (texts, dimension). For another embedder, build another index.",
        )
    # For NaN, FAISS would return arbitrary rows.
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        raise ConfigurationError(
            f"The vector of text {int(finite.argmin()) + 1} of {count} contains NaN or infinity.",
            hint="Check the embedder that made it.",
        )
    return array
