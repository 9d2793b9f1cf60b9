"""Metrics of scores against labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rgate_integrations.errors import DataFormatError


def auc(
    scores: Sequence[float] | npt.NDArray[np.float64], labels: Sequence[bool] | npt.NDArray[np.bool_]
) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative.

    Ties count one half (the Mann-Whitney statistic with mid-ranks).

    Args:
        scores: One score an item; higher should mean positive.
        labels: Whether each item is positive.

    Raises:
        DataFormatError: The lengths differ, a score is not a number, or all labels are the same.
    """
    values, positive = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if values.shape != positive.shape or values.ndim != 1:
        raise DataFormatError(f"{values.size} scores do not match {positive.size} labels.")
    if np.isnan(values).any():
        raise DataFormatError("A score is not a number.")
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise DataFormatError(f"All {positive.size} labels are the same.", hint="AUC needs both.")
    unique, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2
    ranks = midranks[inverse] if unique.size else midranks
    u = ranks[positive].sum() - n_positive * (n_positive + 1) / 2
    return float(u / (n_positive * n_negative))
