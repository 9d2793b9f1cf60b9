"""Pooling of hidden states: which layers, over which tokens, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Pooling = Literal["mean", "last"]
"""How to reduce the states of a span to one vector."""
Span = Literal["question", "prompt", "draft", "all"]
"""The tokens whose states are pooled; see `PooledLayer`."""
_DEPTH: Mapping[Span, tuple[float, float]] = {"question": (0.47, 0.60), "draft": (0.47, 0.74)}


class PooledLayer(NamedTuple):
    """Which hidden states to pool to one vector, and how; a plain tuple is also accepted.

    Attributes:
        layer: The layer, from 0 (the embedding) to the number of layers (the output after the final norm). An
            `EncoderProxy` has layers 1 to 16.
        span: The tokens of the ``"question"``, of the whole ``"prompt"``, of the ``"draft"``, or of ``"all"``: prompt
            and draft. Prompts include control tokens. Without a draft, ``"draft"`` means the whole prompt; so does
            ``"question"`` if the question is not found in the prompt.
        pooling: ``"mean"`` over the span, or its ``"last"`` token.
    """

    layer: int
    span: Span
    pooling: Pooling


@dataclass(frozen=True)
class RequestLayers:
    """Which layers to pool for a request, and how.

    Attributes:
        whole: Layers to pool over the request, without the earlier turns.
        segments: Layers to pool over each segment, the same for all; their span must be ``"question"``, which here
            means the segment.
    """

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()

    @property
    def every(self) -> tuple[PooledLayer, ...]:
        """All layers to pool: those for the whole request, then those for segments."""
        return (*self.whole, *self.segments)


def layer_numbers(layers: Iterable[PooledLayer]) -> list[int]:
    """Return the distinct layer numbers in ascending order."""
    return sorted({layer for layer, _, _ in layers})


def middle_layers(layers: int, span: Span = "draft") -> tuple[int, ...]:
    """Return the numbers of every second layer in the middle of a model, where linear probes work best.

    Args:
        layers: The model's number of layers.
        span: What the probe reads: ``"question"`` or ``"draft"``. For drafts, the range ends at a higher layer.
    """
    first, last = _DEPTH[span]
    return tuple(range(round(layers * first), round(layers * last) + 1, 2))


def pool_states(
    states: Mapping[int, Any], question: range, prompt: int, draft: int, layers: Sequence[PooledLayer]
) -> list[Any]:
    """Return one vector per item of ``layers``, shape (hidden size,), pooled from the states of one text.

    Args:
        states: Arrays or tensors by layer number, each of shape (tokens, hidden size).
        question: Positions of the question in the prompt; if empty, its span is the prompt.
        prompt: Length of the prompt in tokens.
        draft: Length of the draft in tokens; if 0, its span is the prompt.
        layers: The states to return.
    """
    spans = {
        "question": question or range(prompt),
        "prompt": range(prompt),
        "draft": range(prompt, prompt + draft) or range(prompt),
        "all": range(prompt + draft),
    }
    vectors = []
    for layer, span, pooling in layers:
        tokens = states[layer][spans[span].start : spans[span].stop]
        vectors.append(tokens.mean(0) if pooling == "mean" else tokens[-1])
    return vectors
