"""Hidden states of some layers: read in a pass that ends at the last of them, or watched while a draft is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rgate_integrations.proxy.base import PooledLayer, Span


class _Enough(Exception):
    """Ends a forward pass early; not an error."""


def can_watch(model: Any, layers: Sequence[int]) -> bool:
    """Return whether the states of these layers pass between two layers of the decoder ``model``.

    Those of the last layer do not: transformers counts them after the final norm.
    """
    return max(layers, default=0) < len(getattr(model, "layers", ()))


@contextmanager
def watching(model: Any, layers: Sequence[int], *, stop: bool = False) -> Iterator[dict[int, list[Any]]]:
    """Collect what goes into some layers of a decoder, a tensor (rows, tokens, hidden size) a forward pass.

    Args:
        model: The decoder without its language model head.
        layers: Layer n's states are the input of layer n, counted from 0; 0 is the embedding.
        stop: End each forward pass at the highest of them; the caller sees it end without a result.
    """
    found: dict[int, list[Any]] = {n: [] for n in layers}

    def hook(n: int) -> Any:
        def keep(module: Any, arguments: Any, keywords: Any) -> None:
            found[n].append(arguments[0] if arguments else keywords["hidden_states"])
            if stop and n == max(found):
                raise _Enough

        return keep

    handles = [model.layers[n].register_forward_pre_hook(hook(n), with_kwargs=True) for n in found]
    try:
        yield found
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()


def layer_states(model: Any, inputs: Mapping[str, Any], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Run a decoder as far as is needed; returns states by layer, each of shape (rows, tokens, hidden size)."""
    if not can_watch(model, layers):
        states = model(**inputs, output_hidden_states=True).hidden_states
        return {n: states[n] for n in layers}
    with watching(model, layers, stop=True) as found:
        model(**inputs)
    return {n: parts[0] for n, parts in found.items()}


def pooled(
    states: Mapping[int, torch.Tensor], spans: Mapping[Span, range], layers: Sequence[PooledLayer]
) -> npt.NDArray[np.float32]:
    """Pool the states of one text by layer, each (tokens, hidden size), to shape (layers, hidden size)."""
    parts = []
    for layer, span, pooling in layers:
        part = states[layer][spans[span].start : spans[span].stop].float()
        parts.append(part.mean(0) if pooling == "mean" else part[-1])
    return torch.stack(parts).cpu().numpy()


def spans_of(question: range, prompt: int, draft: int) -> dict[Span, range]:
    """Return the positions of each span; without a draft, that span is the prompt.

    Args:
        question: Positions of the question in the prompt; empty if it was not found.
        prompt: Length of the prompt.
        draft: Length of the draft.
    """
    return {
        "question": question or range(prompt),
        "draft": range(prompt, prompt + draft) or range(prompt),
        "all": range(prompt + draft),
    }
