"""An index of passages: their vectors, searched by FAISS, and themselves beside them, in memory and in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rgate_integrations.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
    RGateError,
    missing_dependency,
)
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.passages import Passage, check_passages, duplicate_id
from rgate_integrations.index.retriever import Hit, check_k, check_search
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import locked, write_atomically
from rgate_integrations.runtime.threads import ForkSafeLock

FILE = "index.safetensors"
FORMAT = "4"
_BATCH = 1_024  # embedded together, sorted by length: less padding than in small batches
_BUILD = "rgate index build --corpus FILE.jsonl --out DIR"
# Id, title, text and metadata.
_SAVED_PASSAGES = TypeAdapter(list[tuple[str, str, str, dict[str, Any]]])


@dataclass(frozen=True)
class _State:
    """What an index holds at one moment. It never changes: a write makes another one.

    Attributes:
        passages: The passages.
        row_of: The row of each id.
        buffer: The vectors, of length 1, a row each. The rows below are free for the passages that are added next, so
            that adding one does not copy the others.
    """

    passages: tuple[Passage, ...]
    row_of: Mapping[str, int]
    buffer: Float32Array

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], buffer: Float32Array) -> _State:
        """Number the passages."""
        rows = tuple(passages)
        return cls(rows, {passage.id: row for row, passage in enumerate(rows)}, buffer)

    @property
    def vectors(self) -> Float32Array:
        """The vectors of the passages, shape (passages, dimension)."""
        return self.buffer[: len(self.passages)]


class PassageIndex:
    """Passages, searchable by meaning: by the cosine of their vectors, which are normalised here.

    Search is exact: a batch of 1,000 queries takes 0.5 s in 100,000 passages. For millions, use a vector database.

    Any number of threads may read and write. A write happens as a whole or, if it raises, not at all, and no reader
    sees half of one. Texts are embedded outside of the lock, for that is slow. A forked child has the whole index.

    Args:
        embedder: Embeds passages and queries.

    Raises:
        MissingDependencyError: FAISS is not installed.

    Attributes:
        folder: Where it was loaded from or saved to last; None if it was not.
    """

    def __init__(self, embedder: Embedder | None = None) -> None:
        try:
            import faiss  # here: a child that is forked during an import could not import it any more
        except ImportError as error:
            raise missing_dependency("faiss", "faiss") from error
        self._faiss = faiss
        self.embedder: Embedder = embedder or SentenceEmbedder()
        self.folder: Path | None = None
        self._state = _State.from_passages((), np.zeros((0, 0), np.float32))
        self._lock = ForkSafeLock()  # for writers: readers take the state as it is

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the free rows only one index can make use.
        return PassageIndex._of, (self.embedder, replace(self._state, buffer=self._state.vectors))

    @classmethod
    def _of(cls, embedder: Embedder, state: _State) -> PassageIndex:
        index = cls(embedder)
        index._state = state
        return index

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self.passages)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The passages that are there now; the same tuple until they change."""
        return self._state.passages

    @property
    def fingerprint(self) -> str:
        """Changes when another search result may come: with any passage, or the embedder. All passages are read."""
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
        """Build an index.

        Args:
            passages: The passages; their ids must differ.
            embedder: Embeds passages and queries; multilingual-e5-small by default.
            report: Told how many passages are done, after each batch.

        Raises:
            ConfigurationError: The embedder failed, or its vectors cannot be used.
            DataFormatError: Two passages have the same id, or a value cannot be stored.
        """
        index = cls(embedder)
        given = list(passages)
        for start in range(0, len(given), _BATCH):
            index.add(given[start : start + _BATCH])
            if report is not None:
                report(len(index))
        return index

    def add(self, passages: Sequence[Passage], vectors: Float32Array | None = None) -> None:
        """Add passages: all of them or, with an error, none.

        Args:
            passages: The passages.
            vectors: Their vectors, where the embedder has computed them already; shape (passages, dimension).

        Raises:
            ConfigurationError: The embedder failed, or the vectors cannot be used.
            DataFormatError: An id is there already or twice in the batch, or a value of the metadata cannot be stored
                as JSON.
        """
        self._write(passages, vectors, replace=False)

    def upsert(self, passages: Sequence[Passage], vectors: Float32Array | None = None) -> None:
        """Add passages; those whose id is there already take its place. All of it happens or, with an error, nothing.

        Args:
            passages: The passages.
            vectors: Their vectors, where the embedder has computed them already; shape (passages, dimension).

        Raises:
            ConfigurationError: The embedder failed, or the vectors cannot be used.
            DataFormatError: An id is twice in the batch, or a value of the metadata cannot be stored as JSON.
        """
        self._write(passages, vectors, replace=True)

    def _write(self, passages: Sequence[Passage], vectors: Float32Array | None, *, replace: bool) -> None:
        if not passages:
            return
        new = check_passages(passages)  # before the long work of embedding
        if vectors is None:
            vectors = self._embed(new)
        with self._lock:
            old = self._state
            known = old.row_of.keys() & {passage.id for passage in new}
            if known and not replace:
                raise duplicate_id(min(known))
            checked = check_vectors(vectors, len(new), old.buffer.shape[1])
            self._replace(known, new, normalise_vectors(checked))

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

    def delete(self, ids: Iterable[str]) -> int:
        """Remove passages by id; ids that are not there are ignored. Returns how many were removed."""
        with self._lock:
            gone = self._state.row_of.keys() & set(map(str, ids))
            if gone:
                self._replace(gone, [], np.zeros((0, self._state.buffer.shape[1]), np.float32))
            return len(gone)

    def _replace(self, gone: Collection[str], passages: Sequence[Passage], vectors: Float32Array) -> None:
        """Make the next state. All happens in the last step: what stops before it has changed nothing."""
        old = self._state
        kept = old.passages
        kept_vectors = old.vectors
        if gone:
            kept = tuple(passage for passage in old.passages if passage.id not in gone)
            kept_vectors = np.delete(old.vectors, [old.row_of[name] for name in gone], axis=0)
        count = len(kept) + len(passages)
        buffer = old.buffer
        if gone or count > len(buffer):
            buffer = np.empty((2 * count, vectors.shape[1]), np.float32)
            if kept:  # a new index does not know the dimension
                buffer[: len(kept)] = kept_vectors
        buffer[len(kept) : count] = vectors  # no state that a reader may have has these rows
        self._state = _State.from_passages((*kept, *passages), buffer)

    def get(self, ids: Iterable[str]) -> list[Passage]:
        """Return the passages with these ids; ids that are not there are left out."""
        state = self._state
        found = []
        for name in map(str, ids):
            if name in state.row_of:
                found.append(state.passages[state.row_of[name]])
        return found

    def vectors(self, ids: Iterable[str]) -> Float32Array:
        """Return the vectors of passages that are there, shape (ids, dimension)."""
        state = self._state
        rows = [state.row_of[str(name)] for name in ids]
        return state.vectors[rows]

    def search(self, queries: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """Return for each query its ``k`` nearest passages, nearest first; one embedding call for all queries.

        Fewer are returned when the index holds fewer.
        """
        check_search(queries, k)
        if not queries or not self.passages:
            return [[] for _ in queries]
        return self.search_vectors(self.embed_queries(queries), k, queries)

    def embed_queries(self, queries: Sequence[str]) -> Float32Array:
        """Return the vectors of queries, shape (queries, dimension), by the embedder's own way if it has one."""
        embed = getattr(self.embedder, "embed_queries", self.embedder.embed)
        vectors: Float32Array = embed(queries)
        return vectors

    def search_vectors(
        self, vectors: Float32Array, k: int, queries: Sequence[str] | None = None
    ) -> list[list[Hit]]:
        """Search with vectors of shape (queries, dimension) in place of texts.

        Raises:
            ConfigurationError: The vectors have another dimension than those of the index, or are not finite.
        """
        check_k(k)
        state = self._state
        if not state.passages:
            return [[] for _ in vectors]
        asked = normalise_vectors(check_vectors(vectors, len(vectors), state.buffer.shape[1]))
        most = min(k, len(state.passages))
        product = self._faiss.METRIC_INNER_PRODUCT
        cosines, rows = self._faiss.knn(asked, state.vectors, most, metric=product)
        found = []
        for query, own_cosines, own_rows in zip(queries or [""] * len(asked), cosines, rows, strict=True):
            hits = []
            for row, cosine in zip(own_rows, own_cosines, strict=True):
                hits.append(Hit(state.passages[row], float(cosine), query))
            found.append(hits)
        return found

    def save(self, folder: str | Path) -> Path:
        """Save into a folder, as one file that replaces an earlier one in one step.

        A process that dies at any moment leaves the old index or the new one. Writers wait meanwhile.

        Raises:
            WriteError: It could not be written, such as on a full disk; an index that was there is as it was.
        """
        from safetensors.numpy import save

        root = Path(folder)
        facts = {"format": FORMAT, "embedder": self.embedder.name, "identity": self.embedder.identity}
        # One process at a time, so that what a killed one left is nobody's.
        with locked(root / FILE, waiting=lambda: None), self._lock:
            for unfinished in root.glob(f".{FILE}-*"):
                unfinished.unlink()
            vectors = self._state.vectors
            rows = [(each.id, each.title, each.text, each.metadata) for each in self.passages]
            passages = json.dumps(rows, ensure_ascii=False).encode()
            facts["checksum"] = checksum(facts, passages, vectors)
            tensors = {"passages": np.frombuffer(passages, np.uint8), "vectors": vectors}
            write_atomically(root / FILE, save(tensors, metadata=facts))
        self.folder = root
        return root

    @classmethod
    def load(cls, folder: str | Path, embedder: Embedder | None = None) -> PassageIndex:
        """Load an index.

        Args:
            folder: Where `save` put it.
            embedder: The embedder it was built with; by default the one it names.

        Raises:
            IndexNotFoundError: There is no index in the folder.
            IndexCorruptError: Its file is truncated or changed, or holds something else.
            IndexMismatchError: The embedder is not the one it was built with, or the format is another.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise IndexNotFoundError(f"There is no index in {str(folder)!r}.", hint=_BUILD)
        try:
            name, identity, state = _read(path)
        except IndexMismatchError:
            raise
        except Exception as error:  # the file may come from anywhere
            raise IndexCorruptError(
                f"The index {str(path)!r} cannot be read: {str(error).splitlines()[0]}",
                hint=f"Build the index again: {_BUILD}",
            ) from error
        index = cls._of(embedder or SentenceEmbedder(name), state)
        index.folder = path.parent
        if index.embedder.identity != identity:
            raise IndexMismatchError(
                f"The index {str(folder)!r} was built with the embedder {name!r} ({identity}), not with "
                f"{index.embedder.name!r} ({index.embedder.identity}).",
                hint=f"Open it with {name!r}, or build it again with {index.embedder.name!r}.",
            )
        return index


def _read(path: Path) -> tuple[str, str, _State]:
    """Read a file that `PassageIndex.save` wrote: name and identity of the embedder, and what the index held.

    Any class of error may come if it is not such a file.
    """
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        facts: dict[str, str] = dict(file.metadata())
        if facts["format"] != FORMAT:
            raise IndexMismatchError(
                f"The index has format {facts['format']}, not {FORMAT}.",
                hint=f"Build it again ({_BUILD}), or upgrade rgate-integrations if the format is newer.",
            )
        vectors = file.get_tensor("vectors")
        saved = file.get_tensor("passages").tobytes()
    if facts.pop("checksum") != checksum(facts, saved, vectors):
        raise ValueError("it was changed")
    passages = []
    for name, title, text, metadata in _SAVED_PASSAGES.validate_json(saved, strict=True):
        passages.append(Passage(name, text, title, metadata))
    state = _State.from_passages(passages, check_vectors(vectors, len(passages)))
    if len(state.row_of) != len(passages):
        raise ValueError("an id is there twice")
    return facts["embedder"], facts["identity"], state


def checksum(facts: Mapping[str, str], passages: bytes, vectors: Float32Array) -> str:
    """Return a hash of all that is in a saved index."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(passages)
    digest.update(vectors.tobytes())
    return digest.hexdigest()


def check_vectors(vectors: Any, count: int, dimension: int = 0) -> Float32Array:
    """Return vectors as FAISS takes them.

    Args:
        vectors: What an embedder gave.
        count: How many there must be.
        dimension: How long they must be; 0 if any length will do.

    Raises:
        ConfigurationError: They have another shape, are no numbers, or are not finite.
    """
    try:
        array = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "The embedder's vectors are no array of numbers.", hint="Return shape (texts, dimension)."
        ) from error
    if array.ndim != 2 or array.shape != (count, dimension or array.shape[1]) or (count and not array.size):
        raise ConfigurationError(
            f"Vectors of shape {array.shape} do not fit {count} texts and dimension {dimension or '(any)'}.",
            hint="An embedder returns shape (texts, dimension). An index takes vectors of its first embedder.",
        )
    if not np.isfinite(array).all():
        raise ConfigurationError(
            "Vectors must be finite, and one holds NaN or infinity.", hint="Check the embedder."
        )
    return array


def normalise_vectors(vectors: Float32Array) -> Float32Array:
    """Return vectors of length 1; those of length 0 stay so."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(norms, 1e-12), dtype=np.float32)
