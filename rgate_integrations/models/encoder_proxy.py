"""The encoder as a proxy: what the shipped heads read of a request, in any language."""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import HasStates, HiddenStates, RequestStates, Values
from rgate_integrations.models.download import fetch_path
from rgate_integrations.models.encoder import (
    ENCODER,
    FINGERPRINT,
    STATES,
    Encoder,
    join_segments,
    shared_encoder,
)
from rgate_integrations.models.encoder_file import LAYERS
from rgate_integrations.models.pooling import PooledLayer, RequestLayers, layer_numbers
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.segments import Segmented

_MAX_HISTORY = 768
"""Tokens of what was said before; of more the end is read."""


class EncoderProxy(HasStates):
    """multilingual-e5-small as far as gates read it: `Encoder`, loaded when it is first used.

    It reads requests by themselves, without a prompt, and no begun answers. It neither writes nor scores.

    Attributes:
        max_batch_size: How many requests share a pass.
    """

    name = ENCODER
    fingerprint = FINGERPRINT
    num_layers = LAYERS
    question_layers = STATES
    max_batch_size = 16

    @property
    def encoder(self) -> Encoder:
        """The encoder, shared in the process.

        Raises:
            ModelLoadError: It is not downloaded, or cannot be loaded.
        """
        return shared_encoder(fetch_path(ENCODER, "gate's model"))

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states of questions; see `HasStates.hidden`.

        Raises:
            EvidenceError: There are drafts, which it does not read, or other states than means over the question.
        """
        if drafts is not None:
            raise EvidenceError(
                f"{ENCODER} reads questions, and no begun answers.",
                hint="Use a gate for begun answers, such as answer, or proxy='smollm2-135m-instruct'.",
            )
        numbers = _means(layers)
        read = self.encoder.encode([" ".join(each["question"].split()) for each in values], layers=numbers)
        return [HiddenStates(_in_order(each.whole, layers, numbers), each.tokens) for each in read]

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Pool hidden states of requests and of their segments in one pass; see `HasStates.request_states`."""
        numbers = _means(layers.every)
        encoder = self.encoder
        read_texts, parts = [], []
        for text in texts:
            before = encoder.keep_end(text.history, _MAX_HISTORY)
            request, ranges = join_segments(text.lines)
            moved = [(begin + len(before), end + len(before)) for begin, end in ranges]
            read_texts.append(before + request)
            # What was said before counts through the attention of what was said last.
            parts.append([(len(before), len(before) + len(request)), *moved] if before else moved)
        results = []
        for text, each in zip(texts, encoder.encode(read_texts, parts, layers=numbers), strict=True):
            whole, segments = each.whole, each.parts
            if len(segments) > len(text.segments):
                whole, segments = segments[0], segments[1:]
            results.append(
                RequestStates(
                    _in_order(whole, layers.whole, numbers),
                    _in_order(segments, layers.segments, numbers),
                    each.tokens,
                )
            )
        return results

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        return self.encoder.truncate(text, tokens)


def _means(layers: Sequence[PooledLayer]) -> list[int]:
    """Return the numbers of the layers that are pooled, in order.

    Raises:
        EvidenceError: Something else than means over a question is asked for.
    """
    for layer, span, pooling in layers:
        if not 0 < layer <= LAYERS or (span, pooling) != ("question", "mean"):
            raise EvidenceError(
                f"{ENCODER} gives the mean over a question of layers 1 to {LAYERS}, not {(layer, span, pooling)}."
            )
    return layer_numbers(layers)


def _in_order(pooled: Float32Array, layers: Sequence[PooledLayer], numbers: Sequence[int]) -> Float32Array:
    """Return the layers that are asked for of what was pooled, whose next to last axis is the layer."""
    chosen: Float32Array = pooled[..., [numbers.index(layer) for layer, _, _ in layers], :]
    return chosen
