"""Numbers worked by hand from the papers' formulas."""

import math
from typing import ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from rgate_integrations import Draft, Gate, load_gate
from rgate_integrations.engine.decision_engine import decide_together
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.gates import Score
from rgate_integrations.gates.calibrated import CalibratedGate
from rgate_integrations.gates.papers.boundary import certainty
from rgate_integrations.gates.papers.ik import ik_score
from rgate_integrations.gates.papers.neighbours import vote
from rgate_integrations.gates.papers.popularity import fit_cutoff
from rgate_integrations.gates.papers.slimplm import parse_verdict
from rgate_integrations.gates.papers.token_probability import (
    first_weak_sentence,
    masked_query,
    sentences,
    token_probability,
)
from rgate_integrations.gates.papers.uncertainty import laplacian_sets, similarity_matrix
from rgate_integrations.prompts import SHORT_ANSWER
from rgate_integrations.runtime.text import comparable, contains_answer, matching_ratio, normalise, rouge_l
from tests.scripted_proxy import ScriptedProxy


class Private(Gate):
    """Everything is about the user's own documents."""

    specs: ClassVar = ()

    def score(self, evidence):
        return Score(0.5, "private", signals={"private": 0.9})


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


def test_what_a_gate_says_of_the_kind_is_passed_on():
    gate = CalibratedGate(inner=Private())
    assert load_gate(gate, on_error="raise").decide("who?").signals == {"private": 0.9}


class Answers(ScriptedProxy):
    """Samples the given answers, whatever the question."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = answers

    def sample(self, prompt, values, *, n, tokens, temperature, seed):
        assert prompt == SHORT_ANSWER
        assert n == len(self.answers)
        return [tuple(Draft(text=a) for a in self.answers) for _ in values]


SAMPLING = ("boundary", "semantic_sets", "lexical_similarity", "eigval_laplacian")


@pytest.mark.parametrize(
    ("answers", "certain", "sets", "alike", "laplacian"),
    [
        (("Paris", "paris.", "The Paris", "PARIS!"), 1.0, 1.0, 1.0, 1.0),
        (("a1", "a2", "a3", "a4"), 0.0, 0.0, 0.0, 0.0),
        # 3:1. H = 0.8113 bits of log2(2) = 1; two sets of four; 3 of the 6 pairs are equal; two blocks.
        (("Rome", "Rome", "Oslo", "rome"), 1 - 0.811278, 2 / 3, 0.5, 2 / 3),
        # 2:2. H = 1 = H_max; 2 of the 6 pairs are equal.
        (("Rome", "Oslo", "Rome", "Oslo"), 0.0, 2 / 3, 1 / 3, 2 / 3),
        # Silence agrees with nothing, itself included: four sets, as above with four answers.
        (("Rome", "", " ", "..."), 0.0, 0.0, 0.0, 0.0),
        (("Rome", "Rome", "Rome", ""), 1 - 0.811278, 2 / 3, 0.5, 2 / 3),
    ],
)
def test_gates_on_four_samples(answers, certain, sets, alike, laplacian):
    proxy = Answers(*answers)
    found = decide_together([load_gate(n, samples=4, proxy=proxy) for n in SAMPLING], ["capital?"])
    assert [d.p_known for (d,) in found] == pytest.approx([certain, sets, alike, laplacian], abs=1e-6)


def test_samples_that_all_say_nothing_retrieve():
    proxy = Answers("", " ", "the", "?")
    for (d,) in decide_together([load_gate(n, samples=4, proxy=proxy) for n in SAMPLING], ["capital?"]):
        assert d.retrieve
        assert d.error.type == "EvidenceError"
        assert "All 4 sampled answers are empty" in d.reason
    assert comparable(["The Cat", ""])[0] == "cat"
    assert len(set(comparable(["x", "", ""]))) == 3


def test_boundary_hands_on_the_most_frequent_answer_and_takes_the_papers_threshold():
    gate = load_gate("boundary", samples=3, proxy=Answers("Oslo", "Rome", "rome!"))
    d = gate.decide("capital?")
    assert d.draft.text == "Rome"
    assert d.threshold == 0.9
    assert d.p_known == pytest.approx(1 - 0.918296, abs=1e-6)  # H(1/3) in bits
    by_samples = load_gate("boundary", samples=3, normalisation="samples", proxy=gate.get_proxy())
    assert by_samples.decide("capital?").p_known == pytest.approx(1 - 0.918296 / math.log2(3), abs=1e-6)


def decide_on(name, draft, **options):
    return load_gate(name, proxy=ScriptedProxy(), **options).decide("who?", draft=draft)


def test_draft_gates_on_given_probabilities():
    p = (0.5, 1.0, 0.25, 1.0)
    draft = Draft(text="a b c d", tokens=("a", " b", " c", " d"), logprobs=tuple(map(math.log, p)))
    assert decide_on("token_probability", draft).p_known == pytest.approx(0.25)
    assert decide_on("token_probability", draft, tokens=2).p_known == pytest.approx(0.5)
    assert decide_on("token_probability", draft, statistic="first").p_known == pytest.approx(0.5)
    # The geometric mean: (1/2 * 1/4) ** (1/4) = 2 ** (-3/4).
    assert decide_on("token_probability", draft, statistic="mean").p_known == pytest.approx(2**-0.75)
    assert decide_on("perplexity", draft).p_known == pytest.approx(2**-0.75)
    assert decide_on("token_probability", draft, threshold=0.25 + 1e-9).retrieve
    entropy = draft.model_copy(update={"entropies": (math.log(2), 0.0, math.log(8), 0.0)})
    assert decide_on("mean_token_entropy", entropy).p_known == pytest.approx(0.5)  # the mean is ln 2
    assert "no entropies" in decide_on("mean_token_entropy", draft).reason


def test_targ_by_hand():
    draft = Draft(
        text="a b c",
        tokens=("a", " b", " c"),
        logprobs=(-0.1, -0.2, -0.3),
        margins=(0.0, math.log(2), math.log(4)),
        entropies=(math.log(2), 0.0, 0.0),
    )
    # exp(-margin) is 1, 1/2 and 1/4: U = 7/12 over three tokens, 3/4 over the first two.
    assert decide_on("targ", draft).p_known == pytest.approx(5 / 12)
    assert decide_on("targ", draft, tokens=2).p_known == pytest.approx(1 / 4)
    # At beta = 1/2 the margins count twice: 1, 1/4 and 1/16.
    assert decide_on("targ", draft, beta=0.5).p_known == pytest.approx(1 - (1 + 1 / 4 + 1 / 16) / 3)
    assert decide_on("targ", draft, signal="entropy").p_known == pytest.approx(2 ** (-1 / 3))
    bare = draft.model_copy(update={"margins": None, "entropies": None})
    for signal in ("margin", "entropy"):
        refused = decide_on("targ", bare, signal=signal)
        assert refused.retrieve
        assert f"gives no {signal}" in refused.reason


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_draft_with_nan_anywhere_is_refused(place):
    logprobs = [-0.1, -0.1, -0.1]
    logprobs[place] = math.nan
    with pytest.raises(ValidationError, match="not a number"):
        Draft(text="a b c", tokens=("a", " b", " c"), logprobs=tuple(logprobs))
    assert math.isnan(token_probability(tuple(logprobs)))


@pytest.mark.parametrize("name", ["token_probability", "perplexity"])
def test_an_empty_draft_retrieves(name):
    assert "empty" in decide_on(name, Draft(text="", logprobs=())).reason


def test_flare_masks_tokens_below_beta_and_refuses_what_it_cannot_place():
    draft = flare_draft()
    # In "Joe Biden went to Penn." the tokens are .9 .95 .85 .9 .9 .99: theta .86 finds "went" weak.
    assert masked_query(draft, 0.86) == "Joe Biden went to Penn."
    assert masked_query(draft, 0.86, beta=0.9) == "Joe Biden to Penn."
    assert masked_query(draft, 0.86, beta=1.0) is None
    assert first_weak_sentence(draft, 0.0) is None
    abbreviated = Draft(text="3.5 km. Yes", tokens=("3", ".", "5", " km", ".", " Yes"), logprobs=(-0.1,) * 6)
    assert sentences(abbreviated) == [range(5), range(5, 6)]
    with pytest.raises(EvidenceError, match="no tokens"):
        first_weak_sentence(Draft(text="a b", logprobs=(-5.0, -5.0)), 0.5)


class Targets(ScriptedProxy):
    """Gives the targets of every prompt the same log-probabilities, by name."""

    def __init__(self, **logprobs):
        super().__init__(fixed="An answer.")
        self.logprobs = logprobs

    def score(self, prompt, values, targets, *, adapter=None):
        from rgate_integrations.models.base import TargetScores

        return [TargetScores(tuple(self.logprobs[t.strip("<>")] for t in targets), 1) for _ in values]


def test_adapt_is_one_minus_the_probability_of_ret():
    d = load_gate("adapt", proxy=Targets(RET=math.log(0.3))).decide("who?")
    assert d.p_known == pytest.approx(0.7)
    assert d.draft.text == "An answer."
    proxy = Targets(RET=math.log(0.01))
    proxy.fixed = "<RET>"
    asked = load_gate("adapt", proxy=proxy).decide("who?")
    assert asked.p_known == 0.0
    assert asked.draft is None


def test_ik_and_prompt_read_opposite_answers():
    proxy = Targets(Yes=math.log(0.06), No=math.log(0.02))
    assert load_gate("ik", proxy=proxy).decide("who?").p_known == pytest.approx(0.75)
    assert load_gate("prompt", proxy=proxy).decide("who?").p_known == pytest.approx(0.25)


def test_a_name_with_a_bad_argument_is_a_typed_error():
    for name in ("popularity:many", "popularity:0", "popularity:nan", "constant:sometimes", "boundary:x"):
        with pytest.raises(ConfigurationError, match="cannot take"):
            load_gate(name)
