"""Tuning: the gates that come out, and how they are saved and loaded."""

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations import Gate, load_gate
from rgate_integrations.cli.main import app
from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    EvidenceError,
    ModelLoadError,
)
from rgate_integrations.gates import Score
from rgate_integrations.gates.tuned import TunedGate
from rgate_integrations.tuning import Budget, MaxLoss, MinCost
from rgate_integrations.tuning.tune import TuneOptions, tune
from tests.tuning_parts import (
    Direct,
    Reader,
    questions,
    retrieve,
    shipped,
    tuned,
)


@pytest.fixture
def prior(tmp_path):
    return shipped(tmp_path)


def test_a_gate_comes_out_that_knows_what_the_llm_knows(tmp_path, prior):
    found = tuned(tmp_path, prior)
    assert found.question.auc > 0.95
    assert found.question.auc_before == 0.5
    assert found.question.chosen.kept
    assert found.failed == 0
    gate = load_gate(str(found.folder), proxy=Reader(), on_error="raise")
    assert gate.threshold == found.question.chosen.threshold
    even, odd = gate.decide_batch(["what is number 102?", "what is number 103?"])
    assert even.p_known > 0.5 > odd.p_known
    assert even.gate == "tuned"
    assert sorted(p.name for p in found.folder.iterdir()) == [
        "README.md", "answer-first", "gate.json", "prior", "report.html", "weights.safetensors",
    ]  # fmt: skip


def test_the_answer_first_gate_reads_the_log_probabilities_of_the_begun_answer(tmp_path, prior):
    found = tuned(tmp_path, prior)
    gate = load_gate(f"{found.folder}/answer-first", proxy=Reader(), on_error="raise")
    sure = Draft(text="x", tokens=("a", "b"), logprobs=(-0.1, -0.2))
    unsure = Draft(text="x", tokens=("a", "b"), logprobs=(-2.0, -3.0))
    question = "what is number 102?"
    first, second = gate.decide_batch([question, question], drafts=[sure, unsure])
    assert first.p_known > second.p_known
    with pytest.raises(EvidenceError, match="no log-probabilities"):
        gate.decide_batch([question], drafts=[Draft(text="x")])
    lenient = load_gate(f"{found.folder}/answer-first", proxy=Reader())
    assert lenient.decide_batch([question], drafts=[Draft(text="x")])[0].retrieve


def test_without_log_probabilities_there_is_no_answer_first_gate(tmp_path, prior):
    found = tuned(tmp_path, prior, direct=lambda q: Direct()(q).text)
    assert found.answer_first is None
    assert not (found.folder / "answer-first").exists()


def test_the_saved_gate_scores_as_the_fit_did(tmp_path, prior):
    found = tuned(tmp_path, prior)
    artifact = found.question.artifact
    gate = load_gate(str(found.folder), proxy=Reader())
    (decision,) = gate.decide_batch(["what is number 8?"])
    (state,) = Reader().hidden(None, [{"question": "what is number 8?"}], None, artifact.layers)
    logit = float((artifact.weight * state.states).sum()) + artifact.bias  # the prior's logit is 0
    assert decision.p_known == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


def test_what_the_shipped_gate_says_of_the_kind_is_passed_on(tmp_path, prior, monkeypatch):
    class Private(Gate):
        """Everything is about the user's own documents."""

        specs: ClassVar = ()

        def score(self, evidence):
            return Score(0.5, "private", signals={"private": 0.9})

    folder = str(tuned(tmp_path, prior).folder)
    monkeypatch.setattr("rgate_integrations.gates.registry.make_gate", lambda name, **options: Private())
    gate = load_gate(TunedGate(artifact=folder), proxy=Reader(), on_error="raise")
    assert gate.decide("what is number 8?").signals == {"private": 0.9}


def test_the_shipped_gate_is_kept_in_the_folder(tmp_path, prior):
    found = tuned(tmp_path, prior)
    for file in (tmp_path / "shipped").iterdir():
        file.unlink()
    assert load_gate(str(found.folder), proxy=Reader(), on_error="raise").decide("what is number 4?")


def test_an_existing_folder_is_left_alone_before_anything_is_asked(tmp_path, prior):
    direct = Direct()
    (tmp_path / "my-gate").mkdir()
    with pytest.raises(ConfigurationError, match="exists"):
        tuned(tmp_path, prior, direct=direct)
    (tmp_path / "my-gate" / "gate.json").write_text(json.dumps({"format": 1, "method": "calibrated"}))
    with pytest.raises(ConfigurationError, match="no tuned gate"):
        tuned(tmp_path, prior, direct=direct, update=True)
    assert direct.asked == []


def test_folders_that_are_missing_are_made(tmp_path, prior):
    assert load_gate(str(tuned(tmp_path / "a" / "b", prior).folder)).gate.name == "tuned"


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_that_cannot_be_named(out, prior):
    with pytest.raises(ConfigurationError):
        tune(questions(), direct=Direct(), retrieve=retrieve, out=out, options=TuneOptions(prior=prior))


def test_options_out_of_range_are_refused():
    for name in ("concurrency", "tokens", "folds", "sample"):
        with pytest.raises(ConfigurationError, match=name):
            TuneOptions(**{name: 0})


def test_too_small_for_a_promise_says_how_many_would_do(tmp_path, prior):
    found = tuned(tmp_path, prior, options={"policy": MaxLoss(0.05)})
    assert not found.question.chosen.kept
    assert found.question.chosen.threshold > 1
    assert "questions like these would do" in found.question.chosen.promise


@pytest.mark.parametrize("policy", [Budget(0.9), MinCost(retrieval=2.0, answer=1.0)])
def test_other_policies(tmp_path, prior, policy):
    found = tuned(tmp_path, prior, options={"policy": policy})
    assert found.question.chosen.kept
    assert found.question.artifact.provenance["policy"]["name"] == policy.name


def test_a_damaged_gate_is_refused(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelLoadError, match="damaged"):
        load_gate(str(folder))


def test_a_gate_without_its_prior_is_refused(tmp_path, prior, monkeypatch):
    tuned(tmp_path, prior)
    shutil.rmtree(tmp_path / "my-gate" / "prior")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no trained gate"):
        load_gate("my-gate")


def test_a_gate_for_another_model_is_refused(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder

    class Other(Reader):
        fingerprint = "other"

    decision = load_gate(str(folder), proxy=Other()).decide("what is number 4?")
    assert decision.retrieve
    assert decision.error.type == "ModelLoadError"


def test_decisions_are_monitored(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder
    log = tmp_path / "decided.jsonl"
    log.write_text("".join(json.dumps({"question": "q", "p_known": i / 100}) + "\n" for i in range(100)))
    done = CliRunner().invoke(app, ["monitor", str(log), "--gate", str(folder)])
    assert done.exit_code == 0, done.output
    assert "100 decisions" in done.output


@pytest.mark.model
def test_the_shipped_gate_is_tuned_with_its_own_model(tmp_path, smollm2):
    found = tune(
        questions(24),
        direct=Direct(),
        retrieve=retrieve,
        out=tmp_path / "my-gate",
        options=TuneOptions(policy=Budget(0.9)),
    )
    assert found.question.artifact.weight.shape == (3, 576)
    gate = load_gate(str(found.folder), on_error="raise")
    asked = [each.question.text for each in found.labels.answered]
    assert np.isfinite([decision.p_known for decision in gate.decide_batch(asked)]).all()
    begun = Draft(text="a b", tokens=("a", " b"), logprobs=(-0.1, -0.2))
    (decision,) = load_gate(f"{found.folder}/answer-first", on_error="raise").decide_batch(
        asked[:1], drafts=[begun]
    )
    assert decision.draft == begun
