"""A local model that answers in a chat: what the adapters of the frameworks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rgate_integrations.models.base import middle_layers
from rgate_integrations.models.local import LocalProxy
from rgate_integrations.models.written import WritingOptions, WrittenToken, context_of

# Needs torch, which is imported when a model is loaded.
if TYPE_CHECKING:
    from rgate_integrations.models.writing import Writing


def begin_answer(
    proxy: LocalProxy, messages: Sequence[Mapping[str, str]], options: WritingOptions
) -> Writing:
    """Return the answer to a conversation; its first token is written when its first piece is asked for.

    Args:
        proxy: The model; it is loaded now.
        messages: The turns, each with ``role`` and ``content``.
        options: How the answer is written.

    Raises:
        ConfigurationError: The model takes no conversations, or not this one.
    """
    proxy.load()
    from rgate_integrations.models.writing import Writing

    with proxy.using() as runner:
        prompt = runner.encoder.encode_chat(messages)
    return Writing(proxy.using, prompt, options)


def layers_to_keep(proxy: LocalProxy, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Return whose hidden states are kept: the given layers, or those that a probe reads by default."""
    if layers is not None:
        return tuple(layers)
    count = proxy.num_layers
    return tuple(sorted({*middle_layers(count, "question"), *middle_layers(count, "draft")}))


def context_size(proxy: LocalProxy) -> int:
    """Return how many tokens the model's context holds, prompt and answer together; loads the model."""
    return context_of(proxy.runner.model)


def logprob_entries(tokens: Sequence[WrittenToken]) -> list[dict[str, Any]]:
    """Return tokens with their log-probabilities, each in the form of OpenAI's API."""
    entries = []
    for token in tokens:
        likeliest = [_entry(text, logprob) for text, logprob in token.likeliest]
        entries.append(_entry(token.text, token.logprob) | {"top_logprobs": likeliest})
    return entries


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
