"""Numbers worked by hand from the papers' formulas."""

import math

import numpy as np
import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.gates.boundary import certainty
from rgate_integrations.gates.ik import ik_score
from rgate_integrations.gates.neighbours import vote
from rgate_integrations.gates.popularity import fit_cutoff
from rgate_integrations.gates.slimplm import parse_verdict
from rgate_integrations.gates.token_probability import (
    first_weak_sentence,
    masked_query,
    sentences,
    token_probability,
)
from rgate_integrations.gates.uncertainty import laplacian_sets, similarity_matrix
from rgate_integrations.text import contains_answer, matching_ratio, normalise, rouge_l
from tests.scripted_proxy import ScriptedProxy


@pytest.mark.parametrize(
    ("counts", "by_distinct", "by_samples"),
    [
        ([30], 1.0, 1.0),
        ([29, 1], 0.789, 1 - 0.2108 / math.log2(30)),
        ([28, 1, 1], 0.735, 1 - 0.4200 / math.log2(30)),
        ([15, 15], 0.0, 1 - 1 / math.log2(30)),
        ([1] * 30, 0.0, 0.0),
    ],
)
def test_certainty_of_the_knowledge_boundary_model(counts, by_distinct, by_samples):
    assert certainty(counts) == pytest.approx(by_distinct, abs=5e-4)
    assert certainty(counts, "samples") == pytest.approx(by_samples, abs=5e-4)


def test_matching_ratio_of_slimplm_keeps_to_token_boundaries():
    assert (
        matching_ratio("I do not know that.", ["no"]) == 0.0
    )  # a substring match finds "no" in "not" and "know"
    assert matching_ratio("No, they were not.", ["no"]) == 1.0
    assert matching_ratio(
        "Burt Bacharach and Hal David wrote it.", ["Hal David", "Burt Bacharach", "Bob Dylan"]
    ) == (pytest.approx(2 / 3))
    assert matching_ratio("The U.S.A. did.", ["USA"]) == 1.0
    assert matching_ratio("In 1969", ["196"]) == 0.0
    assert matching_ratio("anything", ["the", "..."]) == 0.0  # answers that normalise to nothing do not count
    assert matching_ratio("anything", []) == 0.0
    assert normalise("  The Cat's   A-team!") == "cats ateam"
    assert contains_answer("", "x") is False


def test_ik_softmax_takes_the_two_logits_only():
    assert ik_score(2.0, 0.0) == pytest.approx(0.8808, abs=1e-4)
    assert ik_score(0.0, 0.0) == 0.5
    assert ik_score(-1000.0, 1000.0) == 0.0
    assert ik_score(1000.0, -1000.0) == 1.0
    assert math.isnan(ik_score(math.nan, 0.0))


def test_neighbours_vote_and_ties_retrieve():
    assert vote([True] * 3 + [False] * 2) >= 0.5
    assert vote([True] * 2 + [False] * 3) < 0.5
    assert vote([True] * 2 + [False] * 2) < 0.5
    assert vote([]) == 0.0


def flare_draft():
    tokens = ("Joe", " Biden", " went", " to", " Penn", ".", " He", " left", " in", " 1968", ".")
    p = (0.9, 0.95, 0.85, 0.9, 0.9, 0.99, 0.97, 0.9, 0.9, 0.3, 0.99)
    return Draft(text="".join(tokens), tokens=tokens, logprobs=tuple(map(math.log, p)))


def test_flare_finds_the_earliest_weak_sentence_by_probability():
    draft = flare_draft()
    assert sentences(draft) == [range(6), range(6, 11)]
    assert first_weak_sentence(draft, 0.8) == range(6, 11)
    assert first_weak_sentence(draft, 0.86) == range(6)
    assert first_weak_sentence(draft, 0.2) is None
    assert masked_query(draft, 0.8) == "He left in ."
    assert masked_query(draft, 0.2) is None
    assert token_probability(draft.logprobs) == pytest.approx(0.3)
    assert token_probability(draft.logprobs, "first") == pytest.approx(0.9)
    assert token_probability(tuple(map(math.log, (0.25, 1.0))), "mean") == pytest.approx(0.5)
    with pytest.raises(EvidenceError):
        first_weak_sentence(Draft(text="no tokens"), 0.5)


def test_verdicts_are_read_strictly():
    assert parse_verdict("Known(True)") is True
    assert parse_verdict("  Known ( False ) and more") is False
    for text in ("known(true)", "Known True", "It is Known(True)", "Known(Maybe)", "", "Known(Truely)"):
        assert parse_verdict(text) is None


def test_popularity_cutoff_answers_most_questions_rightly():
    popularity = [1, 2, 10, 20]
    assert fit_cutoff(popularity, [False, False, True, True], [True, True, False, False]) == 10
    assert fit_cutoff(popularity, [False] * 4, [True] * 4) == 21  # retrieval always wins: above every score
    assert fit_cutoff(popularity, [True] * 4, [False] * 4) == 1
    with pytest.raises(ConfigurationError, match="match"):
        fit_cutoff([1, 2], [True], [True])


def test_popularity_gate_is_at_one_half_at_the_cutoff():
    gate = load_gate("popularity:100")
    found = gate.decide_batch(["a", "b", "c"], popularity=[100, 0, 300])
    assert [d.p_known for d in found] == [0.5, 0.0, 0.75]
    assert [d.retrieve for d in found] == [False, True, False]


def test_soft_sets_of_block_matrices():
    two = np.kron(np.eye(2), np.ones((3, 3)))
    assert laplacian_sets(two) == pytest.approx(2.0)
    assert laplacian_sets(np.ones((4, 4))) == pytest.approx(1.0)
    assert laplacian_sets(np.eye(5)) == pytest.approx(5.0)


def test_rouge_l():
    assert rouge_l("the cat sat", "the cat sat") == 1.0
    assert rouge_l("a b c d", "a c") == pytest.approx(2 * 2 / 6)
    assert rouge_l("", "") == 1.0
    assert rouge_l("", "x") == 0.0
    assert similarity_matrix(["a b", "a b", "c"]).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_constant_random_retrieves_at_its_rate():
    questions = [f"question {i}" for i in range(10_000)]
    rate = sum(d.retrieve for d in load_gate("constant:random:0.3").decide_batch(questions)) / 10_000
    assert rate == pytest.approx(0.3, abs=0.015)
    other = load_gate("constant:random:0.3", seed=1).decide_batch(questions[:200])
    same = load_gate("constant:random:0.3").decide_batch(questions[:200])
    assert [d.retrieve for d in other] != [d.retrieve for d in same]
    assert all(d.retrieve for d in load_gate("constant:random:1").decide_batch(questions[:50]))
    assert not any(d.retrieve for d in load_gate("constant:random:0").decide_batch(questions[:50]))


def test_ensemble_combines_logits():
    parts = [load_gate("constant:random:0.5", seed=s) for s in (0, 1)]
    p = [g.decide("who?").p_known for g in parts]
    logit = sum(w * math.log(x / (1 - x)) for w, x in zip((2.0, -1.0), p, strict=True)) + 0.25
    gate = load_gate("ensemble", gates=parts, weights=(2.0, -1.0), bias=0.25)
    assert gate.decide("who?").p_known == pytest.approx(1 / (1 + math.exp(-logit)))
    with pytest.raises(ConfigurationError, match="weights"):
        load_gate("ensemble", gates=["constant:never"], weights=(1.0, 2.0))


def test_cascade_drafts_only_inside_the_band():
    questions = [f"q{i}?" for i in range(20)]
    first = load_gate("ik", tokens=0, proxy=ScriptedProxy()).decide_batch(questions)
    second = load_gate("ik", tokens=32, proxy=ScriptedProxy()).decide_batch(questions)
    gate = load_gate("cascade", low=0.3, high=0.7, proxy=ScriptedProxy())
    for a, b, d in zip(first, second, gate.decide_batch(questions), strict=True):
        unsure = 0.3 <= a.p_known < 0.7
        assert d.p_known == pytest.approx(b.p_known if unsure else a.p_known)
        assert (d.draft is not None) == unsure
        assert d.cost.model_calls == (3 if unsure else 1)
    with pytest.raises(ConfigurationError, match="empty"):
        load_gate("cascade", low=0.8, high=0.2)
