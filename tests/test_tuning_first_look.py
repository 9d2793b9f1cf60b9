"""Tuning: the first look that goes before a begun answer, on scores whose right choice is known."""

import numpy as np
import pytest

from rgate_integrations.tuning.first_look import choose_first_look

N = 4_000


def world(seed=0, n=N):
    """Half is known; retrieval rights 40 % of the unknown and wrongs 10 % of the known."""
    rng = np.random.default_rng(seed)
    direct, u = rng.random(n) < 0.5, rng.random(n)
    return direct, np.where(direct, u > 0.1, u < 0.4), rng


def certain(direct, rng):
    return np.where(direct, rng.uniform(0.6, 1, len(direct)), rng.uniform(0, 0.4, len(direct)))


def test_all_unknown_questions_go_to_retrieval_at_once_where_the_question_says_it_all():
    direct, rag, rng = world()
    found = choose_first_look(certain(direct, rng), certain(direct, rng), 0.5, direct, rag)
    assert found.early_exit_rate == pytest.approx(0.5, abs=0.03)
    assert (found.difference, found.retrieval_difference, found.interval) == (0.0, 0.0, (0.0, 0.0))
    assert found.n == found.chosen_on == N / 2


def test_hardly_any_does_where_the_question_says_nothing():
    direct, rag, rng = world()
    found = choose_first_look(rng.random(N), certain(direct, rng), 0.5, direct, rag)
    assert found.early_exit_rate < 0.12
    assert -0.025 < found.difference < 0.005
    assert found.interval[0] <= found.difference <= found.interval[1]


def test_accuracy_that_is_kept_by_retrieving_more_is_not_wanted():
    direct, _, rng = world()
    found = choose_first_look(rng.random(N), certain(direct, rng), 0.5, direct, np.ones(N, bool))
    assert found.retrieval_difference < 0.04
    assert found.early_exit_rate < 0.12


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, 1.0])
def test_a_question_gate_that_always_says_the_same_is_not_used(value):
    direct, rag, rng = world()
    found = choose_first_look(np.full(N, value), certain(direct, rng), 0.5, direct, rag)
    assert (found.early_exit_rate, found.difference) == (0.0, 0.0)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.01])
def test_it_never_exceeds_the_threshold_and_the_seed_decides_the_halves(threshold):
    direct, rag, rng = world(n=200)
    scores = rng.random(200).round(1), rng.random(200).round(1), threshold, direct, rag
    found = choose_first_look(*scores, seed=3)
    assert 0 <= found.low <= threshold
    assert choose_first_look(*scores, seed=3) == found


def test_the_numbers_are_of_the_held_out_half():
    direct, rag, rng = world(n=300)
    question, begun = np.where(direct, 0.2, 0) + rng.random(300), certain(direct, rng)
    found = choose_first_look(question, begun, 0.4, direct, rag, seed=3)
    out = np.random.default_rng(3).permutation(300)[150:]
    early, before = question[out] < found.low, begun[out] < 0.4
    assert found.early_exit_rate == early.mean() > 0
    right = np.where(early | before, rag[out], direct[out])
    assert found.difference == pytest.approx(right.mean() - np.where(before, rag[out], direct[out]).mean())
    assert found.retrieval_difference == pytest.approx((early | before).mean() - before.mean())
