"""Fits heads that predict from a model's hidden states whether an LLM knows the answer to a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rgate_integrations.gates.heads_artifact import Detector, FactHeads
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.runtime.arrays import Float32Array, Float64Array
from rgate_integrations.tuning.fitting import ridge_logistic

_TINY = 1e-6  # keeps a constant feature from dividing by zero


@dataclass(frozen=True)
class HeadExamples:
    """Answers of LLMs, one row for each question and LLM.

    Attributes:
        states: Pooled hidden states, shape (n, layers, hidden size), any float type.
        known: P(the LLM answers rightly alone) in [0, 1], shape (n,).
        abilities: Ability of each row's LLM, in logits, shape (n,); see `rgate_integrations.gates.ability`.
        groups: Source and set of each row, shape (n,). Rows of a group share the prompt, the judge and how the
            source chose its questions: effects that belong neither to the question nor to the LLM.
        weights: How much each row counts, shape (n,).
    """

    states: np.ndarray[tuple[int, ...], np.dtype[np.floating]]
    known: Float64Array
    abilities: Float64Array
    groups: np.ndarray[tuple[int, ...], np.dtype[np.str_]]
    weights: Float64Array

    def rows(self, chosen: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> HeadExamples:
        """Return the chosen rows, by a mask or by indices."""
        return HeadExamples(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray[Any, Any], ...]:
        """All columns in order."""
        return (self.states, self.known, self.abilities, self.groups, self.weights)


@dataclass(frozen=True)
class HeadsRecipe:
    """How heads are fitted.

    Attributes:
        components: How many principal components of a layer are used.
        penalty: Strength of the ridge penalty on their weights.
        group_penalty: Strength of the penalty on the groups' levels. The higher it is, the more of the difference
            between groups is attributed to their questions.
        ability_sd: Standard deviation of the ability of an unknown LLM, whose mean is the default.
    """

    components: int = 128
    penalty: float = 600.0
    group_penalty: float = 100.0
    ability_sd: float = 1.0


def fit_facts(
    examples: HeadExamples, layers: Sequence[PooledLayer], base_model: str, recipe: HeadsRecipe
) -> FactHeads:
    """Fit uncalibrated heads; see `calibrate_heads`.

    Each layer has a logistic regression of its own, on standardised principal components; their logits are averaged
    over the layers of a view (the same span and pooling), and then over the views. All of this is linear, so it
    folds into one weight vector a layer.

    Args:
        examples: The training rows.
        layers: The layers of their hidden states.
        base_model: The proxy that computed the states.
        recipe: The settings of the fit.
    """
    weight, bias = fit_known(examples, layers, recipe)
    return FactHeads(
        base_model=base_model,
        layers=tuple(layers),
        known_weight=weight,
        known_bias=bias,
        ability_slope=1.0,
        default_ability=(0.0, recipe.ability_sd),
        news=Detector(
            np.zeros_like(weight), -1.0
        ),  # nothing is news until `benchmarks/news.py` has fitted it
    )


def calibrate_heads(heads: FactHeads, slope: float, intercept: float) -> FactHeads:
    """Return heads whose logits of P(known) are mapped by a line."""
    return replace(
        heads,
        known_weight=(heads.known_weight * slope).astype(np.float32),
        known_bias=heads.known_bias * slope + intercept,
        ability_slope=heads.ability_slope * slope,
    )


def fit_known(
    examples: HeadExamples, layers: Sequence[PooledLayer], recipe: HeadsRecipe
) -> tuple[Float32Array, float]:
    """Fit the knowledge head alone; returns its weights, shape (layers, hidden size), and bias.

    This is the one-parameter model of item response theory with fixed abilities and with difficulties that are linear
    in the states (De Boeck and Wilson, "Explanatory Item Response Models", 2004).
    """
    weights, total = [], 0.0
    for layer, share in enumerate(_weigh_layers(layers)):
        weight, bias = _fit_known_layer(examples, layer, recipe)
        weights.append(share * weight)
        total += share * bias
    return np.stack(weights).astype(np.float32), total


def _weigh_layers(layers: Sequence[PooledLayer]) -> list[float]:
    """Return the weight of each layer's logit: the same for all views, and for all layers of a view."""
    views = Counter((span, pooling) for _, span, pooling in layers)
    return [1 / len(views) / views[span, pooling] for _, span, pooling in layers]


class _Components:
    """Standardised principal components of one layer's states; maps coefficients back to weights on the states."""

    def __init__(self, examples: HeadExamples, layer: int, components: int) -> None:
        states = examples.states[:, layer].astype(np.float32)
        share = (examples.weights / examples.weights.sum()).astype(np.float32)
        self.mean = share @ states
        self.scale = np.sqrt(share @ (states - self.mean) ** 2) + _TINY
        standard = (states - self.mean) / self.scale
        _, vectors = np.linalg.eigh((standard * share[:, None]).T @ standard)
        self.vectors = vectors[:, ::-1][:, :components]  # the largest first
        self.values: Float64Array = (standard @ self.vectors).astype(np.float64)

    def unfold(self, coefficients: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return weights on the states and a shift of the bias, for coefficients of shape (k, components)."""
        weight = coefficients @ self.vectors.T / self.scale
        return weight, -(weight @ self.mean)


def _fit_known_layer(examples: HeadExamples, layer: int, recipe: HeadsRecipe) -> tuple[Float64Array, float]:
    """Return weights, shape (hidden size,), and bias of one layer's knowledge head."""
    components = _Components(examples, layer, recipe.components)
    group_columns = (examples.groups[:, None] == np.unique(examples.groups)[None, :]).astype(float)
    # Scaled so that one penalty serves for both: a larger column needs a smaller coefficient.
    group_columns *= np.sqrt(recipe.penalty / recipe.group_penalty)
    coefficients, bias = fit_logistic(
        np.hstack([components.values, group_columns]),
        np.ones((len(examples.known), 1)),
        examples.known,
        examples.weights,
        recipe.penalty,
        examples.abilities,
    )
    weight, shift = components.unfold(coefficients[None, : components.values.shape[1]])
    return weight[0], float(bias[0] + shift[0])


def fit_logistic(
    features: Float64Array,
    free: Float64Array,
    target: Float64Array,
    weights: Float64Array,
    penalty: float,
    offset: Float64Array,
) -> tuple[Float64Array, Float64Array]:
    """Fit a ridge logistic regression by Newton's method; targets may lie between 0 and 1.

    Args:
        features: Shape (n, d); their coefficients are penalised.
        free: Shape (n, f); their coefficients are not penalised.
        target: Probabilities, shape (n,).
        weights: How much each row counts, shape (n,).
        penalty: Half the weight of the squared norm of the coefficients.
        offset: Added to each logit, shape (n,).

    Returns:
        Coefficients of the features, shape (d,), and of the free columns, shape (f,).
    """
    columns = np.hstack([features, free])
    ridge = np.concatenate([np.full(features.shape[1], penalty), np.full(free.shape[1], 1e-3)])
    coefficients = ridge_logistic(columns, target, ridge, offset, weights)
    return coefficients[: features.shape[1]], coefficients[features.shape[1] :]


def fit_line(logits: Float64Array, known: Float64Array) -> tuple[float, float]:
    """Fit the line that calibrates logits; returns slope and intercept.

    Args:
        logits: Shape (n, m): m logits an example, each with the weight 1/m.
        known: The labels, shape (n,).
    """
    n, m = logits.size, logits.shape[1]
    label, weights = np.repeat(known, m), np.full(n, 1 / m)
    slope, intercept = fit_logistic(logits.reshape(n, 1), np.ones((n, 1)), label, weights, 1e-3, np.zeros(n))
    return float(slope[0]), float(intercept[0])
