"""Evaluates a gate on paired data: what it knows, what it saves and costs, and what has changed since."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rgate_integrations.decision import Decision, Request
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import DataFormatError, missing_dependency
from rgate_integrations.gates.corpus import COVERED
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.tuning.collection import Progress, no_progress
from rgate_integrations.tuning.questions import DraftKind, Example, recorded_drafts

_CHUNK = 64
_WITH_INTERVAL = ("auc", "auc_utility", "accuracy", "retrieval_rate", "containment_accuracy", "area_between")
_LEAST_LOGGED = 50
_MOST_SCORES = 1_000_000  # of a calibration, whose file may come from anybody
_SOMEWHAT, _MUCH = 0.1, 0.25  # population stability index, by the usual rule of thumb


@dataclass(frozen=True)
class JudgedQuestions:
    """P(known) of a gate for paired questions, with the labels; all of shape (n,).

    Attributes:
        p: P(known); failures count as 0, for they retrieve, and so do overrides that retrieve.
        retrieve: Whether the gate retrieves.
        closed_book: Whether the answer without retrieval is right.
        rag: Whether the answer with retrieval is right.
        decisions: The decisions.
    """

    p: Float64Array
    retrieve: BoolArray
    closed_book: BoolArray
    rag: BoolArray
    decisions: NDArray[np.object_]

    def part(self, positions: PositionArray) -> JudgedQuestions:
        """Return some of the questions."""
        return JudgedQuestions(
            self.p[positions],
            self.retrieve[positions],
            self.closed_book[positions],
            self.rag[positions],
            self.decisions[positions],
        )


def judge(
    gate: GateLike,
    examples: Sequence[Example],
    *,
    draft: DraftKind = "proxy",
    progress: Progress = no_progress,
) -> JudgedQuestions:
    """Let a gate decide for paired questions.

    Args:
        gate: The gate.
        examples: The questions.
        draft: ``"recorded"`` gives it what the LLM wrote without retrieval, ``"proxy"`` and ``"none"`` nothing.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``draft`` is not one of `DraftKind`.
        DataFormatError: Recorded drafts are asked for, and a question has none.
    """
    questions = [example.question for example in examples]
    requests = []
    for question, recorded in zip(questions, recorded_drafts(questions, draft), strict=True):
        requests.append(Request(question.text, draft=recorded, popularity=question.popularity))
    decider = resolve_gate(gate)
    decisions: list[Decision] = []
    for start in range(0, len(requests), _CHUNK):
        decisions += decider.decide_batch(requests[start : start + _CHUNK])
        progress("asking the gate", len(decisions), len(requests))
    p = np.array([decision.effective_p_known for decision in decisions])
    retrieve = np.array([decision.retrieve for decision in decisions], dtype=bool)
    closed_book, rag = np.array([(example.known, example.rag_correct) for example in examples], dtype=bool).T
    return JudgedQuestions(p, retrieve, closed_book, rag, np.array(decisions, dtype=object))


def measure(judged: JudgedQuestions) -> dict[str, Any]:
    """Return every number about one set of decisions; shares and probabilities are in [0, 1].

    ``auc`` is of P(known) for "right without retrieval", ``auc_utility`` of 1 - P(known) for "retrieval helps"
    against "hurts"; ``accuracy`` the share of right decisions; ``helped`` and ``harmed`` count the skipped
    questions that only the answer without, or only the one with retrieval gets right; ``area_between`` see
    `rgate_integrations.tuning.evaluation.area_between`; ``curve`` is (retrieval rate, in-accuracy) at
    0, 5, ..., 100 %. ``intervals`` holds 95 % bootstrap intervals. What cannot be computed is None.
    """
    numbers = _numbers(judged)
    n = len(judged.p)
    sampled = itemgetter(*_WITH_INTERVAL)
    draws = []
    rng = np.random.default_rng(0)
    for _ in range(1_000):  # a bootstrap
        draws.append(sampled(_numbers(judged.part(rng.integers(0, n, n)))))
    rates = np.linspace(0, 1, 21)
    accuracies = np.interp(
        rates * n, np.arange(n + 1), retrieval_curve(judged.p, judged.closed_book, judged.rag)
    )
    intervals = {}
    for name, values in zip(_WITH_INTERVAL, np.transpose(draws), strict=True):
        if not math.isnan(numbers[name]):
            # A draw of one class has no AUC, and is left out.
            intervals[name] = np.nanquantile(values, [0.025, 0.975]).round(4).tolist()
    rounded = {}
    for name, value in numbers.items():
        # JSON has no NaN. The sum turns -0.0 into 0.0.
        rounded[name] = None if math.isnan(value) else round(value, 4) + 0.0
    return {
        **rounded,
        "n": n,
        "failed": sum(decision.error is not None for decision in judged.decisions),
        "curve": np.stack([rates, accuracies], axis=1).round(4).tolist(),
        "intervals": intervals,
    }


def _numbers(judged: JudgedQuestions) -> dict[str, float]:
    p, retrieve, closed, rag = judged.p, judged.retrieve, judged.closed_book, judged.rag
    rate = float(retrieve.mean())
    never, always = float(closed.mean()), float(rag.mean())
    differ = closed != rag
    return {
        "auc": auc(p, closed),
        "auc_utility": auc(-p[differ], rag[differ]),
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
        "area_between": area_between(p, closed, rag),
    }


def evaluate(
    gate: GateLike,
    examples: Sequence[Example],
    *,
    name: str = "gate",
    draft: DraftKind = "proxy",
    progress: Progress = no_progress,
) -> tuple[dict[str, Any], JudgedQuestions]:
    """Evaluate a gate on paired questions, for each data set and pooled.

    Args:
        gate: The gate.
        examples: The questions.
        name: What the gate is called in the result.
        draft: See `judge`.
        progress: See `judge`.

    Returns:
        The result, as JSON values: ``gate, threshold, draft, sets, pooled, covered, gate_ms, versions``; and what
        the gate made of each question. ``covered`` is the share of the questions that each corpus covers best.
    """
    judged = judge(gate, examples, draft=draft, progress=progress)
    covering = Counter(each.corpora[0] for each in judged.decisions if (each.p_covered or 0.0) >= COVERED)
    thresholds = {decision.threshold for decision in judged.decisions}
    datasets = np.array([example.question.dataset for example in examples])
    sets = {}
    for dataset in dict.fromkeys(datasets.tolist()):
        sets[dataset] = measure(judged.part(np.flatnonzero(datasets == dataset)))
    result = {
        "gate": name,
        "threshold": thresholds.pop() if len(thresholds) == 1 else None,
        "draft": draft,
        "sets": sets,
        "pooled": measure(judged),
        "covered": {name: round(count / len(examples), 4) for name, count in covering.most_common()},
        "gate_ms": round(float(np.mean([d.cost.milliseconds for d in judged.decisions])), 2),
        "versions": {
            "rgate-integrations": version("rgate-integrations"),
            "python": platform.python_version(),
            "numpy": version("numpy"),
        },
    }
    return result, judged


def break_even(rate: float, *, gate: float, direct: float, rag: float) -> dict[str, float]:
    """Return what a gate saves: mean times a question, and the retrieval rate from which on it no longer pays.

    The IK paper's stage times (table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with
    retrieval) give 0.80 when the score reads 32 tokens and 0.94 when it reads the question alone.

    Args:
        rate: The share of questions that is retrieved for, in [0, 1].
        gate: Milliseconds of the decision, with all evidence.
        direct: Those of an answer without retrieval.
        rag: Those of a search, and of an answer with passages.

    Returns:
        ``always_ms`` where every question is retrieved for, ``gated_ms`` with the gate, and ``break_even``, clipped
        to [0, 1].
    """
    saved = rag - gate - direct
    even = float(saved >= 0)  # where more retrieval does not cost more, it pays everywhere or nowhere
    if rag > direct:
        even = min(max(saved / (rag - direct), 0.0), 1.0)
    gated = gate + rate * rag + (1 - rate) * direct
    return {"always_ms": round(rag, 2), "gated_ms": round(gated, 2), "break_even": round(even, 4)}


@dataclass(frozen=True)
class Drift:
    """How far logged scores are from those of the calibration.

    Attributes:
        n: Number of logged scores.
        psi: Population stability index over the deciles of the calibration, without the part that few scores alone
            would give; below 0.1 nothing changed, from 0.25 a lot did (the usual rule of thumb).
        interval: 95 % interval of `psi`.
        retrieval_rate: Retrieval rate in the log.
        expected_rate: Retrieval rate at calibration.
    """

    n: int
    psi: float
    interval: tuple[float, float]
    retrieval_rate: float
    expected_rate: float

    @property
    def advice(self) -> str:
        """One sentence: whether to calibrate again. Only a change that the interval excludes chance for counts."""
        low, high = self.interval
        if low >= _MUCH:
            return "The traffic has changed: calibrate again."
        if low >= _SOMEWHAT:
            return "The traffic has changed somewhat: calibrate again soon."
        if high < _MUCH:
            return "The traffic is like that of the calibration."
        return (
            "Too few decisions, or too few questions at calibration, to tell whether the traffic has changed."
        )


def measure_drift(quantiles: Sequence[float], n: float, logged: Sequence[float], threshold: float) -> Drift:
    """Compare logged P(known) with the calibration's.

    The interval is a basic bootstrap over both samples, which also removes the bias of the plain index: two samples
    of 50 scores from the same traffic have one of 0.3.

    Args:
        quantiles: Evenly spaced quantiles of P(known) at calibration, from the least to the greatest.
        n: How many questions they are of.
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
    shares, drawn = [], []
    rng = np.random.default_rng(0)
    for scores, size in ((before, int(np.clip(n, 1, _MOST_SCORES))), (now, len(now))):
        # Equal scores share a bin, so the calibration's own share of each bin is counted and not one tenth.
        counts = np.bincount(np.searchsorted(edges, scores, side="right"), minlength=len(edges) + 1)
        shares.append(_smoothed(counts * size / len(scores)))
        drawn.append(_smoothed(rng.multinomial(size, shares[-1], 1_000).astype(np.float64)))
    plain, bootstrap = _stability_index(*shares), _stability_index(*drawn)
    low, psi, high = np.maximum(2 * plain - np.quantile(bootstrap, [0.975, 0.5, 0.025]), 0.0).tolist()
    return Drift(
        len(now), psi, (low, high), float((now < threshold).mean()), float((before < threshold).mean())
    )


def _smoothed(counts: Float64Array) -> Float64Array:
    """Return the shares of counts, along the last axis; half a count more each, so that none is 0."""
    shares: Float64Array = (counts + 0.5) / (counts + 0.5).sum(axis=-1, keepdims=True)
    return shares


def _stability_index(before: Float64Array, now: Float64Array) -> Float64Array:
    index: Float64Array = ((now - before) * np.log(now / before)).sum(axis=-1)
    return index


def auc(scores: Sequence[float] | Float64Array, labels: Sequence[bool] | BoolArray) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative.

    Ties count one half (the Mann-Whitney statistic with mid-ranks). It needs NumPy alone, and is quick enough to be
    computed for each sample of a bootstrap.

    Args:
        scores: One score an item; higher should mean positive.
        labels: Whether each item is positive. NaN is returned where all are the same.
    """
    positive = np.asarray(labels, dtype=bool)
    n = int(positive.sum())
    if n in (0, len(positive)):
        return math.nan
    _, value_index, counts = np.unique(
        np.asarray(scores, dtype=float), return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[value_index]
    above = ranks[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(positive) - n)))


def expected_calibration_error(p: Float64Array, labels: BoolArray, bins: int = 10) -> float:
    """Return the mean distance between probability and share of positives over equally wide bins, in [0, 1]."""
    bin_index = np.minimum((p * bins).astype(int), bins - 1)
    distances = np.bincount(bin_index, weights=p - labels, minlength=bins)
    return float(np.abs(distances).sum() / len(p))


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
    return mine / best if best > 1e-12 else math.nan


def question_folds(n: int, folds: int, seed: int) -> Iterator[tuple[PositionArray, PositionArray]]:
    """Yield (training positions, test positions) of each fold; a position is a question.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.model_selection import KFold
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    yield from KFold(folds, shuffle=True, random_state=seed).split(np.zeros(n))


def fold_metrics(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, Any]:
    """Return the AUC of held-out scores as a model card shows it: of each set, their mean, and pooled."""
    names = np.asarray(sets)
    areas = {}
    for name in dict.fromkeys(sets):
        area = auc(scores[names == name], known[names == name])
        if not math.isnan(area):
            areas[name] = area
    return {"auc": areas, "auc_mean": float(np.mean(list(areas.values()))), "auc_pooled": auc(scores, known)}
