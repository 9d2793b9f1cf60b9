"""A gate that `rgate tune` made: what it says where its guarantee failed, and its pair under answer first."""

from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import answer_first_gates
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.folder import ANSWER_FIRST, read_prior, save_gate, tuned_files
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.runtime.files import write_atomically, write_folder
from tests.saved_gates import PROBE, TUNED, change
from tests.scripted_proxy import ScriptedProxy

PROMISE = (
    "No threshold that skips can guarantee a loss of at most 2.0%. About 400 such questions would be enough."
)


def tuned(folder, *, tokens=0, threshold=0.5, **provenance):
    """Write a tuned gate into a folder; returns its name."""
    head = np.zeros(5 if tokens else 0, dtype=np.float32)
    artifact = replace(TUNED, head=head, tokens=tokens, threshold=threshold, provenance=provenance)
    prior = save_gate(PROBE, folder.with_name("prior"))
    return str(write_folder(folder, tuned_files(artifact, prior)))


@pytest.fixture
def pair(tmp_path):
    tuned(tmp_path / "answers", tokens=4)
    folder = tuned(tmp_path / "mine")
    (tmp_path / "answers").rename(tmp_path / "mine" / ANSWER_FIRST)
    return folder


def test_a_gate_without_its_guarantee_says_why_it_always_retrieves(tmp_path, scripted):
    name = tuned(tmp_path / "mine", threshold=1.01, guaranteed=False, guarantee=PROMISE)
    decision = load_gate(name, proxy=scripted).decide("who?")
    assert decision.retrieve
    assert decision.reason.endswith(f"But {PROMISE[0].lower()}{PROMISE[1:]}")
    kept = tuned(tmp_path / "kept", guaranteed=True, guarantee="Loses at most 2.0%.")
    assert "But" not in load_gate(kept, proxy=scripted).decide("who?").reason


def test_a_question_below_all_known_ones_keeps_the_p_known_of_the_prior(tmp_path, scripted):
    name = tuned(tmp_path / "mine")
    uncorrected = load_gate(str(tmp_path / "prior"), proxy=scripted).decide("who?").p_known
    raised = load_gate(name, proxy=scripted).decide("who?").p_known
    assert raised > uncorrected
    for least, p_known in ((uncorrected, raised), (uncorrected + 0.01, uncorrected)):
        change(tmp_path / "mine", least_known=least)
        assert load_gate(name, proxy=scripted).decide("who?").p_known == p_known


def test_a_guarantee_that_failed_is_no_reason_at_another_threshold(tmp_path, scripted):
    """Regression: a calibrated or a caller's threshold skipped, and the reason was that the gate always retrieves."""
    name = tuned(tmp_path / "mine", threshold=1.01, guaranteed=False, guarantee=PROMISE)
    calibrated = load_gate("calibrated", inner=load_gate(name), threshold=0.0, proxy=scripted)
    for decision in (
        calibrated.decide("who wrote it all?"),
        load_gate(name, proxy=scripted, threshold=0.0).decide("who wrote it all?"),
        load_gate(name, proxy=scripted).decide("who wrote it all?", threshold=0.0),
    ):
        assert (decision.retrieve, "guarantee" in decision.reason) == (False, False)


def test_a_tuned_gate_of_the_hub_has_its_pair(pair, tmp_path, monkeypatch):
    """Regression: its answer-first folder was not fetched, so answer first refused the gate."""
    (tmp_path / "mine" / "code.py").touch()

    def snapshot_download(name, allow_patterns):
        (tmp_path / "hub").mkdir(exist_ok=True)
        files = [str(path.relative_to(pair)) for path in Path(pair).rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            write_atomically(tmp_path / "hub" / name / file, (Path(pair) / file).read_bytes())
        return str(tmp_path / "hub" / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    judge, question = answer_first_gates(load_gate("owner/mine"))
    assert (judge.gate.trained.tokens, question.gate.trained.tokens) == (4, 0)
    assert not (tmp_path / "hub" / "owner" / "mine" / "code.py").exists()


def test_the_gates_of_a_tuned_folder_belong_together(pair):
    question, answers = load_gate(pair), load_gate(f"{pair}/{ANSWER_FIRST}")
    for given in (question, answers):
        judge, look = answer_first_gates(given)
        assert (judge.gate.trained.tokens, look.gate.trained.tokens) == (4, 0)
    assert [half.gate for half in answer_first_gates(question)] == [answers.gate, question.gate]
    assert answer_first_gates(question, None)[1] is None


def test_a_tuned_gate_that_is_replaced_while_it_is_loaded_is_the_new_one(tmp_path, monkeypatch):
    name, thresholds = tuned(tmp_path / "mine", threshold=0.1), [0.3, 0.2]

    def read(folder):
        if thresholds:
            tuned(tmp_path / "mine", threshold=thresholds.pop())
            raise ModelLoadError("It has no prior.")
        return read_prior(folder)

    monkeypatch.setattr("rgate_integrations.gates.composite.read_prior", read)
    assert load_gate(name, proxy=ScriptedProxy()).threshold == 0.3


def test_a_tuned_gate_without_its_other_half_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot judge a partial answer"):
        RetrievalGate(tuned(tmp_path / "mine")).route(retrieve=str, direct=str, answer_first=AnswerFirst())


def test_the_name_of_another_llm_changes_nothing_and_is_told_once(pair, caplog):
    """Regression: nothing said so."""
    calibrated = load_gate("calibrated", inner=load_gate(pair)).gate
    for gate in (pair, load_gate(pair).gate, calibrated, calibrated):
        assert load_gate(gate, llm_name="other-llm").gate == load_gate(gate).gate
    load_gate(pair).for_llm("found-llm", "the chat model")
    warning = "llm_name='other-llm' has no effect: the gate '{}' judges the LLM that it was made for."
    assert caplog.messages == [warning.format("tuned"), warning.format("calibrated")]
