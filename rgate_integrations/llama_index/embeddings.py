"""The package's embedder as a LlamaIndex embedding model."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field

from rgate_integrations.decision import Options
from rgate_integrations.index.embedder import DEFAULT_EMBEDDER, SentenceEmbedder


class RGateEmbedding(BaseEmbedding, Options):
    """The embedder of this package's indexes as a LlamaIndex embedding model.

    The model is loaded on first use and shared within the process. The vectors of the latest 1,024 queries are kept,
    so several indexes embed a question only once. Vectors are normalised.

    Attributes:
        model_name: Catalogue name, local folder, or Hub id.
        embed_batch_size: Number of texts per call of the model, from 1 to 2,048.

    Raises:
        pydantic.ValidationError: ``embed_batch_size`` is out of range.
        RGateError: Raised by a call: the model cannot be loaded; see `SentenceEmbedder.embed`.

    Examples:
        >>> vector = RGateEmbedding().get_query_embedding("Who wrote Hamlet?")  # doctest: +SKIP
    """

    model_name: str = Field(default=DEFAULT_EMBEDDER, description="Catalogue name, local folder, or Hub id.")
    embed_batch_size: int = Field(default=256, gt=0, le=2048, description="Texts per call of the model.")

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex saves this class."""
        return "RGateEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return SentenceEmbedder(self.model_name).embed_queries([query])[0].tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return SentenceEmbedder(self.model_name).embed(texts).tolist()

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Any]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
