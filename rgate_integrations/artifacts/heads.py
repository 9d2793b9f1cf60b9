"""Saved heads: several linear readings of the same hidden states of a question."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from rgate_integrations.artifacts.card import ModelCard
from rgate_integrations.artifacts.config import CONFIG, FORMAT
from rgate_integrations.artifacts.folder import (
    CARD,
    HEADS,
    prompt_facts,
)
from rgate_integrations.artifacts.trained import Tensors, read_trained, tensor_bytes
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.segments import LAYOUT
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array, Float64Array
from rgate_integrations.runtime.files import json_text, write_folder

AnyStates: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]
Served = Literal["always", "if known", "never"]
"""Whether the LLM alone serves requests of a kind well; see `Kind`."""


@dataclass(frozen=True)
class Kind:
    """A kind of requests.

    Attributes:
        name: Its name, under which decisions carry its probability.
        served: Whether the LLM alone serves it well: always, if it knows the fact that is asked for, or never.
        about: What such a request does, to follow "The question …".
        bias: Added to the sum of its weights times the states.
    """

    name: str
    served: Served
    about: str
    bias: float = 0.0


@dataclass(frozen=True)
class SegmentHeads:
    """What tells the kind of a segment of a request: a sentence, or a line of pasted text.

    Attributes:
        layers: Which hidden states of the segment: (layer, ``"question"``, pooling) each.
        kinds: The kinds; one more than those of whole requests, for text that is given.
        weight: Shape (K, L, H), float32.
        layout: Shape (K, 11), float32: weights of `rgate_integrations.models.segments.layout`.
    """

    layers: tuple[PooledLayer, ...]
    kinds: tuple[Kind, ...]
    weight: Float32Array = field(repr=False, compare=False)
    layout: Float32Array = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
        wanted = {"weight": (len(self.kinds), len(self.layers)), "layout": (len(self.kinds), LAYOUT)}
        for name, shape in wanted.items():
            found = getattr(self, name)
            if found.shape[:2] != shape or not np.isfinite(found).all():
                raise ConfigurationError(f"The {name} of the segments' heads is not what it should be.")

    def kind_probabilities(self, states: AnyStates, layout: AnyStates) -> Float64Array:
        """Return the probability of each kind for each of n segments, shape (n, K).

        Args:
            states: Pooled states, shape (n, L, H).
            layout: What `rgate_integrations.models.segments.layout` says of them, shape (n, 11).
        """
        biases = np.array([kind.bias for kind in self.kinds])
        return _softmax(_flat(states) @ _flat(self.weight).T + _flat(layout) @ _flat(self.layout).T + biases)

    def p_known(self, kinds: Float64Array, known: float) -> Float64Array:
        """Return P(the LLM alone serves the segment well), shape (n,).

        Args:
            kinds: What `kind_probabilities` returned.
            known: P(the LLM knows the fact that the request asks for).
        """
        shares = np.array([share_served(kind, np.array([known]))[0] for kind in self.kinds])
        found: Float64Array = kinds @ shares
        return np.minimum(found, 1.0)


@dataclass(frozen=True)
class HeadsArtifact:
    """Heads on the pooled states of a question. L are the layers, H the hidden size, K the kinds.

    Attributes:
        layers: Which hidden states: (layer, span, pooling) each; no draft is read.
        kinds: The kinds of requests.
        kind_weight: Shape (K, L, H), float32; the kinds' probabilities are the softmax of the sums.
        known_weight: Shape (L, H), float32: the logit that an LLM of ability 0 knows the fact, of a question about
            one; the question's difficulty with its sign turned.
        known_bias: Added to it.
        ability_slope: Added to it for each unit of the LLM's ability; see `rgate_integrations.gates.ability`.
        default_llm: The LLM that has ability 0.
        default_ability: Mean and standard deviation of the ability of an LLM that nothing is known of.
        base_model: The proxy: catalogue name, folder or Hub id.
        threshold: Default threshold.
        fingerprint: `rgate_integrations.models.LocalProxy.fingerprint` of the base model; empty if unknown.
        provenance: Where it comes from: data, licences, seed, recipe, metrics, versions; JSON values.
        segments: What tells the kind of a part of a longer request; None if nothing does.
    """

    layers: tuple[PooledLayer, ...]
    kinds: tuple[Kind, ...]
    kind_weight: Float32Array = field(repr=False, compare=False)
    known_weight: Float32Array = field(repr=False, compare=False)
    known_bias: float
    ability_slope: float
    default_llm: str
    default_ability: tuple[float, float]
    base_model: str
    threshold: float = 0.5
    fingerprint: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    segments: SegmentHeads | None = None

    def kind_probabilities(self, states: AnyStates) -> Float64Array:
        """Return the probability of each kind for each of n questions, shape (n, K).

        Args:
            states: Pooled states, shape (n, L, H).
        """
        biases = np.array([kind.bias for kind in self.kinds])
        return _softmax(_flat(states) @ _flat(self.kind_weight).T + biases)

    def known_logits(self, states: AnyStates, theta: float) -> Float64Array:
        """Return the logit that an LLM of some ability knows the fact, shape (n,); see `kind_probabilities`."""
        by_question: Float64Array = _flat(states) @ self.known_weight.ravel().astype(np.float64)
        return by_question + self.known_bias + self.ability_slope * theta

    def p_fact_known(self, states: AnyStates, theta: float, sd: float) -> Float64Array:
        """Return P(the LLM knows the fact), shape (n,), over all abilities that it may have.

        The less is known of the LLM, the nearer to a half it is. The mean over a normal distribution of abilities is
        that of MacKay, "The evidence framework applied to classification networks", 1992.

        Args:
            states: Pooled states, shape (n, L, H).
            theta: Mean of the ability.
            sd: Its standard deviation.
        """
        variance = (self.ability_slope * sd) ** 2
        logits = self.known_logits(states, theta) / np.sqrt(1 + np.pi / 8 * variance)
        found: Float64Array = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        return found

    def p_known(self, kinds: Float64Array, known: Float64Array) -> Float64Array:
        """Return P(the LLM alone serves the request well), shape (n,).

        Args:
            kinds: What `kind_probabilities` returned.
            known: What `p_fact_known` returned.
        """
        shares = np.stack([share_served(kind, known) for kind in self.kinds], axis=1)
        found: Float64Array = np.minimum((kinds * shares).sum(axis=1), 1.0)
        return found

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
        states = (len(self.layers), self.known_weight.shape[-1])
        wanted = {
            "kind_weight": (len(self.kinds), *states),
            "known_weight": states,
        }
        for name, shape in wanted.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ConfigurationError(f"{name} has the shape {found}, not {shape}.")
            if not np.isfinite(getattr(self, name)).all():
                raise ConfigurationError(f"{name} has numbers that are not finite.")
        unknown = [kind for kind in self.kinds if kind.served not in get_args(Served)]
        if unknown:
            raise ConfigurationError(f"The kind {unknown[0].name!r} cannot be served {unknown[0].served!r}.")


def share_served(kind: Kind, known: Float64Array) -> Float64Array:
    """Return how many of the requests of a kind the LLM alone serves well, by P(it knows the fact)."""
    if kind.served == "if known":
        return known
    return np.full_like(known, 1.0 if kind.served == "always" else 0.0)


def _softmax(logits: Float64Array) -> Float64Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Float64Array = raised / raised.sum(axis=1, keepdims=True)
    return found


def _flat(states: AnyStates) -> Float64Array:
    return states.reshape(len(states), -1).astype(np.float64)


def save_heads(artifact: HeadsArtifact, folder: str | Path) -> Path:
    """Save heads; the folder appears whole or not at all, and replaces one that was there.

    Args:
        artifact: The heads.
        folder: Where to.

    Returns:
        The folder.
    """
    names = ("kind_weight", "known_weight")
    tensors = {name: getattr(artifact, name) for name in names}
    if artifact.segments is not None:
        tensors |= {"segment_weight": artifact.segments.weight, "segment_layout": artifact.segments.layout}
    weights = tensor_bytes(tensors)
    config = {
        "format": FORMAT,
        "method": "heads",
        "base_model": artifact.base_model,
        "fingerprint": artifact.fingerprint,
        "prompt": prompt_facts(ANSWER),
        "layers": artifact.layers,
        "kinds": [asdict(kind) for kind in artifact.kinds],
        "segments": _segments_config(artifact.segments),
        "known_bias": artifact.known_bias,
        "ability_slope": artifact.ability_slope,
        "default_llm": artifact.default_llm,
        "default_ability": artifact.default_ability,
        "threshold": artifact.threshold,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "provenance": artifact.provenance,
    }
    card = _card(artifact, Path(folder).name)
    return write_folder(folder, {HEADS: weights, CONFIG: json_text(config), CARD: card.text()})


def _segments_config(segments: SegmentHeads | None) -> dict[str, Any] | None:
    if segments is None:
        return None
    return {"layers": segments.layers, "kinds": [asdict(kind) for kind in segments.kinds]}


def read_heads(name: str | Path) -> HeadsArtifact:
    """Read and check saved heads; every call does so anew.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id.

    Raises:
        ModelLoadError: There are none, a file is damaged, or they were trained with another prompt or format.
    """
    return read_trained(name, "heads", _heads)


def _heads(config: dict[str, Any], tensors: Tensors) -> HeadsArtifact:
    mean, sd = config["default_ability"]
    segments = None
    if config["segments"] is not None:
        segments = SegmentHeads(
            _layers(config["segments"]),
            tuple(Kind(**kind) for kind in config["segments"]["kinds"]),
            tensors["segment_weight"],
            tensors["segment_layout"],
        )
    return HeadsArtifact(
        layers=_layers(config),
        kinds=tuple(Kind(**kind) for kind in config["kinds"]),
        kind_weight=tensors["kind_weight"],
        known_weight=tensors["known_weight"],
        known_bias=float(config["known_bias"]),
        ability_slope=float(config["ability_slope"]),
        default_llm=config["default_llm"],
        default_ability=(float(mean), float(sd)),
        base_model=config["base_model"],
        threshold=float(config["threshold"]),
        fingerprint=str(config.get("fingerprint", "")),
        provenance=config["provenance"],
        segments=segments,
    )


def _layers(config: Mapping[str, Any]) -> tuple[PooledLayer, ...]:
    return tuple(PooledLayer(int(layer), span, pooling) for layer, span, pooling in config["layers"])


def _card(artifact: HeadsArtifact, name: str) -> ModelCard:
    numbers = ", ".join(str(n) for n in sorted({layer for layer, _, _ in artifact.layers}))
    mean, sd = artifact.default_ability
    method = [
        f"- **Method**: linear heads on pooled hidden states of layers {numbers}, in one pass.",
        f"- **Kinds**: {', '.join(kind.name for kind in artifact.kinds)}.",
        f"- **Ability of an LLM that nothing is known of**: {mean:.2f} ± {sd:.2f}; {artifact.default_llm} has 0.",
    ]
    return ModelCard(
        name=name,
        base_model=artifact.base_model,
        reads="no draft",
        llm=artifact.default_llm,
        threshold=artifact.threshold,
        method=method,
        provenance=artifact.provenance,
    )
