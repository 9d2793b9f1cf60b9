"""Greedy and sampled decoding on transformers' ``generate``, with the probabilities of what was chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria


class Recorder(LogitsProcessor):  # type: ignore[misc]
    """Records log-probability and entropy of each chosen token, and chooses sampled tokens.

    Sampling adds Gumbel noise to the scaled logits and takes the greatest, which draws exactly from the
    softmax (Gumbel-max). Each row has a generator of its own, so a sample depends on seed and prompt alone,
    not on the batch it happens to be in, which ``do_sample=True`` cannot offer.

    Args:
        temperature: Sampling temperature, or None for greedy decoding.
        seeds: A seed a row, for sampling.
        device: Device of the logits.
    """

    def __init__(self, temperature: float | None, seeds: Sequence[int], device: torch.device) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(s) for s in seeds]
        self.logprobs: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record one step and return the scores whose greatest element is the token to take."""
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        ranked = logprobs
        if self.temperature is not None:
            noise = torch.stack(
                [torch.rand(logprobs.shape[-1], generator=g, device=logprobs.device) for g in self.generators]
            )
            ranked = logprobs / self.temperature - torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
        chosen = ranked.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        self.entropies.append(-(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(dim=-1))
        return ranked


class StopAt(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at a token out of a set, given as a boolean mask over the vocabulary."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether it has ended."""
        return self.mask[input_ids[:, -1]]


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the left; returns token ids and a mask that is 0 where padded, each (rows, longest)."""
    longest = max(len(r) for r in rows)
    ids = torch.tensor([[pad] * (longest - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


def row_seed(seed: int, sample: int, ids: Sequence[int]) -> int:
    """Return the seed of one sampled answer: a hash of seed, number of the sample, and prompt."""
    digest = hashlib.sha256(f"{seed}|{sample}|{','.join(map(str, ids))}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def batches(lengths: Sequence[int], size: int, tokens: int) -> list[list[int]]:
    """Group items of like length, longest first, so that little is spent on padding.

    Args:
        lengths: Length of each item in tokens.
        size: Greatest number of items in a batch.
        tokens: Greatest number of tokens in a batch, padding included; one item is always allowed.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = groups and len(groups[-1]) < size and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens
        if room:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
