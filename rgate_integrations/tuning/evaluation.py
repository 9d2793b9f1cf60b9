"""Evaluates a gate on paired data: what it knows, what it saves and costs, and what has changed since."""

from __future__ import annotations

import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike, decide
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.runtime.flow import run
from rgate_integrations.tuning.paired import Paired
from rgate_integrations.tuning.training.own import DraftKind, valid_draft_kind

_CHUNK = 64
_WITH_INTERVAL = ("auc", "auc_utility", "accuracy", "retrieval_rate", "containment_accuracy", "area_between")
_LEAST_LOGGED = 50
_SOMEWHAT, _MUCH = 0.1, 0.25  # population stability index, by the usual rule of thumb


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

    def part(self, positions: PositionArray) -> JudgedQuestions:
        """Return some of the questions."""
        decisions = tuple(self.decisions[i] for i in positions)
        closed_book, rag = self.closed_book[positions], self.rag[positions]
        return JudgedQuestions(self.p[positions], self.retrieve[positions], closed_book, rag, decisions)


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
    valid_draft_kind(draft)
    drafts = [q.draft() if draft == "recorded" else None for q in questions]
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
    `rgate_integrations.tuning.evaluation.area_between`; ``curve`` is (retrieval rate, in-accuracy) at
    0, 5, ..., 100 %. ``intervals`` holds 95 % bootstrap intervals. What cannot be computed is None.
    """
    p, retrieve, closed, rag = judged.p, judged.retrieve, judged.closed_book, judged.rag
    numbers = _numbers(p, retrieve, closed, rag)
    for name, value in numbers.items():
        if isinstance(value, float):
            numbers[name] = round(value, 4) + 0.0  # the sum turns -0.0 into 0.0
    n = len(p)
    draws: defaultdict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(seed)
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        drawn = _numbers(p[pick], retrieve[pick], closed[pick], rag[pick])
        for name in _WITH_INTERVAL:
            # A draw may hold one class only: it has no AUC, and is left out of that interval.
            if drawn[name] is not None:
                draws[name].append(drawn[name])
    curve = retrieval_curve(p, closed, rag)
    accuracies = np.interp(np.linspace(0, n, 21), np.arange(n + 1), curve)
    return {
        **numbers,
        "failed": sum(d.error is not None for d in judged.decisions),
        "curve": [[round(i * 0.05, 2), round(float(value), 4)] for i, value in enumerate(accuracies)],
        "intervals": {name: _interval(draws[name]) for name in _WITH_INTERVAL if name in draws},
    }


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
        The result, as JSON values: ``gate, threshold, draft, sets, pooled, gate_ms, versions, seconds``; and what
        the gate made of each question.
    """
    start = time.perf_counter()
    judged = judge(gate, questions, draft=draft, threshold=threshold, report=report)
    seconds = time.perf_counter() - start
    thresholds = {d.threshold for d in judged.decisions}
    places: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(question.dataset, []).append(place)
    sets = {}
    for dataset, positions in places.items():
        sets[dataset] = measure(judged.part(np.array(positions)), samples=samples, seed=seed)
    result = {
        "gate": name,
        "threshold": thresholds.pop() if len(thresholds) == 1 else None,
        "draft": draft,
        "sets": sets,
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
    differences = first.answered_rightly().astype(float) - second.answered_rightly()
    only_first, only_second = int((differences > 0).sum()), int((differences < 0).sum())
    n = len(differences)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(samples):
        pick = rng.integers(0, n, n)
        known = first.closed_book[pick]
        if known.any() and not known.all():
            draws.append(auc(first.p[pick], known) - auc(second.p[pick], known))
    of_first, of_second = _auc(first.p, first.closed_book), _auc(second.p, second.closed_book)
    # A fair coin's tail: both are equally often right where they differ.
    differing, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(differing, i) for i in range(fewer + 1)) / 2**differing
    return {
        "auc_difference": None if of_first is None or of_second is None else round(of_first - of_second, 4),
        "auc_interval": _interval(draws) if draws else None,
        "in_accuracy_difference": round(float(differences.mean()), 4),
        "in_accuracy_interval": [round(end, 4) for end in paired_interval(differences, samples, seed)],
        "only_first": only_first,
        "only_second": only_second,
        "p_value": round(min(1.0, 2 * tail), 6),
    }


def break_even(
    rate: float, *, gate: float, direct: float, rag: float, search: float = 0.0
) -> dict[str, float]:
    """Return what a gate saves: mean times a question, and the retrieval rate from which on it no longer pays.

    The IK paper's stage times (table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with
    retrieval) give 0.80 when the score reads 32 tokens and 0.94 when it reads the question alone.

    Args:
        rate: The share of questions that is retrieved for, in [0, 1].
        gate: Milliseconds of the decision, with all evidence.
        direct: Those of an answer without retrieval.
        rag: Those of an answer with passages, without the search itself.
        search: Those of the search.

    Returns:
        ``always_ms`` where every question is retrieved for, ``gated_ms`` with the gate, and ``break_even``, clipped
        to [0, 1].

    Raises:
        ConfigurationError: A time is below 0.
    """
    if min(gate, direct, rag, search) < 0:
        raise ConfigurationError("A stage cannot take less than 0 milliseconds.")
    always = search + rag
    saved = always - gate - direct
    even = float(saved >= 0)  # where more retrieval does not cost more, it pays everywhere or nowhere
    if always > direct:
        even = min(max(saved / (always - direct), 0.0), 1.0)
    gated = gate + rate * always + (1 - rate) * direct
    return {"always_ms": round(always, 2), "gated_ms": round(gated, 2), "break_even": round(even, 4)}


@dataclass(frozen=True)
class Drift:
    """How far logged scores are from those of the calibration.

    Attributes:
        n: Number of logged scores.
        psi: Population stability index over the deciles of the calibration; below 0.1 nothing changed, above
            0.25 a lot did (the usual rule of thumb).
        retrieval_rate: Retrieval rate in the log.
        expected_rate: Retrieval rate at calibration.
    """

    n: int
    psi: float
    retrieval_rate: float
    expected_rate: float

    @property
    def advice(self) -> str:
        """One sentence: whether to calibrate again."""
        if self.psi >= _MUCH:
            return "The traffic has changed: calibrate again."
        if self.psi >= _SOMEWHAT:
            return "The traffic has changed somewhat: calibrate again soon."
        return "The traffic is like that of the calibration."


def measure_drift(quantiles: Sequence[float], logged: Sequence[float], threshold: float) -> Drift:
    """Compare logged P(known) with the calibration's.

    Args:
        quantiles: Evenly spaced quantiles of P(known) at calibration, from the least to the greatest.
        logged: P(known) of logged decisions, at least 50.
        threshold: The gate's threshold.

    Raises:
        DataFormatError: There are fewer than 50 logged decisions.
    """
    if len(logged) < _LEAST_LOGGED:
        raise DataFormatError(
            f"{len(logged)} logged decisions are too few.", hint=f"At least {_LEAST_LOGGED} are needed."
        )
    before, now = np.asarray(quantiles, dtype=float), np.asarray(logged, dtype=float)
    edges = np.unique(np.quantile(before, np.linspace(0, 1, 11)))[1:-1]
    shares = []
    for scores in (before, now):
        # Equal scores share a bin, so the calibration's own share of each bin is counted and not one tenth.
        counts = np.bincount(np.searchsorted(edges, scores, side="right"), minlength=len(edges) + 1)
        shares.append(np.maximum(counts / len(scores), 1e-4))
    psi = float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())
    return Drift(len(now), psi, float((now < threshold).mean()), float((before < threshold).mean()))


def auc(scores: Sequence[float] | Float64Array, labels: Sequence[bool] | BoolArray) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative.

    Ties count one half (the Mann-Whitney statistic with mid-ranks). It needs NumPy alone, and is quick enough to be
    computed for each sample of a bootstrap.

    Args:
        scores: One score an item; higher should mean positive.
        labels: Whether each item is positive.

    Raises:
        DataFormatError: The lengths differ, a score is not a number, or all labels are the same.
    """
    values, positive = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if values.shape != positive.shape or np.isnan(values).any():
        raise DataFormatError(f"{values.size} scores do not match {positive.size} labels, or are no numbers.")
    if positive.all() or not positive.any():
        raise DataFormatError(f"All {positive.size} labels are the same.", hint="AUC needs both.")
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n = int(positive.sum())
    above = ranks[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(positive) - n)))


def expected_calibration_error(p: Float64Array, labels: BoolArray, bins: int = 10) -> float:
    """Return the mean distance between probability and share of positives over equally wide bins, in [0, 1]."""
    place = np.minimum((p * bins).astype(int), bins - 1)
    distances = np.bincount(place, weights=p - labels, minlength=bins)
    return float(np.abs(distances).sum() / len(p))


def paired_interval(differences: Float64Array, samples: int = 2_000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of paired differences.

    Args:
        differences: One a question, shape (n,); of few distinct values, which are drawn by their counts.
        samples: Bootstrap samples.
        seed: Seed of the bootstrap.
    """
    n = len(differences)
    values, counts = np.unique(differences, return_counts=True)
    means = np.random.default_rng(seed).multinomial(n, counts / n, samples) @ values / n
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def retrieval_curve(p: Float64Array, closed_book: BoolArray, rag: BoolArray) -> Float64Array:
    """Return the expected in-accuracy when the n questions with the lowest P(known) are retrieved, n = 0 ... N.

    Questions with equal P(known) are retrieved in random order, so a constant gate gives the random line.

    Args:
        p: P(known), shape (N,).
        closed_book: Whether the answer without retrieval is right.
        rag: Whether the answer with retrieval is right.

    Returns:
        Shape (N + 1,): from never to always.
    """
    order = np.argsort(p, kind="stable")
    gain = rag[order].astype(float) - closed_book[order]
    _, start, counts = np.unique(p[order], return_index=True, return_counts=True)
    steps = np.repeat(np.add.reduceat(gain, start) / counts, counts)
    curve: Float64Array = closed_book.mean() + np.concatenate([[0.0], np.cumsum(steps)]) / len(p)
    return curve


def area_between(p: Float64Array, closed_book: BoolArray, rag: BoolArray) -> float:
    """Return the area between a gate's accuracy-retrieval curve and the random line, over that of the oracle.

    1.0 is the oracle, 0.0 a random gate; NaN when both arms are equally right everywhere.
    """
    gain = rag.astype(float) - closed_book
    line = np.linspace(closed_book.mean(), rag.mean(), len(p) + 1)
    # Both curves meet the line at its ends, so the sum of the distances is the area under them.
    mine = float((retrieval_curve(p, closed_book, rag) - line).sum())
    best = float((retrieval_curve(-gain, closed_book, rag) - line).sum())
    return mine / best if best > 1e-12 else float("nan")
