"""The fit of the heads in the benchmarks: it predicts what is known, and learns nothing about the groups."""

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rgate_integrations.models.base import PooledLayer

head_fit = pytest.importorskip("head_fit")

LAYERS = (PooledLayer(1, "question", "mean"), PooledLayer(2, "all", "last"))
RECIPE = head_fit.HeadsRecipe(6, 1.0)


def fit(examples, recipe=RECIPE):
    return head_fit.fit_facts(examples, LAYERS, "scripted", recipe)


def test_logistic_finds_the_slope_of_soft_labels():
    x = np.linspace(-3, 3, 200)[:, None]
    soft = 1 / (1 + np.exp(-(2 * x[:, 0] - 0.5)))
    (slope,), (bias,) = head_fit.fit_logistic(x, np.ones((200, 1)), soft, np.ones(200), 1e-6, np.zeros(200))
    assert (slope, bias) == (pytest.approx(2, abs=0.01), pytest.approx(-0.5, abs=0.01))


def examples(n=600, seed=0):
    """Knowledge by the fourth number; an LLM that knows more than the other."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, 2, 6)).astype(np.float32)
    stronger = rng.random(n) < 0.5
    known = (states[:, 0, 3] + stronger * 1.5 + rng.normal(size=n) * 0.5 > 0).astype(float)
    abilities = np.where(stronger, 6.0, 0.0)
    return head_fit.HeadExamples(states, known, abilities, np.full(n, "a:nq"), np.ones(n))


def test_fitted_heads_tell_what_is_known():
    test, heads = examples(seed=1), fit(examples())
    own = test.abilities == 0
    assert roc_auc_score(test.known[own], heads.known_logits(test.states[own], 0.0)) > 0.9
    assert heads.p_fact_known(test.states[~own], 6.0, 0.0).mean() > 0.9
    assert heads.default_ability == (0.0, RECIPE.ability_sd)  # the head itself is for this LLM


def test_what_sets_groups_apart_is_put_down_to_them_as_far_as_the_penalty_allows():
    train = examples(n=2_000)
    rng = np.random.default_rng(2)
    lenient = rng.random(2_000) < 0.3  # a judge that takes half of the wrong answers for right ones
    known = np.where(lenient & (rng.random(2_000) < 0.5), 1.0, train.known)
    train = dataclasses.replace(train, known=known, groups=np.where(lenient, "b", "a"))
    train.states[lenient, 1, 5] += 3  # and questions that can be separated
    weights = []
    for penalty in (1e-3, 1e6):
        recipe = head_fit.HeadsRecipe(6, 1.0, penalty)
        weights.append(head_fit.fit_known(train, LAYERS, recipe)[0][1, 5])
    assert weights[1] > 2 * abs(weights[0])
