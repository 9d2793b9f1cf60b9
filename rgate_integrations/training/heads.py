"""Fits the heads of a `heads` gate on hidden states of questions: kinds, knowledge, and in what LLMs differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rgate_integrations.arrays import Float32Array, Float64Array
from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.saved.heads import HeadsArtifact, Kind, KnownLLM

Mask: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"

_TINY = 1e-6  # keeps a constant feature from dividing by zero
_NEWTON_STEPS = 30
_CONVERGED = 1e-4


@dataclass(frozen=True)
class HeadExamples:
    """Questions with what is known about them; one row each. One question may have a row for each LLM.

    Attributes:
        states: Pooled hidden states, shape (n, layers, hidden size), any float type.
        kinds: Kind of each request; empty where it is not known.
        known: P(the LLM answers rightly alone) in [0, 1], shape (n,); NaN where it is not labelled.
        llms: The LLM of each label; empty for what holds for every LLM.
        groups: Questions of a group share a base rate that says nothing (how a source was selected, a data set).
        weights: How much each row counts, shape (n,).
    """

    states: np.ndarray[tuple[int, ...], np.dtype[np.floating]]
    kinds: np.ndarray[tuple[int, ...], np.dtype[np.str_]]
    known: Float64Array
    llms: np.ndarray[tuple[int, ...], np.dtype[np.str_]]
    groups: np.ndarray[tuple[int, ...], np.dtype[np.str_]]
    weights: Float64Array

    def __len__(self) -> int:
        return len(self.known)

    def rows(self, chosen: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> HeadExamples:
        """Return some rows, by a mask or by positions."""
        parts = (self.states, self.kinds, self.known, self.llms, self.groups, self.weights)
        return HeadExamples(*(part[chosen] for part in parts))


@dataclass(frozen=True)
class HeadsRecipe:
    """How heads are fitted.

    Attributes:
        components: Principal components of a layer that the knowledge head reads.
        kind_components: Those that the kinds read.
        kind_penalty: Strength of the ridge penalty on the kinds' weights.
        known_penalty: That on the weights of the knowledge head.
        llm_penalty: That on what sets an LLM apart.
        rank: In how many directions LLMs may differ.
        knowledge_bias: Added to the logits of the kinds that an LLM serves if it knows the fact: where the kind of a
            request is in doubt, the knowledge head decides.
        never_bias: Added to those that it never serves: where it may be one of these, it is rather retrieved for.
    """

    components: int = 128
    kind_components: int = 512
    kind_penalty: float = 60.0
    known_penalty: float = 200.0
    llm_penalty: float = 1_000.0
    rank: int = 2
    knowledge_bias: float = 0.5
    never_bias: float = 0.4


def fit_heads(
    examples: HeadExamples,
    layers: Sequence[PooledLayer],
    kinds: Sequence[Kind],
    default_llm: str,
    base_model: str,
    recipe: HeadsRecipe | None = None,
    known: tuple[Float32Array, float] | None = None,
) -> HeadsArtifact:
    """Fit all heads. They are not calibrated, and say nothing of where they come from: see `calibrated_heads`.

    Each layer has logistic regressions of its own, on standardised principal components; their logits are averaged
    over the layers of a view (the same span and pooling), and then over the views. The knowledge head is fitted
    twice and averaged: as it is, and with a free intercept a group, which learns what tells known from unknown
    *within* a group. All of this is linear, so it folds into one weight vector a layer.

    Args:
        examples: The rows.
        layers: Which hidden states they hold.
        kinds: The kinds; their biases are fitted.
        default_llm: The LLM that is judged unless another is named.
        base_model: The proxy whose states they are.
        recipe: How to fit.
        known: What `fit_known` returned, if the knowledge head is fitted already.

    Raises:
        DataFormatError: A kind, or a label, does not occur.
    """
    recipe = recipe or HeadsRecipe()
    shares = _shares(layers)
    of_kind = examples.rows(examples.kinds != "")
    labelled = examples.rows(~np.isnan(examples.known))
    missing = [kind.name for kind in kinds if kind.name not in of_kind.kinds]
    if missing or (known is None and not len(labelled)):
        raise DataFormatError(f"There are no examples of {missing[0] if missing else 'known questions'!r}.")
    kind_weights = []
    kind_bias = np.zeros(len(kinds))
    for layer, share in enumerate(shares):
        weights, biases = _fit_kinds(of_kind, [kind.name for kind in kinds], layer, recipe)
        kind_weights.append(share * weights)
        kind_bias += share * biases
    by_serving = {"always": 0.0, "if known": recipe.knowledge_bias, "never": recipe.never_bias}
    kind_bias += [by_serving[kind.served] for kind in kinds]
    known_weight, known_bias = known or fit_known(labelled, layers, recipe)
    heads = HeadsArtifact(
        layers=tuple(PooledLayer(*layer) for layer in layers),
        kinds=tuple(replace(kind, bias=float(b)) for kind, b in zip(kinds, kind_bias, strict=True)),
        kind_weight=np.stack(kind_weights, axis=1).astype(np.float32),
        known_weight=known_weight,
        known_bias=known_bias,
        llms=(KnownLLM(default_llm, 0.0, (0.0,) * recipe.rank),),
        llm_directions=np.zeros((recipe.rank, *examples.states.shape[1:]), np.float32),
        base_model=base_model,
    )
    return _with_llms(heads, labelled, recipe) if recipe.rank else heads


def calibrated_heads(heads: HeadsArtifact, slope: float, intercept: float) -> HeadsArtifact:
    """Return heads whose knowledge logits are mapped by a line."""
    llms = [replace(e, intercept=e.intercept * slope) for e in heads.llms]
    return replace(
        heads,
        known_weight=(heads.known_weight * slope).astype(np.float32),
        known_bias=heads.known_bias * slope + intercept,
        llms=tuple(llms),
        llm_directions=(heads.llm_directions * slope).astype(np.float32),
    )


def fit_known(
    examples: HeadExamples, layers: Sequence[PooledLayer], recipe: HeadsRecipe
) -> tuple[Float32Array, float]:
    """Fit the knowledge head alone; returns its weights, shape (layers, hidden size), and bias. See `fit_heads`."""
    weights, total = [], 0.0
    for layer, share in enumerate(_shares(layers)):
        weight, bias = _fit_known_layer(examples, layer, recipe)
        weights.append(share * weight)
        total += share * bias
    return np.stack(weights).astype(np.float32), total


def _shares(layers: Sequence[PooledLayer]) -> list[float]:
    """Return how much each layer's logit counts: views alike, and the layers of a view alike."""
    views: dict[tuple[str, str], int] = defaultdict(int)
    for _, span, pooling in layers:
        views[span, pooling] += 1
    return [1 / len(views) / views[span, pooling] for _, span, pooling in layers]


class _Components:
    """Standardised principal components of one layer's states, and the way back to weights on the states."""

    def __init__(self, states: Float32Array, weights: Float64Array, components: int) -> None:
        share = (weights / weights.sum()).astype(np.float32)
        self.mean = share @ states
        self.scale = np.sqrt(share @ (states - self.mean) ** 2) + _TINY
        standard = (states - self.mean) / self.scale
        _, vectors = np.linalg.eigh((standard * share[:, None]).T @ standard)
        self.vectors = vectors[:, ::-1][:, :components]  # the largest first
        self.values: Float64Array = (standard @ self.vectors).astype(np.float64)

    def unfold(self, coefficients: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return weights on the states and what they add to the bias, for coefficients of shape (k, components)."""
        weight = coefficients @ self.vectors.T / self.scale
        return weight, -(weight @ self.mean)


def _layer(examples: HeadExamples, layer: int, components: int) -> _Components:
    return _Components(examples.states[:, layer].astype(np.float32), examples.weights, components)


def _fit_kinds(
    examples: HeadExamples, kinds: Sequence[str], layer: int, recipe: HeadsRecipe
) -> tuple[Float64Array, Float64Array]:
    """Return weights, shape (kinds, hidden size), and biases of one layer's kind head."""
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    found = _layer(examples, layer, recipe.kind_components)
    numbers = np.array([list(kinds).index(kind) for kind in examples.kinds])
    model = LogisticRegression(C=1 / recipe.kind_penalty, max_iter=500)
    model.fit(found.values, numbers, sample_weight=examples.weights)
    weight, bias = found.unfold(model.coef_)
    return weight, bias + model.intercept_


def _fit_known_layer(examples: HeadExamples, layer: int, recipe: HeadsRecipe) -> tuple[Float64Array, float]:
    """Return weights, shape (hidden size,), and bias of one layer's knowledge head."""
    found = _layer(examples, layer, recipe.components)
    one = np.ones((len(examples), 1))
    inside = examples.groups[:, None] == np.unique(examples.groups)[None, :]
    none = np.zeros(len(examples))
    plain, bias = logistic(found.values, one, examples.known, examples.weights, recipe.known_penalty, none)
    within, _ = logistic(
        found.values, inside.astype(float), examples.known, examples.weights, recipe.known_penalty, none
    )
    weight, shift = found.unfold((plain + within)[None] / 2)
    return weight[0], float(bias[0] + shift[0])


def logistic(
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
        free: Shape (n, f); theirs are not.
        target: Probabilities, shape (n,).
        weights: How much each row counts, shape (n,).
        penalty: Half the weight of the squared norm of the coefficients.
        offset: Added to each logit, shape (n,).

    Returns:
        Coefficients of the features, shape (d,), and of the free columns, shape (f,).
    """
    columns = np.hstack([features, free])
    ridge = np.concatenate([np.full(features.shape[1], penalty), np.full(free.shape[1], 1e-3)])
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(columns @ coefficients + offset, -30, 30)))
        gradient = columns.T @ (weights * (p - target)) + ridge * coefficients
        curvature = weights * np.maximum(p * (1 - p), 1e-4)
        hessian = (columns * curvature[:, None]).T @ columns + np.diag(ridge)
        step = np.linalg.solve(hessian, gradient)
        coefficients -= step
        if np.abs(step).max() < _CONVERGED:
            break
    return coefficients[: features.shape[1]], coefficients[features.shape[1] :]


def _with_llms(heads: HeadsArtifact, examples: HeadExamples, recipe: HeadsRecipe) -> HeadsArtifact:
    """Add the LLMs that have labels of their own: how far each is off the default one, in few directions."""
    default = heads.llms[0]
    names = [name for name in np.unique(examples.llms) if name not in ("", default.name)]
    if not names:
        return heads
    common = heads.known_logits(examples.states, default)
    levels = _levels(examples, common)
    flat = examples.states.reshape(len(examples), -1).astype(np.float32)
    found = _Components(flat, examples.weights, recipe.components)
    differences = []
    for name in (default.name, *names):
        own = examples.llms == name
        inside = examples.groups[own][:, None] == np.unique(examples.groups[own])[None, :]
        difference, _ = logistic(
            found.values[own],
            inside.astype(float),
            examples.known[own],
            examples.weights[own],
            recipe.llm_penalty,
            common[own],
        )
        differences.append(difference)
    # The default LLM is what the head itself is for: the others are described by how they differ from it.
    left, sizes, right = np.linalg.svd(np.stack(differences[1:]) - differences[0], full_matrices=False)
    rank = min(recipe.rank, len(sizes))
    directions, shifts = found.unfold(right[:rank])
    llms = [KnownLLM(default.name, 0.0, (0.0,) * rank)]
    for name, mix in zip(names, left[:, :rank] * sizes[:rank], strict=True):
        intercept = _higher(levels, name, default.name) + float(mix @ shifts)
        llms.append(KnownLLM(str(name), intercept, tuple(mix.tolist())))
    shape = (rank, *heads.known_weight.shape)
    return replace(heads, llms=tuple(llms), llm_directions=directions.reshape(shape).astype(np.float32))


def _levels(examples: HeadExamples, common: Float64Array) -> dict[tuple[str, str], float]:
    """Return how much more than the common head says each LLM knows, in logits, by LLM and data set.

    Groups are named ``source:dataset:llm`` for that. Those of sources that chose the share of right answers say
    nothing.
    """
    found: dict[tuple[str, str], float] = {}
    for group in np.unique(examples.groups):
        source, _, rest = group.partition(":")
        dataset, _, llm = rest.partition(":")
        if not llm or source.startswith("selected"):
            continue
        own = examples.groups == group
        nothing, one = np.zeros((int(own.sum()), 0)), np.ones((int(own.sum()), 1))
        _, level = logistic(nothing, one, examples.known[own], examples.weights[own], 1.0, common[own])
        found[llm, dataset] = float(level[0])
    return found


def _higher(levels: dict[tuple[str, str], float], llm: str, other: str) -> float:
    """Return how much more one LLM knows than another, on the data sets that both have labels of; 0 without any."""
    shared = [dataset for name, dataset in levels if name == llm and (other, dataset) in levels]
    return float(np.mean([levels[llm, d] - levels[other, d] for d in shared])) if shared else 0.0
