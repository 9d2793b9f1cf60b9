"""Fits an LLM's two gates, for the question alone and for a partial answer, to labelled answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from rgate_integrations.decision import Decision
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.artifacts import TunedArtifact
from rgate_integrations.gates.composite import draft_features
from rgate_integrations.gates.corpus import CorpusGate
from rgate_integrations.gates.probability import CLEARLY_LESS, logits, sigmoid, sigmoids
from rgate_integrations.models.base import HasStates, PooledLayer
from rgate_integrations.models.proxies import read_states, require_states
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray
from rgate_integrations.tuning.calibration import (
    LEAST,
    Budget,
    Policy,
    ThresholdChoice,
    describe_choice,
    policy_scores,
)
from rgate_integrations.tuning.collection import Progress, in_chunks
from rgate_integrations.tuning.evaluation import auc, expected_calibration_error, question_folds
from rgate_integrations.tuning.labelling import Labels


@dataclass(frozen=True)
class Readings:
    """Decisions of the prior, which is the gate that tuning corrects, and the questions' hidden states.

    Attributes:
        decisions: The prior's decision about each question.
        states: Hidden states, shape (n, layers, hidden size).
        layers: The layers of these states, and how they are pooled.
        proxy: The model whose states they are.
        llm: The parameters by which the prior is adjusted to an LLM, as JSON values; empty if it has none.
    """

    decisions: tuple[Decision, ...]
    states: Float32Array
    layers: tuple[PooledLayer, ...]
    proxy: HasStates
    llm: dict[str, Any] = field(default_factory=dict)

    @property
    def prior(self) -> Float64Array:
        """Logit of P(known) of the `decisions`, shape (n,)."""
        return logits(np.array([decision.p_known for decision in self.decisions]))


@dataclass(frozen=True)
class FittedGate:
    """A fitted gate, and how well it judges the questions to which it was fitted.

    Attributes:
        artifact: The gate, in the form in which it is saved.
        choice: Its threshold and guarantee.
        indices: Indices in `Labels.answered` of the questions to which it was fitted, shape (n,).
        p: P(known) of each of them, from a fit that has not seen the question, shape (n,).
        retrieves: Whether the gate retrieves for each of them, by the threshold or an override, shape (n,).
        auc: AUC of `p`: how well it ranks the questions that are right without retrieval above the others. Questions
            with an override rank last if it retrieves, and first if it skips.
        auc_before: The same for the P(known) of the prior, the gate that was corrected.
    """

    artifact: TunedArtifact
    choice: ThresholdChoice
    indices: PositionArray
    p: Float64Array
    retrieves: BoolArray
    auc: float
    auc_before: float


def make_readings(gate: DecisionEngine, questions: Sequence[str], progress: Progress) -> Readings:
    """Let a gate decide about questions, and read the questions' hidden states in its proxy.

    Args:
        gate: The prior: the gate that tuning corrects. If it has corpora, the decisions tell what these cover, but
            are made without them, as the saved gate decides.
        questions: The questions.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        EvidenceError: The gate's proxy has no hidden states.
        RGateError: The gate failed on a question. Leaving the question out would change the fit.
    """
    strict, proxy = gate.with_options(on_error="raise"), require_states(gate.get_proxy())
    # Its overrides count in the guarantee, and corpora are not saved.
    without = strict.with_options(gate=strict.gate.inner) if isinstance(strict.gate, CorpusGate) else strict
    layers = tuple(PooledLayer(depth, "question", "mean") for depth in proxy.question_layers)
    decisions: list[Decision] = []
    states: list[Float32Array] = []
    for chunk in in_chunks(questions, "reading the questions", progress):
        values = [{"question": question} for question in chunk]
        decided = without.decide_batch(chunk)
        if strict.corpora:
            decided = list(map(_with_coverage, decided, strict.decide_batch(chunk)))
        decisions += decided
        states += [hidden.states for hidden in read_states(proxy, ANSWER, values, None, layers)]
    config = without.gate.config()
    llm: dict[str, Any] = {
        name: config[name] for name in ("llm_name", "llm_name_source", "ability") if name in config
    }
    return Readings(tuple(decisions), np.stack(states), layers, proxy, llm)


def _with_coverage(decision: Decision, covered: Decision) -> Decision:
    """Return a decision with what the corpora of another decision cover."""
    return decision.model_copy(update={"p_covered": covered.p_covered, "corpora": covered.corpora})


def check_learnable(labels: Labels) -> None:
    """Raise an error for labels from which no gate can be learned.

    Raises:
        DataFormatError: Fewer than 20 questions are labelled, or all answers without retrieval are right, or
            all are wrong.
    """
    n, right = len(labels.known), int(labels.known.sum())
    if n < LEAST:
        judge = f"Check that {labels.judge} replies Yes or No. " if labels.judge and labels.unlabelled else ""
        raise DataFormatError(
            f"Only {n} questions have labels for both answers, direct and retrieve; at least {LEAST} are needed. "
            f"{labels.unlabelled} more were answered, but have no label.",
            hint=judge
            + "Add questions: a useful guarantee needs hundreds. A question does not count if one of its "
            "calls failed.",
        )
    if right in (0, n):
        raise DataFormatError(
            f"All {n} answers without retrieval are {'right' if right else 'wrong'}, so a gate cannot be fitted.",
            hint="Check the labels, or add other questions.",
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
    """Fit a gate. Return None for fewer than 20 usable questions, or if the LLM knows all of them or none.

    Args:
        labels: The labelled answers.
        readings: What the prior, the gate to be corrected, decided about the questions, and their hidden states.
        policy: Chooses the threshold, on scores from fits that have not seen the question.
        tokens: Number of tokens of each partial answer to read, or 0 for the question alone. If above 0, answers
            without log-probabilities are left out.
        seed: Seed of the folds, and of the sample of questions for the principal components.
        facts: Further provenance, as JSON values.
        llm: Name of the LLM.
    """
    answers = [answered.direct for answered in labels.answered]
    indices = np.flatnonzero([not tokens or answer.logprobs is not None for answer in answers])
    features = np.zeros((len(indices), 0))
    if tokens:
        features = np.array([draft_features(answers[index].head(tokens)) for index in indices])
    known, rag, states = labels.known[indices], labels.rag[indices], readings.states[indices]
    if len(known) < LEAST or known.all() or not known.any():
        return None
    # Fitted to all questions before the cross-fitting, which is sound because it does not see labels.
    basis = Basis.fit(states, seed)
    table = Table(readings.prior[indices], basis(states), features, known, labels.target[indices])
    p = sigmoids(crossfit(table, seed))
    # The fitted gate keeps the overrides of the prior.
    decisions = [readings.decisions[index] for index in indices]
    scores = policy_scores(p, decisions)
    choice = _choose(policy, scores, known, rag)
    correction = fit_correction(table, seed)
    # With overrides, as the report's page and `rgate evaluate` show it.
    before, after = auc(policy_scores(sigmoids(table.prior), decisions), known), auc(scores, known)
    # Drift is measured against the final gate's scores, not the folds', because its decisions will be logged.
    provenance = describe_choice(policy, choice, sigmoids(correction(table))) | {
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
    return FittedGate(artifact, choice, indices, p, scores < choice.threshold, after, before)


def _to_artifact(correction: Correction, basis: Basis, readings: Readings, **facts: Any) -> TunedArtifact:
    """Return the gate as it is saved: with a weight and bias for the hidden states, not for their components."""
    components = basis.projection.shape[1]
    (slope,), states, head, (bias,) = np.split(correction.weights, [1, 1 + components, -1])
    weight = basis.projection @ states
    return TunedArtifact(
        slope=1.0 + float(slope),
        bias=float(bias - basis.mean @ weight),
        weight=weight.reshape(readings.states.shape[1:]).astype(np.float32),
        head=head.astype(np.float32),
        least_known=sigmoid(correction.least_known),
        parameters=readings.llm,
        layers=readings.layers,
        base_model=readings.proxy.name,
        fingerprint=readings.proxy.fingerprint,
        **facts,
    )


def _choose(policy: Policy, scores: Float64Array, known: BoolArray, rag: BoolArray) -> ThresholdChoice:
    """Choose a threshold; without a guarantee, say how many questions would be enough, estimated by resampling."""
    choice = policy.choose(scores, known, rag)
    if choice.guaranteed and isinstance(policy, Budget):
        # Scores of the folds' fits are spread a little differently; a loss hardly changes by that, a rate does.
        note = "That is by fits to a part of the log; the rate of the gate, fitted to all of it, may differ."
        return replace(choice, guarantee=f"{choice.guarantee} {note}")
    if choice.guaranteed:
        return choice
    required = (
        "Even {n} questions like these would not be enough: check the labels, or allow a larger loss or rate."
    )
    rng = np.random.default_rng(0)
    for factor in (2, 4, 8, 16, 32):
        n = factor * len(scores)
        # With replacement, as if further questions came from the same traffic.
        sample = rng.integers(0, len(scores), n)
        if policy.choose(scores[sample], known[sample], rag[sample]).guaranteed:
            required = "About {n} questions like these would be enough."
            break
    return replace(choice, guarantee=f"{choice.guarantee} {required.format(n=n)}")


COMPONENTS = 64
"""Maximum number of principal components of the hidden states."""

STRENGTHS = (10.0, 1_000.0, 100.0, 30.0, 3.0, 1.0)
"""Candidate shrinkages of the states' weights; the states' components have a total variance of 1. The first is used
unless another is clearly better, since it was near the best for every recorded LLM, with 50 to 1,000 questions."""

HEAD_STRENGTHS = (0.3, 3.0, 30.0)
"""Candidate shrinkages of the weights of a partial answer's features, each of which has a variance of 1."""

FOLDS = 5
"""Folds of the cross-fitting, and of the choice of the shrinkage."""

_SLOPE = 5.0  # shrinkage of the prior's slope towards 1; of 20, 5 and 1 the best for four recorded LLMs
_INTERCEPT = 1e-3  # keeps the intercept finite if all labels are the same
_BASIS = 2_000  # maximum number of questions from which the principal components are computed
# Avoids a division by zero if a state never varies.
_TINY = 1e-6
_NEWTON_STEPS = 30
_CONVERGED = 1e-4
_MIN_CURVATURE = 1e-4  # per row; if all predictions were certain, a Newton step would be infinite


@dataclass(frozen=True)
class Basis:
    """Principal components of standardised hidden states, scaled to a total variance of 1.

    Attributes:
        mean: Mean of the states, shape (layers * hidden size,).
        projection: Projection of centred states, shape (layers * hidden size, components).
    """

    mean: Float64Array
    projection: Float64Array

    @classmethod
    def fit(cls, states: Float32Array, seed: int = 0) -> Basis:
        """Return the basis of states, shape (n, layers, hidden size); if n is above 2,000, of 2,000 random rows."""
        from sklearn.decomposition import PCA

        flat = states.reshape(len(states), -1).astype(np.float64)
        if len(flat) > _BASIS:
            flat = flat[np.random.default_rng(seed).choice(len(flat), _BASIS, replace=False)]
        mean, scale = flat.mean(axis=0), flat.std(axis=0) + _TINY
        # The full solver is deterministic, unlike the randomised one.
        pca = PCA(min(COMPONENTS, len(flat) - 1, flat.shape[1]), svd_solver="full")
        spread = np.sqrt(max(pca.fit_transform((flat - mean) / scale).var(axis=0).sum(), _TINY))
        return cls(mean, pca.components_.T / scale[:, None] / spread)

    def __call__(self, states: Float32Array) -> Float64Array:
        """Return the components of states, shape (n, components)."""
        return (states.reshape(len(states), -1) - self.mean) @ self.projection


@dataclass(frozen=True)
class Table:
    """The data of a fit, one row per question.

    Attributes:
        prior: Logit of P(known) by the prior, the gate that tuning corrects, shape (n,).
        states: Components of the hidden states, shape (n, components).
        features: Features of the partial answers, shape (n, features); no columns for the question alone.
        known: Whether the answer without retrieval is right, shape (n,).
        target: Target of the fit, in [0, 1], shape (n,): `known`, or the share of right samples.
    """

    prior: Float64Array
    states: Float64Array
    features: Float64Array
    known: BoolArray
    target: Float64Array

    @property
    def columns(self) -> Float64Array:
        """`prior`, `states`, `features` and a column of ones, shape (n, 1 + components + features + 1)."""
        return np.column_stack([self.prior, self.states, self.features, np.ones(len(self.prior))])

    def part(self, indices: PositionArray) -> Table:
        """Return the rows of the table at the given indices."""
        return Table(
            self.prior[indices],
            self.states[indices],
            self.features[indices],
            self.known[indices],
            self.target[indices],
        )


@dataclass(frozen=True)
class Correction:
    """A fitted correction of the logits of the prior, the gate that tuning corrects.

    Attributes:
        weights: One weight per column of `Table.columns`. The weighted sum of the columns is added to the logit.
        strength: The chosen shrinkage of the weights of the hidden states' components.
        least_known: Logit of the prior clearly below those of all known questions. A lower one is never raised.
    """

    weights: Float64Array
    strength: float
    least_known: float

    def __call__(self, table: Table) -> Float64Array:
        """Return the corrected logit of each question, shape (n,)."""
        corrected = table.prior + table.columns @ self.weights
        # Nothing shows that the LLM knows such questions, and they may be of a kind that the log lacks.
        return np.where(table.prior < self.least_known, np.minimum(corrected, table.prior), corrected)


def fit_correction(table: Table, seed: int = 0) -> Correction:
    """Fit a correction, with shrinkages chosen by their log loss on held-out questions.

    A candidate is one of `STRENGTHS` with one of `HEAD_STRENGTHS`. The first of each is used, unless the candidate
    with the lowest loss is better by more than one standard error.

    Args:
        table: The data of the questions.
        seed: Seed of the folds.
    """
    head_strengths = HEAD_STRENGTHS if table.features.shape[1] else HEAD_STRENGTHS[:1]
    candidates = list(product(head_strengths, STRENGTHS))
    n = len(table.known)
    losses = np.zeros((len(candidates), n))
    for train, test in question_folds(n, FOLDS, seed):
        fit_part, held_out = table.part(train), table.part(test)
        for row, (head_strength, strength) in enumerate(candidates):
            logits = _fit(fit_part, strength, head_strength)(held_out)
            losses[row, test] = np.logaddexp(0.0, logits) - held_out.target * logits
    # The first candidate, unless another is better by more than one standard error.
    best = int(losses.mean(axis=1).argmin())
    # Paired differences, because the losses of a question under two candidates are strongly correlated.
    difference = losses[0] - losses[best]
    is_better = difference.mean() > difference.std() / np.sqrt(n)
    head_strength, strength = candidates[best if is_better else 0]
    correction = _fit(table, strength, head_strength)
    if not np.array_equal(table.target, table.known):
        # Samples are right less often than the most likely answers, so the intercept is refitted to the latter.
        (shift,) = ridge_logistic(np.ones((n, 1)), table.known, [_INTERCEPT], correction(table))
        correction.weights[-1] += shift
    return correction


def crossfit(table: Table, seed: int) -> Float64Array:
    """Return the logit of each question from a correction fitted without the question's fold, shape (n,)."""
    # Each fold chooses its own shrinkage, because a choice on all questions would have seen the test part.
    logits = np.zeros(len(table.known))
    for train, test in question_folds(len(table.known), FOLDS, seed):
        logits[test] = fit_correction(table.part(train), seed)(table.part(test))
    return logits


def _fit(table: Table, strength: float, head_strength: float) -> Correction:
    """Fit a correction, with the shrinkage ``strength`` for the components and ``head_strength`` for the features.

    The features are standardised first.
    """
    components, features = table.states.shape[1], table.features.shape[1]
    # The prior is the offset, so with all weights at 0 the gate equals the prior.
    penalty = np.array([_SLOPE, *[strength] * components, *[head_strength] * features, _INTERCEPT])
    mean, scale = np.zeros(len(penalty)), np.ones(len(penalty))
    mean[1 + components : -1] = table.features.mean(axis=0)
    scale[1 + components : -1] = table.features.std(axis=0) + _TINY
    weights = ridge_logistic((table.columns - mean) / scale, table.target, penalty, table.prior) / scale
    weights[-1] -= weights @ mean
    # If a fold has no known question, no logit is raised.
    return Correction(weights, strength, table.prior[table.known].min(initial=np.inf) - CLEARLY_LESS)


def ridge_logistic(
    columns: Float64Array,
    target: Float64Array | BoolArray,
    penalty: Sequence[float] | Float64Array,
    offset: Float64Array,
    weights: Float64Array | None = None,
) -> Float64Array:
    """Return the ``w`` that minimises the log loss of ``offset + columns @ w`` plus ``penalty @ w² / 2``.

    It is found by Newton's method.

    scikit-learn's logistic regression has neither an offset nor one penalty per column.

    Args:
        columns: Shape (n, d).
        target: Probabilities in [0, 1], shape (n,).
        penalty: Shape (d,).
        offset: Shape (n,).
        weights: Weights of the rows, shape (n,); all 1 when None.

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
        # The limits keep the exponential from overflowing.
        p = sigmoids(np.clip(offset + columns @ fitted, -30, 30))
        gradient = columns.T @ (weights * (p - target)) + ridge * fitted
        curvature = weights * np.maximum(p * (1 - p), _MIN_CURVATURE)
        step = np.linalg.solve((columns * curvature[:, None]).T @ columns + np.diag(ridge), gradient)
        # A full step may overshoot if the labels are separable.
        loss = loss_at(fitted)
        while loss_at(fitted - step) > loss and np.abs(step).max() > _CONVERGED:
            step = step / 2
        fitted = fitted - step
        if np.abs(step).max() < _CONVERGED:
            break
    return fitted
