"""This package's embedder as LangChain embeddings, and LangChain embeddings as an embedder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from langchain_core.embeddings import Embeddings

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.passage_index import check_vectors
from rgate_integrations.runtime.arrays import Float32Array, unit


class RGateEmbeddings(SentenceEmbedder, Embeddings):
    """The embedder of this package's indexes and gates, as LangChain embeddings.

    The model is loaded on first use and shared within the process. The vectors of the latest 1,024 queries are kept,
    so several indexes and stores embed a question only once. Vectors are normalised.

    Args:
        model: Catalogue name, local folder, or Hub id.

    Raises:
        RGateError: Raised by a call: the model cannot be loaded; see `SentenceEmbedder.embed`.

    Examples:
        >>> vector = RGateEmbeddings().embed_query("Who wrote Hamlet?")  # doctest: +SKIP
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each document; one call of the model embeds all."""
        return self.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return self.embed_queries([text])[0].tolist()


class EmbeddingsAdapter:
    """LangChain embeddings as the embedder of a `PassageIndex`.

    Its `identity` is saved with an index, so that the index is not opened with another model. It is a hash of a fixed
    text's vector, because not every model has a name, and a name may stand for several versions.

    Args:
        embeddings: The embeddings.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings = embeddings

    @property
    def name(self) -> str:
        """The name of the model, or else of the class."""
        name = getattr(self.embeddings, "model_name", None) or getattr(self.embeddings, "model", None)
        return name if isinstance(name, str) else type(self.embeddings).__name__

    @cached_property
    def identity(self) -> str:
        """Hash of the normalised vector of a fixed text, each number rounded to two decimals."""
        vector = unit(self.embed(["What is the identity of this embedder?"]))
        # Rounded, because hardware and batch size change the last digits.
        return hashlib.sha256(np.round(vector, 2).tobytes()).hexdigest()[:16]

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return the vectors of documents, shape (texts, dimension), made in one call.

        Raises:
            ConfigurationError: The vectors are not numbers, are not finite, or have the wrong shape.
            Exception: The embeddings raised it.
        """
        return check_vectors(self.embeddings.embed_documents(list(texts)), len(texts))

    def embed_queries(self, texts: Sequence[str]) -> Float32Array:
        """Return the vectors of queries, shape (texts, dimension), made one by one: LangChain has no batch call.

        Raises the errors of `embed`.
        """
        # Not `embed_documents`, because many models embed queries and documents differently.
        return check_vectors([self.embeddings.embed_query(text) for text in texts], len(texts))


def as_embedder(embeddings: Embeddings) -> Embedder:
    """Return LangChain embeddings as the embedder of an index.

    Raises:
        ConfigurationError: The object is not LangChain embeddings.
    """
    if type(embeddings) is RGateEmbeddings:
        return embeddings  # not wrapped, because the command line opens only indexes of this embedder
    if not isinstance(embeddings, Embeddings):
        raise ConfigurationError(
            f"A vector store needs LangChain embeddings, not {type(embeddings).__name__}.",
            hint="Pass an instance of a subclass of langchain_core.embeddings.Embeddings.",
        )
    return EmbeddingsAdapter(embeddings)
