"""Log-probabilities as servers and files give them, read in one place: what is tuned is what runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

TokenLogprobs: TypeAlias = tuple[tuple[str, ...], tuple[float, ...]]
"""Tokens and the log-probability of each; both empty where there are none."""

_ROUNDING = 1e-3  # by which a log-probability may be above 0
_LEAST = -9_999.0  # what APIs send for "never"; JSON has no infinity


def as_logprob(value: float) -> float:
    """Return a natural log-probability, at most 0, and finite: "never" is -9999.

    Raises:
        ValueError: It is above 0, or infinite, or not a number. Taken for 0, it would make any answer certain.
    """
    if math.isnan(value):
        raise ValueError("a log-probability is not a number")
    if value > _ROUNDING:
        raise ValueError(f"a log-probability is at most 0, not {value}: are these probabilities?")
    return max(min(value, 0.0), _LEAST)


def read_logprobs(entries: Any) -> TokenLogprobs:
    """Read a list of what has a ``token`` and its ``logprob``, as OpenAI's API gives them.

    What cannot be read is none. Tokens without text, such as the end of the turn, are left out.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return (), ()
    try:
        for entry in entries:
            fields = entry if isinstance(entry, Mapping) else vars(entry)
            if fields["token"]:
                tokens.append(str(fields["token"]))
                logprobs.append(as_logprob(float(fields["logprob"])))
    except (KeyError, TypeError, ValueError):
        return (), ()
    return tuple(tokens), tuple(logprobs)


def message_logprobs(metadata: Any) -> TokenLogprobs:
    """Read the ``response_metadata`` of a message of LangChain."""
    given = metadata.get("logprobs") if isinstance(metadata, Mapping) else None
    return read_logprobs(given.get("content") if isinstance(given, Mapping) else given)
