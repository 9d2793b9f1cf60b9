"""Tuning: the gates that come out, how they are saved and loaded, and what is told about them."""

import json
import shutil

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, ModelLoadError
from rgate_integrations.gates.tuned import TunedGate
from rgate_integrations.tuning import Budget, MaxLoss, MinCost, TuneOptions, tune
from rgate_integrations.tuning.collection import Answered
from rgate_integrations.tuning.questions import Question
from rgate_integrations.tuning.report import mean_tokens
from tests.test_gate_values import Private
from tests.tuning_parts import Direct, Reader, questions, retrieve, tuned


def test_a_gate_comes_out_that_knows_what_the_llm_knows(tmp_path, prior):
    found = tuned(tmp_path / "a" / "b", prior)  # folders that are missing are made
    assert found.question.auc > 0.95
    assert found.question.auc_before == 0.5
    assert found.question.choice.guaranteed
    assert found.failed == 0
    assert str(found).splitlines()[1] == f"question alone: {found.question.choice.guarantee}"
    shutil.rmtree(tmp_path / "shipped")  # the shipped gate is kept in the folder
    gate = load_gate(str(found.folder), proxy=Reader(), on_error="raise")
    assert gate.threshold == found.question.choice.threshold
    even, odd = gate.decide_batch(["what is number 102?", "what is number 103?"])
    assert even.p_known > 0.5 > odd.p_known
    assert even.gate == "tuned"
    names = {path.name for path in found.folder.iterdir()}
    assert names == {"README.md", "answer-first", "gate.json", "prior", "report.html", "weights.safetensors"}


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


def test_the_saved_gate_scores_as_the_fit_did(tmp_path, prior, monkeypatch):
    found = tuned(tmp_path, prior)
    artifact = found.question.artifact
    decision = load_gate(str(found.folder), proxy=Reader()).decide("what is number 8?")
    (state,) = Reader().hidden(None, [{"question": "what is number 8?"}], None, artifact.layers)
    logit = float((artifact.weight * state.states).sum()) + artifact.bias  # the prior's logit is 0
    assert decision.p_known == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)

    monkeypatch.setattr("rgate_integrations.gates.registry.make_gate", lambda name, **options: Private())
    # What the shipped gate says of the user's own documents is passed on.
    gate = load_gate(TunedGate(artifact=str(found.folder)), proxy=Reader(), on_error="raise")
    assert gate.decide("what is number 8?").signals == {"private": 0.9}


def test_an_existing_folder_is_left_alone_before_anything_is_asked(tmp_path, prior):
    direct = Direct()
    (tmp_path / "my-gate").mkdir()
    with pytest.raises(ConfigurationError, match="exists"):
        tuned(tmp_path, prior, direct=direct)
    (tmp_path / "my-gate" / "gate.json").write_text(json.dumps({"format": 1, "method": "calibrated"}))
    with pytest.raises(ConfigurationError, match="no tuned gate"):
        tuned(tmp_path, prior, direct=direct, update=True)
    for out in (".", "/"):
        with pytest.raises(ConfigurationError):
            tune(questions(), direct=direct, retrieve=retrieve, out=out, options=TuneOptions(prior=prior))
    assert direct.asked == []


@pytest.mark.parametrize(
    "bad", [{"concurrency": 0}, {"tokens": 0}, {"sample": 0}, {"samples": -1}, {"labels": "guess"}]
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigurationError):
        TuneOptions(**bad)


def test_too_small_for_a_guarantee_says_how_many_would_do(tmp_path, prior):
    choice = tuned(tmp_path, prior, options={"policy": MaxLoss(0.05)}).question.choice
    assert not choice.guaranteed
    assert choice.threshold > 1
    assert "questions like these would do" in choice.guarantee


def test_other_policies(tmp_path, prior):
    found = tuned(tmp_path, prior, options={"policy": MinCost(retrieval=2.0, answer=1.0)})
    assert found.question.artifact.provenance["policy"]["name"] == "cost"
    found = tuned(tmp_path, prior, update=True, options={"policy": Budget(0.9)})
    assert found.question.choice.guaranteed


def test_a_damaged_gate_is_refused(tmp_path, prior, monkeypatch):
    folder = tuned(tmp_path, prior).folder
    weights = folder / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ModelLoadError, match="damaged"):
        load_gate(str(folder))
    weights.write_bytes(whole)
    decision = load_gate(str(folder), proxy=type("Other", (Reader,), {"fingerprint": "other"})()).decide(
        "number 4?"
    )
    assert decision.retrieve
    assert decision.error.type == "ModelLoadError"
    shutil.rmtree(folder / "prior")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no trained gate"):
        load_gate("my-gate")


# --- what is told ------------------------------------------------------------------------------------------


def test_the_report_is_one_page_that_fetches_nothing_and_runs_nothing_of_the_log(tmp_path, prior):
    given = [
        *questions(),
        {"question": "</script><script>alert(1)</script> number 62?", "gold_answers": ["n62"]},
    ]
    found = tuned(tmp_path, prior, given)
    page = (found.folder / "report.html").read_text()
    for name in ("src=", "href=", "@import", "https:", "<script>alert"):
        assert name not in page
    assert json.dumps(found.question.choice.guarantee) in page
    assert "tuned, answer first" in page
    assert '"gate": "shipped"' in page


def test_tokens_by_hand():
    short = Draft(text="x", tokens=("a",) * 4, prompt_tokens=10)
    long = Draft(text="x" * 40, prompt_tokens=100)  # whose tokens are not listed: about ten
    answered = [Answered(Question("?"), {"direct": short, "retrieve": long}, {})] * 2
    both, neither, one = np.array([True, True]), np.array([False, False]), np.array([True, False])
    assert mean_tokens(answered, both).tolist() == [100, 10]
    assert mean_tokens(answered, neither).tolist() == [10, 4]
    assert mean_tokens(answered, one).tolist() == [55, 7]
    assert mean_tokens(answered, one, 3).tolist() == [60, 8.5]  # its prompt and three tokens
    unknown = [Answered(Question("?"), {"direct": short, "retrieve": Draft(text="x")}, {})]
    assert mean_tokens(unknown, one[:1]) is None


@pytest.mark.model
def test_the_shipped_gate_is_tuned_with_its_own_model(tmp_path, smollm2):
    options = TuneOptions(policy=Budget(0.9))
    arms = {"direct": Direct(), "retrieve": retrieve}
    found = tune(questions(24), out=tmp_path / "my-gate", options=options, **arms)
    assert found.question.artifact.weight.shape == (3, 576)
    gate = load_gate(str(found.folder), on_error="raise")
    asked = [each.question.text for each in found.labels.answered]
    assert np.isfinite([decision.p_known for decision in gate.decide_batch(asked)]).all()
    begun = Draft(text="a b", tokens=("a", " b"), logprobs=(-0.1, -0.2))
    gate = load_gate(f"{found.folder}/answer-first", on_error="raise")
    assert gate.decide_batch(asked[:1], drafts=[begun])[0].draft == begun
