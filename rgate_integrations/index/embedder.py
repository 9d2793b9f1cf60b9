"""Sentence embedders turn texts into vectors, a batch per call. The default reads a hundred languages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from rgate_integrations.errors import needs_extra
from rgate_integrations.index.retriever import check_list
from rgate_integrations.models.download import cached_path, resolve_model
from rgate_integrations.models.encoder import ENCODER, Encoder, Prefix
from rgate_integrations.models.pretrained import load_errors, offline, quiet, refuse_pickles
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.text import encodable
from rgate_integrations.runtime.threads import ForkSafeLock, cached_property

DEFAULT_EMBEDDER = ENCODER

_MAX_QUERIES = 1_024  # number of queries per model whose vectors are cached
_HASHED = {".json", ".safetensors", ".txt", ".model", ".bin"}

_Encode: TypeAlias = Callable[[Sequence[str], Prefix], Float32Array]


class Embedder(Protocol):
    """The interface of embedders.

    The method ``embed_queries`` is optional; without it, `embed` also embeds queries.
    """

    @property
    def name(self) -> str:
        """A name saved with an index; by default, the index is loaded with the `SentenceEmbedder` of that name."""

    @property
    def identity(self) -> str:
        """A text that changes whenever the embedder's vectors change; saved with an index."""

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return one vector per text, shape (texts, dimension); they need not be normalised."""


class SentenceEmbedder:
    """A sentence embedder, loaded on first use and shared within the process, with a cache of its latest queries.

    multilingual-e5-small runs on ONNX Runtime; others are loaded by sentence-transformers, which needs torch.

    Args:
        model: A name that ``rgate download`` lists, a local folder, or a Hub id.
    """

    def __init__(self, model: str = DEFAULT_EMBEDDER) -> None:
        self.name = model

    @property
    def identity(self) -> str:
        """A SHA-256 of the files on which the vectors depend; for a Hub id, the id itself.

        All of these files are read, which takes 60 ms for the default model (90 MB). A missing model that
        ``rgate download`` lists is downloaded first. Raises the errors of `embed`.
        """
        folder = Path(resolve_model(self.name, kind="embedder"))
        if not folder.is_dir():
            return self.name
        # Hash contents, not names or dates: a copied folder is the same embedder, and a changed one is not.
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            if path.suffix in _HASHED and path.name != "rgate.json":
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.relative_to(folder).as_posix()}:{content};".encode())
        return "sha256:" + digest.hexdigest()[:32]

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors of passages, shape (texts, dimension); for queries, use `embed_queries`.

        Raises:
            ConfigurationError: ``texts`` is one string.
            ModelLoadError: The model's path is not a folder; the model is missing, and this process may not download
                it; or it cannot be loaded.
            DownloadError: The model could not be downloaded.
            MissingDependencyError: The extra ``local`` is needed, and is not installed.
            UnknownNameError: No embedder has this name, and it is neither a folder nor a Hub id.
        """
        return _shared(self.name).embed(check_list(texts))

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors of queries, shape (texts, dimension).

        The 1,024 vectors computed last are cached, and all users of the model in this process share them.
        Raises the errors of `embed`.
        """
        return _shared(self.name).embed_queries(check_list(texts))


class _SharedModel:
    """A model and its cache of queries. One lock serves all callers, so that a question is embedded only once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._latest: dict[str, Float32Array] = {}
        self._lock = ForkSafeLock()

    @cached_property
    def _encode(self) -> _Encode:
        """The embedding function; loads the model, and raises the errors of `SentenceEmbedder.embed`."""
        if self._where == ENCODER or self._where == str(cached_path(ENCODER)):
            return Encoder.shared().vectors
        with needs_extra("local"):
            from sentence_transformers import SentenceTransformer
        with (
            load_errors(
                f"The embedder {self._where!r}",
                hint="Use a sentence-transformers folder, a Hub id (which needs a network), or a name that "
                "`rgate download` lists.",
            ),
            quiet(),
        ):
            refuse_pickles(self._where)
            options = {"use_safetensors": True, "adapter_kwargs": offline()}
            model = SentenceTransformer(
                self._where, trust_remote_code=False, model_kwargs=options, **offline()
            )

        # Sentence-transformers models add their own prefix.
        def encode(texts: Sequence[str], _: Prefix) -> Float32Array:
            vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
            return np.ascontiguousarray(vectors, dtype=np.float32)

        return encode

    def embed(self, texts: Sequence[str]) -> Float32Array:
        # Under the lock, so that threads that start together load the model only once.
        with self._lock:
            return self._encode(list(map(encodable, texts)), "passage: ")

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._latest]
            if new:
                vectors = self._encode(list(map(encodable, new)), "query: ")
                for text, vector in zip(new, vectors, strict=True):
                    self._latest[text] = vector.copy()  # a view would keep the whole batch in memory
            # Collect the result before dropping the oldest, because a batch may be larger than the cache.
            vectors = np.array([self._latest[text] for text in texts], np.float32)
            for oldest in list(self._latest)[:-_MAX_QUERIES]:
                del self._latest[oldest]
            return vectors


_models: dict[str, _SharedModel] = {}


def _shared(name: str) -> _SharedModel:
    """Return the process-wide model for a name; names that resolve to the same path or Hub id share it.

    The encoder is not resolved, because once loaded it needs no folder; see `OnnxModel.shared`.
    """
    where = name if name == ENCODER else resolve_model(name, kind="embedder")
    # `setdefault` needs no lock: it is atomic, and no model is loaded yet.
    return _models.setdefault(where, _SharedModel(where))
