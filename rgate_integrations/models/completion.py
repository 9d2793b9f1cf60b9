"""What an OpenAI-compatible server answers, in either of two shapes. Whatever it is, it is data or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rgate_integrations.decision import Draft
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.records import read_logprobs

Completion: TypeAlias = tuple[Draft, Mapping[str, float]]
"""What a server wrote, and the tokens that were likeliest in the first place, with their log-probabilities.

The draft has tokens if the server gives log-probabilities; there may be no likeliest ones.
"""


def read_completion(body: bytes, model: str = "") -> Completion | None:
    """Read the body of a response.

    Args:
        body: The body.
        model: Name of the model that wrote it.

    Returns:
        What the server wrote, or None if it is not what OpenAI's API answers. There is no error to chain: it would
        quote the body, and a body may quote the key.
    """
    try:
        answer = parse_json(body)
        choice = answer["choices"][0]
        message = choice.get("message")
        content = choice["text"] if message is None else message.get("content") or ""
        if isinstance(content, list):
            [block["type"] for block in content]
        else:
            content.strip()
        entries, likeliest = _logprob_entries(choice.get("logprobs") or {})
        tokens, logprobs = read_logprobs(entries)
        usage = answer.get("usage") or {}
        draft = Draft.from_message(
            choice if message is None else message,
            usage=usage,
            reason=choice.get("finish_reason"),
            tokens=tokens,
            logprobs=logprobs or None,
            source="proxy",
            model=model,
            prompt_tokens=max(int(usage.get("prompt_tokens") or 0), 0),
        )
        return draft, dict(zip(*read_logprobs(likeliest), strict=True))
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _logprob_entries(given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the tokens, and the likeliest in place of the first: objects with ``token`` and ``logprob`` each."""
    if given.get("content"):  # chat completions
        return given["content"], given["content"][0].get("top_logprobs") or []
    # Completions: parallel lists, and the likeliest as a mapping. A text's very first token has no probability.
    tokens, likeliest = [], []
    for token, logprob in zip(given.get("tokens") or (), given.get("token_logprobs") or (), strict=False):
        tokens.append({"token": token, "logprob": logprob or 0.0})
    tops = given.get("top_logprobs") or [None]
    for token, logprob in (tops[0] or {}).items():
        likeliest.append({"token": token, "logprob": logprob})
    return tokens, likeliest
