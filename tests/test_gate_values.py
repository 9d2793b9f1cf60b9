"""Numbers worked by hand from the papers' formulas."""

import math

import numpy as np
import pytest

from rgate_integrations import Draft, Request, load_gate
from rgate_integrations.gates.papers.verdicts import certainty, ik_score
from rgate_integrations.models.base import TargetScores
from rgate_integrations.prompts import SHORT_ANSWER
from rgate_integrations.runtime.text import contains_answer, matching_ratio, normalise, normalise_answers
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import write


@pytest.mark.parametrize(
    ("counts", "certain"),
    [([30], 1.0), ([29, 1], 0.789), ([28, 1, 1], 0.735), ([15, 15], 0.0), ([1] * 30, 0.0)],
)
def test_certainty_of_the_knowledge_boundary_model(counts, certain):
    assert certainty(counts) == pytest.approx(certain, abs=5e-4)


@pytest.mark.parametrize(
    ("text", "gold", "ratio"),
    [
        ("I do not know that.", ["no"], 0.0),  # a substring match finds "no" in "not" and "know"
        ("No, they were not.", ["no"], 1.0),
        ("Burt Bacharach and Hal David wrote it.", ["Hal David", "Burt Bacharach", "Bob Dylan"], 2 / 3),
        ("The U.S.A. did.", ["USA"], 1.0),
        ("In 1969", ["196"], 0.0),
        ("法国的首都是巴黎。", ["巴黎"], 1.0),  # no spaces between words
        ("「1969年」、と答えます", ["1969年", "69年"], 0.5),
        ("باريس، عاصمة فرنسا", ["باريس"], 1.0),
        ("यह पेरिस।", ["पेरिस"], 1.0),
        ("เมืองหลวงคือปารีสครับ", ["ปารีส"], 1.0),
        ("三十五", ["五"], 0.0),  # one character is in many words
        ("五。", ["五"], 1.0),
        ("Paris、London（1879）", ["Paris", "1879"], 1.0),
        ("It was “Hamlet” by Eugene O’Neill, 1939–1945.", ["Hamlet", "O'Neill", "1939-1945"], 1.0),
        ("Paris—not Lyon", ["Paris", "Lyon"], 1.0),
        ("anything", ["the", "..."], 0.0),  # answers that normalise to nothing do not count
        ("anything", [], 0.0),
    ],
)
def test_matching_ratio_of_slimplm_keeps_to_token_boundaries(text, gold, ratio):
    assert matching_ratio(text, gold) == pytest.approx(ratio)


def test_texts_are_compared_without_case_articles_and_punctuation():
    assert normalise("  The Cat's   A-team!") == "cats ateam"
    assert contains_answer("", "x") is False
    assert normalise_answers(["The Cat", ""])[0] == "cat"
    assert len(set(normalise_answers(["x", "", ""]))) == 3, "silence agrees with nothing"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("公司成立于1998年。", "1998"),
        ("首都はParisです。", "Paris"),
        ("정답은 23입니다.", "23"),
        ("수도는 서울입니다.", "서울"),
        ("الجواب ٢٣.", "23"),
        ("حوالي ٣٫١٤ أو ١٬٢٠٠", "3.14"),
        ("حوالي ٣٫١٤ أو ١٬٢٠٠", "1,200"),
        ("उत्तर २३ है", "23"),
    ],
)
def test_an_answer_may_touch_other_scripts_and_have_their_digits(text, gold):
    """Regression: only answers in scripts without spaces were found in them."""
    assert contains_answer(text, gold)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("1998年", "199"),
        ("首都はParisです", "Par"),
        ("아니다", "니"),
        ("第二", "二"),
        ("그는 이미 국가대표였다.", "미국"),
        ("비행기 타고 갔다", "기타"),
        ("인도네시아", "인도"),
        ("試合は10月3日です", "10"),
        ("1945년 3월에 끝났다", "3"),
    ],
)
def test_part_of_a_word_is_no_answer(text, gold):
    assert not contains_answer(text, gold)


def test_ik_softmax_takes_the_two_logits_only():
    assert ik_score(2.0, 0.0) == pytest.approx(0.8808, abs=1e-4)
    extremes = [ik_score(0.0, 0.0), ik_score(-1000.0, 1000.0), ik_score(1000.0, -1000.0)]
    assert extremes == pytest.approx([0.5, 0.0, 1.0], abs=1e-12)
    assert math.isnan(ik_score(math.nan, 0.0))


def test_constant_random_retrieves_at_its_rate():
    questions = [f"question {i}" for i in range(10_000)]
    decided = [d.retrieve for d in load_gate("constant:random:0.3").decide_batch(questions)]
    assert sum(decided) / 10_000 == pytest.approx(0.3, abs=0.015)
    other = load_gate("constant:random:0.3", seed=1).decide_batch(questions[:200])
    assert [d.retrieve for d in other] != decided[:200]
    edges = [load_gate(f"constant:random:{rate}").decide_batch(questions[:50]) for rate in (0, 1)]
    assert [{d.retrieve for d in found} for found in edges] == [{False}, {True}]


# --- sampled answers --------------------------------------------------------------------------------------------


class Answers(ScriptedProxy):
    """Samples the given answers, whatever the question."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = answers

    def sample(self, prompt, values, *, n, tokens, temperature, seed):
        assert (prompt, n) == (SHORT_ANSWER, len(self.answers))
        return [tuple(Draft(text=a) for a in self.answers) for _ in values]


@pytest.mark.parametrize(
    ("answers", "certain"),
    [
        (("Paris", "paris.", "The Paris", "PARIS!"), 1.0),
        (("a1", "a2", "a3", "a4"), 0.0),
        (("Rome", "Rome", "Oslo", "rome"), 1 - 0.811278),  # 3:1. H = 0.8113 bits of log2(2) = 1
        (("Rome", "Oslo", "Rome", "Oslo"), 0.0),  # 2:2. H = 1 = H_max
        # Silence agrees with nothing, itself included.
        (("Rome", "", " ", "..."), 0.0),
        (("Rome", "Rome", "Rome", ""), 1 - 0.811278),
    ],
)
def test_certainty_of_four_samples(answers, certain):
    found = load_gate("boundary", samples=4, proxy=Answers(*answers)).decide("capital?")
    assert found.p_known == pytest.approx(certain, abs=1e-6)


def test_boundary_hands_on_the_most_frequent_answer_and_takes_the_papers_threshold():
    gate = load_gate("boundary", samples=3, proxy=Answers("Oslo", "Rome", "rome!"))
    d = gate.decide("capital?")
    assert (d.draft.text, d.threshold) == ("Rome", 0.9)
    assert d.p_known == pytest.approx(1 - 0.918296, abs=1e-6)  # H(1/3) is 0.918296 bits, of log2(2)
    silent = gate.with_options(proxy=Answers("", " ", "the")).decide("capital?")
    assert silent.retrieve
    assert silent.error.message.startswith("None of the 3 samples is an answer: ")


# --- the tokens of a draft --------------------------------------------------------------------------------------


LOGPROBS = tuple(map(math.log, (0.5, 1.0, 0.25, 1.0)))
DRAFT = Draft(text="a b c d", tokens=("a", " b", " c", " d"), logprobs=LOGPROBS)


@pytest.mark.parametrize(
    ("options", "p"),
    [
        ({}, 0.25),
        ({"tokens": 2}, 0.5),
        ({"statistic": "first"}, 0.5),
        # The geometric mean: (1/2 * 1/4) ** (1/4) = 2 ** (-3/4).
        ({"statistic": "mean"}, 2**-0.75),
    ],
)
def test_the_probability_of_tokens(options, p):
    gate = load_gate("token_probability", threshold=p + 1e-9, **options)
    found, empty = gate.decide_batch(
        [Request("who?", draft=each) for each in (DRAFT, Draft(text="", logprobs=()))]
    )
    assert (found.p_known, found.retrieve) == (pytest.approx(p), True)
    assert (empty.retrieve, "wrote nothing" in empty.reason) == (True, True)


# --- what a model scores or writes ------------------------------------------------------------------------------


class Targets(ScriptedProxy):
    """Gives the targets of every prompt the same log-probabilities, by name."""

    def __init__(self, fixed="An answer.", **logprobs):
        super().__init__(fixed=fixed)
        self.logprobs = logprobs

    def score(self, prompt, values, targets, *, adapter=None):
        return [TargetScores(tuple(self.logprobs[t.strip("<>")] for t in targets), 1) for _ in values]


def test_adapt_is_one_minus_the_probability_of_ret():
    d = load_gate("adapt", proxy=Targets(RET=math.log(0.3))).decide("who?")
    assert (d.p_known, d.draft.text) == (pytest.approx(0.7), "An answer.")
    asked = load_gate("adapt", proxy=Targets("<RET>", RET=math.log(0.01))).decide("who?")
    assert (asked.p_known, asked.draft) == (0.0, None)


@pytest.mark.parametrize(
    ("verdict", "p"),
    [
        ("Known(True)", 1.0),
        ("  Known ( False ) and more", 0.0),
        ("known(true)", None),
        ("Known True", None),
        ("It is Known(True)", None),
        ("Known(Maybe)", None),
    ],
)
def test_verdicts_are_read_strictly(verdict, p):
    decision = load_gate("slimplm", mode="generate", proxy=ScriptedProxy(fixed=verdict)).decide("who?")
    assert (decision.p_known, decision.error is None) == (p or 0.0, p is not None)


def test_neighbours_vote_and_ties_retrieve(tmp_path, monkeypatch):
    class Alike:
        def __init__(self, name):
            self.name = name

        def embed(self, texts):
            return np.ones((len(texts), 1), np.float32)

        embed_queries = embed

    monkeypatch.setattr("rgate_integrations.index.embedder.SentenceEmbedder", Alike)
    for known, skips in ((3, True), (2, False), (0, False)):
        labelled = [{"question": f"q{i}", "known": i < known} for i in range(4)]
        path = write(tmp_path / "labelled.jsonl", *labelled)
        decision = load_gate(f"neighbours:{path}", k=4).decide("who wrote hamlet?")
        assert (decision.p_known, decision.retrieve) == (known / 5, not skips)
