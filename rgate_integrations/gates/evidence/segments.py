"""Pooled hidden states of a request and of its segments, read in one pass, whatever white space it was typed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Inputs, Piece
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec
from rgate_integrations.models.base import PooledLayer, RequestLayers, Segmented
from rgate_integrations.models.segments import layout, segments
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array

_SHORT_REPLY = 5  # words


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
        read = [_with_what_it_answers(each) for each in context.inputs]
        texts = [Segmented.of(text, history) for text, history in read]
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
        for (text, _), segmented, each in zip(read, texts, found, strict=True):
            calls = int(
                each.prompt_tokens > 0
            )  # states that were kept while a draft was written cost nothing
            value = ReadRequest(segmented.segments, each.whole, each.segments, layout(text))
            pieces.append(Piece(value, Cost(model_calls=calls, tokens_in=each.prompt_tokens)))
        return pieces


def _with_what_it_answers(inputs: Inputs) -> tuple[str, Sequence[str]]:
    """Return a message and the turns before it as they are read.

    A short reply to a question is read behind that question: "Yes, please" asks for what was offered.
    """
    if not inputs.history or len(inputs.question.split()) > _SHORT_REPLY:
        return inputs.question, inputs.history
    *before, last = inputs.history
    speaker, _, said = last.partition(":")
    if speaker != "assistant" or not said.rstrip().endswith("?"):
        return inputs.question, inputs.history
    *rest, asked = segments(said)
    if rest:
        before.append(f"assistant: {' '.join(rest)}")
    return f"{asked}\n{inputs.question}", before


def _read_with_a_draft(prompt: PromptTemplate, context: Context) -> HiddenSpec | None:
    """Return the evidence for which the same requests are read with given drafts, if there is one."""
    if any(each.draft is None or each.history for each in context.inputs):
        return None
    for other in context.planned:
        if isinstance(other, HiddenSpec) and other.draft is not None and other.prompt == prompt:
            return other
    return None
