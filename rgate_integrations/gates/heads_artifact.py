"""The weights of the gate with heads: small models that read the states of an encoder.

They judge the kind of a request, and whether an LLM knows the fact that it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

import numpy as np
from pydantic.dataclasses import dataclass

from rgate_integrations.decision import Finite
from rgate_integrations.gates.artifacts import STRICT, SavedGate, Weights, check_shape
from rgate_integrations.gates.probability import logit, sigmoids, softmax
from rgate_integrations.models.base import PooledLayer
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

# The reader reads an English request of one segment if P(known) is within this distance of the threshold, in logits.
# With 3, hardly any decision would change, and it would read half as many again.
_MARGIN_OF_KINDS = 2.0
# But not if knowing the fact changes P(known) by more than this: it would read 81 % of the questions of six sets, not
# 34 %, and change hardly any decision.
_ASKS_FACT = 0.5


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


BETWEEN_PLEASANTRIES = Kind(
    "between_pleasantries",
    "never",
    "seems to ask about something that the LLM does not know",
)
"""The kind of a request that the detector of this name recognises."""


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

    def p_asked(self, states: AnyStates, layout: AnyStates) -> Float64Array:
        """Return P(kind) of each segment of a list of questions, shape (n, K); none of them is given text.

        In context, long lists of questions look like pasted text: of eight numbered ones about private documents,
        half would skip. See `logits` for the arguments.
        """
        logits = self.logits(states[:, : len(self.layers)], layout)
        logits[:, [kind.name == "given" for kind in self.kinds]] = -np.inf
        return softmax(logits)

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
            if it or a segment is of any kind but the first. If it is one segment, the logit of the last kind is added
            to that of the same kind in `segments`.
        about_quotation: Recognises, without the quoted text, a request whose answer depends on what is true about it.
        works_on_text: Classifies a request by the layers of `first_facts`, without those of its segments that need
            passages: whether it works on their words, so that it needs none. Its last kind is that it does.
        between_pleasantries: Recognises a request with pleasantries around it in one sentence, which needs passages.
        drafts: Recognises a request of one segment for a text or plan about whose matter it says all that is needed.
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
    about_quotation: Detector
    works_on_text: KindHead
    between_pleasantries: Detector
    drafts: Detector

    def __post_init__(self) -> None:
        """Raise ValueError if weights have a wrong shape, or heads do not fit together."""
        for name, value in vars(self).items():
            if isinstance(value, Detector):
                check_shape(f"{name}.weight", value.weight, len(self.first_facts.layers))
        heads = (self.segments, self.in_context, self.together, self.reader_kinds)
        if len({tuple(kind.name for kind in head.kinds) for head in heads}) > 1:
            raise ValueError("segments, in_context, together and reader_kinds have different kinds")
        if self.reader_kinds.layers != self.facts.layers:
            raise ValueError("reader_kinds and facts read different layers")
        if self.own_matters.kinds[-1].name not in (kind.name for kind in self.segments.kinds):
            raise ValueError("the last kind of own_matters is not one of segments")
        if self.works_on_text.layers != self.first_facts.layers:
            raise ValueError("works_on_text and first_facts read different layers")
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
            if self.drafts.detect(whole[None])[0]:
                logits[:, [kind.answerable == "never" for kind in self.segments.kinds]] = -np.inf
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
        kind = int(np.argmax(logits.max(axis=0)))
        if not kind:
            return (BETWEEN_PLEASANTRIES, None) if self.between_pleasantries.detect(whole[None])[0] else None
        row = int(np.argmax(logits[:, kind]))
        return self.own_matters.kinds[kind], row if row < len(states) - 1 else None


def p_answered(kinds: Sequence[Kind], probabilities: Float64Array, known: Float64Array) -> Float64Array:
    """Return P(the LLM alone answers well) for each of n requests or segments, shape (n,).

    Args:
        kinds: The K kinds.
        probabilities: The probability of each kind, shape (n, K).
        known: P(the LLM knows the fact), shape (n,), or (1,) if it is the same for all.
    """
    shares = np.stack([kind.share_answered(known) for kind in kinds], axis=1)
    return np.minimum((probabilities * shares).sum(axis=1), 1.0)  # rounding may exceed 1


def may_reader_change(
    kinds: Sequence[Kind],
    shares: Float64Array,
    logit_known: Float64Array,
    threshold: float,
    margin: float,
    *,
    alone: bool,
) -> bool:
    """Return whether the reader, which costs a second pass, may change the decision; see `HeadsGate.look_closer`.

    Args:
        kinds: The K kinds.
        shares: The probability of each kind for each segment, by the encoder, shape (segments, K).
        logit_known: The encoder's logit that the LLM knows the fact, shape (1,).
        threshold: The request's threshold.
        margin: See `HeadsGate`.
        alone: Whether the request is a single segment without earlier turns.
    """
    if_unknown, p, if_may_be_known, if_known = (
        p_answered(kinds, shares, known).min()
        for known in (np.zeros(1), sigmoids(logit_known), sigmoids(logit_known + margin), np.ones(1))
    )
    if if_unknown < threshold <= if_may_be_known:
        return True
    asks_fact = if_known - if_unknown > _ASKS_FACT
    is_close = 0 < threshold < 1 and abs(logit(p) - logit(threshold)) < _MARGIN_OF_KINDS
    return alone and is_close and not asks_fact
