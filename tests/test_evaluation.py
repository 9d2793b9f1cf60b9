"""Paired data, metrics, break-even and calibration: bad files first, then numbers worked by hand, then coverage."""

import json
import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from rgate_integrations import load_gate
from rgate_integrations.cli.main import app
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.probability import ProbabilityMap
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning import Budget, MaxLoss, MinCost, calibrate, compare, evaluate, read_paired
from rgate_integrations.tuning.calibration import fit_map
from rgate_integrations.tuning.evaluation import (
    JudgedQuestions,
    area_between,
    auc,
    break_even,
    expected_calibration_error,
    measure,
    paired_interval,
    retrieval_curve,
)
from rgate_integrations.tuning.paired import Paired
from rgate_integrations.tuning.policies import ALWAYS, betting_p_value, upper_bound
from tests.scripted_proxy import ScriptedProxy

T, F = True, False
GOOD = {"question": "a?", "closed_book_correct": True, "rag_correct": False}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- paired data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"question": 3}, "line 2: no question"),
        ({"question": "b?", "rag_correct": True}, "line 2: no closed_book_correct"),
        ({"question": "b?", "closed_book_correct": True}, "line 2: no rag_correct"),
        ({"question": "b?", "closed_book_correct": 1}, "line 2: closed_book_correct is 1"),
        ({**GOOD, "id": "1", "question": "c?"}, "line 2: the id '1' occurs twice"),
    ],
)
def test_paired_files_that_lack_something_are_named(tmp_path, bad, why):
    path = write(tmp_path / "bad.jsonl", {**GOOD, "id": "1"}, bad)
    with pytest.raises(DataFormatError, match=why):
        read_paired([path])
    path.write_text("\n")
    with pytest.raises(DataFormatError, match="no questions"):
        read_paired([path])


def test_correctness_is_computed_where_it_is_not_given(tmp_path):
    answers = {"closed_book_answer": "It was beatles!", "rag_answer": "Stones"}
    line = {"question": "a?", "gold_answers": ["The Beatles"], **answers}
    path = write(tmp_path / "set.jsonl", line, {**GOOD, "id": 0})
    found, zero = read_paired([path])[0].records
    assert (found.closed_book_correct, found.rag_correct) == (True, False)
    assert (found.dataset, found.id, zero.id) == ("set", "1", "0")
    assert not read_paired([path], correctness="exact_match")[0].records[0].closed_book_correct
    assert is_correct("new york city", ["york city hall"], "token_f1")
    assert not is_correct("anything", ["the", "!"])


# --- metrics by hand ---------------------------------------------------------------------------------------


def judged(p, retrieve, closed, rag):
    arrays = (np.array(p, float), np.array(retrieve), np.array(closed), np.array(rag))
    return JudgedQuestions(*arrays, tuple(load_gate("constant:always").decide_batch(["q?"] * len(p))))


def test_auc_against_hand_worked_values_and_scikit_learn():
    assert auc([0.1, 0.4, 0.35, 0.8], [F, F, T, T]) == 0.75
    assert auc([1, 1, 1], [T, F, T]) == 0.5
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.4
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    for scores, labels in (([1, 2], [T, T]), ([], []), ([1], [T, F]), ([math.nan, 1], [T, F])):
        with pytest.raises(DataFormatError):
            auc(scores, labels)


def test_every_number_by_hand():
    found = measure(judged([0.9, 0.8, 0.3, 0.1], [F, F, T, T], [T, F, F, F], [F, T, T, F]), samples=50)
    assert found["auc"] == 1.0
    assert found["accuracy"] == 0.75  # the second is skipped and unknown
    assert (found["never"], found["always"], found["oracle"]) == (0.25, 0.5, 0.75)
    assert (found["retrieval_rate"], found["containment_accuracy"], found["random_same_rate"]) == (
        0.5,
        0.5,
        0.375,
    )
    assert (found["helped"], found["harmed"]) == (1, 1)
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.09 + 0.01) / 4)
    # hurts: the first (0.9); helps: the second and third (0.8, 0.3): 1 - p ranks both above
    assert found["auc_utility"] == 1.0
    assert found["curve"][0] == [0.0, 0.25]
    assert found["curve"][-1] == [1.0, 0.5]
    assert found["curve"][10] == [0.5, 0.5]


def test_ties_are_retrieved_in_random_order():
    closed, rag = np.array([T, F, F, F]), np.array([F, T, T, F])
    curve = retrieval_curve(np.full(4, 0.5), closed, rag)
    np.testing.assert_allclose(curve, [0.25, 0.3125, 0.375, 0.4375, 0.5])
    assert area_between(np.full(4, 0.5), closed, rag) == pytest.approx(0)
    assert area_between(np.array([0.9, 0.1, 0.1, 0.5]), closed, rag) == pytest.approx(1)
    assert math.isnan(area_between(np.full(2, 0.5), np.array([T, F]), np.array([T, F])))


def test_calibration_error_by_hand():
    p, known = np.array([0.95, 0.95, 0.05, 0.05]), np.array([T, F, F, F])
    assert expected_calibration_error(p, known) == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([T, F])) == 0


def test_comparison_is_paired():
    closed, rag = [T] * 10 + [F] * 10, [T] * 10 + [T] * 10
    first = judged([0.9] * 10 + [0.1] * 10, [F] * 10 + [T] * 10, closed, rag)
    second = judged([0.1] * 10 + [0.9] * 10, [T] * 10 + [F] * 10, closed, rag)
    found = compare(first, second, samples=50)
    assert (found["only_first"], found["only_second"], found["auc_difference"]) == (10, 0, 1.0)
    assert found["p_value"] == pytest.approx(2 / 2**10, abs=1e-6)
    assert compare(first, first, samples=20)["p_value"] == 1.0


def test_paired_interval():
    values = np.repeat([-1.0, 0.0, 1.0], [10, 70, 20])
    low, high = paired_interval(values)
    half = 1.96 * values.std() / 10
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.02)
    assert paired_interval(values) == (low, high)
    assert paired_interval(np.zeros(5)) == (0.0, 0.0)


def test_break_even_of_the_ik_paper():
    # Table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with retrieval
    found = break_even(0.5, gate=3.7 + 8.3, direct=18.2, rag=78.4)
    assert found["break_even"] == pytest.approx(0.80, abs=5e-3)
    found = break_even(0.5, gate=3.7, direct=18.2, rag=78.4)
    assert found["break_even"] == pytest.approx(0.94, abs=5e-3)
    slow = break_even(0.5, gate=500, direct=10, rag=20, search=5)
    assert slow == {"always_ms": 25, "gated_ms": 517.5, "break_even": 0}
    with pytest.raises(ConfigurationError):
        break_even(0.5, gate=-1, direct=1, rag=1)


def test_recorded_drafts_reach_the_gate(tmp_path):
    questions = [
        Paired("1", "who?", "s", True, False, "It was me."),
        Paired("2", "what?", "s", False, True, "x"),
    ]
    result, found = evaluate(load_gate("ik", proxy=ScriptedProxy()), questions, draft="recorded", samples=10)
    assert [d.draft.text for d in found.decisions] == ["It was me.", "x"]
    assert result["sets"]["s"]["n"] == result["pooled"]["n"] == 2
    proxy = ScriptedProxy()
    sure = [Paired("1", "who?", "s", True, False, "It was me.", (-0.1, -0.2, -0.1))]
    _, found = evaluate(load_gate("perplexity", proxy=proxy), sure, draft="recorded", samples=10)
    assert found.p[0] == pytest.approx(math.exp(-0.4 / 3))
    assert proxy.calls == []  # nothing is read again
    with pytest.raises(DataFormatError, match="closed_book_text"):
        evaluate(load_gate("constant:always"), [Paired("1", "who?", "s", True, True)], draft="recorded")


# --- calibration -------------------------------------------------------------------------------------------


def test_exact_binomial_bound():
    assert upper_bound(0, 10, 0.95) == pytest.approx(1 - 0.05 ** (1 / 10))
    assert upper_bound(9, 10, 0.95) == pytest.approx(0.95 ** (1 / 10))
    assert upper_bound(5, 5, 0.95) == 1.0


def test_maps_keep_the_order():
    rng = np.random.default_rng(0)
    p = rng.random(400)
    known = rng.random(400) < p**3
    for method in ("platt", "temperature", "isotonic"):
        fitted = fit_map(p, known, method)
        mapped = np.array([fitted(v) for v in np.linspace(0, 1, 50)])
        assert (np.diff(mapped) >= 0).all()
        assert mapped.min() >= 0
        assert mapped.max() <= 1
        values = np.array([fitted(v) for v in p])
        assert expected_calibration_error(values, known) < expected_calibration_error(p, known)
        assert ProbabilityMap.model_validate_json(fitted.model_dump_json()) == fitted
    assert fit_map(p, np.ones(400, bool)).method == "none"


def world(rng, n):
    """Questions whose P(known) is informative; retrieval helps on 20 % of the unknown and hurts on 6 %."""
    p = rng.beta(1.2, 1.5, n)
    closed = rng.random(n) < p
    u = rng.random(n)
    rag = np.where(closed, u > 0.06, u < 0.2)
    return p, closed, rag


def test_guarantees_hold_as_often_as_they_say():
    rng = np.random.default_rng(1)
    p, closed, rag = world(rng, 400_000)
    order = np.argsort(p)
    everybody, gain = p[order], (rag.astype(float) - closed)[order]
    lost_from = np.append(np.cumsum(gain[::-1])[::-1], 0.0) / len(p)  # by skipping from this position on
    repetitions, confidence = 500, 0.9
    budget, loss = Budget(0.4, confidence), MaxLoss(0.02, confidence)
    broken = {"budget": 0, "loss": 0}
    useful = {"budget": 0, "loss": 0}
    for seed in range(repetitions):
        sample = world(rng, 400)
        threshold = budget.choose(*sample, seed).threshold
        broken["budget"] += np.searchsorted(everybody, threshold) / len(p) > 0.4
        useful["budget"] += threshold > 0
        threshold = loss.choose(*sample, seed).threshold
        broken["loss"] += lost_from[np.searchsorted(everybody, threshold)] > 0.02
        useful["loss"] += threshold < 1
    allowed = (1 - confidence) + 2 * math.sqrt(confidence * (1 - confidence) / repetitions)
    assert broken["budget"] / repetitions <= allowed
    assert broken["loss"] / repetitions <= allowed
    assert useful["budget"] == repetitions
    assert useful["loss"] > repetitions / 2


def test_what_cannot_be_guaranteed_is_not():
    p, closed, rag = np.full(30, 0.9), np.zeros(30, bool), np.ones(30, bool)
    chosen = MaxLoss(0.01).choose(p, closed, rag, 0)
    assert (chosen.threshold, chosen.guaranteed) == (ALWAYS, False)
    assert "n = 30" in chosen.guarantee
    assert (
        not Budget(0.001).choose(p, closed, rag, 0).guaranteed
    )  # none of 30 is no proof of one in a thousand
    assert Budget(0.1).choose(p, closed, rag, 0).guaranteed
    assert Budget(0.0).choose(np.full(30, 0.01), closed, rag, 0).threshold < 0.01
    assert betting_p_value(np.zeros(5), 0.01, 0.05) > 0.05
    assert betting_p_value(np.ones(500), 0.01, 0.05) == 1.0
    for bad in (lambda: Budget(1.5), lambda: MaxLoss(0), lambda: MaxLoss(0.1, 1.0), lambda: MinCost(-1)):
        with pytest.raises(ConfigurationError):
            bad()


def test_the_least_cost():
    p, closed, rag = np.array([0.9, 0.8, 0.2, 0.1]), np.array([T, T, F, F]), np.array([T, T, T, T])
    priced = MinCost(retrieval=10, wrong=100).choose(p, closed, rag, 0)
    assert (p < priced.threshold).tolist() == [F, F, T, T]
    assert priced.facts["cost"] == 5
    assert MinCost(retrieval=1000, wrong=100).choose(p, closed, rag, 0).threshold == 0


def test_calibrating_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda *a, **k: ScriptedProxy())
    rng = np.random.default_rng(0)
    asked = [f"question {i}?" for i in range(200)]
    scores = [d.p_known for d in load_gate("ik", proxy=ScriptedProxy()).decide_batch(asked)]
    data = write(
        tmp_path / "d.jsonl",
        *(
            {
                "id": str(i),
                "question": asked[i],
                "closed_book_correct": bool(rng.random() < scores[i]),
                "rag_correct": bool(rng.random() < 0.6),
            }
            for i in range(200)
        ),
    )
    out = tmp_path / "calibrated"
    options = ["calibrate", "--gate", "ik", "--data", str(data), "--out", str(out)]
    done = CliRunner().invoke(app, [*options, "--budget", "0.5"])
    assert done.exit_code == 0, done.output
    assert "at most 50.0%" in done.output
    gate = load_gate(str(out), proxy=ScriptedProxy())
    facts = json.loads((out / "gate.json").read_text())["provenance"]
    assert facts["policy"] == {"name": "budget", "rate": 0.5, "confidence": 0.95}
    assert facts["retrieval_rate"] < 0.5
    decision = gate.decide("question 3?")
    assert decision.threshold == gate.threshold
    assert gate.decide("question 3?", threshold=0.0).retrieve is False
    # the map is applied to what the inner gate says
    inner = load_gate("ik", proxy=ScriptedProxy()).decide("question 3?").p_known
    assert decision.p_known == pytest.approx(gate.gate.probability(inner))
    result = tmp_path / "r.json"
    options = ["evaluate", "--gate", str(out), "--versus", "constant:never", "--data", str(data)]
    done = CliRunner().invoke(app, [*options, "--latency", "direct=20,rag=80", "--out", str(result)])
    assert done.exit_code == 0, done.output
    found = json.loads(result.read_text())
    assert found["pooled"]["n"] == 200
    assert {"gate", "threshold", "sets", "pooled", "versions", "seconds", "break_even", "versus"} <= set(
        found
    )
    assert 0.3 < found["pooled"]["retrieval_rate"] < 0.65
    for bad in ((), ("--budget", "0.5", "--max-loss", "0.1"), ("--cost", "draft=3")):
        failed = CliRunner().invoke(app, ["calibrate", "--data", str(data), "--out", str(out), *bad])
        assert isinstance(failed.exception, ConfigurationError)


def test_too_few_questions_to_calibrate(tmp_path):
    data = write(
        tmp_path / "d.jsonl",
        *({"question": f"{i}?", "closed_book_correct": True, "rag_correct": True} for i in range(30)),
    )
    with pytest.raises(DataFormatError, match="15 of 30"):
        calibrate(load_gate("constant:always"), read_paired([data]), Budget(0.5))
