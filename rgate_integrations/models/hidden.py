"""Hidden states of some layers: read in a pass that ends at the last of them, or watched while a draft is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rgate_integrations.models.base import PooledLayer, Span
from rgate_integrations.runtime.arrays import Float32Array


class _StopForward(Exception):
    """Ends a forward pass early; not an error."""


class _Watch:
    """A hook before one layer that keeps what goes into it in passes of this thread.

    Others may use the model between two passes of a text that is written.

    Args:
        kept: Where to put each tensor.
        stop: End the forward pass here.
    """

    def __init__(self, kept: list[torch.Tensor], *, stop: bool) -> None:
        self.kept = kept
        self.stop = stop
        self.thread = threading.get_ident()

    def __call__(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        self.kept.append(arguments[0] if arguments else keywords["hidden_states"])
        if self.stop:
            raise _StopForward


def layer_numbers(layers: Sequence[PooledLayer]) -> tuple[int, ...]:
    """Return which layers are pooled, each once, in order."""
    return tuple(sorted({layer for layer, _, _ in layers}))


def can_watch(decoder: Any, numbers: Sequence[int]) -> bool:
    """Return whether the states of these layers pass between two layers of the decoder.

    Those of the last layer do not: transformers counts them after the final norm.
    """
    return max(numbers, default=0) < len(getattr(decoder, "layers", ()))


@contextmanager
def watching(
    decoder: Any, numbers: Sequence[int], *, stop: bool = False
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Collect what goes into some layers of a decoder, a tensor (rows, tokens, hidden size) a forward pass.

    Args:
        decoder: The model without its language model head.
        numbers: Layer n's states are the input of layer n, counted from 0; 0 is the embedding.
        stop: End each forward pass at the highest of them; the caller sees it end without a result.
    """
    found: dict[int, list[torch.Tensor]] = {number: [] for number in numbers}
    handles = []
    for number, kept in found.items():
        watch = _Watch(kept, stop=stop and number == max(found))
        handles.append(decoder.layers[number].register_forward_pre_hook(watch, with_kwargs=True))
    try:
        yield found
    except _StopForward:
        pass
    finally:
        for handle in handles:
            handle.remove()


def layer_states(decoder: Any, inputs: Mapping[str, Any], numbers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Run a decoder as far as is needed; returns states by layer, each of shape (rows, tokens, hidden size)."""
    if not can_watch(decoder, numbers):
        states = decoder(**inputs, output_hidden_states=True).hidden_states
        return {number: states[number] for number in numbers}
    with watching(decoder, numbers, stop=True) as found:
        decoder(**inputs)
    return {number: passes[0] for number, passes in found.items()}


def pooled(
    states: Mapping[int, torch.Tensor], spans: Mapping[Span, range], layers: Sequence[PooledLayer]
) -> Float32Array:
    """Pool the states of one text by layer, each (tokens, hidden size), to shape (layers, hidden size)."""
    vectors = []
    for layer, span, pooling in layers:
        tokens = states[layer][spans[span].start : spans[span].stop].float()
        vectors.append(tokens.mean(0) if pooling == "mean" else tokens[-1])
    return torch.stack(vectors).cpu().numpy()


def spans_of(question: range, prompt: int, draft: int) -> dict[Span, range]:
    """Return the positions of each span; without a draft, that span is the prompt.

    Args:
        question: Positions of the question in the prompt; empty if it was not found.
        prompt: Length of the prompt.
        draft: Length of the draft.
    """
    whole_prompt = range(prompt)
    return {
        "question": question or whole_prompt,
        "prompt": whole_prompt,
        "draft": range(prompt, prompt + draft) or whole_prompt,
        "all": range(prompt + draft),
    }
