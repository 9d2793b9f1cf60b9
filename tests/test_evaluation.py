"""Paired data, metrics, break-even and calibration: bad files first, then numbers worked by hand, then coverage."""

import math
import re
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rgate_integrations import CorpusProfile, Draft, load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, EvidenceError
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.papers.verdicts import IKGate
from rgate_integrations.gates.registry import saved_gate
from rgate_integrations.tuning import Budget, MaxLoss, calibrate, collect, evaluate, read_paired
from rgate_integrations.tuning.calibration import ALWAYS, fit_map
from rgate_integrations.tuning.evaluation import (
    JudgedQuestions,
    auc,
    break_even,
    expected_calibration_error,
    fold_metrics,
    judge,
    measure,
    retrieval_curve,
)
from rgate_integrations.tuning.questions import DataFile, Example, Question, all_examples, read_examples
from tests.commands import printed, rgate
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import write

T, F = True, False
GOOD = {"question": "a?", "closed_book_correct": True, "rag_correct": False}


def numbered(count):
    return [{**GOOD, "question": f"What is number {number}?"} for number in range(count)]


# --- paired data -------------------------------------------------------------------------------------------


def test_a_question_that_is_repeated_counts_once_in_each_data_set(tmp_path):
    """Regression: three questions in 200 lines each gave a guarantee."""
    asked = [{**GOOD, "question": text} for text in ("What is C?", "What is C++?", "What is the C?")]
    again = {**asked[0], "question": " WHAT is c? ", "closed_book_correct": False}
    (file,) = read_paired(write(tmp_path / "a.jsonl", *asked, again, {**again, "dataset": "other"}))
    found = [(example.question.dataset, example.known) for example in file.examples]
    assert found == [("a", True)] * 3 + [("other", False)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"question": 3}, "line 2: question is empty or not a string"),
        # Regression: the gate refused these after all calls of the LLM, without the line.
        ({**GOOD, "question": "a\0b"}, "line 2: question contains NUL bytes"),
        ({**GOOD, "question": "\x1f"}, "line 2: question has only control characters"),
        ({"question": "b?", "rag_correct": True}, "line 2: it has neither closed_book_correct"),
        ({"question": "b?", "closed_book_correct": True}, "line 2: it has neither rag_correct"),
        ({"question": "b?", "closed_book_correct": 2}, "closed_book_correct must be true or false, not 2"),
        ({"question": "b?", "closed_book_correct": "yes"}, "line 2: .* must be true or false, not 'yes'"),
    ],
)
def test_paired_files_that_lack_something_are_named(tmp_path, bad, why):
    with pytest.raises(DataFormatError, match=why):
        read_paired([write(tmp_path / "bad.jsonl", GOOD, bad)])


def test_a_file_that_is_given_twice_is_refused(tmp_path):
    """Regression: it counted twice, and calibration had each question in both halves."""
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataFormatError, match="has no new questions"):
        read_paired([path, write(tmp_path / "copy.jsonl", GOOD)])


# --- metrics by hand ---------------------------------------------------------------------------------------


def judged(p, retrieve, closed, rag):
    arrays = (np.array(p, float), np.array(retrieve), np.array(closed), np.array(rag))
    decisions = load_gate("constant:always").decide_batch(["q?"] * len(p))
    return JudgedQuestions(*arrays, np.array(decisions, dtype=object))


def test_auc_against_hand_worked_values_and_scikit_learn():
    assert auc([0.1, 0.4, 0.35, 0.8], [F, F, T, T]) == 0.75
    assert math.isnan(auc([], []))
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 400) / 5, rng.random(400) < 0.4
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_every_number_by_hand():
    found = measure(judged([0.9, 0.8, 0.3, 0.1], [F, F, T, T], [T, F, F, F], [F, T, T, F]))
    wanted = {
        "auc": 1.0,
        "accuracy": 0.75,  # the second is skipped and unknown
        "never": 0.25,
        "always": 0.5,
        "oracle": 0.75,
        "retrieval_rate": 0.5,
        "containment_accuracy": 0.5,
        "random_same_rate": 0.375,
        "helped": 1,
        "harmed": 1,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert isinstance(found["helped"], int)
    assert [found["curve"][place] for place in (0, 10, 20)] == [[0.0, 0.25], [0.5, 0.5], [1.0, 0.5]]
    one_class = measure(judged([0.9, 0.1], [F, T], [T, T], [T, T]))
    assert (one_class["auc"], "auc" in one_class["intervals"]) == (None, F)


def test_few_right_answers_do_not_make_an_interval_of_no_width():
    """Regression: one right answer had an accuracy of 100 % to 100 %, and two questions an AUC of 1.00 to 1.00."""
    one = measure(judged([0.9], [F], [T], [T]))["intervals"]
    assert one["containment_accuracy"] == pytest.approx(
        [0.2065, 1.0], abs=1e-4
    )  # by Wilson's formula, 1 / (1 + 1.96²)
    assert one["retrieval_rate"] == pytest.approx([0.0, 0.7935], abs=1e-4)
    two = measure(judged([0.9, 0.1], [F, T], [T, F], [T, T]))["intervals"]
    assert set(two) == {"accuracy", "retrieval_rate", "containment_accuracy"}
    half = measure(judged([0.9, 0.1] * 10, [F, T] * 10, [T, F] * 10, [T, T] * 10))["intervals"]
    assert half["retrieval_rate"] == pytest.approx([0.2993, 0.7007], abs=1e-4)
    assert "auc" in half


@pytest.mark.parametrize(
    ("p", "curve"),
    [
        ([0.5, 0.5, 0.5, 0.5], [0.25, 0.3125, 0.375, 0.4375, 0.5]),  # ties are retrieved in random order
        # The best curve retrieves first if only retrieval helps, and last if it hurts.
        ([0.9, 0.1, 0.1, 0.5], [0.25, 0.5, 0.75, 0.75, 0.5]),
    ],
)
def test_curve_by_hand(p, curve):
    found = retrieval_curve(np.array(p), np.array([T, F, F, F]), np.array([F, T, T, F]))
    np.testing.assert_allclose(found, curve)


def test_sets_of_one_label_have_no_mean_of_their_aucs():
    """Regression: NumPy warned, and gate.json had a NaN, which is not JSON."""
    metrics = fold_metrics(np.array([0.1, 0.9]), np.array([False, True]), ["a", "b"])
    assert metrics == {"auc": {}, "auc_mean": None, "auc_pooled": 1.0}


@pytest.mark.model
def test_the_judged_llm_is_named_as_for_decide_and_saved_with_the_gate(tmp_path):
    file = write(tmp_path / "d.jsonl", *numbered(50))
    printed("calibrate", "--data", file, "--llm-name", "gpt-4o", "--out", tmp_path / "gate")
    assert read_gate(tmp_path / "gate").parameters["inner"]["llm_name"] == "gpt-4o"
    assert load_gate(str(tmp_path / "gate")).decide("Who wrote Emma?").llm.startswith("gpt-4o")
    error = rgate("evaluate", "--data", file, "--gate", "constant:never", "--llm-name", "gpt-4o").exception
    assert "cannot be adjusted to an LLM" in str(error)


def test_calibration_error_by_hand():
    p, known = np.array([0.95, 0.95, 0.05, 0.05]), np.array([T, F, F, F])
    assert expected_calibration_error(p, known) == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)


@pytest.mark.parametrize(("gate", "rate"), [(3.7 + 8.3, 0.80), (3.7, 0.94)])
def test_break_even_of_the_ik_paper(gate, rate):
    """Table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with retrieval."""
    assert break_even(0.5, gate=gate, direct=18.2, rag=78.4)["break_even"] == pytest.approx(rate, abs=5e-3)
    slow = break_even(0.5, gate=500, direct=10, rag=25)
    assert slow == {"always_ms": 25, "gated_ms": 517.5, "break_even": 0}


@pytest.mark.parametrize("measured", [evaluate, judge])
@pytest.mark.parametrize("examples", [[], [Example(Question("a?"), 1.0, True), Example(Question("b?"), 1.0)]])
def test_nothing_is_measured_without_the_labels_of_both_arms(measured, examples):
    """Regression: a missing label counted as a wrong answer, so that always retrieving looked useless."""
    with pytest.raises(
        DataFormatError, match=r"no label of its answer with retrieval|There are no questions"
    ):
        measured(load_gate("constant:always"), examples)


PAIRED = [Example(Question("a?"), 1.0, True)]
FILES = [DataFile("d", "", tuple(PAIRED))]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda gate, data: evaluate(gate, str(data)),
            "Example objects, but str was given.*read_paired",
        ),
        (lambda gate, data: evaluate(gate, data), "Example objects, but .*Path was given"),
        (lambda gate, data: evaluate(gate, FILES), "Example objects, but DataFile was given"),
        (
            lambda gate, data: calibrate(gate, str(data), Budget(0.5)),
            "list of DataFile objects, but str was given",
        ),
        (
            lambda gate, data: calibrate(gate, FILES[0], Budget(0.5)),
            "list of DataFile objects, but DataFile was given",
        ),
        (
            lambda gate, data: calibrate(gate, FILES, 0.05),
            r"policy= must be MaxLoss\(…\) or Budget\(…\), not 0.05",
        ),
        (lambda gate, data: calibrate(Mock(), FILES, Budget(0.5)), "only gates from load_gate"),
        (
            lambda gate, data: collect(data, lambda question: "x", data),
            "collect needs a model .*, not function",
        ),
    ],
)
def test_an_argument_of_another_type_is_named_before_the_work(tmp_path, call, said):
    """Regression: errors of Python, without a hint, some of them after all decisions."""
    with pytest.raises(ConfigurationError, match=said):
        call(load_gate("constant:always"), tmp_path / "data.jsonl")


def test_recorded_drafts_reach_the_gate():
    draft = Draft(text="It was me.", logprobs=(-0.1, -0.2, -0.1), source="recorded")
    gate = load_gate("token_probability", statistic="mean", proxy=ScriptedProxy())
    _, found = evaluate(
        gate, [Example(Question("who wrote it all?", draft=draft), 1.0, False)], draft="recorded"
    )
    assert found.p[0] == pytest.approx(math.exp(-0.4 / 3))
    assert found.decisions[0].draft == draft
    assert found.decisions[0].cost.model_calls == 0  # nothing is read again
    with pytest.raises(DataFormatError, match="closed_book_text"):
        evaluate(gate, [Example(Question("who wrote it all?"), 1.0, True)], draft="recorded")
    with pytest.raises(ConfigurationError, match="draft cannot be 'record'"):
        evaluate(gate, [], draft="record")


def test_an_empty_answer_is_recorded_and_retrieves(tmp_path):
    """Regression: collect writes it, but evaluate said that closed_book_text was missing."""
    recorded = {"closed_book_text": "Me.", "closed_book_logprobs": [-0.1]}
    lines = [{**line, **recorded} for line in numbered(2)]
    lines[0]["closed_book_text"] = ""
    (file,) = read_paired(write(tmp_path / "d.jsonl", *lines))
    gate = load_gate("token_probability", statistic="mean", proxy=ScriptedProxy())
    _, found = evaluate(gate, file.examples, draft="recorded")
    assert (found.retrieve[0], found.p[0], found.decisions[0].error.type) == (True, 0.0, "NoAnswerError")
    (learned,) = read_examples(
        write(tmp_path / "m.jsonl", {**lines[0], "gold_answers": ["x"]}), "match_ratio"
    )
    assert learned.examples[0].target == 0


# --- calibration -------------------------------------------------------------------------------------------


def test_a_map_keeps_the_order():
    rng = np.random.default_rng(0)
    p = np.sort(rng.random(400))
    known = rng.random(400) < p**3
    mapped = np.array(list(map(fit_map(p, known), p)))
    assert (np.diff(mapped) >= 0).all()
    assert expected_calibration_error(mapped, known) < expected_calibration_error(p, known)
    assert fit_map(p, np.ones(400, bool)).method == "none"


@pytest.mark.parametrize("seed", range(8))
def test_a_map_does_not_raise_what_is_less_known_than_all_that_was_known(seed):
    """Regression: by a log of facts alone, all known alike, the slope was 0, and private questions had P = 0.97."""
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.08, 1, 120)
    known = rng.random(120) < 0.97
    learned = fit_map(p, known)
    scores = np.linspace(0, 1, 1_000)
    mapped = np.array([learned(score) for score in scores])
    assert (mapped <= scores)[scores < p[known].min() / 3].all()
    assert (np.diff(mapped) >= 0).all()
    # Regression: a negative slope was set to 0, but the intercept was the one that belonged to it.
    assert np.mean([learned(score) for score in p]) == pytest.approx(known.mean(), abs=0.01)


def world(rng, n):
    """Questions whose P(known) is informative; retrieval helps on 20 % of the unknown and hurts on 6 %."""
    p = rng.beta(1.2, 1.5, n)
    closed = rng.random(n) < p
    u = rng.random(n)
    rag = np.where(closed, u > 0.06, u < 0.2)
    return p, closed, rag


@pytest.mark.slow
def test_guarantees_hold_as_often_as_they_say():
    rng = np.random.default_rng(1)
    p, closed, rag = world(rng, 400_000)
    order = np.argsort(p)
    gain = (rag.astype(float) - closed)[order]
    lost_from = np.append(np.cumsum(gain[::-1])[::-1], 0.0) / len(p)  # by skipping from this position on
    chosen = []
    for _ in range(500):
        sample = world(rng, 400)
        chosen.append([policy.choose(*sample).threshold for policy in (Budget(0.4, 0.9), MaxLoss(0.02, 0.9))])
    budgets, losses = np.array(chosen).T
    allowed = 0.1 + 2 * math.sqrt(0.9 * 0.1 / 500)
    assert (np.searchsorted(p[order], budgets) / len(p) > 0.4).mean() <= allowed
    assert (lost_from[np.searchsorted(p[order], losses)] > 0.02).mean() <= allowed
    assert budgets.min() > 0
    assert (losses < 1).mean() > 0.5


def test_what_cannot_be_guaranteed_is_not():
    p, closed, rag = np.full(30, 0.9), np.zeros(30, bool), np.ones(30, bool)
    # By Clopper and Pearson's bound, 0 of 30 proves a rate of at most 1 - 0.05 ** (1 / 30) = 0.095.
    assert Budget(0.1).choose(p, closed, rag).facts["upper_bound"] == pytest.approx(1 - 0.05 ** (1 / 30))
    assert not Budget(0.09).choose(p, closed, rag).guaranteed
    assert Budget(0.1).choose(p, closed, rag).guaranteed
    assert Budget(0.0).choose(np.full(30, 0.01), closed, rag).threshold < 0.01
    # whatever the threshold is, overrides retrieve for half
    overridden = np.where(np.arange(30) % 2, 0.9, -1.0)
    by_override = Budget(0.2).choose(overridden, closed, rag)
    assert (by_override.threshold, by_override.guaranteed) == (0.0, False)
    assert by_override.facts["retrieval_rate"] == 0.5
    assert "50.0% of the questions" in by_override.guarantee
    # where passages never help, nothing is lost by skipping all
    assert MaxLoss(0.2).choose(p, rag, rag).facts["retrieval_rate"] == 0


@pytest.mark.parametrize("least", [0.03, 0.6])
def test_a_gate_that_may_skip_all_questions_of_a_log_retrieves_those_that_are_less_known(least):
    """Regression: the threshold was 0, and "Where is my order?", of P(known) 0.00 and unlike any of them, skipped."""
    p, right = np.linspace(least, 1, 400), np.ones(400, bool)
    choice = MaxLoss(0.02).choose(np.append(p, -1.0), np.append(right, True), np.append(right, True))
    assert choice.guaranteed
    assert choice.facts["retrieval_rate"] == pytest.approx(1 / 401), "only the one with an override"
    assert choice.threshold == pytest.approx(least, abs=0.003)
    assert choice.threshold <= least


@pytest.mark.parametrize("n", [100, 130])
def test_a_few_questions_are_enough_where_the_llm_alone_is_far_better(n):
    """Regression: the tests began at the highest threshold, where nothing is skipped and little can be shown."""
    rng = np.random.default_rng(0)
    p, closed, rag = rng.uniform(0.5, 0.95, n), rng.random(n) < 0.97, rng.random(n) < 0.75
    choice = MaxLoss(0.02).choose(p, closed, rag)
    assert (choice.guaranteed, choice.facts["retrieval_rate"]) == (True, 0.0)
    assert p.min() - 0.01 < choice.threshold <= p.min()


def test_a_loss_just_above_the_limit_is_rarely_taken_for_less():
    """The worst case: whatever is skipped, the loss is just above the limit."""
    rng = np.random.default_rng(0)
    for p_known in (0.0, 1.0):
        broken = 0
        for _ in range(400):
            gain = rng.choice([1, -1, 0], 200, p=[0.221, 0.2, 0.579])
            p = np.full(200, p_known)
            broken += MaxLoss(0.02, 0.9).choose(p, gain < 0, gain > 0).guaranteed
        assert broken / 400 <= 0.1 + 2 * math.sqrt(0.9 * 0.1 / 400)


@pytest.mark.parametrize("right", [0, 2])
def test_labels_by_which_hardly_any_answer_is_right_make_no_gate_skip(right):
    """Regression: nothing could be lost, so a gate that skipped everything "lost at most 2 points"."""
    p, labels = np.full(300, 0.9), np.arange(300) < right
    for closed, rag in ((labels, labels), (labels, ~labels & labels)):
        choice = MaxLoss(0.02).choose(p, closed, rag)
        assert (choice.threshold, choice.guaranteed) == (ALWAYS, False)
        assert f"only {right / 300:.1%} of the questions have a right answer" in choice.guarantee


def labelled(decisions):
    """Return lines whose answers are right where a gate says so."""
    return [{**GOOD, "question": d.question, "closed_book_correct": d.p_known > 0.5} for d in decisions]


def test_a_calibrated_gate_maps_what_its_inner_gate_says_and_tells_where_its_threshold_is_from(tmp_path):
    gate = load_gate("ik", proxy=ScriptedProxy())
    inner = gate.decide_batch([f"question {i}?" for i in range(200)])
    files = read_paired([write(tmp_path / "d.jsonl", *labelled(inner))])
    # Regression: JSON has no numbers of numpy, so saving failed at the end.
    found = calibrate(gate, files, Budget(np.float32(0.5), np.float64(0.9)), seed=np.int64(0))
    saved = save_gate(saved_gate(found.gate.gate, found.provenance), tmp_path / "gate")
    provenance = read_gate(saved).provenance
    assert "at most 50%" in found.choice.guarantee
    assert provenance["policy"] == {"name": "budget", "rate": 0.5, "confidence": 0.9}
    assert provenance["seed"] == 0
    assert provenance["retrieval_rate"] < 0.5
    decision = found.gate.decide("question 3?")
    assert decision.p_known == pytest.approx(found.gate.gate.probability(inner[3].p_known))
    assert decision.threshold == found.choice.threshold
    assert decision.reason == f"{inner[3].reason} Calibrated, P(known) is {decision.p_known:.2f}."


@pytest.mark.parametrize("policy", [Budget(0.0004, 0.999), MaxLoss(0.0004, 0.999)])
@pytest.mark.parametrize("n", [20, 100_000])
def test_the_numbers_of_a_guarantee_are_said_as_they_are(policy, n):
    """Regression: it promised at most 0.0%, with confidence 100%."""
    said = policy.choose(np.ones(n), np.ones(n, bool), np.zeros(n, bool)).guarantee
    assert "at most 0.04" in said
    assert "100%" not in said


class Overriding(IKGate):
    """Overrides what it says of every fourth question, once each way."""

    def score(self, evidence):
        score = super().score(evidence)
        number = int(evidence.question.strip("?").split()[-1])
        return score if number % 4 else score.overridden("A reason.", retrieve=bool(number % 8))


class Failing(ScriptedProxy):
    """Fails for questions with an end, which all have by default."""

    ends = ""

    def _called(self, what, values):
        if any(each["question"].endswith(self.ends) for each in values):
            raise RuntimeError("scripted failure")


class Sevens(Failing):
    ends = "7?"


@pytest.mark.parametrize("budget", [0.9, 0.01], ids=["within it", "too many for it"])
def test_what_is_not_decided_by_the_threshold_counts_as_retrieved_and_does_not_change_the_map(
    tmp_path, budget
):
    """Regressions: rules and failures were fitted as P(known) = 0; at the threshold 0, nothing was retrieved."""
    gate = load_gate(Overriding(), proxy=Sevens(), always=[re.compile(r"[13]\?")])
    real = gate.decide_batch([f"What is number {i}?" for i in range(400)])
    files = read_paired([write(tmp_path / "d.jsonl", *labelled(real))])
    found = calibrate(gate, files, Budget(budget))
    assert (found.choice.threshold > 0) is (budget == 0.9)
    p = np.array([d.p_known for d in real])
    # Overrides of the gate leave P(known) as it is.
    estimated = np.array([not re.search(r"[137]\?", d.question) for d in real])
    fit, choose = np.split(np.random.default_rng(0).permutation(400), [200])
    fit, logged = fit[estimated[fit]], choose[estimated[choose]]
    assert found.gate.gate.probability == fit_map(p[fit], p[fit] > 0.5)
    decided = found.gate.decide_batch([real[i].question for i in choose])
    assert found.choice.facts["retrieval_rate"] == np.mean([d.retrieve for d in decided])
    mapped = [found.gate.gate.probability(p[i]) for i in logged]
    assert found.provenance["scores"] == np.quantile(mapped, np.linspace(0, 1, 101)).round(5).tolist()
    assert found.provenance["scored"] == len(mapped) < found.provenance["n"]
    for start, retrieve in ((0, False), (4, True)):
        assert {d.retrieve for d in real[start::8]} == {retrieve}
        assert set(judge(gate, all_examples(files)).p[start::8]) == {float(not retrieve)}


def test_a_question_in_other_punctuation_or_another_data_set_is_not_calibrated_on_twice(tmp_path):
    """Regression: it was in both halves, and counted repeatedly: 50 questions had the guarantee of 200."""
    asked = numbered(50)
    again = [{**row, "question": row["question"].replace("?", ends)} for row in asked for ends in ("", " ?")]
    files = [write(tmp_path / "a.jsonl", *asked), write(tmp_path / "b.jsonl", *again)]
    gate = load_gate("ik", proxy=ScriptedProxy())
    once, repeated = (calibrate(gate, read_paired(given), Budget(0.5)) for given in (files[0], files))
    assert once.choice == repeated.choice
    assert [found.provenance["repeated"] for found in (once, repeated)] == [0, 100]
    data = [option for file in files for option in ("--data", file)]
    output = printed("calibrate", *data, "--gate", "constant:always", "--out", tmp_path / "gate")
    assert "100 repeated questions were left out; of each, the first line counts." in output
    # Regression: those within one file were left out in silence.
    twice = read_paired([write(tmp_path / "c.jsonl", *asked, *asked[:7])])
    assert calibrate(gate, twice, Budget(0.5)).provenance["repeated"] == 7


def with_a_corpus():
    return load_gate("constant:never", corpus=CorpusProfile.from_description("Handbook of the Acme X200."))


@pytest.mark.parametrize(
    ("make", "questions", "error", "why"),
    [
        # Regression: the gate that came out could be saved, but not loaded.
        pytest.param(with_a_corpus, 60, ConfigurationError, "corpus", marks=pytest.mark.model),
        # Regression: its failures counted as P(known) = 0, and a gate came out.
        (
            lambda: load_gate("prompt", proxy=Failing()),
            60,
            EvidenceError,
            "every question",
        ),
        (lambda: load_gate("constant:always"), 30, DataFormatError, r"30 questions are too few.*at least 39"),
    ],
    ids=["corpus", "fails", "too few"],
)
def test_what_is_not_calibrated(tmp_path, make, questions, error, why):
    files = read_paired([write(tmp_path / "d.jsonl", *numbered(questions))])
    with pytest.raises(error, match=why):
        calibrate(make(), files, Budget(0.5))
