"""Sentence embedders: texts to normalised vectors, one call a batch. The default one reads a hundred languages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from rgate_integrations.errors import ModelLoadError, missing_dependency
from rgate_integrations.models.download import cached_path, resolve_model
from rgate_integrations.models.encoder import ENCODER, shared_encoder
from rgate_integrations.models.onnx_session import OnnxSession
from rgate_integrations.models.pretrained import quiet, refuse_pickles, refuse_special_files
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.text import encodable
from rgate_integrations.runtime.threads import ForkSafeLock, usable_cores

DEFAULT_EMBEDDER = ENCODER
MINILM = "all-minilm-l6-v2"
GRAPH = "graph.onnx"
WEIGHTS = "model.safetensors"
DIMENSION = 384

_LATEST = 1_024  # queries whose vectors are kept, for each model
_HASHED = {".json", ".safetensors", ".txt", ".model", ".bin"}
_MOST_TOKENS = 256  # of a text; what is longer is cut, as the model's own configuration says
_TEXTS = 32  # of one run
_TESTED = ("What is the capital of France?", "Paris is the capital and largest city of France.")
_SIMILARITY = 0.7724  # cosine of these two
_TOLERANCE = 1e-3

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

    all-minilm-l6-v2 and multilingual-e5-small run on ONNX Runtime; others are loaded by sentence-transformers, which
    needs torch.

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
    if where == str(cached_path(MINILM)):
        encode = MiniLM(Path(where)).encode
        return _Model(encode, encode)
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


class MiniLM:
    """all-MiniLM-L6-v2 on ONNX Runtime: English, float32, no torch. Safe for threads.

    Args:
        folder: What `rgate download all-minilm-l6-v2` wrote.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._tokenizer.enable_truncation(_MOST_TOKENS)
            self._tokenizer.enable_padding()
            self._session = OnnxSession((SHIPPED / "embedder" / GRAPH).read_bytes(), folder)
            one, other = self.encode(_TESTED)
            if not abs(float(one @ other) - _SIMILARITY) < _TOLERANCE:
                raise ValueError("it does not give the vectors that it should")
        # ONNX Runtime and tokenizers raise classes of their own, or plain Exception.
        except Exception as error:
            raise ModelLoadError(
                f"The embedder in {str(folder)!r} could not be loaded: {(str(error).splitlines() or [''])[0]}",
                hint="Remove the folder, then: rgate download all-minilm-l6-v2",
            ) from error

    def encode(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, 384)."""
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        # Texts of like length share a batch: less padding.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        batches = [order[start : start + _TEXTS] for start in range(0, len(order), _TEXTS)]

        def read(batch: list[int]) -> None:
            rows = self._tokenizer.encode_batch([texts[place] for place in batch])
            ids = np.array([row.ids for row in rows], np.int64)
            mask = np.array([row.attention_mask for row in rows], np.int32)
            vectors[batch] = self._session.run(None, {"ids": ids, "mask": mask})[0]

        with ThreadPoolExecutor(usable_cores()) as pool:
            each = map if len(batches) == 1 else pool.map  # no thread is started for a query
            list(each(read, batches))
        return vectors
