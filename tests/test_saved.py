"""Saved gates: read back as they were, refused when they are damaged or fit another model."""

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.artifacts import push_to_hub
from rgate_integrations.artifacts.adapter import AdapterArtifact, save_adapter
from rgate_integrations.artifacts.calibrated import save_calibrated
from rgate_integrations.artifacts.folder import (
    CARD,
    CONFIG,
    PROBE,
    TrainedOn,
    check_fingerprint,
    read_config,
    saved_folder,
    shipped,
    trained_on,
)
from rgate_integrations.artifacts.probe import EarlyExit, LogprobHead, ProbeArtifact, read_probe, save_probe
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.registry import loadable
from rgate_integrations.prompts import ANSWER
from tests.scripted_proxy import ScriptedProxy


@pytest.fixture
def artifact():
    return ProbeArtifact(
        weight=np.full((2, 4), 0.5, dtype=np.float32),
        bias=-1.0,
        layers=((1, "question", "mean"), (2, "question", "mean")),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="an LLM",
        threshold=0.4,
        provenance={"data": [], "metrics": {"auc": {"x": 0.7}, "auc_mean": 0.7, "auc_pooled": 0.7}},
    )


def test_artefacts_are_saved_whole_and_checked(artifact, tmp_path):
    folder = save_probe(artifact, tmp_path / "g")
    loaded = read_probe(str(folder))
    assert loaded.weight.tolist() == artifact.weight.tolist()
    assert (loaded.threshold, loaded.layers, loaded.tokens) == (0.4, artifact.layers, 0)
    save_probe(artifact, folder)
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
        save_probe(artifact, folder)
        (folder / "gate.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelLoadError, match=why):
            load_gate(str(folder))


LOGPROBS = LogprobHead(text=0.5, total=0.1, least=1.0, mean=2.0, bias=0.3)


@pytest.fixture
def reads_logprobs(artifact, tmp_path):
    """A gate that finds a draft's words known with a logit of 1.5, and also reads its log-probabilities."""
    probe = dataclasses.replace(
        artifact,
        weight=np.zeros((1, 4), np.float32),
        layers=((1, "draft", "mean"),),
        bias=1.5,
        tokens=3,
        source="recorded",
        logprobs=LOGPROBS,
    )
    return load_gate(str(save_probe(probe, tmp_path / "logprobs")), proxy=ScriptedProxy())


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


def test_log_probabilities_are_weighed_against_the_words(reads_logprobs):
    draft = Draft(text="He is Bob", tokens=("He", " is", " Bob"), logprobs=(-0.5, -0.1, -1.8), source="llm")
    found = reads_logprobs.decide("who?", draft=draft)
    # 0.5 * 1.5 + 0.1 * -2.4 + 1.0 * -1.8 + 2.0 * -0.8 + 0.3
    assert found.p_known == pytest.approx(sigmoid(-2.59))
    assert "log-probabilities" in found.reason


def test_only_the_tokens_that_are_read_count(reads_logprobs):
    tokens = ("He", " is", " Bob", " Dole")
    draft = Draft(text="He is Bob Dole", tokens=tokens, logprobs=(-0.5, -0.1, -1.8, -9.0), source="llm")
    assert reads_logprobs.decide("who?", draft=draft).p_known == pytest.approx(sigmoid(-2.59))


def test_a_token_that_cannot_be_counts_as_a_very_rare_one(reads_logprobs):
    draft = Draft(text="Bob", tokens=("Bob",), logprobs=(-9_999.0,), source="llm")
    # 0.5 * 1.5 + (0.1 + 1.0 + 2.0) * -20 + 0.3
    assert reads_logprobs.decide("who?", draft=draft).p_known == pytest.approx(sigmoid(-60.95))


@pytest.mark.parametrize(
    "draft",
    [
        Draft(text="He is Bob", source="llm"),
        Draft(text="Bob", tokens=("Bob",), logprobs=(-9.0,), source="recorded", scored_by="another"),
        "He is Bob",
    ],
)
def test_without_the_writers_log_probabilities_the_words_alone_are_judged(reads_logprobs, draft):
    found = reads_logprobs.decide("who?", draft=draft)
    assert found.p_known == pytest.approx(sigmoid(1.5))
    assert "log-probabilities" not in found.reason


def test_weights_of_log_probabilities_are_saved_and_checked(artifact, tmp_path):
    folder = save_probe(dataclasses.replace(artifact, logprobs=LOGPROBS), tmp_path / "g")
    assert read_probe(str(folder)).logprobs == LOGPROBS
    assert "Log-probabilities" in (folder / "README.md").read_text()
    config = json.loads((folder / "gate.json").read_text())
    older = {name: value for name, value in config.items() if name != "logprobs"}
    (folder / "gate.json").write_text(json.dumps(older))
    assert read_probe(str(folder)).logprobs is None
    for wrong in ({"text": 1.0}, {**dataclasses.asdict(LOGPROBS), "bias": "x"}, 7):
        (folder / "gate.json").write_text(json.dumps({**config, "logprobs": wrong}))
        with pytest.raises(ModelLoadError):
            read_probe(str(folder))
    with pytest.raises(ConfigurationError, match="not finite"):
        save_probe(
            dataclasses.replace(artifact, logprobs=dataclasses.replace(LOGPROBS, mean=math.inf)), folder
        )


def test_what_is_clearly_known_is_not_drafted(artifact, tmp_path):
    def gate_that_exits_from(p, **options):
        early = EarlyExit(np.zeros((1, 4), np.float32), math.log(0.7 / 0.3), p)
        layers = ((1, "draft", "mean"), (1, "question", "mean"))
        both = dataclasses.replace(artifact, layers=layers, tokens=8, early_exit=early)
        proxy = ScriptedProxy()
        return load_gate(str(save_probe(both, tmp_path / "g")), proxy=proxy, **options), proxy

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
        def hidden(self, prompt, values, drafts, blocks):
            found = super().hidden(prompt, values, drafts, blocks)
            return [type(f)(np.zeros((2, 9), np.float32), 1) for f in found]

    decision = load_gate(str(save_probe(artifact, tmp_path / "g")), proxy=Wide()).decide("who?")
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

    folder = save_probe(artifact, tmp_path / "g")
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
    assert {"default", DEFAULT_GATE} <= set(shipped())
    size = 0
    for name in shipped():
        config = read_config(name)
        facts = config["provenance"]
        size += sum(file.stat().st_size for file in saved_folder(name).iterdir())
        assert facts["metrics"]["auc_mean"] > 0.6
        assert all(len(d["sha256"]) == 64 for d in facts["data"])
        assert load_gate(name).proxy == config["base_model"]
    assert size < 2e6


def test_the_default_gate_reads_the_question_alone_and_names_its_sources():
    gate = load_gate()
    assert gate.gate == load_gate(DEFAULT_GATE).gate
    assert [type(spec).__name__ for spec in gate.gate.specs] == ["RequestSpec"]
    facts = read_config(DEFAULT_GATE)["provenance"]
    assert all(data["licence"] for data in facts["data"])
    assert not [data for data in facts["data"] if data["licence"].startswith("none")]
    metrics = facts["metrics"]
    assert metrics["auc_mean"] > 0.66
    assert min(metrics["auc_without_source"].values()) > 0.95


def test_every_call_reads_the_files_anew(artifact, tmp_path):
    folder = save_probe(artifact, tmp_path / "g")
    changed = (folder / "gate.json").stat()
    assert read_probe(folder).threshold == 0.4
    save_probe(dataclasses.replace(artifact, threshold=0.6), folder)
    # As old as before: an earlier version told files apart by their time.
    os.utime(folder / "gate.json", ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert read_probe(folder).threshold == 0.6


def test_weights_that_are_no_tensors_are_refused(artifact, tmp_path):
    folder = save_probe(artifact, tmp_path / "g")
    config = json.loads((folder / "gate.json").read_text())
    (folder / "probe.safetensors").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    (folder / "gate.json").write_text(json.dumps(config | {"weights_sha256": digest}))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_probe(folder)
    config["evidence"]["source"] = "nobody"
    save_probe(artifact, folder)
    (folder / "gate.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"evidence\.source: Input should be 'proxy'"):
        read_probe(folder)


def test_an_adapter_becomes_a_gate(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    facts = {"data": [{"name": "d", "n": 4, "known": 0.5, "sha256": "0" * 64}], "folds": 0}
    saved = AdapterArtifact("ik", ANSWER, {"tokens": 8}, "scripted", "f" * 16, "an LLM", facts)
    assert save_adapter(saved, tmp_path) == tmp_path
    config = read_config(tmp_path)
    assert (config["method"], config["parameters"], config["folder"]) == ("ik", {"tokens": 8}, str(tmp_path))
    assert "reads the question and 8 tokens of a draft" in (tmp_path / "README.md").read_text()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="checksum"):
        read_config(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_config(tmp_path)


def test_a_calibrated_gate_keeps_what_it_was_given(tmp_path):
    folder = save_calibrated({"gate": "constant"}, {"answer": "h"}, 0.3, {"n": 5}, tmp_path / "g")
    config = read_config(folder)
    assert (config["config"], config["prompts"], config["threshold"]) == (
        {"gate": "constant"},
        {"answer": "h"},
        0.3,
    )
    assert config["provenance"] == {"n": 5}


def test_a_gate_that_a_kill_left_aside_still_loads(artifact, tmp_path):
    folder = save_probe(artifact, tmp_path / "g")
    folder.rename(tmp_path / ".g-before")
    assert saved_folder(folder) == tmp_path / ".g-before"
    assert load_gate(str(folder), proxy=ScriptedProxy()).threshold == 0.4


def test_the_model_that_a_gate_was_trained_on(artifact, tmp_path):
    folder = save_probe(dataclasses.replace(artifact, fingerprint="a" * 16), tmp_path / "g")
    trained = trained_on(folder)
    assert trained == TrainedOn("scripted", "a" * 16)
    assert trained_on(tmp_path) is None
    for found in ("", "a" * 16):
        check_fingerprint("g", trained, "other", found)
    check_fingerprint("g", TrainedOn("scripted", ""), "other", "b" * 16)
    with pytest.raises(ModelLoadError, match=r"was trained on 'scripted' .* Hint: .*proxy='scripted'"):
        check_fingerprint("g", trained, "other", "b" * 16)
    (folder / "gate.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        trained_on(folder)


@pytest.mark.parametrize("name", ["tuned", "ik", "ik:2", "mine", "gates/tuned"])
def test_a_folder_that_is_named_like_a_gate_is_loaded_by_the_name_that_is_printed(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    never = load_gate("constant:never").gate
    save_calibrated(never.config(), {}, 0.25, {}, Path(name))
    assert load_gate(loadable(name)).decide("who?").p_known == 1.0
    assert loadable(name) in (name, f"./{name}")


def test_a_file_of_a_million_empty_tensors_is_refused_unread(artifact, tmp_path, monkeypatch):
    """Its list of tensors took 21 s to be read, and was refused then."""
    save_probe(artifact, tmp_path / "gate")
    weights = (1 << 24).to_bytes(8, "little") + b"{" + b" " * (1 << 16)
    (tmp_path / "gate" / PROBE).write_bytes(weights)
    config = json.loads((tmp_path / "gate" / CONFIG).read_text())
    config["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    (tmp_path / "gate" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="list of tensors is too long"):
        load_gate(tmp_path / "gate").decide("who?")


def test_the_name_of_an_llm_is_text_in_a_card(artifact, tmp_path):
    sly = "<img src=x onerror=alert(1)>\n# Mine"
    save_probe(dataclasses.replace(artifact, llm=sly), tmp_path / "gate")
    card = (tmp_path / "gate" / CARD).read_text()
    assert "&lt;img src=x onerror=alert(1)&gt; # Mine" in card
    assert "<img" not in card
    assert "\n# Mine" not in card
