"""Calibrates a gate on paired data: a probability map on one part, a threshold with a promise on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import DataFormatError
from rgate_integrations.evidence.base import expand_specs
from rgate_integrations.gates.calibrated import CalibratedGate
from rgate_integrations.gates.probability import Method
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.training.drafts import DraftKind
from rgate_integrations.tuning.evaluate import JudgedQuestions, judge
from rgate_integrations.tuning.metrics import expected_calibration_error
from rgate_integrations.tuning.paired import PairedFile
from rgate_integrations.tuning.policies import Chosen, Policy
from rgate_integrations.tuning.probability import fit_map

LEAST = 20


@dataclass(frozen=True)
class Calibration:
    """A calibrated gate and how it came about.

    Attributes:
        gate: The gate, with its threshold.
        chosen: What the policy chose and promises.
        provenance: Policy, number of questions, seed, data, quality and date, as JSON values.
    """

    gate: DecisionEngine
    chosen: Chosen
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
    that the policy's promise is about scores that have not seen its questions.

    Args:
        gate: The gate.
        files: Paired data, from the traffic the gate will see.
        policy: Chooses the threshold.
        method: The probability map.
        draft: What the gate reads, see `rgate_integrations.tuning.evaluate.judge`.
        share: Share of the questions that fit the map; 0 with ``method="none"``.
        seed: Seed of the split and of the policy.
        report: Told how many questions are done.

    Raises:
        DataFormatError: There are fewer than 20 questions for the threshold.
    """
    questions = [q for f in files for q in f.records]
    order = np.random.default_rng(seed).permutation(len(questions))
    fitting = round(len(questions) * (0.0 if method == "none" else share))
    if len(questions) - fitting < LEAST:
        raise DataFormatError(
            f"{len(questions) - fitting} of {len(questions)} questions are left to choose a threshold on.",
            hint=f"At least {LEAST} are needed, and hundreds for a promise worth having.",
        )
    judged = judge(gate, questions, draft=draft, report=report)
    fit, choose = order[:fitting], order[fitting:]
    fitted = fit_map(judged.p[fit], judged.closed_book[fit], method)
    p = np.array([fitted(score) for score in judged.p])
    # Thresholds are tried at the scores of the questions that fitted the map: those that choose must not name them.
    seen = np.quantile(p[fit], np.linspace(0, 1, 101)) if fitting else None
    chosen = policy.choose(p[choose], judged.closed_book[choose], judged.rag[choose], seed, seen)
    known = judged.closed_book[choose]
    provenance = {
        "policy": {"name": policy.name, **policy.__dict__},
        "guarantee": chosen.promise,
        "guaranteed": chosen.kept,
        **chosen.facts,
        "probability": fitted.method,
        "ece_before": round(expected_calibration_error(judged.p[choose], known), 4),
        "ece": round(expected_calibration_error(p[choose], known), 4),
        **origin(files, draft, seed, p[choose]),
    }
    calibrated = CalibratedGate(
        inner=gate.gate,
        probability=fitted,
        threshold=chosen.threshold,
        proxy=gate.proxy,
        fingerprint=_fingerprint(gate, judged),
    )
    return Calibration(gate.with_options(gate=calibrated), chosen, provenance)


def _fingerprint(gate: DecisionEngine, judged: JudgedQuestions) -> str:
    """Return the fingerprint of the model that a gate was calibrated with; empty if none read the questions."""
    may_read = any(spec.reads_model for spec in expand_specs(gate.gate.specs))
    called = any(decision.cost.model_calls for decision in judged.decisions)
    return gate.get_proxy().fingerprint if may_read and called else ""


def origin(files: Sequence[PairedFile], draft: DraftKind, seed: int, p: Float64Array) -> dict[str, Any]:
    """Return where a calibration comes from, and the quantiles of P(known) that drift is measured against."""
    return {
        "draft": draft,
        "seed": seed,
        "data": [{"name": f.name, "sha256": f.sha256, "n": len(f.records)} for f in files],
        "date": date.today().isoformat(),
        "scores": np.quantile(p, np.linspace(0, 1, 101)).round(5).tolist(),
    }
