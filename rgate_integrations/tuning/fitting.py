"""From labelled answers to the two gates: what they read, how they are fitted, and what they guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from rgate_integrations.decision import Decision
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.artifacts import TunedArtifact
from rgate_integrations.gates.probability import logits, sigmoids
from rgate_integrations.gates.tuned import draft_features
from rgate_integrations.models.base import HasStates
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.models.proxies import read_states, require_states
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray
from rgate_integrations.tuning.calibration import LEAST, Policy, ThresholdChoice, provenance_of
from rgate_integrations.tuning.collection import Progress
from rgate_integrations.tuning.evaluation import auc, expected_calibration_error, question_folds
from rgate_integrations.tuning.labelling import Labels

_CHUNK = 64


@dataclass(frozen=True)
class Readings:
    """What the proxy read of the questions; one row a question.

    Attributes:
        decisions: Those of the gate that is corrected.
        states: Hidden states, shape (n, layers, hidden size).
        layers: Which states.
        proxy: The model that read them.
    """

    decisions: tuple[Decision, ...]
    states: Float32Array
    layers: tuple[PooledLayer, ...]
    proxy: HasStates

    @property
    def prior(self) -> Float64Array:
        """Logit of the gate that is corrected, shape (n,)."""
        return logits(np.array([decision.p_known for decision in self.decisions]))


@dataclass(frozen=True)
class FittedGate:
    """A gate that was fitted, and what it does on questions that its fit has not seen.

    Attributes:
        artifact: The gate.
        choice: Its threshold and guarantee.
        indices: Which of the labelled questions it was fitted to, shape (n,).
        p: P(known) of these, held out, shape (n,).
        auc: Of `p` for "right without retrieval".
        auc_before: Of the gate that was corrected, on the same questions.
    """

    artifact: TunedArtifact
    choice: ThresholdChoice
    indices: PositionArray
    p: Float64Array
    auc: float
    auc_before: float

    @property
    def retrieves(self) -> BoolArray:
        """For which of its questions it retrieves, shape (n,)."""
        return self.p < self.choice.threshold


def read_questions_with(gate: DecisionEngine, questions: Sequence[str], progress: Progress) -> Readings:
    """Ask the gate that is to be corrected, and read the states that probes of a question read best.

    Raises:
        RGateError: The gate failed; here nothing is gained by going on.
    """
    strict, proxy = gate.with_options(on_error="raise"), require_states(gate.get_proxy())
    layers = tuple(PooledLayer(depth, "question", "mean") for depth in proxy.question_layers)
    decisions: list[Decision] = []
    states: list[Float32Array] = []
    for start in range(0, len(questions), _CHUNK):
        chunk = questions[start : start + _CHUNK]
        read = read_states(proxy, ANSWER, [{"question": question} for question in chunk], None, layers)
        for decision, hidden in zip(strict.decide_batch(chunk), read, strict=True):
            decisions.append(decision)
            states.append(hidden.states)
        progress("reading the questions", len(states), len(questions))
    return Readings(tuple(decisions), np.stack(states), layers, proxy)


def check_learnable(labels: Labels) -> None:
    """Refuse labels that nothing can be learned from.

    Raises:
        DataFormatError: There are fewer than 20, or all are the same.
    """
    n, right = len(labels.known), int(labels.known.sum())
    if n < LEAST:
        raise DataFormatError(
            f"Only {n} questions have answers of both arms and a label.",
            hint=f"At least {LEAST} are needed, and hundreds for a guarantee worth having.",
        )
    if right in (0, n):
        what, gate = ("wrong", "constant:always") if right == 0 else ("right", "constant:never")
        raise DataFormatError(
            f"All {n} answers without retrieval are {what}: there is nothing to tell apart.",
            hint=f"load_gate({gate!r}) fits these questions; check the labels, or give other questions.",
        )


def fit_gate(
    labels: Labels,
    readings: Readings,
    policy: Policy,
    *,
    tokens: int = 0,
    seed: int = 0,
    facts: dict[str, Any] | None = None,
    llm: str = "",
) -> FittedGate | None:
    """Fit a gate, and choose its threshold on scores that come from fits without the question.

    Args:
        labels: The labelled answers.
        readings: What the proxy read of their questions.
        policy: Chooses the threshold.
        tokens: How many tokens of the partial answer are read; 0 for the question alone.
        seed: Seed of everything.
        facts: What else the gate's file says of its origin; JSON values.
        llm: Name of the LLM.

    Returns:
        The gate; None if it reads partial answers, and too few have log-probabilities or all of those are alike.
    """
    indices, features = np.arange(len(labels.answered)), np.zeros((len(labels.answered), 0))
    if tokens:
        indices, features = _read_beginnings(labels, tokens)
    known, rag = labels.known[indices], labels.rag[indices]
    if len(known) < LEAST or known.all() or not known.any():
        return None
    basis = Basis.fit(readings.states[indices], seed)
    table = Table(
        readings.prior[indices], basis(readings.states[indices]), features, known, labels.target[indices]
    )
    held_out = crossfit(table, seed)
    p = sigmoids(held_out)
    # Thresholds come from a fixed grid, not from these scores: the guarantee needs that.
    choice = policy.choose(p, known, rag)
    if not choice.guaranteed:
        choice = replace(choice, guarantee=f"{choice.guarantee} {_required_questions(policy, p, known, rag)}")
    correction = fit_correction(table, seed)
    before, after = auc(table.prior, known), auc(held_out, known)
    # Logged decisions are compared with what this very gate gives, not with what those of the folds gave.
    provenance = provenance_of(policy, choice, sigmoids(correction(table))) | {
        "seed": seed,
        "labels": labels.kind,
        "samples": labels.samples,
        "unlabelled": labels.unlabelled,
        "known": round(float(known.mean()), 4),
        "auc": round(after, 4),
        "auc_before": round(before, 4),
        "ece": round(expected_calibration_error(p, known), 4),
        "shrinkage": correction.strength,
        "folds": FOLDS,
        **(facts or {}),
    }
    artifact = _to_artifact(
        correction, basis, readings, tokens=tokens, llm=llm, threshold=choice.threshold, provenance=provenance
    )
    return FittedGate(artifact, choice, indices, p, after, before)


def _to_artifact(correction: Correction, basis: Basis, readings: Readings, **facts: Any) -> TunedArtifact:
    """Fold the basis into weight and bias, so that the gate multiplies the states once."""
    many = basis.projection.shape[1]
    (slope,), states, head, (bias,) = np.split(correction.weights, [1, 1 + many, -1])
    weight = basis.projection @ states
    return TunedArtifact(
        slope=1.0 + float(slope),
        bias=float(bias - basis.mean @ weight),
        weight=weight.reshape(readings.states.shape[1:]).astype(np.float32),
        head=head.astype(np.float32),
        layers=readings.layers,
        base_model=readings.proxy.name,
        fingerprint=readings.proxy.fingerprint,
        **facts,
    )


def _read_beginnings(labels: Labels, tokens: int) -> tuple[PositionArray, Float64Array]:
    """Return which answers came with the LLM's own log-probabilities, and the features of their first tokens."""
    indices = np.flatnonzero([each.direct.logprobs is not None for each in labels.answered])
    features = [draft_features(labels.answered[index].direct.head(tokens)) for index in indices]
    return indices, np.array(features)


def _required_questions(policy: Policy, p: Float64Array, known: BoolArray, rag: BoolArray) -> str:
    """Say how many questions like these would do: they are drawn with replacement, and the policy chooses on them."""
    rng = np.random.default_rng(0)
    for times in (2, 4, 8, 16, 32):
        n = times * len(p)
        drawn = rng.integers(0, len(p), n)
        if policy.choose(p[drawn], known[drawn], rag[drawn]).guaranteed:
            return f"About {n} questions like these would do."
    return f"{n} questions like these would not do either: allow for more."


COMPONENTS = 64
"""Principal components of the hidden states that are kept."""

STRENGTHS = (10.0, 1_000.0, 100.0, 30.0, 3.0, 1.0)
"""Shrinkage of the states' weights that is tried; the states' components have a total variance of 1. The first is
taken unless another is clearly better: it was near the best for every recorded LLM, from 50 to 1,000 questions."""

HEAD_STRENGTHS = (0.3, 3.0, 30.0)
"""Shrinkage of the weights of a partial answer's features, likewise; each has a variance of 1."""

FOLDS = 5
"""Of the cross-fitting, and of the choice of the shrinkage."""

_SLOPE = 20.0  # shrinkage of the prior's slope towards 1: few questions must not turn its order around
_INTERCEPT = 1e-3  # keeps the intercept finite where all labels are the same
_BASIS = 2_000  # questions that the principal components are computed from
_TINY = 1e-6
_NEWTON_STEPS = 30
_CONVERGED = 1e-4
_FLATTEST = 1e-4  # curvature that a row has at least: where all is certain, a step would be endless


@dataclass(frozen=True)
class Basis:
    """Principal components of standardised hidden states, scaled to a total variance of 1.

    Attributes:
        mean: Of the states, shape (layers * hidden size,).
        projection: Of what is left without the mean, shape (layers * hidden size, components).
    """

    mean: Float64Array
    projection: Float64Array

    @classmethod
    def fit(cls, states: Float32Array, seed: int = 0) -> Basis:
        """Compute it from states, shape (n, layers, hidden size). No label is looked at."""
        flat = states.reshape(len(states), -1).astype(np.float64)
        if len(flat) > _BASIS:
            flat = flat[np.random.default_rng(seed).choice(len(flat), _BASIS, replace=False)]
        mean, scale = flat.mean(axis=0), flat.std(axis=0) + _TINY
        standard = (flat - mean) / scale
        # Of the small matrix of questions by questions: there are more dimensions than questions.
        values, vectors = np.linalg.eigh(standard @ standard.T)
        largest = np.argsort(values)[::-1][: min(COMPONENTS, max(len(flat) - 1, 1))]
        directions = standard.T @ vectors[:, largest] / np.sqrt(np.maximum(values[largest], _TINY))
        spread = np.sqrt(max(values[largest].sum() / len(flat), _TINY))
        return cls(mean, directions / scale[:, None] / spread)

    def __call__(self, states: Float32Array) -> Float64Array:
        """Return the components of states, shape (n, components)."""
        components: Float64Array = (states.reshape(len(states), -1) - self.mean) @ self.projection
        return components


@dataclass(frozen=True)
class Table:
    """What a correction is fitted to; all arrays have one row a question.

    Attributes:
        prior: Logit of the gate that is corrected, shape (n,).
        states: Components of the hidden states, shape (n, components).
        features: Of the partial answers, shape (n, features); no columns for the question alone.
        known: Whether the answer is right, shape (n,).
        target: What is fitted to, in [0, 1], shape (n,): `known`, or the share of right samples.
    """

    prior: Float64Array
    states: Float64Array
    features: Float64Array
    known: BoolArray
    target: Float64Array

    @property
    def columns(self) -> Float64Array:
        """The prior, the components, the features, and a one; shape (n, 1 + components + features + 1)."""
        return np.column_stack([self.prior, self.states, self.features, np.ones(len(self.prior))])

    def part(self, positions: PositionArray) -> Table:
        """Return some of the questions."""
        return Table(
            self.prior[positions],
            self.states[positions],
            self.features[positions],
            self.known[positions],
            self.target[positions],
        )


@dataclass(frozen=True)
class Correction:
    """A fitted correction of a logit.

    Attributes:
        weights: Of the columns of a table, shape (1 + components + features + 1,).
        strength: The shrinkage of the components' weights that was chosen.
    """

    weights: Float64Array
    strength: float

    def __call__(self, table: Table) -> Float64Array:
        """Return the corrected logit of each question, shape (n,)."""
        correction: Float64Array = table.columns @ self.weights
        return table.prior + correction


def fit_correction(table: Table, seed: int = 0) -> Correction:
    """Fit a correction, with the shrinkage that predicts held-out labels best.

    Args:
        table: The questions.
        seed: Seed of the folds.
    """
    head_strengths = HEAD_STRENGTHS if table.features.shape[1] else HEAD_STRENGTHS[:1]
    tried = list(product(head_strengths, STRENGTHS))
    n = len(table.known)
    losses = np.zeros((len(tried), n))
    for train, test in question_folds(n, FOLDS, seed):
        fitted_to, held_out = table.part(train), table.part(test)
        for row, (head_strength, strength) in enumerate(tried):
            logits = _fit(fitted_to, strength, head_strength)(held_out)
            losses[row, test] = np.logaddexp(0.0, logits) - held_out.target * logits
    # The first, unless another is better by one standard error.
    best = int(losses.mean(axis=1).argmin())
    difference = losses[0] - losses[best]
    if difference.mean() <= difference.std() / np.sqrt(n):
        best = 0
    head_strength, strength = tried[best]
    correction = _fit(table, strength, head_strength)
    if np.array_equal(table.target, table.known):
        return correction
    # The intercept must fit the answers themselves: samples are right less often than they are.
    (moved,) = ridge_logistic(np.ones((n, 1)), table.known, [_INTERCEPT], correction(table))
    correction.weights[-1] += moved
    return correction


def crossfit(table: Table, seed: int) -> Float64Array:
    """Return for each question the logit of a correction that was fitted without its fold, shape (n,)."""
    # The shrinkage is chosen anew within each fold: chosen once on everything, it would have seen the test part.
    logits = np.zeros(len(table.known))
    for train, test in question_folds(len(table.known), FOLDS, seed):
        logits[test] = fit_correction(table.part(train), seed)(table.part(test))
    return logits


def _fit(table: Table, strength: float, head_strength: float) -> Correction:
    """Fit with given shrinkage; the features are standardised for it."""
    many, few = table.states.shape[1], table.features.shape[1]
    penalty = np.array([_SLOPE, *[strength] * many, *[head_strength] * few, _INTERCEPT])
    mean, scale = np.zeros(len(penalty)), np.ones(len(penalty))
    mean[1 + many : -1] = table.features.mean(axis=0)
    scale[1 + many : -1] = table.features.std(axis=0) + _TINY
    weights = ridge_logistic((table.columns - mean) / scale, table.target, penalty, table.prior) / scale
    weights[-1] -= weights @ mean
    return Correction(weights, strength)


def ridge_logistic(
    columns: Float64Array,
    target: Float64Array | BoolArray,
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
    if weights is None:
        weights = np.ones(len(target))
    target = target.astype(np.float64)

    def loss_at(w: Float64Array) -> float:
        logits = offset + columns @ w
        return float(weights @ (np.logaddexp(0.0, logits) - target * logits) + ridge @ w**2 / 2)

    fitted = np.zeros(columns.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = sigmoids(np.clip(offset + columns @ fitted, -30, 30))
        gradient = columns.T @ (weights * (p - target)) + ridge * fitted
        curvature = weights * np.maximum(p * (1 - p), _FLATTEST)
        step = np.linalg.solve((columns * curvature[:, None]).T @ columns + np.diag(ridge), gradient)
        # A full step may overshoot where labels are separable.
        loss = loss_at(fitted)
        while loss_at(fitted - step) > loss and np.abs(step).max() > _CONVERGED:
            step = step / 2
        fitted = fitted - step
        if np.abs(step).max() < _CONVERGED:
            break
    return fitted
