"""Batches as a model takes them: left padding, position ids, and a prompt prefix whose keys and values are cached.

The columns of a batch, for rows of two and four tokens after a shared prefix of three::

    token ids      P P P _ _ a b        mask  1 1 1 0 0 1 1        positions  0 1 2 2 2 3 4
                   P P P c d e f              1 1 1 1 1 1 1                   0 1 2 3 4 5 6

Padding stands on the left of what differs, so that all rows end in the last column: there the next token of every
row is read, and new tokens are appended to all rows alike. Positions count tokens, not columns, so that a token has
the position that it would have in a batch of its own, and the padded columns are masked out of the attention.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

LayerStates: TypeAlias = Mapping[int, torch.Tensor]
"""Hidden states by layer, each (rows, columns, hidden size) or, of one row, (tokens, hidden size)."""

_CHEAP = 128
"""Padding to so many tokens costs less than another pass."""


@dataclass(frozen=True)
class CachedPrefix:
    """Tokens with which all rows of a batch begin, and what the model computed for them.

    Attributes:
        ids: The tokens; empty if nothing is shared.
        cache: Their keys and values, for one row; None if nothing is shared. A model that would append to it gets a
            copy; see `Batch.of`.
        states: Their hidden states by layer, each (tokens, hidden size), for the layers that were asked for.
    """

    ids: tuple[int, ...] = ()
    cache: Any = None
    states: LayerStates = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Rows as a model takes them: the cached prefix, padding, and the rest of each row.

    Attributes:
        prefix: What all rows begin with.
        ids: Token ids, shape (rows, prefix + width), where width is the length of the longest rest.
        mask: 1 where there is a token, 0 for padding; the same shape.
        cache: The prefix's keys and values, or None. Where the model appends to it, there is one copy a row, and a
            batch is read once.
    """

    prefix: CachedPrefix
    ids: torch.Tensor
    mask: torch.Tensor
    cache: Any

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        prefix: CachedPrefix,
        pad_token_id: int,
        device: torch.device,
    ) -> Batch:
        """Make a batch of rows of token ids.

        Args:
            rows: The rows, all of which begin with the prefix.
            prefix: What they share.
            pad_token_id: Stands on the left of shorter rows.
            device: Where the model is.
        """
        rests = [row[len(prefix.ids) :] for row in rows]
        ids, mask = pad_left(rests, pad_token_id, device)
        if not prefix.ids:
            return cls(prefix, ids, mask, None)
        # A copy, because repeating it and every forward pass change a cache in place.
        cache = copy.deepcopy(prefix.cache)
        cache.batch_repeat_interleave(len(rows))
        prefix_ids = torch.tensor([prefix.ids], device=device).expand(len(rows), -1)
        prefix_mask = torch.ones_like(prefix_ids)
        return cls(prefix, torch.cat([prefix_ids, ids], dim=1), torch.cat([prefix_mask, mask], dim=1), cache)

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of one forward pass over what is not in the cache.

        The mask covers the cached columns too, ids and positions only the new ones.
        """
        cached = len(self.prefix.ids)
        return {
            "input_ids": self.ids[:, cached:],
            "attention_mask": self.mask,
            "position_ids": positions(self.mask)[:, cached:],
            "use_cache": self.cache is not None,
            **self.cache_argument,
        }

    @property
    def cache_argument(self) -> dict[str, Any]:
        """The cache as an argument, if there is one."""
        return {} if self.cache is None else {"past_key_values": self.cache}

    def row_states(self, states: LayerStates, row: int, prompt: int, written: int = 0) -> LayerStates:
        """Return one row's states without padding, each (prompt + written, hidden size).

        Args:
            states: What was collected in the columns after the prefix, while this batch was read and continued.
            row: Which row.
            prompt: Length of the row in this batch, with the prefix.
            written: How many tokens were written after it.
        """
        cached = len(self.prefix.ids)
        width = self.ids.shape[1] - cached
        first = width - (prompt - cached)  # the columns before it are padding
        found = {}
        for layer, columns in states.items():
            own = columns[row, first : width + written]
            found[layer] = torch.cat([self.prefix.states[layer], own]) if cached else own
        return found


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the left; returns token ids and a mask that is 0 where padded, each (rows, longest)."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return each column's position id: how many tokens, not columns, stand before it in its row."""
    # Padding at the start of a row would have position -1. It is masked out, but must be in the table.
    return (mask.cumsum(-1) - 1).clamp(min=0)


def group_by_length(lengths: Sequence[int], size: int, tokens: int) -> list[list[int]]:
    """Group items of like length, longest first, so that little is spent on padding.

    A long item shares no batch with one of less than half its length: one long question would cost fifteen short
    ones the time of as many long ones. Items of up to `_CHEAP` tokens are not told apart.

    Args:
        lengths: Length of each item in tokens.
        size: Maximum number of items in a batch.
        tokens: Maximum number of tokens in a batch, padding included; one item is always allowed.

    Returns:
        The items' indices, a list a batch.
    """
    groups: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for index in longest_first:
        if groups:
            group = groups[-1]
            longest = lengths[group[0]]  # all others are padded to it
            alike = longest <= _CHEAP or 2 * lengths[index] >= longest
            if alike and len(group) < size and (len(group) + 1) * longest <= tokens:
                group.append(index)
                continue
        groups.append([index])
    return groups
