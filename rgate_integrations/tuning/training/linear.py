"""Linear probes: fitted on hidden states, cross-validated, and weighted against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgate_integrations.errors import missing_dependency
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray
from rgate_integrations.tuning.evaluation import auc

COMPONENTS = 128
"""Principal components that are kept of a layer."""

REGULARISATION = 0.005
"""scikit-learn's C: the inverse of the strength."""

_HARDLY_REGULARISED = 100.0  # as large a feature gets a small weight, which costs little
_TINY = 1e-6  # keeps a constant feature from dividing by zero
_NEWTON_STEPS = 30
_CONVERGED = 1e-4
_FLATTEST = 1e-4  # curvature that a row has at least: where all is certain, a step would be endless


@dataclass(frozen=True)
class LinearProbe:
    """A linear probe.

    Attributes:
        weight: Shape (layers, hidden size).
        bias: Added to the sum of ``weight * states``.
    """

    weight: Float32Array
    bias: float

    def __call__(self, states: Float32Array) -> Float64Array:
        """Return the logit for each of the states, shape (n, layers, hidden size)."""
        logits: Float64Array = np.einsum("nlh,lh->n", states.astype(np.float64), self.weight) + self.bias
        return logits


def fit_probe(
    states: Float32Array, known: BoolArray, seed: int = 0, sets: Sequence[str] | None = None
) -> LinearProbe:
    """Fit one regularised logistic regression a layer, on standardised principal components, and average them.

    With several data sets each layer is fitted twice and averaged: once as it is, and once with a free intercept
    a set. The latter learns what tells known from unknown within a set, not which set a question is from.
    Standardisation, projection and averaging are linear, so the result folds into one weight vector a layer.

    Args:
        states: Shape (n, layers, hidden size).
        known: The labels, shape (n,).
        seed: Seed of the solver.
        sets: The data set of each question, or None if they are one.
    """
    names = np.asarray(sets if sets is not None else [""] * len(known))
    in_set = names[:, None] == np.unique(names)[None, :]
    fits = [
        _fit_layer(states[:, layer].astype(np.float64), known, seed, in_set)
        for layer in range(states.shape[1])
    ]
    weight = np.stack([layer_weight for layer_weight, _ in fits]) / len(fits)
    bias = sum(layer_bias for _, layer_bias in fits) / len(fits)
    return LinearProbe(weight.astype(np.float32), float(bias))


def _fit_layer(
    states: Float64Array, known: BoolArray, seed: int, in_set: BoolArray
) -> tuple[Float64Array, float]:
    """Return weight, shape (hidden size,), and bias of one layer's states, shape (n, hidden size)."""
    try:
        from sklearn.decomposition import PCA
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    mean, scale = states.mean(axis=0), states.std(axis=0) + _TINY
    pca = PCA(min(COMPONENTS, *states.shape), svd_solver="full")
    components = pca.fit_transform((states - mean) / scale)
    model = LogisticRegression(C=REGULARISATION, max_iter=2_000, random_state=seed).fit(components, known)
    coefficients, intercept = model.coef_[0], float(model.intercept_[0])
    if in_set.shape[1] > 1:
        model.fit(np.hstack([components, _HARDLY_REGULARISED * in_set]), known)
        coefficients = (coefficients + model.coef_[0, : components.shape[1]]) / 2
    # Back from components to states: x -> coefficients @ components_ @ ((x - mean) / scale - pca.mean_) + intercept
    projected = pca.components_.T @ coefficients
    weight = projected / scale
    return weight, intercept - float(mean @ weight) - float(pca.mean_ @ projected)


def cross_validate(
    states: Float32Array, known: BoolArray, folds: int, seed: int, sets: Sequence[str] | None = None
) -> Float64Array:
    """Return for each question the logit of a probe that was fitted without its fold."""
    logits = np.zeros(len(known))
    names = np.asarray(sets if sets is not None else [""] * len(known))
    for train, test in question_folds(len(known), folds, seed):
        fitted = fit_probe(states[train], known[train], seed, names[train].tolist())
        logits[test] = fitted(states[test])
    return logits


def combine(logits: Float64Array, known: BoolArray) -> tuple[Float64Array, float]:
    """Fit the weights of several probes' held-out logits, and so calibrate them: sigmoid(logits @ weights + bias).

    Args:
        logits: Held-out logits, shape (n, probes).
        known: The labels, shape (n,).
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1e6).fit(logits, known)
    return model.coef_[0], float(model.intercept_[0])


def ridge_logistic(
    columns: Float64Array,
    target: Float64Array,
    penalty: Sequence[float] | Float64Array,
    offset: Float64Array,
    weights: Float64Array | None = None,
) -> Float64Array:
    """Minimise the log loss of ``offset + columns @ w`` plus ``penalty @ w² / 2`` by Newton's method.

    scikit-learn's logistic regression has neither an offset nor a penalty for each column.

    Args:
        columns: Shape (n, d).
        target: Probabilities in [0, 1], shape (n,).
        penalty: Shape (d,).
        offset: Shape (n,).
        weights: How much each row counts, shape (n,); alike when None.

    Returns:
        The weights of the columns, shape (d,).
    """
    ridge = np.asarray(penalty, dtype=float)
    counts = np.ones(len(target)) if weights is None else weights
    target = target.astype(np.float64)

    def loss_at(w: Float64Array) -> float:
        logits = offset + columns @ w
        return float(counts @ (np.logaddexp(0.0, logits) - target * logits) + ridge @ w**2 / 2)

    found = np.zeros(columns.shape[1])
    loss = loss_at(found)
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(offset + columns @ found, -30, 30)))
        gradient = columns.T @ (counts * (p - target)) + ridge * found
        curvature = counts * np.maximum(p * (1 - p), _FLATTEST)
        step = np.linalg.solve((columns * curvature[:, None]).T @ columns + np.diag(ridge), gradient)
        # A full step may overshoot where labels are separable.
        while loss_at(found - step) > loss and np.abs(step).max() > _CONVERGED:
            step = step / 2
        found = found - step
        loss = loss_at(found)
        if np.abs(step).max() < _CONVERGED:
            break
    return found


def question_folds(n: int, folds: int, seed: int) -> Iterator[tuple[PositionArray, PositionArray]]:
    """Yield (training positions, test positions) of each fold; a position is a question."""
    try:
        from sklearn.model_selection import KFold
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    yield from KFold(folds, shuffle=True, random_state=seed).split(np.zeros(n))


def auc_by_set(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, float]:
    """Return the AUC of each data set that has both labels."""
    names = np.asarray(sets)
    found = {}
    for name in dict.fromkeys(sets):
        inside = names == name
        if known[inside].any() and not known[inside].all():
            found[name] = auc(scores[inside], known[inside])
    return found


def fold_metrics(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, Any]:
    """Return the AUC of held-out scores as a model card shows it: of each set, their mean, and pooled."""
    each = auc_by_set(scores, known, sets)
    pooled = auc_by_set(scores, known, ["all"] * len(known))
    return {"auc": each, "auc_mean": float(np.mean(list(each.values()))), "auc_pooled": pooled["all"]}
