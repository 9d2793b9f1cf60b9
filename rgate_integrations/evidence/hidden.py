"""Pooled hidden states of the proxy over the chat of question and draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import DraftSpec, questions_as_values
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


@dataclass(frozen=True)
class HiddenSpec(EvidenceSpec[Float32Array]):
    """Pooled hidden states, shape (layers, hidden size).

    Attributes:
        layers: Which states: (layer, span, pooling) each; layer 0 is the embedding, the last is the output.
        draft: The draft that is the assistant's turn, or None for the question alone.
        prompt: The prompt that the question stands in.
    """

    layers: tuple[PooledLayer, ...]
    draft: DraftSpec | None = None
    prompt: PromptTemplate = ANSWER

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """The draft that is read."""
        return () if self.draft is None else (self.draft,)

    def compute(self, context: Context) -> list[Piece[Float32Array]]:
        """Read the questions, with their drafts if there are any."""
        drafts = None if self.draft is None else context.get(self.draft)
        states = context.proxy.hidden(self.prompt, questions_as_values(context), drafts, self.layers)
        pieces = []
        for each in states:
            # States that were kept while a draft was written have no prompt of their own, and cost nothing.
            cost = Cost(model_calls=int(each.prompt_tokens > 0), tokens_in=each.prompt_tokens)
            pieces.append(Piece(each.states, cost))
        return pieces
