"""The embedding of the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rgate_integrations.arrays import Float32Array
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece


@dataclass(frozen=True)
class EmbeddingSpec(EvidenceSpec[Float32Array]):
    """The question's embedding, shape (dimensions,), of length 1.

    Attributes:
        embedder: Catalogue name, folder or Hub id of the sentence embedder.
    """

    reads_model: ClassVar[bool] = False  # embedders cut long texts themselves

    embedder: str = "all-minilm-l6-v2"

    def compute(self, context: Context) -> list[Piece[Float32Array]]:
        """Embed the questions as they are: an index that embeds them with the same model shares the vectors."""
        from rgate_integrations.index.embedder import SentenceEmbedder

        vectors = SentenceEmbedder(self.embedder).embed_queries([each.question for each in context.inputs])
        return [Piece(vector) for vector in vectors]
