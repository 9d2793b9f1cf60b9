"""Sentence embedders: texts to normalised vectors, one call a batch."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rgate_integrations.errors import ModelLoadError, missing_dependency
from rgate_integrations.proxy.download import resolve_model

DEFAULT_EMBEDDER = "all-minilm-l6-v2"


class Embedder(Protocol):
    """What an index needs of an embedder.

    Attributes:
        name: What to open the index with.
        identity: Changes when the vectors would; an index remembers it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def identity(self) -> str: ...  # noqa: D102

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return normalised vectors, shape (texts, dimension)."""


class SentenceEmbedder:
    """A sentence-transformers model, loaded on first use and shared in the process.

    Args:
        model: Catalogue name, local folder, or Hub id.
    """

    def __init__(self, model: str = DEFAULT_EMBEDDER) -> None:
        self.name = model

    @property
    def identity(self) -> str:
        """Hash of the model's configuration and weights size for a folder; the Hub id otherwise."""
        folder = Path(resolve_model(self.name, kind="embedder"))
        if not folder.is_dir():
            return self.name
        digest = hashlib.sha256()
        for file in sorted(folder.rglob("*")):
            if file.suffix in {".json", ".safetensors", ".bin"} and file.name != "rgate.json":
                digest.update(f"{file.relative_to(folder)}:{file.stat().st_size};".encode())
        return digest.hexdigest()[:16]

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return normalised vectors, shape (texts, dimension); one model call for the batch."""
        model, lock = _model(resolve_model(self.name, kind="embedder"))
        if not texts:
            return np.zeros((0, int(model.get_embedding_dimension())), np.float32)
        with lock:
            vectors = model.encode(
                list(texts),
                batch_size=32,
                normalize_embeddings=True,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        return np.ascontiguousarray(vectors, dtype=np.float32)


@functools.cache
def _model(where: str) -> tuple[Any, threading.Lock]:
    try:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise missing_dependency(error.name or "sentence_transformers", "local") from error
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(where, trust_remote_code=False), threading.Lock()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(
            f"The embedder {where!r} could not be loaded: {str(error).splitlines()[0]}",
            hint="Give a sentence-transformers folder or Hub id, or a name from `rgate download`.",
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
