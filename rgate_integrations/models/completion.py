"""What a server answered, in either of OpenAI's two shapes. Whatever it is, it is data or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rgate_integrations.runtime.files import parsed_json
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
        answer = _Answer.model_validate(parsed_json(body))
    except (ValueError, ValidationError):
        return None
    choice = answer.choices[0]
    if choice.message is None and choice.text is None:
        return None
    written = choice.text if choice.message is None else choice.message.content
    return Completion(
        text=_unicode(written or ""),
        tokens=tuple(_tokens(choice.logprobs or _Logprobs())),
        finished=choice.finish_reason == "stop",
        prompt_tokens=(answer.usage.prompt_tokens if answer.usage else None) or 0,
    )


def _tokens(given: _Logprobs) -> Iterator[ServedToken]:
    if given.content:  # chat completions
        for token in given.content:
            likeliest = {_unicode(each.token): each.logprob for each in token.top_logprobs or ()}
            yield ServedToken(_unicode(token.token), token.logprob, likeliest)
        return
    # Completions: parallel lists, and the likeliest as a mapping. The first token has no probability if it is the
    # first of all.
    texts, logprobs = given.tokens or [], given.token_logprobs or []
    tops = given.top_logprobs or [None] * len(texts)
    for text, logprob, top in zip(texts, logprobs, tops, strict=False):
        likeliest = {_unicode(name): value for name, value in (top or {}).items()}
        yield ServedToken(_unicode(text), 0.0 if logprob is None else logprob, likeliest)


def _unicode(text: str) -> str:
    """Return text without half surrogate pairs, which JSON can hold and nothing else."""
    return text.encode(errors="replace").decode()


_Logprob = Annotated[float, AfterValidator(as_logprob)]


class _Part(BaseModel):
    """A part of an answer; what else is in it is ignored."""

    model_config = ConfigDict(coerce_numbers_to_str=True)


class _Likely(_Part):
    token: str
    logprob: _Logprob


class _Token(_Likely):
    top_logprobs: list[_Likely] | None = None


class _Logprobs(_Part):
    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[_Logprob | None] | None = None
    top_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Message(_Part):
    content: str | None = None


class _Choice(_Part):
    message: _Message | None = None
    text: str | None = None
    finish_reason: Any = None
    logprobs: _Logprobs | None = None


class _Usage(_Part):
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None


class _Answer(_Part):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None
