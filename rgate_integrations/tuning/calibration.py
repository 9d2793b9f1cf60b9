"""Calibrates a gate on paired data: a probability map on one part, a threshold with a guarantee on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.gates.calibrated import CalibratedGate
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.probability import Method, ProbabilityMap, logits
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.tuning.evaluation import JudgedQuestions, expected_calibration_error, judge
from rgate_integrations.tuning.paired import PairedFile
from rgate_integrations.tuning.policies import Policy, ThresholdChoice, provenance_of
from rgate_integrations.tuning.training.own import DraftKind

LEAST = 20


@dataclass(frozen=True)
class Calibration:
    """A calibrated gate and how it came about.

    Attributes:
        gate: The gate, with its threshold.
        choice: What the policy chose and guarantees.
        provenance: Policy, number of questions, seed, data, quality and date, as JSON values.
    """

    gate: DecisionEngine
    choice: ThresholdChoice
    provenance: dict[str, Any]


def calibrate(
    gate: DecisionEngine,
    files: Sequence[PairedFile],
    policy: Policy,
    *,
    method: Method = "platt",
    draft: DraftKind = "proxy",
    share: float = 0.5,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> Calibration:
    """Calibrate a gate on paired data.

    The questions are split: on one part the probability map is fitted, on the other the threshold is chosen, so
    that the policy's guarantee is about scores that have not seen its questions.

    Args:
        gate: The gate.
        files: Paired data, from the traffic the gate will see.
        policy: Chooses the threshold.
        method: The probability map.
        draft: What the gate reads, see `rgate_integrations.tuning.evaluation.judge`.
        share: Share of the questions that fit the map; 0 with ``method="none"``.
        seed: Seed of the split and of the policy.
        report: Told how many questions are done.

    Raises:
        DataFormatError: There are fewer than 20 questions for the threshold.
    """
    questions = list(chain.from_iterable(file.records for file in files))
    order = np.random.default_rng(seed).permutation(len(questions))
    fitting = round(len(questions) * (0.0 if method == "none" else share))
    if len(questions) - fitting < LEAST:
        raise DataFormatError(
            f"{len(questions) - fitting} of {len(questions)} questions are left to choose a threshold on.",
            hint=f"At least {LEAST} are needed, and hundreds for a guarantee worth having.",
        )
    judged = judge(gate, questions, draft=draft, report=report)
    fit, choose = order[:fitting], order[fitting:]
    fitted = fit_map(judged.p[fit], judged.closed_book[fit], method)
    p = np.array([fitted(score) for score in judged.p])
    # Thresholds are tried at the scores of the questions that fitted the map: those that choose must not name them.
    seen = np.quantile(p[fit], np.linspace(0, 1, 101)) if fitting else None
    known, rag = judged.closed_book[choose], judged.rag[choose]
    choice = policy.choose(p[choose], known, rag, seed, seen)
    provenance = provenance_of(policy, choice, p[choose], seed) | {
        "probability": fitted.method,
        "ece_before": round(expected_calibration_error(judged.p[choose], known), 4),
        "ece": round(expected_calibration_error(p[choose], known), 4),
        "draft": draft,
        "data": [{"name": f.name, "sha256": f.sha256, "n": len(f.records)} for f in files],
    }
    calibrated = CalibratedGate(
        inner=gate.gate,
        probability=fitted,
        threshold=choice.threshold,
        proxy=gate.proxy,
        fingerprint=_fingerprint(gate, judged),
    )
    return Calibration(gate.with_options(gate=calibrated), choice, provenance)


def _fingerprint(gate: DecisionEngine, judged: JudgedQuestions) -> str:
    """Return the weights that the scores are of; nothing if no model was read, which is then not loaded for it."""
    may_read = any(spec.reads_model for spec in expand_specs(gate.gate.specs))
    called = any(decision.cost.model_calls for decision in judged.decisions)
    return gate.get_proxy().fingerprint if may_read and called else ""


def fit_map(p: Float64Array, known: BoolArray, method: Method = "platt") -> ProbabilityMap:
    """Fit a map of P(known) that makes it a probability; it never turns the order of scores around.

    Args:
        p: Scores in [0, 1], shape (n,).
        known: Labels, shape (n,). With one class only nothing can be fitted, and the scores stay as they are.
        method: Which map: Platt scaling, temperature, or isotonic regression.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    if method == "none" or known.all() or not known.any():
        return ProbabilityMap()
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    if method == "isotonic":
        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(p, known)
        x, y = model.X_thresholds_.tolist(), model.y_thresholds_.tolist()
        return ProbabilityMap(method="isotonic", x=tuple(x), y=tuple(y))
    fitted = LogisticRegression(C=1e4, fit_intercept=method == "platt").fit(logits(p)[:, None], known)
    slope = max(float(fitted.coef_[0, 0]), 0.0)
    intercept = float(fitted.intercept_[0]) if method == "platt" else 0.0
    return ProbabilityMap(method=method, slope=slope, intercept=intercept)
