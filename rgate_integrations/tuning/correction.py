"""Fits a correction of another gate's logit: ridge logistic regression with that logit as an offset.

With the strongest shrinkage the correction is a slope near 1 and an intercept, so that few questions leave the other
gate's order as it is. How much of it gives way is chosen by cross-validation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray
from rgate_integrations.training.folds import question_folds
from rgate_integrations.training.linear import ridge_logistic

COMPONENTS = 64
"""Principal components of the hidden states that are kept."""

STRENGTHS = (10.0, 1_000.0, 100.0, 30.0, 3.0, 1.0)
"""Shrinkage of the states' weights that is tried; the states' components have a total variance of 1. The first is
taken unless another is clearly better: it was near the best for every recorded LLM, from 50 to 1,000 questions."""

HEAD_STRENGTHS = (0.3, 3.0, 30.0)
"""Shrinkage of the weights of a begun answer's features, likewise; each has a variance of 1."""

_SLOPE = 20.0  # shrinkage of the prior's slope towards 1: few questions must not turn its order around
_INTERCEPT = 1e-3  # keeps the intercept finite where all labels are the same
_FOLDS = 5
_BASIS = 2_000  # questions that the principal components are computed from
_TINY = 1e-6


@dataclass(frozen=True)
class Basis:
    """Principal components of standardised hidden states, scaled to a total variance of 1.

    Attributes:
        mean: Of the states, shape (layers * hidden size,).
        scale: Their standard deviations, shape (layers * hidden size,).
        components: Shape (components, layers * hidden size).
    """

    mean: Float64Array
    scale: Float64Array
    components: Float64Array

    @classmethod
    def of(cls, states: Float32Array, seed: int = 0) -> Basis:
        """Compute it from states, shape (n, layers, hidden size). No label is looked at."""
        flat = states.reshape(len(states), -1).astype(np.float64)
        if len(flat) > _BASIS:
            flat = flat[np.random.default_rng(seed).choice(len(flat), _BASIS, replace=False)]
        mean, scale = flat.mean(axis=0), flat.std(axis=0) + _TINY
        standard = (flat - mean) / scale
        # Of the small matrix of questions by questions: there are more dimensions than questions.
        values, vectors = np.linalg.eigh(standard @ standard.T)
        kept = np.argsort(values)[::-1][: min(COMPONENTS, max(len(flat) - 1, 1))]
        directions = standard.T @ vectors[:, kept] / np.sqrt(np.maximum(values[kept], _TINY))
        spread = np.sqrt(max(values[kept].sum() / len(flat), _TINY))
        return cls(mean, scale, directions.T / spread)

    def __call__(self, states: Float32Array) -> Float64Array:
        """Return the components of states, shape (n, components)."""
        flat = states.reshape(len(states), -1).astype(np.float64)
        found: Float64Array = ((flat - self.mean) / self.scale) @ self.components.T
        return found


@dataclass(frozen=True)
class Table:
    """What a correction is fitted to; all arrays have one row a question.

    Attributes:
        prior: Logit of the gate that is corrected, shape (n,).
        states: Components of the hidden states, shape (n, components).
        features: Of the begun answers, shape (n, features); no columns for the question alone.
        known: Whether the answer is right, shape (n,).
        shares: The share of right samples, in [0, 1], shape (n,): what is fitted to in place of `known`, if given.
    """

    prior: Float64Array
    states: Float64Array
    features: Float64Array
    known: BoolArray
    shares: Float64Array | None = None

    @property
    def labels(self) -> Float64Array:
        """What is fitted to, in [0, 1], shape (n,)."""
        return self.known.astype(np.float64) if self.shares is None else self.shares

    def part(self, positions: PositionArray) -> Table:
        """Return some of the questions."""
        return Table(
            self.prior[positions],
            self.states[positions],
            self.features[positions],
            self.known[positions],
            None if self.shares is None else self.shares[positions],
        )


@dataclass(frozen=True)
class Correction:
    """A fitted correction of a logit.

    Attributes:
        slope: Of the prior.
        bias: Added.
        weight: Of the components, shape (components,).
        head: Of the features as they are, shape (features,).
        strength: The shrinkage of `weight` that was chosen.
    """

    slope: float
    bias: float
    weight: Float64Array
    head: Float64Array
    strength: float

    def __call__(self, table: Table) -> Float64Array:
        """Return the corrected logit of each question, shape (n,)."""
        found: Float64Array = (
            self.slope * table.prior + table.states @ self.weight + table.features @ self.head + self.bias
        )
        return found


def fit_correction(table: Table, seed: int = 0) -> Correction:
    """Fit a correction, with the shrinkage that predicts held-out labels best.

    Args:
        table: The questions.
        seed: Seed of the folds.
    """
    head_strengths = HEAD_STRENGTHS if table.features.shape[1] else HEAD_STRENGTHS[:1]
    folds = list(question_folds(len(table.known), min(_FOLDS, len(table.known)), seed))
    tried: list[tuple[float, float]] = []
    losses: list[Float64Array] = []
    for head_strength in head_strengths:
        for strength in STRENGTHS:
            loss = np.zeros(len(table.known))
            for train, test in folds:
                held_out = table.part(test)
                logits = _fitted(table.part(train), strength, head_strength)(held_out)
                loss[test] = np.logaddexp(0.0, logits) - held_out.labels * logits
            tried.append((strength, head_strength))
            losses.append(loss)
    # The first, unless another is better by one standard error.
    best = int(np.stack(losses).mean(axis=1).argmin())
    difference = losses[0] - losses[best]
    if difference.mean() <= difference.std() / np.sqrt(len(difference)):
        best = 0
    strength, head_strength = tried[best]
    fitted = _fitted(table, strength, head_strength)
    if table.shares is None:
        return fitted
    # The intercept must fit the answers themselves: samples are right less often than they are.
    one, labels = np.ones((len(table.known), 1)), table.known.astype(np.float64)
    (moved,) = ridge_logistic(one, labels, [_INTERCEPT], fitted(table))
    return replace(fitted, bias=fitted.bias + float(moved))


def crossfit(table: Table, folds: int, seed: int) -> Float64Array:
    """Return for each question the logit of a correction that was fitted without its fold, shape (n,)."""
    # The shrinkage is chosen anew within each fold: chosen once on everything, it would have seen the test part.
    found = np.zeros(len(table.known))
    for train, test in question_folds(len(table.known), min(folds, len(table.known)), seed):
        found[test] = fit_correction(table.part(train), seed)(table.part(test))
    return found


def _fitted(table: Table, strength: float, head_strength: float) -> Correction:
    """Fit with given shrinkage. The columns are: the prior, the components, the features, a one."""
    mean = table.features.mean(axis=0)
    scale = table.features.std(axis=0) + _TINY
    one = np.ones((len(table.known), 1))
    columns = np.hstack([table.prior[:, None], table.states, (table.features - mean) / scale, one])
    many, few = table.states.shape[1], table.features.shape[1]
    penalty = np.array([_SLOPE, *[strength] * many, *[head_strength] * few, _INTERCEPT])
    solved = ridge_logistic(columns, table.labels, penalty, table.prior)
    head = solved[1 + many : 1 + many + few] / scale
    return Correction(
        slope=1.0 + float(solved[0]),
        bias=float(solved[-1]) - float(mean @ head),
        weight=solved[1 : 1 + many],
        head=head,
        strength=strength,
    )
