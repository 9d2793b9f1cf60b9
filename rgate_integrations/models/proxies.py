"""Chooses the class that runs a proxy model, by the model's name.

The encoder is an `EncoderProxy`. The default model has two implementations: `ReaderProxy` (ONNX Runtime, no torch)
reads the states that the shipped gates use; the whole model, a `TransformersProxy`, generates, scores, and reads the
other states. A model with any other name is a `TransformersProxy`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models import local
from rgate_integrations.models.base import (
    HasStates,
    HiddenStates,
    LanguageModel,
    PooledLayer,
    Proxy,
    Values,
    draft_tokens_or_text,
)
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.encoder import ENCODER, EncoderProxy
from rgate_integrations.models.reader import ReaderProxy, can_read
from rgate_integrations.models.streamed_answer import recall_states
from rgate_integrations.prompts import PromptTemplate


def gate_proxy(name: str) -> HasStates:
    """Return an `EncoderProxy` for the encoder's name, a `ReaderProxy` for `DEFAULT_MODEL`, or else a local model."""
    if name == ENCODER:
        return EncoderProxy()
    return ReaderProxy() if name == DEFAULT_MODEL else local.shared_proxy(name)


def language_model(proxy: Proxy) -> LanguageModel:
    """Return the proxy itself if it generates and scores text; for a `ReaderProxy`, the whole default model.

    Raises:
        EvidenceError: The proxy is another model that cannot generate and score text.
    """
    if isinstance(proxy, ReaderProxy):
        return local.shared_proxy(proxy.name)
    if not isinstance(proxy, LanguageModel):
        raise EvidenceError(
            f"The proxy {proxy.name!r} is not a language model that can generate and score text.",
            hint=f"Use another proxy, such as proxy={DEFAULT_MODEL!r}.",
        )
    return proxy


def state_reader(
    proxy: Proxy, prompt: PromptTemplate, layers: Sequence[PooledLayer], draft: Draft | None = None
) -> HasStates:
    """Return the model that reads hidden states for a proxy.

    A `ReaderProxy` has only the first layers of the default model. The whole model replaces it for prompts and layers
    that the `ReaderProxy` cannot read, and for a draft that the whole model wrote. Other proxies read for themselves.

    Args:
        proxy: The proxy.
        prompt: The prompt.
        layers: The states to read.
        draft: The draft that continues the prompt, if any.

    Raises:
        EvidenceError: The proxy has no hidden states.
    """
    if isinstance(proxy, ReaderProxy):
        is_own_draft = draft is not None and not isinstance(draft_tokens_or_text(draft, proxy.name), str)
        return local.shared_proxy(proxy.name) if is_own_draft or not can_read(prompt, layers) else proxy
    return require_states(proxy)


def require_states(proxy: Proxy) -> HasStates:
    """Return the proxy itself if it has hidden states.

    Raises:
        EvidenceError: The proxy has no hidden states.
    """
    if not isinstance(proxy, HasStates):
        raise EvidenceError(
            f"This gate needs hidden states, which the model {proxy.name!r} does not provide.",
            hint="Omit proxy=, so that the gate reads its own model, or use a gate without states, such as 'ik'.",
        )
    return proxy


def read_states(
    proxy: Proxy,
    prompt: PromptTemplate,
    values: Sequence[Values],
    drafts: Sequence[Draft] | None,
    layers: Sequence[PooledLayer],
) -> list[HiddenStates]:
    """Return the pooled hidden states of prompts and drafts. Those that a local LLM kept while writing are reused.

    Args:
        proxy: The proxy.
        prompt: The template.
        values: The template's fields, one mapping per prompt.
        drafts: One draft per prompt, or None for the prompts alone.
        layers: The states to read.

    Raises:
        EvidenceError: States must be read, and the proxy has none.
    """
    if drafts is None:
        return state_reader(proxy, prompt, layers).hidden(prompt, values, None, layers)
    results: dict[int, HiddenStates] = {}
    unread: dict[HasStates, list[int]] = {}
    for i, draft in enumerate(drafts):
        # States that the LLM has kept cost nothing and are exact.
        recalled = recall_states(draft, proxy.fingerprint, prompt, values[i], layers)
        if recalled is not None:
            results[i] = HiddenStates(recalled, prompt_tokens=0)
        else:
            unread.setdefault(state_reader(proxy, prompt, layers, draft), []).append(i)
    for model, indices in unread.items():
        states = model.hidden(prompt, [values[i] for i in indices], [drafts[i] for i in indices], layers)
        results.update(zip(indices, states, strict=True))
    return [results[i] for i in range(len(values))]
