"""How an answer is written, and what is written: the values of `rgate_integrations.models.writing`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_CONTEXT = 2_048
FinishReason = Literal["stop", "length"]
"""Why an answer ended: by itself or at a stop sequence, or because it was long enough."""


@dataclass(frozen=True)
class WritingOptions:
    """How an answer is written.

    Attributes:
        tokens: Maximum number of tokens, at least 1; None is as many as the model's context holds.
        stop: Texts that end the answer, and are no part of it.
        temperature: 0 is greedy; above that, tokens are drawn.
        seed: Of the draw; None draws another answer each time.
        likeliest: How many of the likeliest tokens are given in each place.
        layers: Layers whose hidden states are kept.
    """

    tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    likeliest: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class WrittenToken:
    """A token of an answer.

    Attributes:
        text: The text that it adds; empty where a character is not complete yet.
        logprob: Its log-probability, <= 0.
        likeliest: The likeliest tokens in its place with their log-probabilities, the likeliest first.
    """

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class WrittenPiece:
    """A part of an answer.

    Attributes:
        text: Its text, without a stop sequence.
        tokens: The tokens that were written for it.
    """

    text: str
    tokens: tuple[WrittenToken, ...]


def context_of(model: Any) -> int:
    """Return the context of a model of transformers; a guess where it does not say."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or _CONTEXT)
