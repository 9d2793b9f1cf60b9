"""Batches of rows of tokens: padding, positions, which rows share one, and how the next token is chosen.

The columns of a batch, for rows of two and four tokens::

    token ids      _ _ a b        mask  0 0 1 1        positions  0 0 0 1
                   c d e f              1 1 1 1                   0 1 2 3

Padding stands on the left, so that all rows end in the last column: there the next token of every row is read, and
new tokens are appended to all rows alike. Positions count tokens, not columns, so that a token has the position that
it would have in a batch of its own, and padded columns are masked out of the attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_SHORT = 128
"""Padding up to so many tokens costs less than another pass."""


class ChosenTokens(NamedTuple):
    """One token a row: its id and its log-probability, each of shape (rows,)."""

    ids: torch.Tensor
    logprobs: torch.Tensor


def pad_left(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the left; returns token ids and a mask that is 0 where padded, each (rows, longest)."""
    longest = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        padding = longest - len(row)
        ids.append([pad_token_id] * padding + list(row))
        mask.append([0] * padding + [1] * len(row))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return each column's position id: how many tokens, not columns, stand before it in its row."""
    # Padding at the start of a row would have position -1. It is masked out, but must be in the table.
    return (mask.cumsum(-1) - 1).clamp(min=0)


def group_by_length(lengths: Sequence[int], size: int, tokens: int) -> list[list[int]]:
    """Group items of like length, longest first, so that little is spent on padding.

    A long item shares no batch with one of less than half its length: one long question would cost fifteen short
    ones the time of as many long ones. Items of up to 128 tokens are not told apart.

    Args:
        lengths: Length of each item in tokens.
        size: Maximum number of items in a batch.
        tokens: Maximum number of tokens in a batch, padding included; one item is always allowed.

    Returns:
        The items' indices, a list a batch.
    """
    groups: list[list[int]] = []
    longest = 0  # of the last group: all its others are padded to it
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        alike = longest <= _SHORT or 2 * lengths[index] >= longest
        if groups and alike and len(groups[-1]) < size and (len(groups[-1]) + 1) * longest <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def choose_tokens(
    logits: torch.Tensor, temperature: float = 0.0, generators: Sequence[torch.Generator] = ()
) -> ChosenTokens:
    """Choose the next token of each row.

    Sampling adds Gumbel noise to the scaled logits and takes the maximum, which draws exactly from the softmax. Each
    row has a generator of its own, so a sample does not depend on the batch that it happens to be in.

    Args:
        logits: Shape (rows, vocabulary).
        temperature: Divides the logits; 0 is greedy.
        generators: One a row, unless it is greedy.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ranked = logprobs
    if temperature > 0:
        noise = [torch.rand(logits.shape[-1], generator=each, device=logits.device) for each in generators]
        uniform = torch.stack(noise).clamp(1e-20, 1 - 1e-7)  # neither logarithm is infinite
        ranked = logprobs / temperature - torch.log(-torch.log(uniform))
    ids = ranked.argmax(dim=-1)
    chosen = logprobs.gather(-1, ids[:, None]).squeeze(-1)
    return ChosenTokens(ids, chosen.clamp(max=0.0))


def row_seed(seed: int, sample: int, ids: Sequence[int]) -> int:
    """Return the seed of one sampled answer: a hash of seed, number of the sample, and prompt."""
    digest = hashlib.sha256(f"{seed}|{sample}|{','.join(map(str, ids))}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


# --- hidden states -------------------------------------------------------------------------------------------


class _StopForward(Exception):
    """Ends a forward pass early; not an error."""


def can_watch(decoder: Any, layers: Collection[int]) -> bool:
    """Return whether the states of these layers pass between two layers of the decoder.

    Those of the last layer do not: transformers counts them after the final norm.
    """
    count = len(getattr(decoder, "layers", ()))
    return all(0 <= layer < count for layer in layers)


@contextmanager
def watch_layers(
    decoder: Any, layers: Collection[int], *, stop: bool = False
) -> Iterator[dict[int, torch.Tensor]]:
    """Collect what goes into some layers in one forward pass, each (rows, tokens, hidden size).

    Args:
        decoder: The model without its language model head.
        layers: Layer n's states are the input of layer n, counted from 0; 0 is the embedding.
        stop: End the pass at the highest of them; the caller sees it end without a result.
    """
    seen: dict[int, torch.Tensor] = {}
    handles = []
    for layer in layers:

        def keep(
            module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], layer: int = layer
        ) -> None:
            seen[layer] = arguments[0] if arguments else keywords["hidden_states"]
            if stop and layer == max(layers):
                raise _StopForward

        handles.append(decoder.layers[layer].register_forward_pre_hook(keep, with_kwargs=True))
    try:
        yield seen
    except _StopForward:
        pass
    finally:
        for handle in handles:
            handle.remove()


def layer_states(decoder: Any, inputs: Mapping[str, Any], layers: Collection[int]) -> dict[int, torch.Tensor]:
    """Run a decoder as far as is needed; returns states by layer, each of shape (rows, tokens, hidden size)."""
    if not can_watch(decoder, layers):
        states = decoder(**inputs, output_hidden_states=True).hidden_states
        return {layer: states[layer] for layer in layers}
    with watch_layers(decoder, layers, stop=True) as seen:
        decoder(**inputs)
    return seen
