"""A cascade's band: what cannot be chosen first, then scores whose right answer is known, then the command line."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations import load_gate
from rgate_integrations.calibration import BandOptions
from rgate_integrations.calibration.bands import cascaded, choose_band
from rgate_integrations.cli.main import app
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.evaluation import read_paired
from rgate_integrations.evaluation.metrics import paired_interval
from tests.scripted_proxy import ScriptedProxy

N = 4_000


def world(seed=0, n=N):
    """Half is known; retrieval rights 40 % of the unknown and wrongs 10 % of the known."""
    rng = np.random.default_rng(seed)
    closed, u = rng.random(n) < 0.5, rng.random(n)
    return closed, np.where(closed, u > 0.1, u < 0.4), rng


def certain(closed, rng):
    return np.where(closed, rng.uniform(0.6, 1, len(closed)), rng.uniform(0, 0.4, len(closed)))


def test_too_few_questions():
    some = np.full(39, 0.5)
    with pytest.raises(DataFormatError, match="39 questions are 20 to choose a band on and 19") as error:
        choose_band(some, some, 0.5, some > 0, some > 0)
    assert "At least 20" in error.value.hint


@pytest.mark.parametrize(
    "bad",
    [{"loss": -0.1}, {"confidence": 1.0}, {"share": 0.0}, {"threshold": -1.0}, {"more_retrieval": -0.1}],
)
def test_options_out_of_range(bad):
    closed, rag, rng = world(n=100)
    p = rng.random(100)
    with pytest.raises(ConfigurationError, match="out of range"):
        choose_band(p, p, bad.pop("threshold", 0.5), closed, rag, BandOptions(**bad))


@pytest.mark.parametrize("bad", [np.full(100, np.nan), np.full(100, 1.1), np.full(99, 0.5)])
def test_scores_that_are_none(bad):
    closed, rag, rng = world(n=100)
    for pair in ((bad, rng.random(100)), (rng.random(100), bad)):
        with pytest.raises(DataFormatError, match=r"do not match|not a number"):
            choose_band(*pair, 0.5, closed, rag)


def test_nothing_needs_a_draft_where_the_first_gate_is_perfect():
    closed, rag, rng = world()
    first = certain(closed, rng)
    band = choose_band(first, certain(closed, rng), 0.5, closed, rag)
    assert (band.early_exit_rate, band.difference, band.retrieval_difference) == (1.0, 0.0, 0.0)
    assert band.n == band.chosen_on == N / 2
    assert band.kept
    assert "at most 0.5% in-accuracy" in band.promise
    better = choose_band(first, rng.random(N), 0.5, closed, rag, BandOptions(more_retrieval=1.0))
    assert better.early_exit_rate == 1.0
    assert better.interval[0] > 0


def test_where_the_first_gate_is_noise_almost_all_need_a_draft():
    closed, rag, rng = world()
    band = choose_band(rng.random(N), certain(closed, rng), 0.5, closed, rag)
    assert band.early_exit_rate < 0.12
    assert -0.025 < band.difference < 0.005
    assert band.interval[0] <= band.difference <= band.interval[1]


def test_only_the_side_that_is_clear_needs_no_draft():
    closed, rag, rng = world()
    first = np.where(closed & (rng.random(N) < 0.6), 0.9, rng.uniform(0.1, 0.6, N))
    band = choose_band(first, certain(closed, rng), 0.5, closed, rag)
    assert 0.5 <= band.high <= 0.9
    assert band.early_exit_rate == pytest.approx(0.3, abs=0.1)
    assert band.difference > -0.02


def test_accuracy_that_is_kept_by_retrieving_more_is_not_wanted():
    closed, _, rng = world()
    always_right, first = np.ones(N, bool), rng.random(N)
    scores = first, certain(closed, rng), 0.5, closed, always_right
    bounded, free = choose_band(*scores), choose_band(*scores, BandOptions(more_retrieval=1.0))
    assert bounded.retrieval_difference < 0.03
    assert bounded.early_exit_rate < 0.1
    assert free.early_exit_rate > 0.45
    assert free.retrieval_difference > 0.2
    assert free.difference > -0.02


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, 1.0])
def test_a_first_gate_that_always_says_the_same(value):
    closed, rag, rng = world()
    band = choose_band(np.full(N, value), certain(closed, rng), 0.5, closed, rag)
    assert (
        band.early_exit_rate == 0.0
    )  # the first gate's word for all would retrieve for all, or lose many points
    assert band.difference == 0.0


@pytest.mark.parametrize("right", [True, False])
def test_questions_that_are_all_right_or_all_wrong(right):
    _, _, rng = world()
    same = np.full(N, right)
    band = choose_band(rng.random(N), rng.random(N), 0.5, same, same)
    assert band.difference == 0.0
    assert band.interval == (0.0, 0.0)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.97, 1.0, 1.01, 1.5])
def test_the_threshold_lies_in_the_band(threshold):
    for seed in range(5):
        closed, rag, rng = world(seed, 200)
        first, second = rng.random(200).round(1), rng.random(200).round(1)  # many ties
        band = choose_band(first, second, threshold, closed, rag, BandOptions(seed=seed))
        assert band.low <= threshold <= band.high
        load_gate("cascade", low=band.low, high=band.high, threshold=threshold)
        assert choose_band(first, second, threshold, closed, rag, BandOptions(seed=seed)) == band
    assert choose_band(first, second, threshold, closed, rag, BandOptions(seed=seed + 1)) != band


def test_the_numbers_are_of_the_held_out_half():
    closed, rag, rng = world(n=300)
    first, second = rng.random(300), certain(closed, rng)
    band = choose_band(first, second, 0.4, closed, rag, BandOptions(loss=0.05, seed=3))
    out = np.random.default_rng(3).permutation(300)[150:]
    p = cascaded(first, second, band.low, band.high)[out]
    answered = np.where(p < 0.4, rag[out], closed[out])
    before = np.where(second[out] < 0.4, rag[out], closed[out])
    assert band.in_accuracy == answered.mean()
    assert band.difference == pytest.approx(answered.mean() - before.mean())
    assert band.retrieval_rate == (p < 0.4).mean()
    assert band.early_exit_rate == ((first[out] < band.low) | (first[out] >= band.high)).mean()


def test_promises_are_broken_as_seldom_as_they_say():
    rng = np.random.default_rng(5)

    def draw(n):
        closed, u = rng.random(n) < 0.5, rng.random(n)
        rag = np.where(closed, u > 0.05, u < 0.2)
        first = np.clip(np.where(closed, 0.65, 0.35) + rng.normal(0, 0.2, n), 0, 1)
        return first, np.clip(np.where(closed, 0.7, 0.3) + rng.normal(0, 0.2, n), 0, 1), closed, rag

    first, second, closed, rag = draw(200_000)
    broken = made = 0
    for seed in range(300):
        a, b, known, found = draw(1_000)
        band = choose_band(a, b, 0.5, known, found, BandOptions(loss=0.02, confidence=0.9, seed=seed))
        p = cascaded(first, second, band.low, band.high)
        lost = np.where(second < 0.5, rag, closed).mean() - np.where(p < 0.5, rag, closed).mean()
        made += band.kept
        broken += band.kept and lost > 0.02
    assert made > 15
    assert broken / 300 <= 0.1


def test_paired_interval():
    values = np.repeat([-1.0, 0.0, 1.0], [10, 70, 20])
    low, high = paired_interval(values)
    half = 1.96 * values.std() / 10
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.02)
    assert paired_interval(values) == (low, high)
    assert paired_interval(np.zeros(5)) == (0.0, 0.0)


# --- gates and the command line ----------------------------------------------------------------------------


def paired(path, questions, known):
    rng = np.random.default_rng(0)
    lines = (
        {"question": q, "closed_book_correct": bool(k), "rag_correct": bool(rng.random() < 0.6)}
        for q, k in zip(questions, known, strict=True)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_cascade_is_named_by_its_two_gates():
    gate = load_gate("cascade:default-question,default", low=0.3)
    assert (gate.first.artifact, gate.second.artifact, gate.second.early_exit) == (
        "default-question",
        "default",
        False,
    )
    assert (gate.low, gate.threshold, gate.proxy) == (0.3, gate.second.threshold, "smollm2-135m-instruct")
    assert load_gate("cascade:ik,constant:never", threshold=0.4).threshold == 0.4
    for bad in ("ik", "ik,", ",ik"):
        with pytest.raises(ConfigurationError, match="two gates"):
            load_gate(f"cascade:{bad}")


def test_calibrating_a_band_from_the_command_line(tmp_path, monkeypatch):
    proxy = ScriptedProxy()
    monkeypatch.setattr("rgate_integrations.proxy.local.shared_proxy", lambda *a, **k: proxy)
    asked = [f"question {i}?" for i in range(200)]
    first, second = (
        np.array([d.p_known for d in load_gate("ik", tokens=t, proxy=proxy).decide_batch(asked)])
        for t in (0, 32)
    )
    known = np.random.default_rng(1).random(200) < second
    data, out = paired(tmp_path / "d.jsonl", asked, known), tmp_path / "banded"
    options = ["calibrate", "--data", str(data), "--out", str(out), "--gate"]
    done = CliRunner().invoke(app, [*options, "cascade", "--band", "0.05"])
    assert done.exit_code == 0, done.output
    assert "need no draft" in done.output.replace("\n", " ")
    gate = load_gate(str(out), proxy=proxy)
    facts = json.loads((out / "gate.json").read_text())["provenance"]
    assert facts["policy"] == {"name": "band", "loss": 0.05, "more_retrieval": 0.0, "confidence": 0.95}
    assert (gate.low, gate.high, facts["n"], len(facts["scores"])) == (facts["low"], facts["high"], 100, 101)
    rag = np.array([r.rag_correct for f in read_paired([data]) for r in f.records])
    band = choose_band(first, second, 0.5, known, rag, BandOptions(loss=0.05))
    assert (gate.low, gate.high, gate.threshold) == (band.low, band.high, 0.5)
    found = [d.p_known for d in gate.decide_batch(asked)]
    assert found == pytest.approx(cascaded(first, second, band.low, band.high))
    for gate_name, more in (("ik", ["--band", "0.01"]), ("cascade", ["--band", "0.01", "--budget", "0.5"])):
        failed = CliRunner().invoke(app, [*options, gate_name, *more])
        assert isinstance(failed.exception, ConfigurationError)


@pytest.mark.model
def test_a_cascade_of_the_shipped_probes(smollm2):
    first, second = load_gate("default-question"), load_gate("default", early_exit=False)
    asked = [f"What is the capital of {c}?" for c in ("France", "Bhutan", "Brunei")]
    alone, both = ([d.p_known for d in g.decide_batch(asked)] for g in (first, second))
    _, middle, high = sorted(alone)
    gate = load_gate("cascade", first=first, second=second, low=middle, high=high, proxy=smollm2)
    decisions = gate.decide_batch(asked)
    assert [d.error for d in decisions] == [None] * 3
    assert [d.draft is not None for d in decisions] == [p == middle for p in alone]
    expected = [b if a == middle else a for a, b in zip(alone, both, strict=True)]
    assert [d.p_known for d in decisions] == pytest.approx(expected, abs=1e-3)
    assert all(a != b for a, b in zip(alone, both, strict=True))  # the second does not exit early
