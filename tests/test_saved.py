"""Saved gates: read back as they were, refused when they are damaged or fit another model."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

from rgate_integrations import load_gate
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.artifacts import LogprobHead
from rgate_integrations.gates.folder import read_gate, save_gate, saved_folder, shipped
from rgate_integrations.gates.registry import gate_argument, saved_gate
from tests.saved_gates import ADAPTER, HEADS, PROBE, TUNED, change, save_ik
from tests.scripted_proxy import ScriptedProxy

LOGPROBS = LogprobHead(text=0.5, total=0.1, least=1.0, mean=2.0, bias=0.3)


def test_a_gate_is_read_back_as_it_was_saved(tmp_path):
    whole = replace(PROBE, logprobs=LOGPROBS)
    folder = save_gate(whole, tmp_path / "g")
    found = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert found == ["g", "g/README.md", "g/gate.json", "g/weights.safetensors"]
    read = read_gate(str(folder))
    assert (read, read.weight.tolist()) == (whole, PROBE.weight.tolist())
    assert '"auc_mean": 0.7' in (folder / "README.md").read_text()


@pytest.fixture
def folder(tmp_path):
    """A saved probe."""
    return save_gate(PROBE, tmp_path / "g")


def test_a_saved_gate_decides_by_its_threshold_and_model_unless_others_are_given(folder, tmp_path):
    gate = load_gate(str(folder)).gate
    assert (gate.threshold, gate.proxy, gate.replace(threshold=0.9).threshold) == (0.4, "scripted", 0.9)
    # Regression: the threshold and the proxy of the artefact before it stayed.
    other = str(save_gate(replace(PROBE, threshold=0.7, base_model="other"), tmp_path / "h"))
    replaced = gate.replace(artifact=other)
    assert (replaced.threshold, replaced.proxy, replaced.artifact) == (0.7, "other", other)
    assert gate.replace(artifact=other, threshold=0.2).threshold == 0.2


def test_a_gate_that_a_kill_left_aside_still_loads(folder, tmp_path):
    folder.rename(tmp_path / ".g-before")
    assert saved_folder(folder) == tmp_path / ".g-before"
    assert load_gate(str(folder), proxy=ScriptedProxy()).threshold == 0.4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 9}, "reads formats up to"),
        ({"format": "1"}, "format is '1', not a whole number"),
        ({"format": 0}, "format is 0"),
        ({"format": True}, "format is True"),
        ({"prompts": {"answer": "0"}}, "another version of the prompt"),
        ({"bias": "x"}, "bias: "),
        ({"source": "stranger"}, "source: Input should be 'proxy'"),
        ({"logprobs": {"text": 1.0}}, "logprobs"),
        ({"more": 1}, "more: Unexpected keyword"),
        ({"weights_sha256": "0" * 64}, "checksum"),
    ],
)
def test_what_a_gate_cannot_be_is_said(folder, changes, why):
    change(folder, **changes)
    with pytest.raises(ModelLoadError, match=why):
        load_gate(str(folder))


@pytest.mark.parametrize("gate", [PROBE, TUNED, HEADS, ADAPTER], ids=lambda gate: gate.method)
def test_a_gate_that_lost_any_part_is_refused(tmp_path, gate):
    """Regression: without its threshold, a tuned gate was loaded, and decided by another one."""
    folder = save_ik(tmp_path / "g") if gate is ADAPTER else save_gate(gate, tmp_path / "g")
    file = folder / "gate.json"
    saved = json.loads(file.read_text())
    for name in saved:
        file.write_text(json.dumps({key: value for key, value in saved.items() if key != name}))
        with pytest.raises(ModelLoadError, match=r"cannot be read|is damaged"):
            read_gate(folder)


def test_a_gate_that_is_replaced_while_it_is_read_is_the_new_one(folder, monkeypatch):
    replacing = [replace(PROBE, weight=PROBE.weight + 1)]

    def load(path):
        if replacing:
            save_gate(replacing.pop(), folder)
        return load_file(path)

    monkeypatch.setattr("rgate_integrations.gates.folder.load_file", load)
    assert np.array_equal(read_gate(str(folder)).weight, PROBE.weight + 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_are_replaced_between_their_checksum_and_their_loading_are_refused(
    folder, tmp_path, monkeypatch, in_place
):
    other = save_gate(replace(PROBE, weight=PROBE.weight + 1), tmp_path / "h")

    def load_later(path):
        if in_place:
            path.write_bytes((other / path.name).read_bytes())
            os.utime(path, ns=(0, 0))
        else:
            (other / path.name).replace(path)
        return load_file(path)

    monkeypatch.setattr("rgate_integrations.gates.folder.load_file", load_later)
    with pytest.raises(ModelLoadError, match="was replaced"):
        read_gate(str(folder))


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (b"x", "cannot be read"),
        # A file of a million empty tensors: its list took 21 s to be read, and was refused then.
        ((1 << 24).to_bytes(8, "little") + b"{" + b" " * (1 << 16), "header of its weights"),
    ],
)
def test_weights_that_are_no_tensors_are_refused(folder, weights, why):
    (folder / "weights.safetensors").write_bytes(weights)
    with pytest.raises(ModelLoadError, match="checksum"):
        read_gate(folder)
    change(folder, weights_sha256=hashlib.sha256(weights).hexdigest())
    with pytest.raises(ModelLoadError, match=why):
        read_gate(folder)


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("{folder}", ModelLoadError, r"is not a trained gate.*permission to read it"),
        # Only the Hub was named, and the network was to blame.
        ("my-gate/answer-first", ModelLoadError, "no local folder 'my-gate/answer-first' .* from the Hub"),
        ("heads:{folder}/g", ModelLoadError, "method 'probe', so it cannot be loaded as 'heads'"),
        # The hint says how a folder that is called like a gate is written.
        ("tuned", ConfigurationError, r"artifact.* Hint: .*'\./tuned'"),
    ],
)
def test_a_name_of_no_gate_or_of_another_one_is_refused(folder, monkeypatch, name, error, why):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=why):
        load_gate(name.format(folder=folder.parent))


# --- what a probe reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logprobs", "logit"),
    [
        # 0.5 * 1.5 + 0.1 * -2.4 + 1.0 * -1.8 + 2.0 * -0.8 + 0.3
        ((-0.5, -0.1, -1.8), -2.59),
        # only the tokens that are read count
        ((-0.5, -0.1, -1.8, -9.0), -2.59),
        # a token that cannot be counts as a very rare one: 0.5 * 1.5 + (0.1 + 1.0 + 2.0) * -20 + 0.3
        ((-9_999.0,), -60.95),
        (None, 1.5),
    ],
)
def test_log_probabilities_are_weighed_against_the_words(tmp_path, logprobs, logit):
    read = {"tokens": 3, "source": "recorded", "logprobs": LOGPROBS}
    probe = replace(PROBE, weight=np.zeros((2, 4), np.float32), bias=1.5, **read)
    gate = load_gate(str(save_gate(probe, tmp_path / "g")), proxy=ScriptedProxy())
    tokens = ("He", " is", " Bob", " Dole")[: len(logprobs or ())]
    found = gate.decide("who?", draft=Draft(text="He is Bob Dole", tokens=tokens, logprobs=logprobs))
    assert found.p_known == pytest.approx(1 / (1 + math.exp(-logit)))
    assert ("log-probabilities" in found.reason) == (logprobs is not None)


# --- adapters, calibrated gates, the Hub ----------------------------------------------------------------------------


def test_an_adapter_becomes_a_gate(tmp_path):
    assert read_gate(save_ik(tmp_path)) == ADAPTER
    gate = load_gate(str(tmp_path)).gate
    assert (gate.name, gate.tokens, gate.proxy, gate.adapter) == ("ik", 0, "scripted", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="checksum"):
        load_gate(str(tmp_path))


def test_a_gate_is_saved_by_its_parameters(tmp_path):
    gate = load_gate(
        "calibrated", inner="ik", threshold=0.3, probability={"method": "platt", "slope": 2.0}
    ).gate
    folder = save_gate(saved_gate(gate, {"n": 5}), tmp_path / "g")
    assert load_gate(str(folder)).gate == gate
    assert read_gate(folder).provenance == {"n": 5}
    change(folder, prompts={"ik-draft": "0"})
    with pytest.raises(ModelLoadError, match="version of the prompt 'ik-draft'"):
        load_gate(str(folder))


@pytest.mark.parametrize("name", ["tuned", "ik", "ik:2", "mine", "mine:2", "gates/tuned"])
def test_a_folder_that_is_named_like_a_gate_is_loaded_by_the_name_that_is_printed(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    save_gate(saved_gate(load_gate("constant:never").gate, {}), Path(name))
    assert load_gate(gate_argument(name)).decide("who?").p_known == 1.0
    assert gate_argument(name) in (name, f"./{name}")


@pytest.mark.parametrize(
    "make", [save_ik, lambda folder: save_gate(PROBE, folder)], ids=["adapter", "weights"]
)
def test_a_gate_that_contains_a_saved_one_finds_it_after_both_have_moved(tmp_path, monkeypatch, make):
    """Regression: the inner gate's relative folder was taken for a Hub id."""
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    make(Path("old/inner"))
    save_gate(saved_gate(load_gate("calibrated", inner="old/inner").gate, {}), "old/outer")
    Path("old").rename("new")
    Path("link").symlink_to("new/outer")
    for name in ("new/outer", "link"):
        assert load_gate(name).gate.inner.trained.base_model == "scripted"
    # Regression: saved by that link, it named the inner one from the link's target, and replaced the link.
    save_gate(saved_gate(load_gate("calibrated", inner="new/inner").gate, {}), "link")
    assert load_gate("link").gate.inner.trained.base_model == "scripted"
    assert load_gate("new/inner").decides_like(load_gate(str(tmp_path / "new" / "inner")))
    # Regression: the error was that '../inner' is not a trained gate, and did not name the gate that contains it.
    Path("new/inner").rename("new/elsewhere")
    says = r"'new/outer' contains the gate '\.\./inner', which is not there.* Hint: Copy both folders"
    with pytest.raises(ModelLoadError, match=says):
        load_gate("new/outer")


def test_a_gate_comes_from_the_hub(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert load_gate("you/gate", proxy=ScriptedProxy()).threshold == 0.4


def test_a_folder_without_its_gate_is_not_replaced_by_the_hubs_gate_of_that_name(tmp_path, monkeypatch):
    """Regression: a folder such as gates/new, copied incompletely or not readable, was looked up on the Hub."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    monkeypatch.chdir(tmp_path)
    save_gate(PROBE, tmp_path / "gates" / "new")
    (tmp_path / "gates" / "new" / "gate.json").unlink()
    with pytest.raises(ModelLoadError, match="'gates/new' is not a trained gate"):
        load_gate("gates/new")


# --- what ships -------------------------------------------------------------------------------------------------


def test_what_ships_is_small_and_documented():
    size = 0
    for name in shipped():
        saved = read_gate(name)
        size += sum(file.stat().st_size for file in saved_folder(name).iterdir())
        assert saved.provenance["metrics"]["auc_mean"] > 0.6
        assert all(len(data["sha256"]) == 64 for data in saved.provenance["data"])
        assert load_gate(name).proxy == saved.base_model
    assert size < 14.5e6
    facts = read_gate(DEFAULT_GATE).provenance
    assert all(data["licence"] and not data["licence"].startswith("none") for data in facts["data"])
    assert min(facts["metrics"]["auc_without_source"].values()) > 0.95


def test_the_name_of_an_llm_is_text_in_a_card(tmp_path):
    sly = "<img src=x onerror=alert(1)>\n# Mine"
    gate = replace(PROBE, llm=sly, provenance={"data": "```\n# Mine"})
    card = (save_gate(gate, tmp_path / "gate") / "README.md").read_text()
    assert "&lt;img src=x onerror=alert(1)&gt; # Mine" in card
    assert [card.count(part) for part in ("<img", "\n# Mine", "```")] == [0, 0, 2]
