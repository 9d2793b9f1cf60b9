"""Keeps what a model computed for the prefixes that its prompts share, so that each is read once in a process."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rgate_integrations.models.batch import CachedPrefix

MAX_PREFIXES = 8
"""So many prefixes are kept, each with the keys and values of all layers."""


class PrefixCache:
    """The prefixes of one model that were used last. Not safe for threads: its proxy holds a lock.

    Args:
        model: A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._kept: OrderedDict[tuple[tuple[int, ...], str | None, tuple[int, ...]], CachedPrefix] = (
            OrderedDict()
        )

    def get(self, ids: tuple[int, ...], adapter: str | None, layers: tuple[int, ...]) -> CachedPrefix:
        """Return a prefix, read now if it is not kept; an empty one where the model's cache cannot be shared.

        Args:
            ids: Its tokens, at least one.
            adapter: The adapter that is switched on: keys and values of another one, or of none, are others.
            layers: Whose hidden states are wanted.
        """
        key = (ids, adapter, layers)
        if key not in self._kept:
            self._kept[key] = self._read(ids, layers)
            if len(self._kept) > MAX_PREFIXES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def __len__(self) -> int:
        """How many prefixes are kept with their keys and values."""
        return sum(bool(prefix.ids) for prefix in self._kept.values())

    def _read(self, ids: tuple[int, ...], layers: tuple[int, ...]) -> CachedPrefix:
        output = self.model.base_model(
            torch.tensor([ids], device=self.model.device), use_cache=True, output_hidden_states=bool(layers)
        )
        if not _can_be_shared(output.past_key_values):
            return CachedPrefix()
        states = {layer: output.hidden_states[layer][0] for layer in layers}
        return CachedPrefix(ids, output.past_key_values, states)


def _can_be_shared(cache: Any) -> bool:
    """Return whether a cache keeps every position of every layer.

    Those of sliding windows drop positions, and those of recurrent models are one state of the whole text: neither
    can be continued after padding.
    """
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
