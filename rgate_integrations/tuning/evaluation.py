"""Evaluates a gate on paired data (questions with labels for both arms), and measures the drift of logged traffic."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rgate_integrations.decision import Decision, Request
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import DataFormatError, EvidenceError, needs_extra
from rgate_integrations.gates.corpus import COVERED
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.tuning.collection import Progress, in_chunks, no_progress
from rgate_integrations.tuning.questions import DraftKind, Example, check_all, recorded_drafts

SCORE_DIGITS = 5
"""Decimal digits of the scores in a calibration's provenance."""
MAX_SEED = 2**32 - 1
"""The largest seed of scikit-learn."""
_SHARES = ("accuracy", "retrieval_rate", "containment_accuracy")
_LEAST_OF_A_CLASS = 10  # a bootstrap of fewer may have no width
_MIN_LOGGED = 50
_SMALL_DRIFT, _LARGE_DRIFT = 0.1, 0.25  # distances; a smaller one hardly changes how many questions retrieve


@dataclass(frozen=True)
class JudgedQuestions:
    """A gate's decisions about questions, with labels for both arms, direct and retrieve. All arrays have shape (n,).

    Attributes:
        p: P(known); 0 for failures and for overrides that retrieve, 1 for overrides that skip.
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
        """Return the questions at the given positions."""
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
    """Return a gate's decisions about paired questions, those with labels for both arms (direct and retrieve).

    Args:
        gate: The gate.
        examples: The questions and their labels.
        draft: ``"recorded"`` gives the gate each question's recorded answer as its draft. With the other kinds, the
            gate gets no draft; it may write one itself.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``gate`` is not a gate, ``examples`` are not `Example` objects, or ``draft`` is not one of
            `DraftKind`.
        DataFormatError: There are no questions, or one lacks a label; or ``draft`` is ``"recorded"``, and a question
            has no recorded answer.
        EvidenceError: The gate failed on every question.
    """
    check_all(
        examples, Example, "Pass the examples of each file of read_paired(PATHS), as in files[0].examples."
    )
    questions = [example.question for example in examples]
    requests = [
        Request(question.text, draft=recorded, popularity=question.popularity)
        for question, recorded in zip(questions, recorded_drafts(questions, draft), strict=True)
    ]
    unlabelled = [example.question.text for example in examples if example.rag_correct is None]
    if unlabelled or not examples:
        raise DataFormatError(
            f"The question {unlabelled[0][:60]!r} has no label of its answer with retrieval."
            if unlabelled
            else "There are no questions.",
            hint="Read the questions with read_paired, from a file that labels both answers of each question.",
        )
    decider = resolve_gate(gate)
    decisions: list[Decision] = []
    for chunk in in_chunks(requests, "asking the gate", progress):
        decisions += decider.decide_batch(chunk)
    errors = [decision.error for decision in decisions if decision.error is not None]
    if errors and len(errors) == len(decisions):
        raise EvidenceError(
            f"The gate failed on every question. The first error: {errors[0].message}", hint=errors[0].hint
        )
    closed_book, rag = np.array([(example.known, example.rag_correct) for example in examples], dtype=bool).T
    return JudgedQuestions(
        p=np.array([decision.effective_p_known for decision in decisions]),
        retrieve=np.array([decision.retrieve for decision in decisions], dtype=bool),
        closed_book=closed_book,
        rag=rag,
        decisions=np.array(decisions, dtype=object),
    )


def measure(judged: JudgedQuestions) -> dict[str, Any]:
    """Return the metrics of a gate's decisions, by name.

    Shares and probabilities are in [0, 1]. An undefined metric is None.

    - ``auc``: how well P(known) ranks the questions that are right without retrieval above the others (`auc`).
    - ``accuracy``: the share of questions that are known and skip, or are not known and retrieve.
    - ``ece``: expected calibration error of P(known).
    - ``retrieval_rate``: the share of questions that retrieve.
    - ``containment_accuracy``: the share of right answers with this gate.
    - ``never``, ``always``, ``random_same_rate``, ``oracle``: the share of right answers if retrieval is never used,
      always used, used at random at the gate's rate, or used exactly where only it gives the right answer.
    - ``helped``: the number of skipped questions for which only the answer without retrieval is right.
    - ``harmed``: the number of skipped questions for which only the answer with retrieval is right.
    - ``curve``: pairs of retrieval rate and share of right answers, at rates of 0, 5, ..., 100 %.
    - ``intervals``: 95 % intervals of ``accuracy``, ``retrieval_rate`` and ``containment_accuracy`` (Wilson's),
      and of the AUC (bootstrap), if it compares at least 10 questions with at least 10 others.
    - ``n``, ``failed``: the number of questions, and of those that the gate could not judge.
    """
    n = len(judged.p)
    p, retrieve, known, rag = judged.p, judged.retrieve, judged.closed_book, judged.rag
    rate, never, always = float(retrieve.mean()), float(known.mean()), float(rag.mean())
    metrics = {
        "auc": auc(p, known),
        "accuracy": float((retrieve == ~known).mean()),
        "ece": expected_calibration_error(p, known),
        "retrieval_rate": rate,
        "containment_accuracy": float(np.where(retrieve, rag, known).mean()),
        "never": never,
        "always": always,
        "oracle": float((known | rag).mean()),
        "random_same_rate": never + rate * (always - never),
        "helped": int((~retrieve & known & ~rag).sum()),
        "harmed": int((~retrieve & ~known & rag).sum()),
    }
    rates = np.linspace(0, 1, 21)
    accuracies = np.interp(rates * n, np.arange(n + 1), retrieval_curve(p, known, rag))
    intervals = {name: [*wilson(metrics[name], n)] for name in _SHARES}
    if min(known.sum(), (~known).sum()) >= _LEAST_OF_A_CLASS:
        # The bootstrap has a fixed seed, so that the same data always give the same interval.
        rng = np.random.default_rng(0)
        areas = []
        for _ in range(1_000):
            rows = rng.integers(0, n, n)
            areas.append(auc(p[rows], known[rows]))
        # A resample with only one class has no AUC, and nanquantile ignores it.
        intervals["auc"] = np.nanquantile(areas, [0.025, 0.975]).tolist()
    return {
        # JSON has no NaN. Not rounded, because they would be rounded twice when they are shown.
        **{name: None if math.isnan(value) else value for name, value in metrics.items()},
        "n": n,
        "failed": sum(decision.error is not None for decision in judged.decisions),
        "curve": np.stack([rates, accuracies], axis=1).round(4).tolist(),
        "intervals": intervals,
    }


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of n cases, n at least 1 (Wilson 1927); it has a width even for 0 and 1."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def evaluate(
    gate: GateLike,
    examples: Sequence[Example],
    *,
    name: str = "gate",
    draft: DraftKind = "proxy",
    progress: Progress = no_progress,
) -> tuple[dict[str, Any], JudgedQuestions]:
    """Evaluate a gate on paired questions, per data set and pooled.

    Args:
        gate: The gate.
        examples: The questions, with labels for both arms: the ``examples`` of each file of `read_paired`.
        name: Name of the gate in the result.
        draft: See `judge`.
        progress: See `judge`.

    Returns:
        The result, as JSON values, and the decisions. The keys of the result are ``gate``, ``threshold`` (None if it
        differs between questions), ``draft``, ``sets`` (the metrics of each data set, see `measure`), ``pooled`` (the
        metrics of all questions), ``covered`` (for each corpus, the share of questions that it covers; a question
        counts only for the corpus that covers it best), ``gate_ms`` (mean time of a decision) and ``versions``.

    Raises:
        ConfigurationError: ``gate`` is not a gate, ``examples`` are not `Example` objects, or ``draft`` is not one of
            `DraftKind`.
        DataFormatError: There are no questions, or one lacks a label; or ``draft`` is ``"recorded"``, and a question
            has no recorded answer.
        EvidenceError: The gate failed on every question.
    """
    judged = judge(gate, examples, draft=draft, progress=progress)
    best = Counter(
        decision.corpora[0] for decision in judged.decisions if (decision.p_covered or 0.0) >= COVERED
    )
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
        "covered": {corpus: count / len(examples) for corpus, count in best.most_common()},
        "gate_ms": round(float(np.mean([decision.cost.milliseconds for decision in judged.decisions])), 2),
        "versions": {
            "rgate-integrations": version("rgate-integrations"),
            "python": platform.python_version(),
            "numpy": version("numpy"),
        },
    }
    return result, judged


def break_even(rate: float, *, gate: float, direct: float, rag: float) -> dict[str, float]:
    """Return the mean time per question, and the retrieval rate above which a gate no longer saves time.

    The IK paper's stage times (table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with
    retrieval) give a rate of 0.80 if the score reads 32 tokens, and 0.94 if it reads the question alone.

    Args:
        rate: Retrieval rate, in [0, 1].
        gate: Milliseconds of a decision, including its drafts and other evidence.
        direct: Milliseconds of an answer without retrieval.
        rag: Milliseconds of a search and an answer with passages.

    Returns:
        ``always_ms``, the mean time if every question retrieves; ``gated_ms``, the mean time with the gate; and
        ``break_even``, the retrieval rate, clipped to [0, 1].
    """
    saved = rag - gate - direct
    even = float(saved >= 0)  # if retrieval costs nothing extra, the gate pays off at every rate or at none
    if rag > direct:
        even = min(max(saved / (rag - direct), 0.0), 1.0)
    gated = gate + rate * rag + (1 - rate) * direct
    return {"always_ms": round(rag, 2), "gated_ms": round(gated, 2), "break_even": even}


@dataclass(frozen=True)
class Drift:
    """How the scores (P(known)) of logged decisions differ from those at calibration.

    Attributes:
        n: Number of logged scores.
        distance: The largest difference, at any threshold, between the shares of logged scores and of those at
            calibration that lie below it (Kolmogorov-Smirnov), in [0, 1].
        margin: With 95 % confidence, the distance between the two kinds of traffic is at most this far from
            `distance`.
        retrieval_rate: Share of the logged scores below the gate's threshold.
        expected_rate: The same share at calibration.
    """

    n: int
    distance: float
    margin: float
    retrieval_rate: float
    expected_rate: float

    @property
    def advice(self) -> str:
        """A sentence on whether to calibrate again."""
        if self.distance - self.margin > _SMALL_DRIFT:
            return "The traffic has changed: calibrate again."
        if self.distance + self.margin < _LARGE_DRIFT:
            return "The traffic is like the traffic at calibration."
        return (
            "Too few decisions, or too few questions at calibration, to tell whether the traffic has changed."
        )


def measure_drift(quantiles: Sequence[float], n: float, logged: Sequence[float], threshold: float) -> Drift:
    """Return how logged P(known) differs from P(known) at calibration.

    Args:
        quantiles: Evenly spaced quantiles of P(known) at calibration.
        n: Number of questions at calibration.
        logged: P(known) of logged decisions, at least 50.
        threshold: The gate's threshold.

    Raises:
        DataFormatError: There are fewer than 50 logged decisions.
    """
    if len(logged) < _MIN_LOGGED:
        raise DataFormatError(
            f"{len(logged)} logged decisions are too few to tell whether the traffic has changed.",
            hint=f"Log at least {_MIN_LOGGED} decisions. Failed ones, and those of rules, do not count.",
        )
    # Rounded as the quantiles are saved: a score that equals one must be on the same side of it.
    before, now = np.sort(quantiles), np.sort(np.round(logged, SCORE_DIGITS))
    scores = np.concatenate([before, now])
    share_before = np.searchsorted(before, scores, side="right") / len(before)
    share_now = np.searchsorted(now, scores, side="right") / len(now)
    # The critical value of the two-sample test. A calibration file of unknown origin may claim any n.
    margin = 1.36 * math.sqrt(1 / max(n, 1.0) + 1 / len(now))
    return Drift(
        n=len(now),
        distance=float(np.abs(share_now - share_before).max()),
        margin=margin,
        retrieval_rate=float((now < threshold).mean()),
        expected_rate=float((before < threshold).mean()),
    )


def is_judged(p_known: float, override: object, error: object) -> bool:
    """Return whether a decision's P(known) is the gate's estimate: there was no error, and no rule set it to 0 or 1.

    Other overrides, such as a corpus that covers the question, do not change P(known).
    """
    return not error and (not override or 0 < p_known < 1)


def auc(scores: Sequence[float] | Float64Array, labels: Sequence[bool] | BoolArray) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative.

    Ties count one half (the Mann-Whitney statistic with mid-ranks). scikit-learn's function is not used: it
    is too slow for the bootstrap, and scikit-learn is an optional dependency.

    Args:
        scores: One score per item; higher should mean positive.
        labels: Whether each item is positive. The result is NaN if all labels are the same.
    """
    positive = np.asarray(labels, dtype=bool)
    n = int(positive.sum())
    if n in (0, len(positive)):
        return math.nan
    _, value_index, counts = np.unique(
        np.asarray(scores, dtype=float), return_inverse=True, return_counts=True
    )
    # The mean rank of each group of equal scores.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[value_index]
    above = ranks[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(positive) - n)))


def expected_calibration_error(p: Float64Array, labels: BoolArray) -> float:
    """Return the expected calibration error, in [0, 1].

    Items are put into ten bins of equal width by ``p``. The error is the mean distance between a bin's mean ``p`` and
    its share of positives, weighted by the number of its items.
    """
    bin_index = np.minimum((p * 10).astype(int), 9)
    # The sum of p - label over a bin is its size times the distance of its means.
    distances = np.bincount(bin_index, weights=p - labels, minlength=10)
    return float(np.abs(distances).sum() / len(p))


def retrieval_curve(p: Float64Array, closed_book: BoolArray, rag: BoolArray) -> Float64Array:
    """Return the expected accuracy if the gate retrieves for the n questions of lowest P(known), n = 0 ... N.

    Questions with equal P(known) are retrieved in random order, so a constant gate gives a straight line.

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
    # Questions with equal scores each get the mean gain of their group.
    steps = np.repeat(np.add.reduceat(gain, start) / counts, counts)
    return float(closed_book.mean()) + np.concatenate([[0.0], np.cumsum(steps)]) / len(p)


def question_folds(n: int, folds: int, seed: int) -> Iterator[tuple[PositionArray, PositionArray]]:
    """Yield the indices of the training and of the test questions, for each fold of a shuffled cross-validation.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    with needs_extra("train"):
        from sklearn.model_selection import KFold
    yield from KFold(folds, shuffle=True, random_state=seed).split(np.zeros(n))


def fold_metrics(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, Any]:
    """Return AUCs of held-out scores for a model card.

    ``auc`` maps the name of each data set to its AUC, without sets whose labels are all the same. ``auc_mean`` is the
    mean of these, or None without any, and ``auc_pooled`` the AUC of all questions together.
    """
    names = np.asarray(sets)
    areas = {name: auc(scores[names == name], known[names == name]) for name in dict.fromkeys(sets)}
    areas = {name: area for name, area in areas.items() if not math.isnan(area)}
    mean = float(np.mean(list(areas.values()))) if areas else None  # JSON has no NaN
    return {"auc": areas, "auc_mean": mean, "auc_pooled": auc(scores, known)}
