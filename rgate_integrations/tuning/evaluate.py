"""Evaluates a gate on paired data: what it knows, what it saves, and what it costs in accuracy."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike, decide
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.flow import run
from rgate_integrations.training.drafts import DraftKind, valid_draft_kind
from rgate_integrations.tuning.metrics import (
    area_between,
    auc,
    expected_calibration_error,
    paired_interval,
    retrieval_curve,
)
from rgate_integrations.tuning.paired import Paired

_CHUNK = 64
_WITH_INTERVAL = ("auc", "auc_utility", "accuracy", "retrieval_rate", "containment_accuracy", "area_between")


@dataclass(frozen=True)
class JudgedQuestions:
    """P(known) of a gate for paired questions, with the labels; all of shape (n,).

    Attributes:
        p: P(known); failures count as 0, for they retrieve.
        retrieve: Whether the gate retrieves.
        closed_book: Whether the answer without retrieval is right.
        rag: Whether the answer with retrieval is right.
        decisions: The decisions.
    """

    p: Float64Array
    retrieve: BoolArray
    closed_book: BoolArray
    rag: BoolArray
    decisions: tuple[Decision, ...]

    def answered_rightly(self) -> BoolArray:
        """Return whether the answer is right that the gate chose; shape (n,)."""
        return np.where(self.retrieve, self.rag, self.closed_book)

    def part(self, chosen: BoolArray) -> JudgedQuestions:
        """Return the questions for which ``chosen`` is true."""
        decisions = tuple(d for d, keep in zip(self.decisions, chosen, strict=True) if keep)
        return JudgedQuestions(
            self.p[chosen], self.retrieve[chosen], self.closed_book[chosen], self.rag[chosen], decisions
        )


def judge(
    gate: GateLike,
    questions: Sequence[Paired],
    *,
    draft: DraftKind = "proxy",
    threshold: float | None = None,
    report: Callable[[int], None] | None = None,
) -> JudgedQuestions:
    """Let a gate decide for paired questions.

    Args:
        gate: The gate.
        questions: The questions.
        draft: ``"recorded"`` gives it what the LLM wrote without retrieval, ``"proxy"`` and ``"none"`` nothing.
        threshold: Used instead of the gate's own.
        report: Told how many questions are done.

    Raises:
        DataFormatError: Recorded drafts are asked for, and a question has none.
    """
    drafts = [q.draft() for q in questions] if draft == "recorded" else [None] * len(questions)
    if draft == "recorded" and not all(drafts):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    decisions: list[Decision] = []
    for start in range(0, len(questions), _CHUNK):
        chunk = questions[start : start + _CHUNK]
        flow = decide(
            gate,
            [q.question for q in chunk],
            threshold=threshold,
            drafts=drafts[start : start + _CHUNK],
            popularity=[q.popularity for q in chunk],
        )
        decisions += run(flow)
        if report is not None:
            report(len(decisions))
    return JudgedQuestions(
        p=np.array([d.p_known for d in decisions], dtype=float),
        retrieve=np.array([d.retrieve for d in decisions], dtype=bool),
        closed_book=np.array([q.closed_book_correct for q in questions], dtype=bool),
        rag=np.array([bool(q.rag_correct) for q in questions], dtype=bool),
        decisions=tuple(decisions),
    )


def measure(judged: JudgedQuestions, *, samples: int = 1_000, seed: int = 0) -> dict[str, Any]:
    """Return every number about one set of decisions; shares and probabilities are in [0, 1].

    ``auc`` is of P(known) for "right without retrieval", ``auc_utility`` of 1 - P(known) for "retrieval helps"
    against "hurts"; ``accuracy`` the share of right decisions; ``helped`` and ``harmed`` count the skipped
    questions that only the answer without, or only the one with retrieval gets right; ``area_between`` see
    `rgate_integrations.tuning.metrics.area_between`; ``curve`` is (retrieval rate, in-accuracy) at
    0, 5, ..., 100 %. ``intervals`` holds 95 % bootstrap intervals. What cannot be computed is None.
    """
    numbers = _numbers(judged.p, judged.retrieve, judged.closed_book, judged.rag)
    for name, value in numbers.items():
        if isinstance(value, float):
            numbers[name] = round(value, 4) + 0.0  # the sum turns -0.0 into 0.0
    n = len(judged.p)
    curve = retrieval_curve(judged.p, judged.closed_book, judged.rag)
    accuracies = np.interp(np.linspace(0, n, 21), np.arange(n + 1), curve)
    return {
        **numbers,
        "failed": sum(d.error is not None for d in judged.decisions),
        "curve": [[round(i * 0.05, 2), round(float(value), 4)] for i, value in enumerate(accuracies)],
        "intervals": _intervals(judged, samples, seed),
    }


def _intervals(judged: JudgedQuestions, samples: int, seed: int) -> dict[str, list[float]]:
    """Return the 95 % bootstrap intervals of the numbers in `_WITH_INTERVAL`."""
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {name: [] for name in _WITH_INTERVAL}
    n = len(judged.p)
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        numbers = _numbers(judged.p[pick], judged.retrieve[pick], judged.closed_book[pick], judged.rag[pick])
        for name in _WITH_INTERVAL:
            if numbers[name] is not None:
                draws[name].append(numbers[name])
    return {name: _interval(values) for name, values in draws.items() if values}


def _interval(draws: Sequence[float]) -> list[float]:
    return [round(float(end), 4) for end in np.quantile(draws, [0.025, 0.975])]


def _numbers(p: Float64Array, retrieve: BoolArray, closed: BoolArray, rag: BoolArray) -> dict[str, Any]:
    rate = float(retrieve.mean())
    never, always = float(closed.mean()), float(rag.mean())
    differ = closed != rag
    area = area_between(p, closed, rag)
    return {
        "n": len(p),
        "auc": _auc(p, closed),
        "auc_utility": _auc(-p[differ], rag[differ]),
        "accuracy": float((retrieve == ~closed).mean()),
        "ece": expected_calibration_error(p, closed),
        "brier": float(((p - closed) ** 2).mean()),
        "retrieval_rate": rate,
        "containment_accuracy": float(np.where(retrieve, rag, closed).mean()),
        "never": never,
        "always": always,
        "oracle": float((closed | rag).mean()),
        "random_same_rate": never + rate * (always - never),
        "helped": int((~retrieve & closed & ~rag).sum()),
        "harmed": int((~retrieve & ~closed & rag).sum()),
        "area_between": None if math.isnan(area) else area,
    }


def _auc(scores: Float64Array, labels: BoolArray) -> float | None:
    return auc(scores, labels) if labels.any() and not labels.all() else None


def evaluate(
    gate: GateLike,
    questions: Sequence[Paired],
    *,
    name: str = "gate",
    draft: DraftKind = "proxy",
    threshold: float | None = None,
    samples: int = 1_000,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any], JudgedQuestions]:
    """Evaluate a gate on paired questions, for each data set and pooled.

    Args:
        gate: The gate.
        questions: The questions.
        name: What the gate is called in the result.
        draft: See `judge`.
        threshold: Used instead of the gate's own.
        samples: Bootstrap samples.
        seed: Seed of the bootstrap.
        report: Told how many questions are done.

    Returns:
        The result, as JSON values: ``gate, threshold, draft, sets, pooled, timings, versions, seconds``; and what
        the gate made of each question.
    """
    valid_draft_kind(draft)
    start = time.perf_counter()
    judged = judge(gate, questions, draft=draft, threshold=threshold, report=report)
    seconds = time.perf_counter() - start
    thresholds = {d.threshold for d in judged.decisions}
    datasets = np.array([q.dataset for q in questions])
    measured_sets = {}
    for dataset in dict.fromkeys(datasets.tolist()):
        measured_sets[str(dataset)] = measure(judged.part(datasets == dataset), samples=samples, seed=seed)
    result = {
        "gate": name,
        "threshold": thresholds.pop() if len(thresholds) == 1 else None,
        "draft": draft,
        "sets": measured_sets,
        "pooled": measure(judged, samples=samples, seed=seed),
        "gate_ms": round(float(np.mean([d.cost.milliseconds for d in judged.decisions])), 2),
        "versions": {
            "rgate-integrations": version("rgate-integrations"),
            "python": platform.python_version(),
            "numpy": version("numpy"),
        },
        "seconds": round(seconds, 2),
    }
    return result, judged


def compare(
    first: JudgedQuestions, second: JudgedQuestions, *, samples: int = 2_000, seed: int = 0
) -> dict[str, Any]:
    """Compare two gates on the same questions, paired.

    Returns:
        ``auc_difference`` and ``in_accuracy_difference`` (first minus second) with 95 % bootstrap intervals, and
        the exact McNemar test of the answers: ``only_first``, ``only_second`` right, and ``p_value``.
    """
    first_right, second_right = first.answered_rightly(), second.answered_rightly()
    only_first = int((first_right & ~second_right).sum())
    only_second = int((second_right & ~first_right).sum())
    n = len(first_right)
    rng = np.random.default_rng(seed)
    auc_draws = []
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        known = first.closed_book[pick]
        if known.any() and not known.all():
            auc_draws.append(auc(first.p[pick], known) - auc(second.p[pick], known))
    auc_first, auc_second = _auc(first.p, first.closed_book), _auc(second.p, second.closed_book)
    auc_difference = None
    if auc_first is not None and auc_second is not None:
        auc_difference = round(auc_first - auc_second, 4)
    differences = first_right.astype(float) - second_right
    return {
        "auc_difference": auc_difference,
        "auc_interval": _interval(auc_draws) if auc_draws else None,
        "in_accuracy_difference": round(float(first_right.mean() - second_right.mean()), 4),
        "in_accuracy_interval": [round(end, 4) for end in paired_interval(differences, samples, seed)],
        "only_first": only_first,
        "only_second": only_second,
        "p_value": _mcnemar(only_first, only_second),
    }


def _mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact test that both are equally often right where they differ: a fair coin's tail."""
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return round(float(min(1.0, 2 * tail)), 6)
