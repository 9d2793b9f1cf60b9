"""Pooled hidden states of a request and of its segments, read in one pass, whatever white space it was typed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.model_outputs import HiddenSpec
from rgate_integrations.models.base import PooledLayer, RequestLayers, Segmented
from rgate_integrations.models.segments import layout
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


@dataclass(frozen=True)
class ReadRequest:
    """A request as it was read.

    Attributes:
        texts: Its segments, in order.
        whole: Pooled hidden states of all of it, shape (layers, hidden size).
        segments: Those of each segment, shape (segments, layers, hidden size).
        layout: How they stand in the request, shape (segments, 11); see `rgate_integrations.models.segments.layout`.
    """

    texts: tuple[str, ...]
    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)
    layout: Float32Array = field(repr=False)


@dataclass(frozen=True)
class RequestSpec(EvidenceSpec[ReadRequest]):
    """Pooled hidden states of a request, and of each of its segments; a given draft is not read.

    Attributes:
        whole: How the request is pooled: (layer, span, pooling) each; layer 0 is the embedding.
        segments: How a segment is pooled; the span is ``"question"``.
        prompt: The prompt that the request stands in.
    """

    reads_history: ClassVar[bool] = True

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()
    prompt: PromptTemplate = ANSWER

    def compute(self, context: Context) -> list[Piece[ReadRequest]]:
        """Read the requests, with their begun answers if another gate reads those: one pass serves both."""
        texts = [Segmented.of(each.question, each.history) for each in context.inputs]
        layers = RequestLayers(self.whole, self.segments)
        drafts: Sequence[Draft] | None = None
        other = _read_with_a_draft(self.prompt, context)
        if other is not None and other.draft is not None:
            drafts = context.get(other.draft)
            layers = RequestLayers(self.whole, self.segments, other.layers)
        found = context.proxy.request_states(self.prompt, texts, drafts, layers)
        if other is not None:  # what it cost is noted below
            context.also(other, [Piece(each.draft) for each in found if each.draft is not None])
        pieces = []
        for inputs, text, each in zip(context.inputs, texts, found, strict=True):
            read = int(each.prompt_tokens > 0)  # states that were kept while a draft was written cost nothing
            value = ReadRequest(text.segments, each.whole, each.segments, layout(inputs.question))
            pieces.append(Piece(value, Cost(model_calls=read, tokens_in=each.prompt_tokens)))
        return pieces


def _read_with_a_draft(prompt: PromptTemplate, context: Context) -> HiddenSpec | None:
    """Return the evidence for which the same requests are read with given drafts, if there is one."""
    if any(each.draft is None or each.history for each in context.inputs):
        return None
    for other in context.planned:
        if isinstance(other, HiddenSpec) and other.draft is not None and other.prompt == prompt:
            return other
    return None
