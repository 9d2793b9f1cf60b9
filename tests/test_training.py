"""Examples, probes and artefacts: bad files first, then numbers, then what is saved."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import DataFormatError, ModelLoadError
from rgate_integrations.training.artifact import (
    EarlyExit,
    ProbeArtifact,
    push_to_hub,
    read_artifact,
    save_artifact,
    shipped,
)
from rgate_integrations.training.examples import read_examples
from rgate_integrations.training.probe import cross_validate, fit_probe, middle_layers
from tests.scripted_proxy import ScriptedProxy


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(question, known, **more):
    return {"question": question, "closed_book_correct": known, **more}


def test_bad_files_name_file_and_line(tmp_path):
    good = write(tmp_path / "good.jsonl", line("who?", True), line("what?", False, dataset="d"))
    (found,) = read_examples([good])
    assert [(e.question, e.known, e.dataset) for e in found.examples] == [
        ("who?", True, "good"),
        ("what?", False, "d"),
    ]
    for bad, why in (
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"question": "x"}', "line 2: no closed_book_correct"),
        ('{"question": 3, "closed_book_correct": true}', "line 2: no question"),
        ('{"question": "x", "closed_book_correct": 1}', "line 2: no closed_book_correct"),
        ('{"question": "Who", "closed_book_correct": false}', "line 2: .*known in"),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"question": "who?", "closed_book_correct": true}\n' + bad)
        with pytest.raises(DataFormatError, match=why):
            read_examples([path])
    (tmp_path / "empty.jsonl").write_text("\n")
    for path in (tmp_path / "empty.jsonl", tmp_path / "missing.jsonl"):
        with pytest.raises(DataFormatError, match=path.name):
            read_examples([path])
    (tmp_path / "binary.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataFormatError, match="cannot be read"):
        read_examples([tmp_path / "binary.jsonl.gz"])


def test_a_repeated_question_counts_once(tmp_path):
    first = write(tmp_path / "a.jsonl", line("Who is it?", True), line("what?", False))
    second = write(tmp_path / "b.jsonl", line("who is  it", True), line("where?", True))
    files = read_examples([first, second])
    assert [len(f.examples) for f in files] == [2, 1]
    with pytest.raises(DataFormatError, match=r"a\.jsonl"):
        read_examples([first, first])


def separable(n=200, seed=0):
    rng = np.random.default_rng(seed)
    known = rng.random(n) < 0.4
    states = rng.normal(size=(n, 3, 24)).astype(np.float32)
    states[:, :, 5] += known[:, None] * 1.5
    return states, known


def test_the_folded_probe_equals_its_parts():
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    states, known = separable()
    fitted = fit_probe(states, known)
    logits = np.zeros(len(known))
    for b in range(3):
        model = make_pipeline(
            StandardScaler(), PCA(24, svd_solver="full"), LogisticRegression(C=0.005, max_iter=2_000)
        )
        logits += model.fit(states[:, b].astype(np.float64), known).decision_function(states[:, b]) / 3
    np.testing.assert_allclose(fitted(states), logits, atol=1e-4)


def test_probes_find_what_is_there_and_nothing_else():
    from sklearn.metrics import roc_auc_score

    states, known = separable()
    assert roc_auc_score(known, cross_validate(states, known, 5, 0)) > 0.8
    shuffled = np.random.default_rng(1).permutation(known)
    assert 0.35 < roc_auc_score(shuffled, cross_validate(states, shuffled, 5, 0)) < 0.65


def test_a_probe_learns_what_differs_within_a_set():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    sets = np.repeat(["easy", "hard"], 200)
    known = rng.random(400) < np.where(sets == "easy", 0.9, 0.1)
    states = rng.normal(size=(400, 1, 6)).astype(np.float32)
    states[:, 0, 0] += 4 * (sets == "easy")
    states[:, 0, 1] += 0.8 * known
    within = [
        np.mean(
            [
                roc_auc_score(known[sets == s], fit_probe(states, known, sets=given)(states[sets == s]))
                for s in set(sets)
            ]
        )
        for given in (sets.tolist(), None)
    ]
    assert within[0] > within[1] + 0.02


def test_fitting_twice_gives_the_same_weights():
    states, known = separable()
    first, second = fit_probe(states, known, 3), fit_probe(states, known, 3)
    assert first.weight.tobytes() == second.weight.tobytes()
    assert first.bias == second.bias


def test_middle_layers():
    assert middle_layers(30) == (14, 16, 18, 20, 22)
    assert middle_layers(30, "question") == (14, 16, 18)
    assert max(middle_layers(24)) < 24


@pytest.fixture
def artifact():
    return ProbeArtifact(
        weight=np.full((2, 4), 0.5, dtype=np.float32),
        bias=-1.0,
        blocks=((1, "question", "mean"), (2, "question", "mean")),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="an LLM",
        threshold=0.4,
        provenance={"data": [], "metrics": {"auc": {"x": 0.7}, "auc_mean": 0.7, "auc_pooled": 0.7}},
    )


def test_artefacts_are_saved_whole_and_checked(artifact, tmp_path):
    folder = save_artifact(artifact, tmp_path / "g")
    loaded = read_artifact(str(folder))
    assert loaded.weight.tolist() == artifact.weight.tolist()
    assert (loaded.threshold, loaded.blocks, loaded.tokens) == (0.4, artifact.blocks, 0)
    save_artifact(artifact, folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g"]
    assert "0.700" in (folder / "README.md").read_text()
    gate = load_gate(str(folder), proxy=ScriptedProxy())
    assert gate.threshold == 0.4
    decision = gate.decide("who?")
    assert decision.error is None
    assert 0 < decision.p_known < 1
    assert load_gate(str(folder), threshold=0.9).threshold == 0.9
    (folder / "probe.safetensors").write_bytes(b"x" + (folder / "probe.safetensors").read_bytes())
    config = json.loads((folder / "gate.json").read_text())
    (folder / "gate.json").write_text(json.dumps(config) + " ")
    with pytest.raises(ModelLoadError, match="checksum"):
        load_gate(str(folder))
    for change, why in (
        ({"format": 9}, "newer"),
        ({"prompt": {**config["prompt"], "hash": "0"}}, "another|not the current"),
        ({"bias": "x"}, "cannot be read"),
    ):
        save_artifact(artifact, folder)
        (folder / "gate.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelLoadError, match=why):
            load_gate(str(folder))


def test_what_is_clearly_known_is_not_drafted(artifact, tmp_path):
    def gate_that_exits_from(p, **options):
        early = EarlyExit(np.zeros((1, 4), np.float32), math.log(0.7 / 0.3), p)
        blocks = ((1, "draft", "mean"), (1, "question", "mean"))
        both = dataclasses.replace(artifact, blocks=blocks, tokens=8, early_exit=early)
        proxy = ScriptedProxy()
        return load_gate(str(save_artifact(both, tmp_path / "g")), proxy=proxy, **options), proxy

    gate, proxy = gate_that_exits_from(0.65)
    decision = gate.decide("who?")
    assert (decision.p_known, decision.draft, decision.retrieve) == (pytest.approx(0.7), None, False)
    assert proxy.calls == ["hidden"]
    assert decision.cost.model_calls == 1
    assert gate.decide("who?", draft="me").draft is not None
    for other, options in ((0.75, {}), (0.65, {"threshold": 0.8}), (0.65, {"early_exit": False})):
        gate, proxy = gate_that_exits_from(other, **options)
        decision = gate.decide("who?")
        assert decision.draft is not None
        assert "generate" in proxy.calls
        assert decision.p_known != pytest.approx(0.7)
        assert decision.cost.model_calls == len(proxy.calls)


def test_a_probe_for_another_model_retrieves_and_says_so(artifact, tmp_path):
    class Wide(ScriptedProxy):
        def hidden(self, prompt, values, drafts, layers):
            found = super().hidden(prompt, values, drafts, layers)
            return [type(f)(np.zeros((2, 9), np.float32), 1) for f in found]

    decision = load_gate(str(save_artifact(artifact, tmp_path / "g")), proxy=Wide()).decide("who?")
    assert decision.retrieve
    assert "was trained on 'scripted'" in decision.reason


def test_there_is_no_gate_there(tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="no trained gate"):
        load_gate(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="from the Hub"):
        load_gate("nobody/no-such-gate")


def test_a_gate_goes_to_the_hub_and_comes_back(artifact, tmp_path, monkeypatch):
    import huggingface_hub

    folder = save_artifact(artifact, tmp_path / "g")
    sent = {}

    class Api:
        def __init__(self, token=None):
            sent["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            sent["private"] = private

        def upload_folder(self, repo_id, folder_path):
            sent["files"] = sorted(p.name for p in Path(folder_path).iterdir())
            return type("Commit", (), {"commit_url": f"https://hub/{repo_id}"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push_to_hub(folder, "you/gate", private=True) == "https://hub/you/gate"
    assert sent == {"token": None, "private": True, "files": ["README.md", "gate.json", "probe.safetensors"]}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert load_gate("you/gate", proxy=ScriptedProxy()).threshold == 0.4
    with pytest.raises(ModelLoadError):
        push_to_hub(tmp_path, "you/gate")


def test_what_ships_is_small_and_documented():
    assert "default" in shipped()
    for name in shipped():
        trained = read_artifact(name)
        assert trained.weight.nbytes < 8e6
        assert trained.provenance["metrics"]["auc_mean"] > 0.6
        assert all(len(d["sha256"]) == 64 for d in trained.provenance["data"])
        assert load_gate(name).proxy == trained.base_model


@pytest.mark.model
def test_the_default_gate_decides(smollm2):
    gate = load_gate()
    known, unknown = gate.decide_batch(
        ["What is the capital of France?", "Who was the mother of Ingeborg of Kalmar?"]
    )
    assert known.error is None
    assert unknown.error is None
    assert known.p_known > unknown.p_known


@pytest.mark.model
def test_training_from_the_command_line(smollm2, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from rgate_integrations.cli.main import app

    monkeypatch.setattr("rgate_integrations.training.drafts.cache_dir", lambda: tmp_path)
    lines = [line(f"What is {i} plus {i}?", i % 2 == 0, closed_book_text=f"{2 * i}.") for i in range(12)]
    data = write(tmp_path / "sums.jsonl", *lines)
    options = ["train", "--data", str(data), "--folds", "2", "--tokens", "4"]
    for draft in ("proxy", "recorded", "none"):
        done = CliRunner().invoke(app, [*options, "--draft", draft, "--out", str(tmp_path / draft)])
        assert done.exit_code == 0, done.output
        assert "mean of the sets" in done.output
        source = {"recorded": ["4."] * 1}.get(draft)
        assert (
            load_gate(str(tmp_path / draft)).decide("What is 2 plus 2?", draft=source and source[0]).error
            is None
        )
    drafts = next((tmp_path / "drafts").glob("*.jsonl"))
    written = drafts.read_text()
    drafts.write_text(written[: len(written) // 2])  # a kill in the middle of a line
    again = CliRunner().invoke(app, [*options, "--draft", "proxy", "--out", str(tmp_path / "again")])
    assert again.exit_code == 0
    # The half that was written again ran in another batch: the same tokens, log-probabilities up to rounding.
    for new, old in zip(drafts.read_text().splitlines(), written.splitlines(), strict=True):
        new_draft, old_draft = json.loads(new)["draft"], json.loads(old)["draft"]
        assert json.loads(new)["question"] == json.loads(old)["question"]
        assert new_draft["token_ids"] == old_draft["token_ids"]
        assert new_draft["logprobs"] == pytest.approx(old_draft["logprobs"], abs=1e-3)
    first, second = read_artifact(str(tmp_path / "proxy")), read_artifact(str(tmp_path / "again"))
    assert first.weight.tobytes() == second.weight.tobytes()
    one_class = write(tmp_path / "one.jsonl", line("a?", True), line("b?", True))
    failed = CliRunner().invoke(app, ["train", "--data", str(one_class), "--out", str(tmp_path / "x")])
    assert isinstance(failed.exception, DataFormatError)
    assert not (tmp_path / "x").exists()
