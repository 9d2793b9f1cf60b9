"""Pooled hidden states of the proxy over the chat of question and draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import (
    DraftSpec,
    WrittenWithDraft,
    is_that_draft,
    questions_as_values,
)
from rgate_integrations.models.base import HiddenStates, PooledLayer, Proxy, Values
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


@dataclass(frozen=True)
class HiddenSpec(WrittenWithDraft[Float32Array]):
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
        return [_piece(each) for each in states]

    def comes_with(self, draft: DraftSpec) -> bool:
        """Return whether the states are those of that draft, under the prompt that it is written for."""
        return self.prompt == draft.prompt and is_that_draft(self.draft, draft)

    def write(
        self, draft: DraftSpec, proxy: Proxy, values: Sequence[Values]
    ) -> tuple[list[Draft], list[Piece[Float32Array]]]:
        """Write the drafts, and keep the states of the pass that writes them."""
        both = proxy.generate_hidden(draft.prompt, values, tokens=draft.tokens, layers=self.layers)
        return [written for written, _ in both], [_piece(states) for _, states in both]


def _piece(states: HiddenStates) -> Piece[Float32Array]:
    # States that were kept while a draft was written have no prompt of their own, and cost nothing.
    cost = Cost(model_calls=int(states.prompt_tokens > 0), tokens_in=states.prompt_tokens)
    return Piece(states.states, cost)
