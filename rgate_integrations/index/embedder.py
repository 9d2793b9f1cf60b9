"""Sentence embedders: texts to normalised vectors, one call a batch. The default one reads a hundred languages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from rgate_integrations.errors import ModelLoadError, missing_dependency
from rgate_integrations.models.download import cached_path, resolve_model
from rgate_integrations.models.encoder import ENCODER, shared_encoder
from rgate_integrations.models.pretrained import quiet, refuse_pickles, refuse_special_files
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.text import encodable
from rgate_integrations.runtime.threads import ForkSafeLock

DEFAULT_EMBEDDER = ENCODER

_LATEST = 1_024  # queries whose vectors are kept, for each model
_HASHED = {".json", ".safetensors", ".txt", ".model", ".bin"}

Encode: TypeAlias = Callable[[Sequence[str]], Float32Array]


class _Model(NamedTuple):
    """What embeds passages, and what embeds queries."""

    passages: Encode
    queries: Encode


class Embedder(Protocol):
    """What an index needs of an embedder.

    It may have ``embed_queries``, too, for what is searched for; `embed` does that otherwise.
    """

    @property
    def name(self) -> str:
        """What to open the index with."""

    @property
    def identity(self) -> str:
        """Changes when the vectors would; an index remembers it."""

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, dimension)."""


class SentenceEmbedder:
    """A sentence embedder, loaded on first use and shared in the process, with its latest queries.

    multilingual-e5-small runs on ONNX Runtime; others are loaded by sentence-transformers, which needs torch.

    Args:
        model: Catalogue name, local folder, or Hub id.
    """

    def __init__(self, model: str = DEFAULT_EMBEDDER) -> None:
        self.name = model

    @property
    def identity(self) -> str:
        """SHA-256 of the files that the vectors depend on, for a folder; the Hub id otherwise.

        All of them are read: 60 ms for the default one, of 82 MB.
        """
        folder = Path(resolve_model(self.name, kind="embedder"))
        if not folder.is_dir():
            return self.name
        refuse_special_files(str(folder))
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            if path.suffix in _HASHED and path.name != "rgate.json":
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.relative_to(folder).as_posix()}:{content};".encode())
        return "sha256:" + digest.hexdigest()[:32]

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
        self._model: _Model | None = None
        self._latest: dict[str, Float32Array] = {}
        self._lock = ForkSafeLock()

    def embed(self, texts: Sequence[str]) -> Float32Array:
        with self._lock:
            return self._loaded().passages(list(map(encodable, texts)))

    def _loaded(self) -> _Model:
        if self._model is None:
            self._model = _load(self._where)
        return self._model

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._latest]
            if new:
                vectors = self._loaded().queries(list(map(encodable, new)))
                for text, vector in zip(new, vectors, strict=True):
                    self._latest[text] = vector.copy()  # the row itself would keep the whole batch in memory
            # Read before anything is forgotten: a batch may be larger than what is kept.
            vectors = np.array([self._latest[text] for text in texts], np.float32)
            for oldest in list(self._latest)[:-_LATEST]:
                del self._latest[oldest]
            return vectors


_models: dict[str, _SharedModel] = {}


def _shared(name: str) -> _SharedModel:
    """Return the process-wide model of a name; names of one folder share it."""
    where = resolve_model(name, kind="embedder")
    return _models.setdefault(where, _SharedModel(where))  # atomic, and nothing is loaded yet


def _load(where: str) -> _Model:
    """Load the model of a folder or Hub id; returns what embeds texts."""
    if where == str(cached_path(ENCODER)):
        vectors = shared_encoder(Path(where)).vectors
        return _Model(partial(vectors, prefix="passage: "), partial(vectors, prefix="query: "))
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

    def by_sentence_transformers(texts: Sequence[str]) -> Float32Array:
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    return _Model(by_sentence_transformers, by_sentence_transformers)
