"""Interfaces for models: drafts and samples, scores of given continuations, hidden states.

A model inherits from the interfaces that it supports. Every method except ``truncate`` takes a batch and
returns results in the same order. Apart from rounding, a result does not depend on the batch. Models split
large batches themselves, and are thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.segments import Segmented

Pooling = Literal["mean", "last"]
"""How to reduce the states of a span to one vector."""
Span = Literal["question", "prompt", "draft", "all"]
"""The tokens whose states are pooled; see `PooledLayer`."""
_DEPTH: Mapping[Span, tuple[float, float]] = {"question": (0.47, 0.60), "draft": (0.47, 0.74)}


class PooledLayer(NamedTuple):
    """Which hidden states to pool to one vector, and how; a plain tuple is also accepted.

    Attributes:
        layer: The layer, from 0 (the embedding) to the number of layers (the output after the final norm). An
            `EncoderProxy` has layers 1 to 16.
        span: The tokens of the ``"question"``, of the whole ``"prompt"``, of the ``"draft"``, or of ``"all"``: prompt
            and draft. Prompts include control tokens. Without a draft, ``"draft"`` means the whole prompt; so does
            ``"question"`` if the question is not found in the prompt.
        pooling: ``"mean"`` over the span, or its ``"last"`` token.
    """

    layer: int
    span: Span
    pooling: Pooling


@dataclass(frozen=True)
class RequestLayers:
    """Which layers to pool for a request, and how.

    Attributes:
        whole: Layers to pool over the request, without the earlier turns.
        segments: Layers to pool over each segment, the same for all; their span must be ``"question"``, which here
            means the segment.
    """

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()

    @property
    def every(self) -> tuple[PooledLayer, ...]:
        """All layers to pool: those for the whole request, then those for segments."""
        return (*self.whole, *self.segments)


def layer_numbers(layers: Iterable[PooledLayer]) -> list[int]:
    """Return the distinct layer numbers in ascending order."""
    return sorted({layer for layer, _, _ in layers})


def middle_layers(layers: int, span: Span = "draft") -> tuple[int, ...]:
    """Return the numbers of every second layer in the middle of a model, where linear probes work best.

    Args:
        layers: The model's number of layers.
        span: What the probe reads: ``"question"`` or ``"draft"``. For drafts, the range ends at a higher layer.
    """
    first, last = _DEPTH[span]
    return tuple(range(round(layers * first), round(layers * last) + 1, 2))


def pool_states(
    states: Mapping[int, Any], question: range, prompt: int, draft: int, layers: Sequence[PooledLayer]
) -> list[Any]:
    """Return one vector per item of ``layers``, shape (hidden size,), pooled from the states of one text.

    Args:
        states: Arrays or tensors by layer number, each of shape (tokens, hidden size).
        question: Positions of the question in the prompt; if empty, its span is the prompt.
        prompt: Length of the prompt in tokens.
        draft: Length of the draft in tokens; if 0, its span is the prompt.
        layers: The states to return.
    """
    spans = {
        "question": question or range(prompt),
        "prompt": range(prompt),
        "draft": range(prompt, prompt + draft) or range(prompt),
        "all": range(prompt + draft),
    }
    vectors = []
    for layer, span, pooling in layers:
        tokens = states[layer][spans[span].start : spans[span].stop]
        vectors.append(tokens.mean(0) if pooling == "mean" else tokens[-1])
    return vectors


Values: TypeAlias = Mapping[str, str]
"""The values of a prompt template's fields, by name."""


@dataclass(frozen=True)
class TargetScores:
    """Log-probabilities of given texts, the targets, as continuations of one prompt.

    Attributes:
        logprobs: Natural log-probability of each target's whole token sequence, each <= 0. On a server, only
            first tokens are compared; see `rgate_integrations.models.remote.RemoteModel`.
        prompt_tokens: Length of the prompt in tokens; 0 if a server does not report it.
    """

    logprobs: tuple[float, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class HiddenStates:
    """Pooled hidden states of one prompt, and of its draft if there is one.

    Attributes:
        states: Shape (requested layers, hidden size), float32.
        prompt_tokens: Number of tokens read; 0 if nothing was read, because the states had been kept when the draft
            was generated.
    """

    states: Float32Array = field(repr=False)
    prompt_tokens: int


@dataclass(frozen=True)
class RequestStates:
    """Pooled hidden states of one request.

    Attributes:
        whole: States of the whole request, shape (requested layers, hidden size), float32.
        segments: States of each segment, shape (segments, requested layers, hidden size); no values if no
            layers were requested for segments.
        prompt_tokens: Number of tokens read, without those that were cut off. If segments are also read alone, their
            tokens count again.
    """

    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)
    prompt_tokens: int


class Proxy(ABC):
    """A model that provides evidence for a gate. `LanguageModel` and `HasStates` define what it can do.

    Attributes:
        name: Catalogue name, folder, Hub id, or the model's name on a server.
    """

    name: str

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the weights; empty if they are unknown, for example on a server."""
        return ""

    @abstractmethod
    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that.

        For a model on a server, the number of tokens is an estimate.
        """


class LanguageModel(Proxy):
    """A model that writes text, and scores given continuations of a prompt by their log-probabilities.

    Attributes:
        is_remote: Whether it is reached over a network. Tuning and evaluation then ask it one question per
            call. As a judge of answers, it writes Yes or No; with a local judge, the probabilities of the two
            words are compared.
        options: Additional options of its requests.
    """

    is_remote: ClassVar[bool] = False
    options: RequestOptions = RequestOptions()

    @abstractmethod
    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Return one draft per prompt: its greedy continuation.

        Args:
            prompt: The template.
            values: The template's fields, one mapping per prompt.
            tokens: Maximum number of new tokens, at least 1.
            adapter: Folder or Hub id of a LoRA adapter, or None for the base model.
        """

    @abstractmethod
    def sample(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        n: int,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> list[tuple[Draft, ...]]:
        """Return ``n`` sampled continuations of each prompt. They depend on ``seed`` and prompt, not on the batch.

        The other arguments are those of `generate`. A ``temperature`` of 0 is greedy.
        """

    @abstractmethod
    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Return, for each prompt, the log-probabilities of the texts ``targets`` as its continuations."""


class HasStates(Proxy):
    """A model whose hidden states can be read.

    Attributes:
        max_batch_size: Maximum number of questions in one batch, if a `DecisionEngine` is given this model as
            ``proxy``. A `TransformersProxy` also reads or writes at most this many texts in one pass.
    """

    max_batch_size: int = 16

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of hidden layers."""

    @property
    def question_layers(self) -> tuple[int, ...]:
        """The layers to read for a question by default."""
        return middle_layers(self.num_layers, "question")

    @abstractmethod
    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Read each prompt, continued by its draft if there is one, and return its pooled hidden states.

        Args:
            prompt: The template.
            values: The template's fields, one mapping per prompt.
            drafts: One draft per prompt, or None for the prompts alone.
            layers: Layer, span and pooling of each of the states to return.
        """

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Return hidden states pooled over each request, and over each of its segments (sentences or lines).

        By default, the request and each segment are read separately, without the earlier turns. Subclasses
        may override this to read a request only once, together with the earlier turns.

        Args:
            prompt: The template.
            texts: The requests.
            layers: The states to return.
        """
        questions = [{"question": " ".join(text.segments)} for text in texts]
        parts = [{"question": segment} for text in texts for segment in text.segments]
        wholes = self.hidden(prompt, questions, None, layers.whole)
        remaining = iter(self.hidden(prompt, parts, None, layers.segments) if layers.segments else ())
        results = []
        for text, whole in zip(texts, wholes, strict=True):
            segments = list(islice(remaining, len(text.segments)))
            states = np.array([segment.states for segment in segments], np.float32)
            tokens = whole.prompt_tokens + sum(segment.prompt_tokens for segment in segments)
            results.append(RequestStates(whole.states, states, tokens))
        return results


def draft_tokens_or_text(draft: Draft, model: str) -> str | tuple[int, ...]:
    """Return a draft's token ids if they are known and the proxy named ``model`` wrote it; otherwise its text."""
    if draft.token_ids and draft.source == "proxy" and draft.model == model:
        return draft.token_ids
    return draft.text
