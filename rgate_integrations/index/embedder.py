"""Sentence embedders: texts to normalised vectors, one call a batch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from rgate_integrations.errors import ModelLoadError, missing_dependency
from rgate_integrations.index.minilm import MiniLM
from rgate_integrations.models.download import resolve_model
from rgate_integrations.models.pretrained import quiet, refuse_pickles
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.threads import ForkSafeLock

DEFAULT_EMBEDDER = "all-minilm-l6-v2"
_LATEST = 1_024  # queries whose vectors are kept, for each model
_HASHED = {".json", ".safetensors", ".txt", ".model"}


class Embedder(Protocol):
    """What an index needs of an embedder.

    It may have ``embed_queries``, too, for what is searched for; `embed` does that otherwise. ``aembed`` and
    ``aembed_queries`` are the same to be awaited; without them the others run in a thread.

    Attributes:
        name: What to open the index with.
        identity: Changes when the vectors would; an index remembers it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def identity(self) -> str: ...  # noqa: D102

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, dimension)."""


class SentenceEmbedder:
    """A sentence embedder, loaded on first use and shared in the process, with its latest queries.

    The default one runs on ONNX Runtime; others are loaded by sentence-transformers, which needs torch.

    Args:
        model: Catalogue name, local folder, or Hub id.
    """

    def __init__(self, model: str = DEFAULT_EMBEDDER) -> None:
        self.name = model

    @property
    def identity(self) -> str:
        """SHA-256 of what the vectors depend on, for a folder; the Hub id otherwise.

        Computed once in a process, and again when a file has changed. What has no prefix ``sha256:`` is of an
        index from before, a hash of names and sizes alone; such an index has to be built again.
        """
        folder = Path(resolve_model(self.name, kind="embedder"))
        if not folder.is_dir():
            return self.name
        return "sha256:" + _digest(folder, _files(folder))[:32]

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, dimension); one model call for the batch."""
        return _shared(self.name).embed(texts)

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, dimension); one model call for those not asked for lately.

        The vectors of the latest 1,024 queries are kept in memory, for every user of the model in the process.
        """
        return _shared(self.name).embed_queries(texts)


class _SharedModel:
    """A model and the vectors of its latest queries. Callers take turns, so a question is embedded once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._encode_with: Callable[[Sequence[str]], Float32Array] | None = None
        self._latest: OrderedDict[str, Float32Array] = OrderedDict()
        self._lock = ForkSafeLock()

    def embed(self, texts: Sequence[str]) -> Float32Array:
        with self._lock:
            return self._encode(texts)

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        if not texts:
            return self.embed(texts)
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._latest]
            if new:
                for text, vector in zip(new, self._encode(new), strict=True):
                    self._latest[text] = vector.copy()  # the row itself would keep the whole batch in memory
            for text in texts:
                self._latest.move_to_end(text)
            # Read before anything is forgotten: a batch may be larger than what is kept.
            vectors = np.stack([self._latest[text] for text in texts])
            while len(self._latest) > _LATEST:
                self._latest.popitem(last=False)
            return vectors

    def _encode(self, texts: Sequence[str]) -> Float32Array:
        if self._encode_with is None:
            self._encode_with = _load(self._where)
        return self._encode_with(texts)


_models: dict[str, _SharedModel] = {}


def _shared(name: str) -> _SharedModel:
    """Return the process-wide model of a name; names of one folder share it."""
    where = resolve_model(name, kind="embedder")
    return _models.setdefault(where, _SharedModel(where))  # atomic, and nothing is loaded yet


def _files(folder: Path) -> tuple[tuple[Path, int, int, int], ...]:
    """Return the files that the vectors depend on, each with what shows that it was written again."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in _HASHED and path.name != "rgate.json":
            stat = path.stat()
            # The time of the last change cannot be set back, as that of the last modification can.
            files.append((path, stat.st_size, stat.st_ctime_ns, stat.st_ino))
    return tuple(files)


@lru_cache(maxsize=32)
def _digest(folder: Path, files: tuple[tuple[Path, int, int, int], ...]) -> str:
    """Hash all contents: 60 ms for MiniLM, of 91 MB. The state of the files is the key of the cache."""
    digest = hashlib.sha256()
    for path, *_ in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}:{content};".encode())
    return digest.hexdigest()


def _load(where: str) -> Callable[[Sequence[str]], Float32Array]:
    """Load the model of a folder or Hub id; returns what embeds texts."""
    if where == resolve_model(DEFAULT_EMBEDDER, kind="embedder"):
        return MiniLM(Path(where)).encode
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise missing_dependency(error.name or "sentence_transformers", "local") from error
    try:
        refuse_pickles(where)
        with quiet():
            model = SentenceTransformer(
                where, trust_remote_code=False, model_kwargs={"use_safetensors": True}
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"The embedder {where!r} could not be loaded: {str(error).splitlines()[0]}",
            hint="Give a sentence-transformers folder or Hub id, or a name from `rgate download`.",
        ) from error

    def encode(texts: Sequence[str]) -> Float32Array:
        if not texts:
            return np.zeros((0, int(model.get_embedding_dimension())), np.float32)
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    return encode
