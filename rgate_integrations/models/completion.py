"""What a server answered, in either of OpenAI's two shapes. Whatever it is, it is data or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.logprobs import as_logprob

__all__ = ["Completion", "ServedToken", "read_completion"]


@dataclass(frozen=True)
class ServedToken:
    """A token that a server wrote.

    Attributes:
        text: The token.
        logprob: Its log-probability, at most 0.
        likeliest: The tokens that were likeliest in its place, with their log-probabilities; may be empty.
    """

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class Completion:
    """What a server wrote.

    Attributes:
        text: The text.
        tokens: Its tokens; empty if the server gives no log-probabilities.
        finished: Whether it came to its end by itself.
        prompt_tokens: Length of the prompt in tokens, at least 0; 0 if the server does not say so.
    """

    text: str
    tokens: tuple[ServedToken, ...]
    finished: bool
    prompt_tokens: int


def read_completion(body: bytes) -> Completion | None:
    """Read the body of a response.

    Returns:
        What the server wrote, or None if it is not what OpenAI's API answers. There is no error to chain: it would
        quote the body, and a body may quote the key.
    """
    try:
        answer = parse_json(body)
        choice = answer["choices"][0]
        message = choice.get("message")
        written = choice["text"] if message is None else message.get("content") or ""
        usage = answer.get("usage") or {}
        return Completion(
            text=_text(written),
            tokens=tuple(_tokens(choice.get("logprobs") or {})),
            finished=choice.get("finish_reason") == "stop",
            prompt_tokens=max(int(usage.get("prompt_tokens") or 0), 0),
        )
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _tokens(given: Mapping[str, Any]) -> Iterator[ServedToken]:
    for token in given.get("content") or ():  # chat completions
        listed = token.get("top_logprobs") or ()
        yield _token(token["token"], token["logprob"], [(each["token"], each["logprob"]) for each in listed])
    # Completions: parallel lists, and the likeliest as a mapping. The first token has no probability if it is the
    # first of all.
    texts, logprobs = given.get("tokens") or (), given.get("token_logprobs") or ()
    tops = given.get("top_logprobs") or [None] * len(texts)
    for text, logprob, top in zip(texts, logprobs, tops, strict=False):
        yield _token(text, logprob or 0.0, (top or {}).items())


def _token(text: Any, logprob: Any, tops: Iterable[tuple[Any, Any]]) -> ServedToken:
    likeliest = {}
    for other, value in tops:
        likeliest[_text(other)] = as_logprob(float(value))
    return ServedToken(_text(text), as_logprob(float(logprob)), likeliest)


def _text(value: Any) -> str:
    """Return text without half surrogate pairs, which JSON can hold and nothing else."""
    if not isinstance(value, str):
        raise TypeError("it is no text")
    return value.encode(errors="replace").decode()
