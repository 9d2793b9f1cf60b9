"""Evaluates a gate on paired data: what it knows, what it saves, and what it costs in accuracy."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from rgate_integrations.calling import DecidesBatches, decide_safely
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.evaluation.metrics import (
    Booleans,
    Floats,
    area_between,
    auc,
    expected_calibration_error,
    paired_interval,
    retrieval_curve,
)
from rgate_integrations.evaluation.paired import Paired

DraftKind = Literal["proxy", "recorded", "none"]
_CHUNK = 64
_WITH_INTERVAL = ("auc", "auc_utility", "accuracy", "retrieval_rate", "in_accuracy", "area_between")


@dataclass(frozen=True)
class Judged:
    """P(known) of a gate for paired questions, with the labels; all of shape (n,).

    Attributes:
        p: P(known); failures count as 0, for they retrieve.
        retrieve: Whether the gate retrieves.
        closed_book: Whether the answer without retrieval is right.
        rag: Whether the answer with retrieval is right.
        decisions: The decisions.
    """

    p: Floats
    retrieve: Booleans
    closed_book: Booleans
    rag: Booleans
    decisions: tuple[Decision, ...]


def judge(
    gate: DecidesBatches,
    questions: Sequence[Paired],
    *,
    draft: DraftKind = "proxy",
    threshold: float | None = None,
    report: Callable[[int], None] | None = None,
) -> Judged:
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
    drafts = [q.draft() for q in questions] if draft == "recorded" else None
    if drafts is not None and not all(drafts):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    popular = all(q.popularity is not None for q in questions)
    found: list[Decision] = []
    for at in range(0, len(questions), _CHUNK):
        some = questions[at : at + _CHUNK]
        options: dict[str, Any] = {}
        if threshold is not None:
            options["threshold"] = threshold
        if drafts is not None:
            options["drafts"] = drafts[at : at + _CHUNK]
        if popular:
            options["popularity"] = [q.popularity for q in some]
        found += decide_safely(gate, [q.question for q in some], **options)
        if report is not None:
            report(len(found))
    return Judged(
        p=np.array([d.p_known for d in found], dtype=float),
        retrieve=np.array([d.retrieve for d in found], dtype=bool),
        closed_book=np.array([q.closed_book_correct for q in questions], dtype=bool),
        rag=np.array([bool(q.rag_correct) for q in questions], dtype=bool),
        decisions=tuple(found),
    )


def measure(judged: Judged, *, samples: int = 1_000, seed: int = 0) -> dict[str, Any]:
    """Return every number about one set of decisions; shares and probabilities are in [0, 1].

    ``auc`` is of P(known) for "right without retrieval", ``auc_utility`` of 1 - P(known) for "retrieval helps"
    against "hurts"; ``accuracy`` the share of right decisions; ``helped`` and ``harmed`` count the skipped
    questions that only the answer without, or only the one with retrieval gets right; ``area_between`` see
    `rgate_integrations.evaluation.metrics.area_between`; ``curve`` is (retrieval rate, in-accuracy) at
    0, 5, ..., 100 %. ``intervals`` holds 95 % bootstrap intervals. What cannot be computed is None.
    """
    found = _numbers(judged.p, judged.retrieve, judged.closed_book, judged.rag)
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {name: [] for name in _WITH_INTERVAL}
    n = len(judged.p)
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        numbers = _numbers(judged.p[pick], judged.retrieve[pick], judged.closed_book[pick], judged.rag[pick])
        for name in _WITH_INTERVAL:
            if numbers[name] is not None:
                draws[name].append(numbers[name])
    intervals = {
        name: [round(float(q), 4) for q in np.quantile(values, [0.025, 0.975])]
        for name, values in draws.items()
        if values
    }
    curve = retrieval_curve(judged.p, judged.closed_book, judged.rag)
    points = np.interp(np.linspace(0, n, 21), np.arange(n + 1), curve)
    return {
        **{k: round(v, 4) + 0.0 if isinstance(v, float) else v for k, v in found.items()},
        "failed": sum(d.error is not None for d in judged.decisions),
        "curve": [[round(i * 0.05, 2), round(float(v), 4)] for i, v in enumerate(points)],
        "intervals": intervals,
    }


def _numbers(p: Floats, retrieve: Booleans, closed: Booleans, rag: Booleans) -> dict[str, Any]:
    answered = np.where(retrieve, rag, closed)
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
        "in_accuracy": float(answered.mean()),
        "never": never,
        "always": always,
        "oracle": float((closed | rag).mean()),
        "random_same_rate": never + rate * (always - never),
        "helped": int((~retrieve & closed & ~rag).sum()),
        "harmed": int((~retrieve & ~closed & rag).sum()),
        "area_between": None if math.isnan(area) else area,
    }


def _auc(scores: Floats, labels: Booleans) -> float | None:
    return auc(scores, labels) if labels.any() and not labels.all() else None


def evaluate(
    gate: DecidesBatches,
    questions: Sequence[Paired],
    *,
    name: str = "gate",
    draft: DraftKind = "proxy",
    threshold: float | None = None,
    samples: int = 1_000,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any], Judged]:
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
    if draft not in ("proxy", "recorded", "none"):
        raise ConfigurationError(f"draft must be proxy, recorded or none, not {draft!r}.")
    start = time.perf_counter()
    judged = judge(gate, questions, draft=draft, threshold=threshold, report=report)
    seconds = time.perf_counter() - start
    sets = np.array([q.dataset for q in questions])
    used = {d.threshold for d in judged.decisions}
    result = {
        "gate": name,
        "threshold": used.pop() if len(used) == 1 else None,
        "draft": draft,
        "sets": {
            str(each): measure(part(judged, sets == each), samples=samples, seed=seed)
            for each in dict.fromkeys(sets.tolist())
        },
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


def part(judged: Judged, chosen: Booleans) -> Judged:
    """Return the questions for which ``chosen`` is true."""
    picked = tuple(d for d, c in zip(judged.decisions, chosen, strict=True) if c)
    return Judged(
        judged.p[chosen], judged.retrieve[chosen], judged.closed_book[chosen], judged.rag[chosen], picked
    )


def compare(first: Judged, second: Judged, *, samples: int = 2_000, seed: int = 0) -> dict[str, Any]:
    """Compare two gates on the same questions, paired.

    Returns:
        ``auc_difference`` and ``in_accuracy_difference`` (first minus second) with 95 % bootstrap intervals, and
        the exact McNemar test of the answers: ``only_first``, ``only_second`` right, and ``p_value``.
    """
    a = np.where(first.retrieve, first.rag, first.closed_book)
    b = np.where(second.retrieve, second.rag, second.closed_book)
    only_first, only_second = int((a & ~b).sum()), int((b & ~a).sum())
    rng = np.random.default_rng(seed)
    n, aucs = len(a), []
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        label = first.closed_book[pick]
        if label.any() and not label.all():
            aucs.append(auc(first.p[pick], label) - auc(second.p[pick], label))
    one, two = _auc(first.p, first.closed_book), _auc(second.p, second.closed_book)
    return {
        "auc_difference": None if one is None or two is None else round(one - two, 4),
        "auc_interval": [round(float(q), 4) for q in np.quantile(aucs, [0.025, 0.975])] if aucs else None,
        "in_accuracy_difference": round(float(a.mean() - b.mean()), 4),
        "in_accuracy_interval": [round(v, 4) for v in paired_interval(a.astype(float) - b, samples, seed)],
        "only_first": only_first,
        "only_second": only_second,
        "p_value": _mcnemar(only_first, only_second),
    }


def _mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact test that both are equally often right where they differ: a fair coin's tail."""
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return round(float(min(1.0, 2 * tail)), 6)
