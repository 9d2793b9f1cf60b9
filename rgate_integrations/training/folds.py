"""Cross-validation by question: folds, and the AUC of each data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rgate_integrations.errors import missing_dependency
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.tuning.metrics import auc


def question_folds(n: int, folds: int, seed: int) -> Iterator[tuple[PositionArray, PositionArray]]:
    """Yield (training positions, test positions) of each fold; a position is a question."""
    try:
        from sklearn.model_selection import KFold
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    yield from KFold(folds, shuffle=True, random_state=seed).split(np.zeros(n))


def auc_by_set(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, float]:
    """Return the AUC of each data set that has both labels."""
    names = np.asarray(sets)
    found = {}
    for name in dict.fromkeys(sets):
        inside = names == name
        if known[inside].any() and not known[inside].all():
            found[name] = auc(scores[inside], known[inside])
    return found


def fold_metrics(scores: Float64Array, known: BoolArray, sets: Sequence[str]) -> dict[str, Any]:
    """Return the AUC of held-out scores as a model card shows it: of each set, their mean, and pooled."""
    each = auc_by_set(scores, known, sets)
    pooled = auc_by_set(scores, known, ["all"] * len(known))
    return {"auc": each, "auc_mean": float(np.mean(list(each.values()))), "auc_pooled": pooled["all"]}
