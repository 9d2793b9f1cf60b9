"""The fit of a correction, and the guarantee that comes with it."""

import numpy as np
import pytest

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.tuned import features_of
from rgate_integrations.tuning import MaxLoss
from rgate_integrations.tuning.fitting import Basis, Table, crossfit, fit_correction, ridge_logistic


def simulated(n, rng, directions=6):
    """Questions of which the prior knows a little, and the states a little more."""
    states = rng.normal(size=(n, directions)) / np.sqrt(directions)
    prior = rng.normal(size=n)
    right = rng.random(n) < 1 / (1 + np.exp(-(0.7 * prior + 3 * states[:, 0])))
    return Table(prior, states, np.zeros((n, 0)), right), rng.random(n) < 0.85


def test_the_guarantee_holds_for_new_questions():
    broken = made = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        table, rag = simulated(200, rng)
        p = 1 / (1 + np.exp(-crossfit(table, seed)))
        chosen = MaxLoss(0.1, confidence=0.9).choose(p, table.known, rag)
        made += chosen.guaranteed
        new, new_rag = simulated(4_000, rng)
        skipped = 1 / (1 + np.exp(-fit_correction(table, seed)(new))) >= chosen.threshold
        broken += np.where(skipped, new_rag.astype(float) - new.known, 0.0).mean() > 0.1
    assert made >= 10
    assert broken <= 2


def test_the_newton_steps_end_at_the_minimum():
    rng = np.random.default_rng(0)
    columns, offset = rng.normal(size=(80, 5)), rng.normal(size=80)
    right = rng.random(80) < 0.5
    found = ridge_logistic(columns, right, np.full(5, 0.5), offset)
    p = 1 / (1 + np.exp(-(offset + columns @ found)))
    assert columns.T @ (p - right) + 0.5 * found == pytest.approx(np.zeros(5), abs=2e-3)


def test_separable_labels_have_finite_weights():
    columns = np.linspace(-1, 1, 40)[:, None] * 1e3
    found = ridge_logistic(columns, columns[:, 0] > 0, [1e-6], np.zeros(40))
    assert np.isfinite(found).all()


def test_few_questions_leave_the_shipped_order_alone():
    rng = np.random.default_rng(1)
    prior = rng.normal(size=40)
    noise = rng.normal(size=(40, 20)) * 1e-3
    table = Table(prior, noise, np.zeros((40, 0)), rng.random(40) < 0.5)
    assert fit_correction(table).slope > 0


def test_the_components_are_of_variance_one_together():
    states = np.random.default_rng(0).normal(size=(50, 2, 8)).astype(np.float32)
    assert Basis.of(states)(states).var(axis=0).sum() == pytest.approx(1.0, abs=1e-6)


def test_features_of_log_probabilities_by_hand():
    found = features_of(Draft(text="x", logprobs=(-1.0, -50.0, -3.0)))
    assert found == pytest.approx([-1.0, -8.0, -20.0, -24.0, np.log(3)])
    assert features_of(Draft(text="", logprobs=())) == pytest.approx([-20.0, -20.0, -20.0, -20.0, 0.0])
    with pytest.raises(EvidenceError):
        features_of(Draft(text="x"))
