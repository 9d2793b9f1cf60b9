"""Parses the answers of OpenAI-compatible servers: chat completions and completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rgate_integrations.decision import Draft
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.records import read_choice_logprobs, read_logprobs

Completion: TypeAlias = tuple[Draft, Mapping[str, float]]
"""A draft, and the top tokens of its first position with their log-probabilities (empty if the server sent none)."""


def read_completion(body: bytes, model: str = "") -> Completion | None:
    """Parse the body of a server's answer.

    Args:
        body: The body.
        model: Name of the model that wrote it.

    Returns:
        The completion, or None if the body is not in the format of OpenAI's API. No error is raised,
        because it would quote the body, which may quote the key.
    """
    try:
        answer = parse_json(body)
        choice = answer["choices"][0]
        message = choice.get("message")
        content = choice["text"] if message is None else message.get("content") or ""
        if not isinstance(content, str | list):
            return None
        if isinstance(content, list) and not all(
            isinstance(part, Mapping) and "type" in part for part in content
        ):
            return None
        tokens, logprobs = read_choice_logprobs(choice)
        usage = answer.get("usage") or {}
        draft = Draft.from_message(
            choice if message is None else message,
            usage=usage,
            reason=choice.get("finish_reason"),
            tokens=tokens,
            logprobs=logprobs or None,
            source="proxy",
            model=model,
            # Servers may send null or a negative number.
            prompt_tokens=max(int(usage.get("prompt_tokens") or 0), 0),
        )
        return draft, _read_top_tokens(choice.get("logprobs") or {})
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _read_top_tokens(logprobs: Mapping[str, Any]) -> dict[str, float]:
    """Return the top tokens of the first position, with their log-probabilities."""
    if logprobs.get("content"):  # chat completions
        entries = logprobs["content"][0].get("top_logprobs") or []
    else:  # completions have a mapping per position
        tops = (logprobs.get("top_logprobs") or [None])[0] or {}
        entries = [{"token": token, "logprob": logprob} for token, logprob in tops.items()]
    return dict(zip(*read_logprobs(entries), strict=True))
