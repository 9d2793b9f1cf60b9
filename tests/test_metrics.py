"""AUC against hand-worked values and scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rgate_integrations.errors import DataFormatError
from rgate_integrations.tuning.metrics import auc


def test_hand_worked():
    assert auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auc([1, 1, 1], [True, False, True]) == 0.5
    assert auc([0, 1], [False, True]) == 1.0
    assert auc([1, 0], [False, True]) == 0.0


def test_against_scikit_learn_with_ties():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores, labels = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.4
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


@pytest.mark.parametrize(
    ("scores", "labels", "why"),
    [
        ([1, 2], [True, True], "same"),
        ([], [], "same"),
        ([1], [True, False], "match"),
        ([float("nan"), 1], [1, 0], "number"),
    ],
)
def test_what_cannot_be_measured(scores, labels, why):
    with pytest.raises(DataFormatError, match=why):
        auc(scores, labels)
