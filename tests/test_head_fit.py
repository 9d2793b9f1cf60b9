"""The fit of the heads in the benchmarks: it tells kinds and knowledge apart, and learns nothing of the groups."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rgate_integrations.models.pooling import PooledLayer
from tests.saved_gates import KINDS

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
head_fit = pytest.importorskip("head_fit")

NAMES = np.array([kind.name for kind in KINDS])
LAYERS = (PooledLayer(1, "question", "mean"), PooledLayer(2, "all", "last"))
RECIPE = head_fit.HeadsRecipe(6, 6, 1.0, 1.0)


def fit(examples, recipe=RECIPE):
    return head_fit.fit_heads(examples, LAYERS, KINDS, "scripted", recipe)


def test_logistic_finds_the_slope_of_soft_labels():
    x = np.linspace(-3, 3, 200)[:, None]
    soft = 1 / (1 + np.exp(-(2 * x[:, 0] - 0.5)))
    (slope,), (bias,) = head_fit.logistic(x, np.ones((200, 1)), soft, np.ones(200), 1e-6, np.zeros(200))
    assert (slope, bias) == (pytest.approx(2, abs=0.01), pytest.approx(-0.5, abs=0.01))


def examples(n=600, seed=0):
    """Kinds by the first three numbers, knowledge by the fourth; an LLM that knows more than the other."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, 2, 6)).astype(np.float32)
    number = rng.integers(0, 3, n)
    states[np.arange(n), 0, number] += 4
    stronger = rng.random(n) < 0.5
    known = (states[:, 0, 3] + stronger * 1.5 + rng.normal(size=n) * 0.5 > 0).astype(float)
    abilities = np.where(stronger, 6.0, 0.0)
    return head_fit.HeadExamples(states, NAMES[number], known, abilities, np.full(n, "a:nq"), np.ones(n))


def test_fitted_heads_tell_kinds_and_knowledge_apart():
    test, heads = examples(seed=1), fit(examples())
    kinds = heads.kind_probabilities(test.states)
    assert kinds.sum(axis=1) == pytest.approx(1.0)
    assert (NAMES[kinds.argmax(axis=1)] == test.kinds).mean() > 0.95
    own = test.abilities == 0
    assert roc_auc_score(test.known[own], heads.known_logits(test.states[own], 0.0)) > 0.9
    abler = heads.p_fact_known(test.states[~own], 6.0, 0.0)
    assert abler.mean() == pytest.approx(test.known[~own].mean(), abs=0.05)
    assert heads.default_ability == (0.0, RECIPE.ability_sd)  # the head itself is for this LLM


def test_what_sets_groups_apart_is_put_down_to_them_as_far_as_the_penalty_allows():
    train = examples(n=2_000)
    rng = np.random.default_rng(2)
    lenient = rng.random(2_000) < 0.3  # a judge that takes half of the wrong answers for right ones
    known = np.where(lenient & (rng.random(2_000) < 0.5), 1.0, train.known)
    train = dataclasses.replace(train, known=known, groups=np.where(lenient, "b", "a"))
    train.states[lenient, 1, 5] += 3  # and questions that can be told
    weights = []
    for penalty in (1e-3, 1e6):
        recipe = head_fit.HeadsRecipe(6, 6, 1.0, 1.0, penalty)
        weights.append(head_fit.fit_known(train, LAYERS, recipe)[0][1, 5])
    assert weights[1] > 2 * abs(weights[0])


def test_rows_without_a_label_count_only_for_the_other_heads():
    train = examples()
    odd = np.arange(600) % 2 == 1
    kinds, known = np.where(odd, "", train.kinds), np.where(odd, train.known, math.nan)
    heads = fit(dataclasses.replace(train, kinds=kinds, known=known))
    assert heads.kind_weight == pytest.approx(fit(train.rows(~odd)).kind_weight)
    assert heads.known_weight == pytest.approx(fit(train.rows(odd)).known_weight)


def test_biases_lift_kinds_by_how_they_are_served():
    train, states = examples(), examples(seed=1).states
    biased = fit(train, dataclasses.replace(RECIPE, knowledge_bias=1.5, never_bias=0.5))
    plain = fit(train, dataclasses.replace(RECIPE, knowledge_bias=0.0, never_bias=0.0))
    lifted = np.log(biased.kind_probabilities(states) / plain.kind_probabilities(states))
    assert lifted - lifted[:, :1] == pytest.approx(np.tile([0.0, 1.5, 0.5], (len(states), 1)))
