"""What a local model writes: how it is told to, what comes out, and which answers are still held. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

FinishReason = Literal["stop", "length"]
"""Why an answer ended: by itself or at a stop sequence, or because it was long enough."""


@dataclass(frozen=True)
class GenerationOptions:
    """How an answer is written.

    Attributes:
        tokens: Maximum number of tokens, at least 1; None is as many as the model's context holds.
        stop: Texts that end the answer, and are no part of it.
        temperature: 0 is greedy; above that, tokens are drawn.
        seed: Of the draw; None draws another answer each time.
        top_logprobs: How many of the likeliest tokens are given in each place.
        layers: Layers whose hidden states are kept.
    """

    tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    top_logprobs: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class GeneratedToken:
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
class TextChunk:
    """A part of an answer.

    Attributes:
        text: Its text, without a stop sequence.
        tokens: The tokens that were written for it.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]


# Weak: an answer is found as long as somebody holds it, who writes it or who judges it.
_live: WeakValueDictionary[str, object] = WeakValueDictionary()


def register_answer(response_id: str, answer: object) -> None:
    """Let a gate in this process find an answer by the id of its response, so that it need not read it again."""
    _live[response_id] = answer


def find_answer(response_id: str) -> object | None:
    """Return the answer with that id; None for those of other models, and those that nobody holds any more."""
    return _live.get(response_id)
