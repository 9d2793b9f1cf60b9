"""Thresholds with a guarantee: policies that choose a threshold on held-out questions, and calibration of a gate.

The guarantees of `Budget` and `MaxLoss` hold with the stated confidence over the random choice of calibration
questions, for new questions from the same source. Both test thresholds in a fixed order and stop at the first that
fails (fixed sequence testing), which needs no correction for the number of thresholds: Angelopoulos et al. 2021,
"Learn then Test", proposition 3 and section 2.3. `MaxLoss` has two starting points, which share its level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import numpy as np

from rgate_integrations.decision import Decision, to_float
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, needs_extra
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.composite import CalibratedGate
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.probability import (
    CLEARLY_LESS,
    ProbabilityMap,
    logit,
    logits,
    sigmoid,
    sigmoids,
)
from rgate_integrations.gates.registry import asks_server
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.tuning.collection import Progress, no_progress
from rgate_integrations.tuning.evaluation import SCORE_DIGITS, expected_calibration_error, is_judged, judge
from rgate_integrations.tuning.questions import (
    DataFile,
    DraftKind,
    all_examples,
    check_all,
    without_repetitions,
)

ALWAYS = 1.01
"""A threshold above every probability: always retrieve."""

# At n = 20 without a single error, the 95 % bound (Clopper and Pearson) is still 14 %.
LEAST = 20
"""Minimum number of labelled questions for choosing a threshold."""

# Evenly spaced both in probability and in logits, because many scores are close to 0 or 1.
GRID = np.unique(np.concatenate([np.linspace(0, 1, 401), sigmoids(np.linspace(-12, 12, 97))]))
"""The candidate thresholds, in ascending order. Fixed sequence testing requires that they not depend on the data."""


# A larger share would need more questions if few are known: with this one, 185 without a loss instead of 173.
_LEVEL_OF_ZERO = 0.2


@dataclass(frozen=True)
class ThresholdChoice:
    """The threshold that a policy chose.

    Attributes:
        threshold: Retrieve iff p_known is below it.
        guarantee: A sentence that says what is guaranteed, or why nothing is.
        guaranteed: Whether the choice has a guarantee.
        facts: The numbers behind the choice, such as ``n`` and ``retrieval_rate``, as JSON values.
    """

    threshold: float
    guarantee: str
    guaranteed: bool
    facts: dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """Retrieve for at most a given share of the questions, with a given confidence.

    The retrieval rate grows with the threshold, so thresholds are tested from 0 upward while the exact upper
    confidence bound (Clopper and Pearson 1934) of the rate stays within the budget.

    Attributes:
        rate: Maximum retrieval rate, in [0, 1].
        confidence: Confidence of the guarantee, in (0, 1).

    Raises:
        ConfigurationError: A number is out of its range.
    """

    rate: float
    confidence: float = 0.95
    name: ClassVar[str] = "budget"

    def __post_init__(self) -> None:
        rate = to_float(self.rate)
        if rate is None or not 0 <= rate <= 1:
            raise ConfigurationError(
                f"The rate of a Budget (--budget) must be a number in [0, 1], not {self.rate!r}.",
                hint="For example, Budget(0.4) or --budget 0.4.",
            )
        _check_fractions(confidence=self.confidence)

    def choose(self, p: Float64Array, closed_book: BoolArray, rag: BoolArray) -> ThresholdChoice:
        """Choose the highest threshold that keeps the budget with the given confidence; 0 if there is none.

        Args:
            p: See `policy_scores`, shape (n,).
            closed_book: Unused; see `MaxLoss.choose`.
            rag: Unused; see `MaxLoss.choose`.

        Raises:
            MissingDependencyError: SciPy is not installed.
        """
        n = len(p)
        # P(known) is never below 0, so at this threshold only overrides retrieve.
        threshold = 0.0
        overridden = int((p < threshold).sum())
        bound = upper_bound(overridden, n, self.confidence) if overridden else 0.0
        for candidate in [*GRID[1:], ALWAYS]:
            upper = upper_bound(int((p < candidate).sum()), n, self.confidence)
            if upper > self.rate:
                break
            threshold, bound = float(candidate), upper
        facts = {"n": n, "retrieval_rate": float((p < threshold).mean()), "upper_bound": bound}
        if threshold == 0:
            only = f"retrieves only where an override decides, {overridden / n:.1%} of the questions"
            return ThresholdChoice(
                threshold,
                f"With n = {n}, no threshold above 0 guarantees a retrieval rate of at most {100 * self.rate:g}%, "
                f"so the gate {only if overridden else 'never retrieves'}.",
                False,
                facts,
            )
        return ThresholdChoice(
            threshold,
            f"Retrieves for at most {100 * self.rate:g}% of the questions, with confidence "
            f"{100 * self.confidence:g}%.",
            True,
            facts,
        )


@dataclass(frozen=True)
class MaxLoss:
    """Lose at most a given amount of accuracy compared with always retrieving, with a given confidence.

    Accuracy is the share of questions whose answer is labelled right.

    The loss of a question is 1 if it is skipped and only the answer with retrieval is right, -1 if it is skipped and
    only the answer without retrieval is right, and 0 otherwise. First, with a fifth of the significance level, the
    threshold 0, which skips everything: it may be shown to be safe where a high one, which skips next to nothing, is
    not. If it fails, thresholds are tested from the highest downward, with the rest of the level (Bonferroni). For
    each, the hypothesis "the mean loss is above ``loss``" is tested by betting (Waudby-Smith and Ramdas 2024,
    "Estimating means of bounded random variables by betting", section 4), which is valid for any number of questions
    and needs fewer of them if the arms rarely differ.

    Attributes:
        loss: Maximum loss of accuracy, in (0, 1).
        confidence: Confidence of the guarantee, in (0, 1).

    Raises:
        ConfigurationError: A number is out of its range.
    """

    loss: float
    confidence: float = 0.95
    name: ClassVar[str] = "max-loss"

    def __post_init__(self) -> None:
        _check_fractions(loss=self.loss, confidence=self.confidence)

    def choose(self, p: Float64Array, closed_book: BoolArray, rag: BoolArray) -> ThresholdChoice:
        """Choose the lowest threshold that keeps the loss within ``loss``, with the given confidence.

        Of those that decide alike about these questions, the highest is chosen. So requests that are less known than
        all of them, such as private ones, retrieve, even if the LLM needs no passages for any question of the log.

        If the tests show that of no threshold that skips a question, or no more than the share ``loss`` of the
        questions has a right answer, choose `ALWAYS`, which skips none and has no guarantee.

        Args:
            p: See `policy_scores`, shape (n,).
            closed_book: Whether each answer without retrieval is right, shape (n,).
            rag: Whether each answer with retrieval is right, shape (n,).
        """
        n, level = len(p), 1 - self.confidence
        # Betting needs a random order, and a file may be sorted.
        order = np.random.default_rng(0).permutation(n)
        p = p[order]
        gain = rag[order].astype(float) - closed_book[order]
        threshold = ALWAYS
        right = float((closed_book | rag).mean())
        # If hardly any answer is right, nothing can be lost, and a gate that skips everything would pass. Such labels
        # are wrong: gold answers may be whole sentences, which no answer contains.
        is_plausible = right > self.loss
        if is_plausible and self._passes(p, gain, 0.0, _LEVEL_OF_ZERO * level):
            threshold = 0.0
        elif is_plausible:
            for candidate in map(float, GRID[::-1]):
                if not self._passes(p, gain, candidate, (1 - _LEVEL_OF_ZERO) * level):
                    break
                threshold = candidate
        skipped = p >= threshold
        facts = {
            "n": n,
            "retrieval_rate": float(1 - skipped.mean()),
            "loss": float(np.where(skipped, gain, 0.0).mean()),
        }
        if not skipped.any():
            why = (
                f"With n = {n}, no threshold that skips anything was shown to lose at most {100 * self.loss:g} "
                f"points of accuracy with confidence {100 * self.confidence:g}%"
            )
            if right <= self.loss:
                why = f"By the labels, only {right:.1%} of the questions have a right answer, with retrieval or not"
            return ThresholdChoice(ALWAYS, f"{why}, so the gate always retrieves.", False, facts)
        alike = GRID[p[skipped].min() >= GRID]
        return ThresholdChoice(
            float(alike.max()),
            f"Loses at most {100 * self.loss:g} points of accuracy against always retrieving, with confidence "
            f"{100 * self.confidence:g}%.",
            True,
            facts,
        )

    def _passes(self, p: Float64Array, gain: Float64Array, threshold: float, level: float) -> bool:
        """Return whether a test at this level shows that the threshold loses at most ``loss``."""
        return betting_p_value(np.where(p >= threshold, gain, 0.0), self.loss, level) <= level


def policy_scores(p: Float64Array, decisions: Sequence[Decision]) -> Float64Array:
    """Return what policies choose a threshold by, shape (n,).

    That is P(known), but -1 for each question that an override or an error retrieves at any threshold, and 1 for each
    that an override skips.

    Args:
        p: P(known) of each question, shape (n,).
        decisions: The decisions about them.
    """
    settled = [decision.override is not None or decision.error is not None for decision in decisions]
    retrieved = [decision.retrieve for decision in decisions]
    return np.where(settled, np.where(retrieved, -1.0, 1.0), p)


def _check_fractions(**values: float) -> None:
    for name, value in values.items():
        if not 0 < (to_float(value) or 0.0) < 1:
            raise ConfigurationError(
                f"{name} must be a number above 0 and below 1, not {value!r}.",
                hint="For example, MaxLoss(0.02) or --max-loss 0.02."
                if name == "loss"
                else "For example, confidence=0.95.",
            )


Policy: TypeAlias = Budget | MaxLoss
"""A way to choose a threshold from P(known) and the correctness of both arms, each of shape (n,)."""
DEFAULT_POLICY = MaxLoss(0.02)


def check_policy(policy: object) -> None:
    """Raise a `ConfigurationError` if ``policy`` is not a `Policy`."""
    if not isinstance(policy, Policy):
        raise ConfigurationError(
            f"policy= must be MaxLoss(…) or Budget(…), not {policy!r}.", hint="Use MaxLoss(0.02)."
        )


def upper_bound(successes: int, n: int, confidence: float) -> float:
    """Return the exact one-sided upper confidence bound of a share (Clopper and Pearson 1934), in [0, 1].

    Args:
        successes: How many of the n items count.
        n: Number of items.
        confidence: Confidence, in (0, 1).

    Raises:
        MissingDependencyError: SciPy is not installed.
    """
    with needs_extra("train"):
        from scipy.stats import beta
    if successes >= n:
        return 1.0
    return float(beta.ppf(confidence, successes + 1, n - successes))


def betting_p_value(losses: Float64Array, bound: float, level: float) -> float:
    """Return a valid p-value for the hypothesis that the expected loss of a question is above ``bound``.

    The capital of a gambler who bets against the hypothesis is a non-negative supermartingale under it, so
    the inverse of its maximum is a p-value (Ville's inequality). The bets are the "predictable plug-in" ones
    of the paper that `MaxLoss` cites.

    Args:
        losses: Losses in [-1, 1], in random order, shape (n,).
        bound: The bound of the hypothesis, below 1.
        level: Significance level of the test. It only tunes the bets; the p-value is valid for any level.
    """
    x, m = (losses + 1) / 2, (bound + 1) / 2
    n = len(x)
    count = np.arange(1, n + 1)
    mean = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (count + 1)
    # Shifted by one, because a bet may only depend on earlier losses.
    before = np.concatenate([[0.25], variance[:-1]])
    # The limit keeps the capital positive whatever the next loss is.
    bets = np.minimum(np.sqrt(2 * math.log(1 / level) / (n * before)), 0.9 / (1 - m))
    capital = np.cumsum(np.log1p(bets * (m - x)))
    return math.exp(-max(float(capital.max()), 0.0))


def describe_choice(policy: Policy, choice: ThresholdChoice, p: Float64Array) -> dict[str, Any]:
    """Return how a threshold was chosen (policy, guarantee, facts, date, scores), as JSON values.

    ``scores`` are the quantiles of ``p``, the saved gate's P(known), with which
    `rgate_integrations.tuning.evaluation.measure_drift` compares later decisions.
    """
    return {
        "policy": {"name": policy.name, **vars(policy)},
        "guarantee": choice.guarantee,
        "guaranteed": choice.guaranteed,
        **choice.facts,
        "date": date.today().isoformat(),
        "scores": np.quantile(p, np.linspace(0, 1, 101)).round(SCORE_DIGITS).tolist(),
    }


@dataclass(frozen=True)
class Calibration:
    """A calibrated gate and its provenance.

    Attributes:
        gate: The gate, with its threshold.
        choice: The choice of the policy, with its guarantee.
        provenance: Policy, number of questions, and of repeated ones that were left out, seed, data, calibration
            error and date, as JSON values.
    """

    gate: DecisionEngine
    choice: ThresholdChoice
    provenance: dict[str, Any]


def calibrate(
    gate: DecisionEngine | Gate | str,
    files: Sequence[DataFile],
    policy: Policy,
    *,
    draft: DraftKind = "proxy",
    seed: int = 0,
    progress: Progress = no_progress,
) -> Calibration:
    """Calibrate a gate: fit Platt scaling on half of the paired data, choose the threshold on the other half.

    Args:
        gate: The gate, or an argument for `load_gate`.
        files: Paired data, from the same traffic that the gate will see. Of a question that they repeat, the first
            line counts.
        policy: Chooses the threshold.
        draft: The drafts that the gate reads, see `rgate_integrations.tuning.evaluation.judge`.
        seed: Seed of the split.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: The gate is not one of `load_gate`, has a corpus or asks a server; ``files`` or ``policy``
            is of another type; or ``draft`` is not one of `DraftKind`.
        DataFormatError: The half for the threshold has fewer than 20 questions, or a draft or label is missing.
        EvidenceError: The gate failed on every question.
        MissingDependencyError: scikit-learn or SciPy is not installed.
    """
    check_policy(policy)
    check_all(files, DataFile, "Pass read_paired(PATHS).")
    gate = _check_savable(resolve_gate(gate))
    labelled = all_examples(files)
    examples = without_repetitions(labelled, attrgetter("question"))
    fit, choose = _split(len(examples), seed)
    judged = judge(gate, examples, draft=draft, progress=progress)
    p_known = np.array([decision.p_known for decision in judged.decisions])
    estimates = np.array([is_judged(d.p_known, d.override, d.error) for d in judged.decisions])
    fitted = fit_map(p_known[fit][estimates[fit]], judged.closed_book[fit][estimates[fit]])
    held_out = judged.part(choose)
    probabilities = np.array(list(map(fitted, p_known[choose])))
    p = policy_scores(probabilities, held_out.decisions.tolist())
    choice = policy.choose(p, held_out.closed_book, held_out.rag)
    kept = estimates[choose] | ~estimates[choose].any()  # all, if rules decide every question
    provenance = describe_choice(policy, choice, probabilities[kept]) | {
        "scored": int(kept.sum()),
        "seed": seed,
        "probability": fitted.method,
        "ece_before": round(expected_calibration_error(p_known[choose][kept], held_out.closed_book[kept]), 4),
        "ece": round(expected_calibration_error(probabilities[kept], held_out.closed_book[kept]), 4),
        "draft": draft,
        "repeated": len(labelled) - len(examples) + sum(file.repeated for file in files),
        "data": list(map(DataFile.as_provenance, files)),
    }
    calibrated = CalibratedGate(
        inner=gate.gate,
        probability=fitted,
        threshold=choice.threshold,
        proxy=gate.proxy,
        fingerprint=_read_fingerprint(gate, judged.decisions.tolist()),
    )
    return Calibration(gate.with_options(gate=calibrated), choice, provenance)


def _read_fingerprint(gate: DecisionEngine, decisions: Sequence[Decision]) -> str:
    """Return the fingerprint of a gate's proxy; empty if no decision read it, as asking would load it."""
    has_read = any(decision.cost.model_calls for decision in decisions)
    may_read = any(spec.reads_model for spec in expand_specs(gate.gate.specs))
    return gate.get_proxy().fingerprint if has_read and may_read else ""


def _split(n: int, seed: int) -> list[PositionArray]:
    """Split the positions of questions at random into two halves: to calibrate P(known), and to choose a threshold.

    Raises:
        DataFormatError: The second half has fewer than `LEAST` questions.
    """
    # Shuffled before splitting, because files are often sorted by data set.
    fit, choose = np.split(np.random.default_rng(seed).permutation(n), [n // 2])
    if len(choose) < LEAST:
        raise DataFormatError(
            f"{n} questions are too few to calibrate a gate: at least {2 * LEAST - 1} are needed.",
            hint="Add questions. One half calibrates P(known), the other half chooses the threshold, and a useful "
            "guarantee needs hundreds.",
        )
    return [fit, choose]


def _check_savable(gate: Decider) -> DecisionEngine:
    """Return the gate; raise a `ConfigurationError` if, calibrated, it could not be saved, or loaded again."""
    if not isinstance(gate, DecisionEngine):
        raise ConfigurationError(
            f"The gate {gate.name!r} cannot be calibrated: only gates from load_gate can.",
            hint="Write it as a subclass of Gate, and pass load_gate(MyGate()).",
        )
    if gate.corpora:
        raise ConfigurationError(
            "A gate with a corpus cannot be calibrated.",
            hint="Pass corpus= only when you load the calibrated gate.",
        )
    if asks_server(gate.gate):
        raise ConfigurationError(
            "A gate that asks a decision server cannot be calibrated, because no saved gate may ask one.",
            hint="Calibrate the gate with which the server was started, and serve the calibrated one.",
        )
    return gate


def fit_map(p: Float64Array, known: BoolArray) -> ProbabilityMap:
    """Return a map from scores to probabilities, fitted by Platt scaling.

    A higher score never gets a lower probability. One clearly below all known ones is never raised.

    Args:
        p: Scores in [0, 1], shape (n,).
        known: Whether each answer without retrieval is right, shape (n,). If all are the same, the map is the
            identity.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    if known.all() or not known.any():
        return ProbabilityMap()
    with needs_extra("train"):
        from sklearn.linear_model import LogisticRegression
    # Hardly any regularisation, because the model has only two parameters.
    fitted = LogisticRegression(C=1e4).fit(logits(p)[:, None], known)
    slope, intercept = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
    if slope < 0:  # it would reverse the order of the scores
        slope, intercept = 0.0, logit(float(known.mean()))
    return ProbabilityMap(
        method="platt",
        slope=slope,
        intercept=intercept,
        least_known=sigmoid(logit(p[known].min()) - CLEARLY_LESS),
    )
