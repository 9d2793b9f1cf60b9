"""Examples and probes: bad files first, then numbers, then the command line."""

import re
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rgate_integrations import load_gate
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import answer_prompt
from rgate_integrations.tuning.evaluation import fold_metrics
from rgate_integrations.tuning.questions import Question, read_examples
from rgate_integrations.tuning.training import (
    TrainingOptions,
    cross_validate,
    drafts_for,
    fit_probe,
)
from tests.commands import printed
from tests.tuning_parts import Model, write


def line(question, known, **more):
    return {"question": question, "closed_book_correct": known, **more}


GOOD = '{"question": "who?", "closed_book_correct": true}\n'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "bad.jsonl has no questions"),
        (GOOD + "{", "line 2: not JSON"),
        (GOOD + "[1]", "line 2: not a JSON object"),
        (GOOD + '{"question": "x"}', "line 2: closed_book_correct must be .*, but is missing"),
        (GOOD + '{"question": 3, "closed_book_correct": true}', "line 2: question is empty or not a string"),
        (GOOD + '{"question": "x", "closed_book_correct": 2}', "line 2: closed_book_correct must be"),
    ],
)
def test_bad_files_and_lines_are_named(tmp_path, content, why):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataFormatError, match=why):
        read_examples([tmp_path / "bad.jsonl"])


def test_a_repeated_question_counts_once(tmp_path):
    first = write(tmp_path / "a.jsonl", line("Who is it?", True), line("what?", False, dataset="d"))
    second = write(tmp_path / "b.jsonl", line("who is  it", True), line("where?", True))
    files = read_examples([first, second])
    found = [(e.question.text, e.known, e.question.dataset) for file in files for e in file.examples]
    assert found == [("Who is it?", True, "a"), ("what?", False, "d"), ("where?", True, "b")]
    with pytest.raises(DataFormatError, match=r"a\.jsonl has no questions, or earlier files have them all\."):
        read_examples([first, first])


ONE_OF_TWO = {"closed_book_text": "Paris.", "gold_answers": ["Paris", "Rome"]}
TWO_OF_THREE = {"closed_book_text": "Paris and Rome.", "gold_answers": ["Paris", "Rome", "Oslo"]}


@pytest.mark.parametrize(
    ("label", "fields", "target"),
    [
        ("certainty", {"certainty": 0.25}, 0.25),
        ("match_ratio", ONE_OF_TWO, 0.0),  # one half is not more than one half
        ("match_ratio", TWO_OF_THREE, 1.0),
    ],
)
def test_labels_other_than_the_default(tmp_path, label, fields, target):
    path = write(tmp_path / "labels.jsonl", {"question": "a?", **fields}, {"question": "b?"})
    with pytest.raises(DataFormatError, match=r"line 2: (certainty must be|gold_answers is missing)"):
        read_examples([path], label)
    (file,) = read_examples([write(path, {"question": "a?", **fields})], label)
    assert (file.examples[0].target, file.examples[0].known) == (target, target > 0.5)


# --- probes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separable():
    """States of three layers, one number of which says what is known; and the labels."""
    rng = np.random.default_rng(0)
    known = rng.random(200) < 0.4
    states = rng.normal(size=(200, 3, 24)).astype(np.float32)
    states[:, :, 5] += known[:, None] * 1.5
    return states, known


def test_the_folded_probe_equals_its_parts(separable):
    states, known = separable
    weight, bias = fit_probe(states, known, 0, [""] * 200)
    logits = np.zeros(200)
    for layer in range(3):
        logistic = LogisticRegression(C=0.005, max_iter=2_000)
        model = make_pipeline(StandardScaler(), PCA(24, svd_solver="full"), logistic)
        model.fit(states[:, layer].astype(np.float64), known)
        logits += model.decision_function(states[:, layer]) / 3
    np.testing.assert_allclose((states * weight).sum(axis=(1, 2)) + bias, logits, atol=1e-4)


def test_probes_find_what_is_there_and_nothing_else(separable):
    states, known = separable
    for labels, least, most in ((known, 0.8, 1.0), (np.roll(known, 7), 0.35, 0.65)):
        assert least < roc_auc_score(labels, cross_validate(states, labels, 5, 0, [""] * 200)) < most


def test_a_probe_learns_what_differs_within_a_set():
    rng = np.random.default_rng(0)
    sets = np.repeat(["easy", "hard"], 200)
    known = rng.random(400) < np.where(sets == "easy", 0.9, 0.1)
    states = rng.normal(size=(400, 1, 6)).astype(np.float32)
    states[:, 0, 0] += 4 * (sets == "easy")
    states[:, 0, 1] += 0.8 * known

    areas = []
    for given in (sets.tolist(), [""] * 400):
        weight, _ = fit_probe(states, known, 0, given)
        scores = (states * weight).sum(axis=(1, 2))
        areas.append(fold_metrics(scores, known, sets.tolist())["auc_mean"])
    assert areas[0] > areas[1] + 0.02


def test_provenance_lists_only_what_is_installed(monkeypatch):
    """Regression: a probe of the encoder, which needs no transformers, could not be made without it."""
    version = Mock(side_effect=["2.9", PackageNotFoundError, PackageNotFoundError, "1.7", "2.3"])
    monkeypatch.setattr("rgate_integrations.tuning.training.version", version)
    versions = TrainingOptions(draft="none").provenance([], "in words", {})["versions"]
    assert versions.keys() == {"python", "torch", "scikit-learn", "numpy"}


@pytest.mark.model
@pytest.mark.usefixtures("own_cache")
def test_training_from_the_command_line(tiny, tmp_path):
    lines = [line(f"What is {i} plus {i}?", i % 2 == 0, closed_book_text=f"{2 * i}.") for i in range(12)]
    data = write(tmp_path / "sums.jsonl", *lines)
    training = ["train", "--data", data, "--folds", "2", "--tokens", "4", "--proxy", tiny]
    for draft, given in (("proxy", None), ("recorded", "4."), ("none", None)):
        assert "mean of the sets" in printed(*training, "--draft", draft, "--out", tmp_path / draft)
        assert load_gate(str(tmp_path / draft)).decide("What is 2 plus 2?", draft=given).error is None
    (drafts,) = (tmp_path / "drafts").glob("*.jsonl")
    drafts.write_text(drafts.read_text()[:-20])  # a kill in the middle of a line
    printed(*training, "--out", tmp_path / "again")
    first, second = (tmp_path / name / "weights.safetensors" for name in ("proxy", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.usefixtures("own_cache")
def test_kept_drafts_are_those_of_the_very_same_weights(tmp_path):
    for words, weights, drafted in (("One.", "a", "One."), ("Two.", "a", "One."), ("Two.", "b", "Two.")):
        proxy = Model(lambda question, seed, words=words: words, weights=weights)
        (draft,) = drafts_for(proxy, [Question("who?")], TrainingOptions())
        assert draft.text == drafted
        assert bool(proxy.asked) == (words == drafted), "what is kept is not asked again"


@pytest.mark.model
@pytest.mark.usefixtures("own_cache")
def test_a_gate_for_the_model_itself(tiny, tmp_path):
    """Its own answers are labelled, and it judges under the prompt that they were written for."""
    asked = [{"question": f"What is {i} plus {i}?"} for i in range(12)]
    prompt = answer_prompt("Be brief.")
    answers = shared_proxy(tiny).generate(prompt, asked, tokens=64)
    gold = ["nowhere" if i % 2 == 0 else re.findall(r"\w+", said.text)[0] for i, said in enumerate(answers)]
    lines = [line | {"gold_answers": right} for line, right in zip(asked, gold, strict=True)]
    data = write(tmp_path / "own.jsonl", *lines)
    options = ["--self-label", "--system", "Be brief.", "--proxy", tiny, "--folds", "2", "--tokens", "4"]
    assert "12 questions, 50% known" in printed("train", "--data", data, "--out", tmp_path / "gate", *options)
    trained = read_gate(tmp_path / "gate")
    assert (trained.llm, trained.base_model) == (tiny, tiny)
    gate = load_gate(str(tmp_path / "gate"), on_error="raise")
    assert gate.decide("What is 2 plus 2?").error is None
    assert gate.gate.specs[-1].prompt == prompt
