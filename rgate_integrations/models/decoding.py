"""Greedy and sampled decoding on transformers' ``generate``, with the probabilities of what was chosen."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits, > 0.
        seeds: A seed a row.
    """

    temperature: float
    seeds: Sequence[int]


class Recorder(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Records log-probability, entropy and margin of each chosen token, and chooses sampled tokens.

    Sampling adds Gumbel noise to the scaled logits and takes the maximum, which draws exactly from the
    softmax (Gumbel-max). Each row has a generator of its own, so a sample depends on seed and prompt alone,
    not on the batch it happens to be in, which ``do_sample=True`` cannot offer.

    Args:
        sampling: Temperature and seeds, or None for greedy decoding.
        device: Device of the logits.
    """

    def __init__(self, sampling: Sampling | None, device: torch.device) -> None:
        self.sampling = sampling
        self.generators: list[torch.Generator] = []
        if sampling is not None:
            self.generators = [torch.Generator(device).manual_seed(seed) for seed in sampling.seeds]
        self.logprobs: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []
        self.margins: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record one step and return the scores whose maximum is the token to take."""
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        ranked = logprobs
        if self.sampling is not None:
            ranked = logprobs / self.sampling.temperature + self._gumbel_noise(logprobs)
        chosen = ranked.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        self.entropies.append(entropy(logprobs))
        self.margins.append(margin(logprobs))
        return ranked

    def _gumbel_noise(self, like: torch.Tensor) -> torch.Tensor:
        vocabulary = like.shape[-1]
        rows = [torch.rand(vocabulary, generator=g, device=like.device) for g in self.generators]
        uniform = torch.stack(rows).clamp(1e-20, 1 - 1e-7)  # neither logarithm is infinite
        return -torch.log(-torch.log(uniform))


class StopAt(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends a row at a token out of a set, given as a boolean mask over the vocabulary."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether it has ended."""
        return self.mask[input_ids[:, -1]]


class Pause(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends no row, and gives others the chance to use the model after each token.

    Args:
        pause: Called after each token; what it raises ends the writing.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return for each row that it goes on."""
        self.pause()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class StopWhen(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends all rows once an event is set, by whichever thread."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether it has ended."""
        return torch.full((len(input_ids),), self.event.is_set(), dtype=torch.bool, device=input_ids.device)


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats over the last dimension."""
    # A token that is impossible has log-probability -inf, and 0 * -inf would be nan.
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(dim=-1)


def margin(logprobs: torch.Tensor) -> torch.Tensor:
    """Return how far the likeliest token is ahead of the second, over the last dimension; at least 0."""
    first, second = logprobs.clamp(min=-1e4).topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def row_seed(seed: int, sample: int, ids: Sequence[int]) -> int:
    """Return the seed of one sampled answer: a hash of seed, number of the sample, and prompt."""
    digest = hashlib.sha256(f"{seed}|{sample}|{','.join(map(str, ids))}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
