"""Reads rows of tokens in a batch, and continues them token by token.

The columns of a batch, for rows of two and four tokens after a shared prefix of three::

    token ids      P P P _ _ a b        mask  1 1 1 0 0 1 1        positions  0 1 2 2 2 3 4
                   P P P c d e f              1 1 1 1 1 1 1                   0 1 2 3 4 5 6

Padding stands on the left of what differs, so that all rows end in the last column: there the next token of every
row is read, and new tokens are appended to all rows alike. Positions count tokens, not columns, so that a token has
the position that it would have in a batch of its own, and padded columns are masked out of the attention.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_SHORT = 128
"""Padding up to so many tokens costs less than another pass."""


class CachedPrefix(NamedTuple):
    """Tokens with which all rows of a batch begin, and their keys and values for one row; both may be empty."""

    ids: tuple[int, ...] = ()
    cache: Any = None


class ChosenTokens(NamedTuple):
    """One token a row, each of shape (rows,): its id, its log-probability, and entropy and margin there."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor
    margins: torch.Tensor


class Decoder:
    """Rows that are read once and continued: it holds their keys and values, and hidden states if any are wanted.

    Args:
        rows: Token ids of each row.
        pad_token_id: Stands on the left of shorter rows.
        device: Where the model is.
        layers: Whose hidden states are collected, as in `watch_layers`.
        prefix: What all rows begin with, if it was read before.

    Attributes:
        mask: 1 where there is a token, 0 for padding; shape (rows, columns).
        logits: Those after the last columns that were read, shape (rows, columns, vocabulary).
        cache: Keys and values of all columns that were read.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        pad_token_id: int,
        device: torch.device,
        layers: Collection[int] = (),
        prefix: CachedPrefix = CachedPrefix(),  # noqa: B008  a tuple
    ) -> None:
        shared = len(prefix.ids)
        self.unread, self.mask = pad_left([row[shared:] for row in rows], pad_token_id, device)
        self.logits = torch.empty(0)
        self.cache: Any = None
        self._states: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        if shared:
            # A copy, because repeating it and every forward pass change a cache in place.
            self.cache = copy.deepcopy(prefix.cache)
            self.cache.batch_repeat_interleave(len(rows))
            self.mask = torch.cat([self.mask.new_ones(len(rows), shared), self.mask], dim=1)

    def read(self, model: Any, keep: int = 1) -> None:
        """Let the model read what was appended since it last did, if anything; keep the last columns' logits."""
        width = self.unread.shape[1]
        if not width:
            return
        with watch_layers(model.base_model, self._states) as seen:
            output = model(
                input_ids=self.unread,
                # The mask covers the cached columns too, ids and positions only the new ones.
                attention_mask=self.mask,
                position_ids=positions(self.mask)[:, -width:],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        for layer, states in seen.items():
            self._states[layer].append(states)
        self.cache = output.past_key_values
        self.logits = output.logits
        self.unread = self.unread[:, :0]

    def append(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Append columns to all rows, each (rows, columns); the mask is 0 in rows that have ended."""
        self.unread = torch.cat([self.unread, ids], dim=1)
        self.mask = torch.cat([self.mask, mask.to(self.mask.dtype)], dim=1)

    def row_states(self, row: int) -> dict[int, torch.Tensor]:
        """Return the states of one row's tokens by layer, each (tokens read, hidden size), without padding."""
        found = {}
        for layer, passes in self._states.items():
            states = torch.cat([each[row] for each in passes])
            found[layer] = states[self.mask[row, : len(states)].bool()].float()
        return found


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
    return ChosenTokens(ids, chosen.clamp(max=0.0), *entropy_and_margin(logprobs))


def entropy_and_margin(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropy in nats, and how far the likeliest token is ahead of the second, over the last dimension."""
    # An impossible token has log-probability -inf, and both 0 * -inf and -inf - -inf would be nan.
    finite = logprobs.clamp(min=-1e4)
    entropy = -(logprobs.exp() * finite).sum(dim=-1)
    first, second = finite.topk(2, dim=-1).values.unbind(dim=-1)
    return entropy, first - second


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
