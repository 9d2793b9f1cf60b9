"""Metrics of scores against labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.arrays import BoolArray, Float64Array


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
