"""The content of saved gates: the validated fields of ``gate.json``, and arrays.

Gates with a LoRA adapter and calibrated gates are plain `SavedGate` objects; the others also have weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field, PlainValidator
from pydantic.dataclasses import dataclass

from rgate_integrations.decision import DraftSource, Finite, Probability, Threshold
from rgate_integrations.gates.probability import sigmoids, softmax
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import (
    AnyStates,
    BoolArray,
    Float32Array,
    Float64Array,
    flatten,
    multiply,
    weighted,
)
from rgate_integrations.runtime.segments import LAYOUT

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
"""Pydantic configuration for ``gate.json``, which rejects unknown fields because a file may come from anywhere."""

MIN_LOGPROB = -20.0
"""Lower log-probabilities count as this: such tokens are practically impossible, and some servers write -9999."""


def _check_weights(value: Any) -> Float32Array:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or not np.isfinite(value).all():
        raise ValueError("not a float32 array of finite numbers")
    return value


Weights: TypeAlias = Annotated[Float32Array, PlainValidator(_check_weights)]
"""A float32 array of a saved gate; all its numbers are finite."""
Count: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SavedGate:
    """The fields that all saved gates have.

    Attributes:
        method: Name of the gate, as for `load_gate`.
        base_model: The proxy, the model with which it was trained or calibrated: catalogue name (see ``rgate
            download``), folder or Hub id; empty for none.
        fingerprint: Hash of the proxy's weights (`rgate_integrations.models.base.Proxy.fingerprint`); empty if
            unknown. A calibrated gate's file has it in `parameters` instead.
        llm: Name of the LLM whose answers it was trained on; empty if not recorded.
        threshold: Default threshold, at least 0.
        prompts: Hash of each prompt that it was trained with, by name; with other prompts its scores are meaningless.
        parameters: Other parameters of the gate (if tuned: of the prior), as JSON values.
        provenance: Its origin as JSON values: data, label, seed, recipe, metrics, versions, licence.
    """

    method: str
    base_model: str = ""
    fingerprint: str = ""
    llm: str = ""
    threshold: Threshold = 0.5
    prompts: dict[str, str] = field(default_factory=lambda: {ANSWER.name: ANSWER.hash})
    parameters: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


def check_shape(name: str, array: Float32Array, *shape: int) -> None:
    """Raise a `ValueError` about an array, by its name, if it is empty or has not these axes before its last."""
    if array.shape[:-1] != shape or not array.size:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has the shape {array.shape}, not ({expected}, n) with n > 0")


@dataclass(frozen=True, config=STRICT)
class LogprobHead:
    """Combines a probe's logit with a draft's log-probabilities; P(known) is the sigmoid of a weighted sum.

    Attributes:
        text: Weight of the probe's calibrated logit.
        total: Weight of the sum of the log-probabilities.
        least: Weight of the lowest log-probability.
        mean: Weight of the mean log-probability.
        bias: Added to the weighted sum.
    """

    text: Finite
    total: Finite
    least: Finite
    mean: Finite
    bias: Finite

    def logit(self, text: float, logprobs: Sequence[float]) -> float:
        """Return the logit of P(known).

        Args:
            text: The probe's calibrated logit.
            logprobs: Natural log-probability of each token, at least one; values below -20 count as -20.
        """
        values = np.maximum(logprobs, MIN_LOGPROB)
        confidence = self.total * values.sum() + self.least * values.min() + self.mean * values.mean()
        return float(self.text * text + confidence + self.bias)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProbeArtifact(SavedGate):
    """A trained linear probe: a weighted sum of hidden states that gives the logit of P(known).

    Attributes:
        weight: Weights of the hidden states, shape (layers, hidden size), float32.
        bias: Added to the sum of ``weight * states``; the result is a logit.
        layers: The hidden states to read, as (layer, span, pooling).
        tokens: Maximum number of draft tokens to read; 0 for the question alone.
        source: Who writes the draft.
        slope: Slope of the logit's Platt calibration.
        intercept: Intercept of the calibration.
        logprobs: Weights for the draft's log-probabilities, if it has any; None to read only the words.
        system: System message of the prompt; None for that of `ANSWER`.
    """

    method: Literal["probe"] = "probe"
    weight: Weights = field(repr=False, compare=False)
    bias: Finite
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0
    source: DraftSource = "proxy"
    slope: Finite = 1.0
    intercept: Finite = 0.0
    logprobs: LogprobHead | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one weight vector per layer."""
        check_shape("weight", self.weight, len(self.layers))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TunedArtifact(SavedGate):
    """A correction of another gate, the prior.

    The logit of P(known) is ``slope * prior + weight · states + head · features + bias``; ``prior`` is a logit, too.

    Attributes:
        slope: Factor of the prior's logit.
        bias: Added to the other terms.
        weight: Weights of the hidden states of the question, shape (layers, hidden size), float32.
        head: Weights of the `draft_features` of a partial answer, float32; empty for the question alone.
        layers: The hidden states to read, as (layer, span, pooling).
        tokens: Maximum number of tokens of the partial answer to read; 0 for the question alone.
        least_known: P(known) by the prior clearly below that of all known questions. A lower one is never raised.
    """

    method: Literal["tuned"] = "tuned"
    slope: Finite
    bias: Finite
    weight: Weights = field(repr=False, compare=False)
    head: Weights = field(repr=False, compare=False)
    layers: tuple[PooledLayer, ...]
    tokens: Count = 0
    least_known: Probability = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one weight vector per layer, and the head is a vector."""
        check_shape("weight", self.weight, len(self.layers))
        if self.head.ndim != 1:
            raise ValueError(f"head must be a vector, but has the shape {self.head.shape}")


@dataclass(frozen=True, config=STRICT)
class Kind:
    """A kind of request.

    Attributes:
        name: Its name in the decision's signals.
        answerable: Whether the LLM alone answers it well: ``"always"``, ``"never"``, or only if it knows the fact
            (``"if_known"``).
        about: What such a request does, as a phrase that follows "The question …".
        bias: Added to the logit of the kind; see `KindHead`.
    """

    name: str
    answerable: Literal["always", "if_known", "never"]
    about: str
    bias: Finite = 0.0

    def share_answered(self, known: Float64Array) -> Float64Array:
        """Return P(the LLM alone answers a request of this kind well), in the shape of ``known``.

        Args:
            known: P(the LLM knows the fact).
        """
        if self.answerable == "if_known":
            return known
        return np.full_like(known, float(self.answerable == "always"))


@dataclass(frozen=True, config=STRICT)
class KindHead:
    """Classifies a segment (a sentence or a line) of a request by the states of the encoder.

    It has one hidden layer: the K logits are ``output · relu(hidden · x + hidden_bias) + bias``, where x concatenates
    the segment's L states of size H and its layout, 11 numbers for its position and form.

    Attributes:
        layers: The hidden states of the segment to read, as (layer, ``"question"``, pooling).
        kinds: The K kinds, with their biases.
        hidden: Weights of the hidden layer, shape (units, L * H + 11), float32.
        hidden_bias: Biases of the hidden layer, shape (units,), float32.
        output: Weights of the logits, shape (K, units), float32.
    """

    layers: tuple[PooledLayer, ...]
    kinds: tuple[Kind, ...]
    hidden: Weights = field(repr=False, compare=False)
    hidden_bias: Weights = field(repr=False, compare=False)
    output: Weights = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError unless the shapes match."""
        units = len(self.hidden_bias)
        check_shape("hidden", self.hidden, units)
        is_divisible = (self.hidden.shape[1] - LAYOUT) % max(len(self.layers), 1) == 0
        if not is_divisible or self.hidden_bias.ndim != 1 or self.output.shape != (len(self.kinds), units):
            shapes = f"{self.hidden.shape}, {self.hidden_bias.shape} and {self.output.shape}"
            raise ValueError(
                f"hidden, hidden_bias and output have the shapes {shapes}, not (units, {len(self.layers)} * "
                f"hidden size + {LAYOUT}), (units,) and ({len(self.kinds)}, units)"
            )

    @property
    def hidden_size(self) -> int:
        """The size of each hidden state."""
        return int(self.hidden.shape[1] - LAYOUT) // len(self.layers)

    def logits(self, states: AnyStates, layout: AnyStates) -> Float64Array:
        """Return the logit of each kind for each of n segments, shape (n, K).

        Args:
            states: Pooled states, shape (n, L, H).
            layout: `rgate_integrations.runtime.segments.layout` of the segments, shape (n, 11).
        """
        return self._classify(self._read(states, layout))

    def whole_logits(self, states: AnyStates) -> Float64Array:
        """Return the logits of n whole requests, for a head that ignores the layout; see `logits`."""
        return self.logits(states, np.zeros((len(states), LAYOUT)))

    def _read(self, states: AnyStates, layout: AnyStates) -> Float32Array:
        """Return the output of the hidden layer, shape (n, units)."""
        x = np.concatenate([flatten(states), flatten(layout)], axis=1).astype(np.float32)
        return np.maximum(multiply(self.hidden, x) + self.hidden_bias, 0)

    def _classify(self, rows: Float32Array) -> Float64Array:
        """Return the logits for the inputs of the last layer, shape (n, units)."""
        return multiply(self.output.astype(np.float64), rows) + np.array([kind.bias for kind in self.kinds])


@dataclass(frozen=True, config=STRICT)
class AttentionHead(KindHead):
    """Classifies all segments of a request together: what one of them asks may be given text that another works on.

    The output h of the hidden layer goes through self-attention over the segments, with A attention heads of size
    units / A (Vaswani et al., "Attention Is All You Need", 2017). Each attention head adds to its scores a bias for
    the distance of two segments (Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", 2020). With the result a, the logits are
    ``output · relu(joint · [h, a] + joint_bias) + bias``.

    Attributes:
        attention: Weights of the queries, keys and values, one below the other, shape (3 * units, units), float32.
        attention_bias: Added to them, shape (3 * units,), float32.
        distances: Biases for distances from -D to D, shape (A, 2 * D + 1), float32; longer ones count as D.
        joint: Weights of the last hidden layer, shape (units, 2 * units), float32.
        joint_bias: Its biases, shape (units,), float32.
    """

    attention: Weights = field(repr=False, compare=False)
    attention_bias: Weights = field(repr=False, compare=False)
    distances: Weights = field(repr=False, compare=False)
    joint: Weights = field(repr=False, compare=False)
    joint_bias: Weights = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError unless the shapes match."""
        super().__post_init__()
        units = len(self.hidden_bias)
        shapes = {
            "attention": (3 * units, units),
            "attention_bias": (3 * units,),
            "joint": (units, 2 * units),
            "joint_bias": (units,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has the shape {getattr(self, name).shape}, not {shape}")
        is_divisor = self.distances.ndim == 2 and self.distances.size and units % len(self.distances) == 0
        if not is_divisor or self.distances.shape[1] % 2 == 0:
            raise ValueError(
                f"distances has the shape {self.distances.shape}, not a divisor of {units} and an odd number"
            )

    def logits(self, states: AnyStates, layout: AnyStates) -> Float64Array:
        """Return the logit of each kind for each of the n segments of one request, shape (n, K); see `KindHead`."""
        hidden = self._read(states, layout)
        projected = multiply(self.attention, hidden) + self.attention_bias
        queries, keys, values = np.split(projected, 3, axis=1)
        farthest = self.distances.shape[1] // 2
        places = np.arange(len(hidden))
        distances = np.clip(places - places[:, None], -farthest, farthest) + farthest
        rows = [hidden]
        size = hidden.shape[1] // len(self.distances)
        for number, biases in enumerate(self.distances):
            part = slice(number * size, (number + 1) * size)
            scores = multiply(keys[:, part], queries[:, part]) / math.sqrt(size) + biases[distances]
            rows.append(multiply(values[:, part].T, softmax(scores)))
        joint = multiply(self.joint, np.concatenate(rows, axis=1)) + self.joint_bias
        return self._classify(np.maximum(joint, 0))


@dataclass(frozen=True, config=STRICT)
class Detector:
    """Recognises one kind of text by a model's L states of size H.

    Attributes:
        weight: Weights of the states, shape (L, H), float32.
        bias: Added to the weighted sum; a text is recognised if the result is above 0.
    """

    weight: Weights = field(repr=False, compare=False)
    bias: Finite

    def detect(self, states: AnyStates) -> BoolArray:
        """Return whether each of n texts is recognised, shape (n,), by its pooled states, shape (n, L, H)."""
        return self.logits(states) > 0

    def logits(self, states: AnyStates) -> Float64Array:
        """Return how clearly each of n texts is recognised, shape (n,); see `detect`."""
        return weighted(states, self.weight) + self.bias


@dataclass(frozen=True, config=STRICT)
class FactHeads:
    """Estimates whether an LLM knows the fact that a question asks about, from a model's L states of size H.

    The reference LLM, of ability 0, is `rgate_integrations.gates.ability.REFERENCE_LLM`.

    Attributes:
        base_model: The model whose states are read.
        layers: The hidden states to read, as (layer, span, pooling); drafts are not read.
        known_weight: Weights of the logit that an LLM of ability 0 knows the fact, shape (L, H), float32.
        known_bias: Added to the logit.
        ability_slope: Added to the logit for each unit of the LLM's ability.
        default_ability: Mean and standard deviation of the ability of an unknown LLM.
        news: Recognises a question that may be about news.
    """

    base_model: str
    layers: tuple[PooledLayer, ...]
    known_weight: Weights = field(repr=False, compare=False)
    known_bias: Finite
    ability_slope: Finite
    default_ability: tuple[Finite, Finite]
    news: Detector

    def __post_init__(self) -> None:
        """Raise ValueError unless the shapes match."""
        check_shape("known_weight", self.known_weight, len(self.layers))
        check_shape("news.weight", self.news.weight, len(self.layers))

    def known_logits(self, states: AnyStates, theta: float | Float64Array, sd: float = 0.0) -> Float64Array:
        """Return the logit of P(an LLM knows the fact), shape (n,), averaged over the LLM's possible abilities.

        Uncertainty about the ability moves the logit towards 0. The mean over a normal distribution is
        approximated as in MacKay, "The evidence framework applied to classification networks", 1992.

        Args:
            states: Pooled states, shape (n, L, H).
            theta: Mean of the ability: one for all questions, or shape (n,).
            sd: Standard deviation of the ability.
        """
        logits = weighted(states, self.known_weight) + self.known_bias + self.ability_slope * theta
        return logits / math.sqrt(1 + math.pi / 8 * (self.ability_slope * sd) ** 2)

    def p_fact_known(self, states: AnyStates, theta: float, sd: float) -> Float64Array:
        """Return P(the LLM knows the fact), shape (n,); see `known_logits` for the arguments.

        Even a very capable LLM has not seen the latest news. So for a question that may be about news, an ability
        above 0 counts as 0. This lowers P(known) even if the heads for kinds do not recognise the question as news.
        """
        abilities = np.where(self.news.detect(states), min(theta, 0.0), theta)
        return sigmoids(self.known_logits(states, abilities, sd))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeadsArtifact(SavedGate):
    """Heads, small models on a request's states: they judge its kind, and whether the LLM knows the fact asked for.

    Attributes:
        segments: Classifies a segment by the states of `base_model`, which reads any language.
        in_context: Also classifies each segment of a request that has several or earlier turns.
        together: Classifies all segments of such a request together, from the layers of `in_context`. The mean of
            both heads' logits is averaged with the logits of `segments`.
        first_facts: Estimates from the states of `base_model` whether the LLM knows a fact.
        facts: The same from a second model's states, which is more accurate but takes a second pass; English only.
        reader_kinds: Classifies a request of one segment by the states that `facts` reads; see `reconsider`.
        english: Recognises English by the layers of `first_facts`.
        romanised: Likewise, romanised text such as Hindi in Latin letters.
        self_contained: Likewise, a segment that asks for nothing beyond itself, such as a sum or "make it shorter".
        self_contained_turns: The same for a message that follows others.
        own_matters: Classifies a request and each of its segments by the layers of `segments`. The request retrieves
            if it or a segment is of any kind but the first; only a whole request is of the kind ``pleasantries``. If
            it is one segment, the logit of the last kind is added to that of the same kind in `segments`.
    """

    method: Literal["heads"] = "heads"
    segments: KindHead
    in_context: KindHead
    together: AttentionHead
    first_facts: FactHeads
    facts: FactHeads
    reader_kinds: KindHead
    english: Detector
    romanised: Detector
    self_contained: Detector
    self_contained_turns: Detector
    own_matters: KindHead

    def __post_init__(self) -> None:
        """Raise ValueError if weights have a wrong shape, or heads do not fit together."""
        for name in ("english", "romanised", "self_contained", "self_contained_turns"):
            check_shape(f"{name}.weight", getattr(self, name).weight, len(self.first_facts.layers))
        heads = (self.segments, self.in_context, self.together, self.reader_kinds)
        if len({tuple(kind.name for kind in head.kinds) for head in heads}) > 1:
            raise ValueError("segments, in_context, together and reader_kinds have different kinds")
        if self.reader_kinds.layers != self.facts.layers:
            raise ValueError("reader_kinds and facts read different layers")
        if self.own_matters.kinds[-1].name not in (kind.name for kind in self.segments.kinds):
            raise ValueError("the last kind of own_matters is not one of segments")
        if self.together.layers != self.in_context.layers:
            raise ValueError("in_context and together read different layers")

    @property
    def context_layers(self) -> tuple[PooledLayer, ...]:
        """The layers that `in_context` reads and `segments` does not."""
        return tuple(layer for layer in self.in_context.layers if layer not in self.segments.layers)

    def kind_probabilities(
        self, states: AnyStates, layout: AnyStates, whole: AnyStates, *, in_context: bool
    ) -> Float64Array:
        """Return the probability of each of K kinds for each of n segments, shape (n, K).

        Args:
            states: Pooled states, shape (n, layers, hidden size): those for the layers of `segments`, followed by
                those for `context_layers` if ``in_context``.
            layout: `rgate_integrations.runtime.segments.layout` of the segments, shape (n, 11).
            whole: Pooled states of the request, shape (L, H).
            in_context: Whether the request has several segments or earlier turns.
        """
        logits = self.segments.logits(states[:, : len(self.segments.layers)], layout)
        if not in_context:
            corrected = [kind.name for kind in self.segments.kinds].index(self.own_matters.kinds[-1].name)
            logits[:, corrected] += self.own_matters.whole_logits(whole[None])[:, -1]
            return softmax(logits)
        layers = (*self.segments.layers, *self.context_layers)
        states = states[:, [layers.index(layer) for layer in self.in_context.layers]]
        context = (self.in_context.logits(states, layout) + self.together.logits(states, layout)) / 2
        return softmax((logits + context) / 2)

    def reconsider(self, probabilities: Float64Array, states: AnyStates) -> Float64Array:
        """Return P(kind) of a request of one segment by both models, the mean of their logits, shape (1, K).

        ``probabilities`` is from `kind_probabilities`; ``states`` are the second model's, shape (L, H).
        """
        logits = np.log(np.maximum(probabilities, 1e-6))
        return softmax((logits + self.reader_kinds.whole_logits(states[None])) / 2)

    def find_own_matter(self, whole: AnyStates, segments: AnyStates) -> tuple[Kind, int | None] | None:
        """Return the kind of own matter that a request is about, or None.

        With it comes the index of the segment that is about it, or None if only the request as a whole is.

        Args:
            whole: Pooled states of the request, shape (L, H).
            segments: Pooled states of its n segments, shape (n, at least L, H).
        """
        others = segments[: len(segments) if len(segments) > 1 else 0, : len(whole)]
        states = np.concatenate([others, whole[None]])
        logits = self.own_matters.whole_logits(states)[:, :-1]
        logits[:-1, [kind.name == "pleasantries" for kind in self.own_matters.kinds[:-1]]] = 0
        kind = int(np.argmax(logits.max(axis=0)))
        row = int(np.argmax(logits[:, kind]))
        return (self.own_matters.kinds[kind], row if row < len(states) - 1 else None) if kind else None
