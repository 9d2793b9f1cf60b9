"""Pooled hidden states of a question alone, whatever white space it was typed with."""

from __future__ import annotations

from dataclasses import dataclass

from rgate_integrations.arrays import Float32Array
from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.proxy.base import PooledLayer


@dataclass(frozen=True)
class QuestionStatesSpec(EvidenceSpec[Float32Array]):
    """Pooled hidden states of the question alone, shape (layers, hidden size); a given draft is not read.

    Attributes:
        layers: Which states: (layer, span, pooling) each; layer 0 is the embedding.
        prompt: The prompt that the question stands in.
    """

    layers: tuple[PooledLayer, ...]
    prompt: PromptTemplate = ANSWER

    def compute(self, context: Context) -> list[Piece[Float32Array]]:
        """Read the questions, each run of white space as one space: line breaks must not change a decision."""
        values = [{"question": " ".join(each.question.split())} for each in context.inputs]
        found = context.proxy.hidden(self.prompt, values, None, self.layers)
        return [Piece(each.states, Cost(model_calls=1, tokens_in=each.prompt_tokens)) for each in found]
