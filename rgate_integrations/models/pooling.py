"""Which hidden states are pooled, over which tokens, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Pooling = Literal["mean", "last"]
"""How the states of a span are reduced to one vector."""
Span = Literal["question", "prompt", "draft", "all"]
"""Whose states; see `PooledLayer`."""
_DEPTH: Mapping[Span, tuple[float, float]] = {"question": (0.47, 0.60), "draft": (0.47, 0.74)}


class PooledLayer(NamedTuple):
    """Hidden states of one layer, pooled to a single vector; a plain tuple is accepted, too.

    Attributes:
        layer: Which layer, from 0 (the embedding) to the number of layers (the output after the final norm).
        span: The tokens of the question, of the prompt around it, of the draft, or of the whole text; the last three
            with control tokens. Without a draft, ``"draft"`` is the whole prompt.
        pooling: ``"mean"`` over the span, or its ``"last"`` token.
    """

    layer: int
    span: Span
    pooling: Pooling


VECTOR = PooledLayer(12, "question", "mean")
"""The encoder's states whose direction is its sentence vector."""


@dataclass(frozen=True)
class RequestLayers:
    """The states that are pooled of a request.

    Attributes:
        whole: Over the request, without the earlier turns.
        segments: Over each segment; their span is ``"question"``.
    """

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()

    @property
    def every(self) -> tuple[PooledLayer, ...]:
        """The states of both."""
        return (*self.whole, *self.segments)


def layer_numbers(layers: Iterable[PooledLayer]) -> list[int]:
    """Return the numbers of the layers, each once, ascending."""
    return sorted({layer for layer, _, _ in layers})


def middle_layers(layers: int, span: Span = "draft") -> tuple[int, ...]:
    """Return the middle layers of a model, where probes work best (measured: docs/benchmarks/gate_quality.md)."""
    first, last = _DEPTH[span]
    return tuple(range(round(layers * first), round(layers * last) + 1, 2))


def pool_states(
    states: Mapping[int, Any], question: range, prompt: int, draft: int, layers: Sequence[PooledLayer]
) -> list[Any]:
    """Pool the states of one text, to one vector a layer.

    Args:
        states: By number of the layer, each (tokens, hidden size): arrays or tensors.
        question: Positions of the question in the prompt; empty if it was not found.
        prompt: Length of the prompt.
        draft: Length of the draft; without one, its span is the prompt.
        layers: Which states.
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
