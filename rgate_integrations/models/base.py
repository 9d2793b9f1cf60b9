"""What a gate needs from a model: drafts, samples, target scores, hidden states. One call serves a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.models.segments import segmented_lines
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array

Values: TypeAlias = Mapping[str, str]
"""The fields of a prompt template by name."""

Pooling = Literal["mean", "last"]
"""How the states of a span become one vector."""
Span = Literal["question", "prompt", "draft", "all"]
"""Whose states; see `PooledLayer`."""
_DEPTH: Mapping[Span, tuple[float, float]] = {"question": (0.47, 0.60), "draft": (0.47, 0.74)}


class PooledLayer(NamedTuple):
    """Hidden states of one layer, pooled to a single vector. A plain tuple of the three will do in its place.

    Attributes:
        layer: Which layer, from 0 (the embedding) to the number of layers (the output after the final norm).
        span: Whose tokens: those of the question, of the prompt that it stands in, of the draft, or of the whole
            text; the last three with control tokens. Without a draft, ``"draft"`` is the whole prompt.
        pooling: ``"mean"`` over the span, or its ``"last"`` token.
    """

    layer: int
    span: Span
    pooling: Pooling


@dataclass(frozen=True)
class TargetScores:
    """Log-probabilities of fixed continuations of one prompt.

    Attributes:
        logprobs: Natural log-probability of each target's whole token sequence, each <= 0.
        prompt_tokens: Length of the prompt in tokens.
    """

    logprobs: tuple[float, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class HiddenStates:
    """Pooled hidden states of one prompt.

    Attributes:
        states: Shape (layers asked for, hidden size), float32.
        prompt_tokens: Length of the text read, in tokens; 0 if they were kept while a draft was written.
    """

    states: Float32Array = field(repr=False)
    prompt_tokens: int


@dataclass(frozen=True)
class Segmented:
    """A request as it is read for its segments.

    Attributes:
        lines: Its segments by line, see `rgate_integrations.models.segments`; at least one.
        history: What was said before it, a line feed behind each turn; read in the same pass, and may be empty.
    """

    lines: tuple[tuple[str, ...], ...]
    history: str = ""

    @classmethod
    def of(cls, text: str, history: Sequence[str] = ()) -> Segmented:
        """Split a request."""
        return cls(tuple(map(tuple, segmented_lines(text))), "".join(f"{turn}\n" for turn in history))

    @property
    def segments(self) -> tuple[str, ...]:
        """All of them in order."""
        return tuple(chain.from_iterable(self.lines))


@dataclass(frozen=True)
class RequestStates:
    """Pooled hidden states of one request.

    Attributes:
        whole: Those of all of it, shape (layers asked for, hidden size), float32.
        segments: Those of each segment, shape (segments, layers asked for, hidden size).
        draft: Those over the draft, shape (layers asked for, hidden size).
        prompt_tokens: Length of the text read, in tokens.
    """

    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)
    draft: Float32Array = field(repr=False)
    prompt_tokens: int


@dataclass(frozen=True)
class RequestLayers:
    """What is to be pooled of a request: (layer, span, pooling) each.

    Attributes:
        whole: Over the request, without what was said before it.
        segments: Over each segment; their span is ``"question"``.
        draft: Over the begun answer.
    """

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()
    draft: tuple[PooledLayer, ...] = ()

    @property
    def every(self) -> tuple[PooledLayer, ...]:
        """All of them."""
        return (*self.whole, *self.segments, *self.draft)


def layer_numbers(layers: Iterable[PooledLayer]) -> list[int]:
    """Return which layers are pooled, each once, in order."""
    return sorted({layer for layer, _, _ in layers})


def middle_layers(layers: int, span: Span = "draft") -> tuple[int, ...]:
    """Return the middle layers of a model, where probes work best (measured: docs/benchmarks/gate_quality.md)."""
    first, last = _DEPTH[span]
    return tuple(range(round(layers * first), round(layers * last) + 1, 2))


def spans_of(question: range, prompt: int, draft: int) -> dict[Span, range]:
    """Return the positions of each span; without a draft, that span is the prompt.

    Args:
        question: Positions of the question in the prompt; empty if it was not found.
        prompt: Length of the prompt.
        draft: Length of the draft.
    """
    whole_prompt = range(prompt)
    return {
        "question": question or whole_prompt,
        "prompt": whole_prompt,
        "draft": range(prompt, prompt + draft) or whole_prompt,
        "all": range(prompt + draft),
    }


def pool_states(
    states: Mapping[int, Any], spans: Mapping[Span, range], layers: Sequence[PooledLayer]
) -> list[Any]:
    """Pool the states of one text by layer, each (tokens, hidden size): arrays or tensors, to one vector a layer."""
    vectors = []
    for layer, span, pooling in layers:
        tokens = states[layer][spans[span].start : spans[span].stop]
        if pooling == "mean":
            vectors.append(tokens.mean(0))
        else:
            vectors.append(tokens[-1])
    return vectors


class Proxy(ABC):
    """A model that drafts answers and scores continuations.

    Every method takes a batch and returns results in its order, equal (within rounding) to those of one
    call an item. Implementations apply their own maximum batch size and are safe to call from threads.
    """

    name: str

    @property
    def fingerprint(self) -> str:
        """Tells the weights apart from those of other models; empty when they cannot be known (a served model)."""
        return ""

    @abstractmethod
    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily.

        Args:
            prompt: The template.
            values: The template's fields, one mapping a prompt.
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
        """Sample ``n`` continuations of each prompt; they depend on seed and prompt, never on the batch."""

    @abstractmethod
    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Score fixed continuations as whole token sequences, however the tokenizer splits them."""

    @abstractmethod
    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states over the prompt with the draft as the assistant's turn.

        Args:
            prompt: The template.
            values: The template's fields, one mapping a prompt.
            drafts: One a prompt, or None for the prompts alone.
            layers: Which layers, and how each is pooled.
        """

    def request_states(
        self,
        prompt: PromptTemplate,
        texts: Sequence[Segmented],
        drafts: Sequence[Draft] | None,
        layers: RequestLayers,
    ) -> list[RequestStates]:
        """Pool hidden states over requests and over each of their segments.

        By default each is read by itself, without what was said before it. A proxy that keeps the states of every
        token reads a request once.

        Args:
            prompt: The template.
            texts: The requests.
            drafts: What answers begin with, one a request, where states over them are asked for; or None.
            layers: What is pooled.
        """
        whole, parts = [], []
        for text in texts:
            whole.append({"question": " ".join(text.segments)})
            parts += [{"question": segment} for segment in text.segments]
        of_whole = self.hidden(prompt, whole, None, layers.whole)
        of_drafts = [HiddenStates(np.zeros((0, 0), np.float32), 0)] * len(texts)
        if layers.draft:
            of_drafts = self.hidden(prompt, whole, drafts, layers.draft)
        of_parts: Iterable[HiddenStates] = ()
        if layers.segments:
            of_parts = self.hidden(prompt, parts, None, layers.segments)
        remaining = iter(of_parts)
        results = []
        for text, read, drafted in zip(texts, of_whole, of_drafts, strict=True):
            own = list(islice(remaining, len(text.segments)))
            segments = np.array([each.states for each in own], np.float32)
            tokens = read.prompt_tokens + sum(each.prompt_tokens for each in own)
            results.append(RequestStates(read.states, segments, drafted.states, tokens))
        return results

    @abstractmethod
    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
