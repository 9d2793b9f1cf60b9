"""The fit of the heads in the benchmarks: it tells kinds and knowledge apart, and learns nothing of the groups."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.artifacts.heads import Kind
from rgate_integrations.models.base import PooledLayer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
head_fit = pytest.importorskip("head_fit")
HeadExamples, HeadsRecipe, fit_heads = head_fit.HeadExamples, head_fit.HeadsRecipe, head_fit.fit_heads

KINDS = (
    Kind("task", "always", "needs nothing"),
    Kind("fact", "if_known", "asks about a fact"),
    Kind("news", "never", "asks about something that changes with time"),
)
LAYERS = (PooledLayer(1, "question", "mean"), PooledLayer(2, "all", "last"))


def test_logistic_finds_the_base_rate_and_the_slope():
    nothing, one = np.zeros((4, 0)), np.ones((4, 1))
    target = np.array([0.0, 1.0, 1.0, 1.0])
    _, (rate,) = head_fit.logistic(nothing, one, target, np.ones(4), 0.0, np.zeros(4))
    assert rate == pytest.approx(math.log(3), abs=1e-2)
    _, (rate,) = head_fit.logistic(nothing, one, target, np.ones(4), 0.0, np.full(4, 2.0))
    assert rate == pytest.approx(math.log(3) - 2, abs=1e-2)
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
    names = np.array([kind.name for kind in KINDS])
    stronger = rng.random(n) < 0.5
    known = (states[:, 0, 3] + stronger * 1.5 + rng.normal(size=n) * 0.5 > 0).astype(float)
    return HeadExamples(
        states=states,
        kinds=names[number],
        known=known,
        abilities=np.where(stronger, 6.0, 0.0),
        groups=np.full(n, "a:nq"),
        weights=np.ones(n),
    )


def test_fitted_heads_tell_kinds_and_knowledge_apart():
    train, test = examples(seed=0), examples(seed=1)
    heads = fit_heads(train, LAYERS, KINDS, "Llama-8B", "scripted", HeadsRecipe(6, 6, 1.0, 1.0))
    kinds = heads.kind_probabilities(test.states)
    names = np.array([kind.name for kind in KINDS])
    assert kinds.sum(axis=1) == pytest.approx(1.0)
    assert (names[kinds.argmax(axis=1)] == test.kinds).mean() > 0.95
    own = test.abilities == 0
    assert roc_auc_score(test.known[own], heads.known_logits(test.states[own], 0.0)) > 0.9
    abler = heads.p_fact_known(test.states[~own], 6.0, 0.0)
    assert abler.mean() == pytest.approx(test.known[~own].mean(), abs=0.05)
    assert heads.llm == "Llama-8B"  # the head itself is for this one
    assert heads.default_ability == (0.0, HeadsRecipe().ability_sd)


def test_what_sets_groups_apart_is_put_down_to_them_as_far_as_the_penalty_allows():
    train = examples(n=2_000)
    rng = np.random.default_rng(2)
    lenient = rng.random(2_000) < 0.3  # a judge that takes half of the wrong answers for right ones
    known = np.where(lenient & (rng.random(2_000) < 0.5), 1.0, train.known)
    train = dataclasses.replace(train, known=known, groups=np.where(lenient, "b", "a"))
    train.states[lenient, 1, 5] += 3  # and questions that can be told
    free, shared = (
        head_fit.fit_known(train, LAYERS, HeadsRecipe(6, 6, 1.0, 1.0, p))[0][1, 5] for p in (1e-3, 1e6)
    )
    assert shared > 2 * abs(free)


def test_rows_without_a_label_count_only_for_the_other_heads():
    train = examples()
    half = dataclasses.replace(
        train,
        kinds=np.where(np.arange(600) % 2 == 0, train.kinds, ""),
        known=np.where(np.arange(600) % 2 == 1, train.known, math.nan),
    )
    heads = fit_heads(half, LAYERS, KINDS, "Llama-8B", "scripted", HeadsRecipe(6, 6, 1.0, 1.0))
    assert np.isfinite(heads.kind_weight).all()
    assert np.isfinite(heads.known_weight).all()
    with pytest.raises(DataFormatError, match="news"):
        fit_heads(train.rows(train.kinds != "news"), LAYERS, KINDS, "Llama-8B", "scripted")


def test_biases_lift_kinds_by_how_they_are_served():
    train, states = examples(), examples(seed=1).states

    def fitted(knowledge, never):
        recipe = HeadsRecipe(6, 6, 1.0, 1.0, knowledge_bias=knowledge, never_bias=never)
        return fit_heads(train, LAYERS, KINDS, "Llama-8B", "scripted", recipe)

    plain, biased = fitted(0.0, 0.0), fitted(1.5, 0.5)
    lifted = np.log(biased.kind_probabilities(states) / plain.kind_probabilities(states))
    gain = np.array([{"always": 0.0, "if_known": 1.5, "never": 0.5}[kind.answerable] for kind in KINDS])
    assert lifted - lifted[:, :1] == pytest.approx(np.tile(gain - gain[0], (len(states), 1)))


def test_calibration_maps_the_logits_by_a_line():
    states = examples(n=1, seed=1).states
    heads = fit_heads(examples(), LAYERS, KINDS, "Llama-8B", "scripted", HeadsRecipe(6, 6, 1.0, 1.0))
    mapped = head_fit.calibrated_heads(heads, 3.0, -1.0)
    for theta in (0.0, 2.0):
        expected = 3 * heads.known_logits(states, theta)[0] - 1
        assert mapped.known_logits(states, theta)[0] == pytest.approx(expected)
