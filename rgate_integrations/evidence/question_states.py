"""Pooled hidden states of a question alone, whatever white space it was typed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rgate_integrations.arrays import Float32Array
from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.hidden import HiddenSpec
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.proxy.base import PooledLayer, Span, Values

_WITHOUT_DRAFT: Mapping[Span, Span] = {
    "question": "question",
    "prompt": "prompt",
    "draft": "prompt",
    "all": "prompt",
}
"""What each span is where there is no draft."""


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
        other = self._read_with_a_draft(context, values)
        if other is None or other.draft is None:
            return self._read(context, values, None, self.layers)
        # A question's states do not change with what follows it, so one pass serves both.
        count = len(self.layers)
        alone = [PooledLayer(layer, _WITHOUT_DRAFT[span], pooling) for layer, span, pooling in self.layers]
        both = self._read(context, values, context.get(other.draft), (*alone, *other.layers))
        context.also(other, [Piece(each.value[count:]) for each in both])  # its cost is noted here
        return [replace(each, value=each.value[:count]) for each in both]

    def _read(
        self,
        context: Context,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[Piece[Float32Array]]:
        found = context.proxy.hidden(self.prompt, values, drafts, layers)
        pieces = []
        for each in found:
            read = int(each.prompt_tokens > 0)  # states that were kept while a draft was written cost nothing
            pieces.append(Piece(each.states, Cost(model_calls=read, tokens_in=each.prompt_tokens)))
        return pieces

    def _read_with_a_draft(self, context: Context, values: Sequence[Values]) -> HiddenSpec | None:
        """Return the evidence for which the same questions are read with given drafts, if there is one."""
        for each, fields in zip(context.inputs, values, strict=True):
            if each.draft is None or each.question != fields["question"]:
                return None
        for other in context.planned:
            if isinstance(other, HiddenSpec) and other.draft is not None and other.prompt == self.prompt:
                return other
        return None
