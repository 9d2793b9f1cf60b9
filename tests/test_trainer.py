"""Labels, pairs, and LoRA fine-tuning on the real smollm2: repeatable, resumable, and worth something."""

import json
import signal
import subprocess
import sys
import time

import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, ModelLoadError
from rgate_integrations.gates.adapt import RET
from rgate_integrations.proxy.base import TargetScores
from rgate_integrations.training.examples import Example, read_examples
from rgate_integrations.training.labels import (
    judge,
    match_ratio,
    sampled_accuracy,
    sampled_certainty,
)
from rgate_integrations.training.pairs import pairs_for, rewriter_pairs
from rgate_integrations.training.trainer import RECIPES
from tests.scripted_proxy import ScriptedProxy


def example(question="who?", known=True, **more):
    return Example(question, known, "", "set", more.pop("target", float(known)), **more)


def test_the_matching_ratio_label_needs_more_than_half_on_token_boundaries():
    assert match_ratio("Paris and Rome.", ["Paris", "Rome", "Oslo"])
    assert not match_ratio("Paris.", ["Paris", "Rome"])  # one half is not more than one half
    assert not match_ratio("I do not know.", ["no"])
    assert not match_ratio("", ["Paris"])


def test_sampled_labels_by_hand():
    assert sampled_accuracy(["Paris", "It is Paris.", "Rome", "rome"], ["Paris"]) == 0.5
    assert sampled_accuracy([], ["Paris"]) == 0.0
    assert sampled_certainty(["Paris"] * 29 + ["Rome"]) == pytest.approx(0.789, abs=1e-3)
    assert sampled_certainty(["the Paris", "Paris."]) == 1.0


def test_the_judge_leaves_refusals_and_nonsense_without_a_label():
    class Judge(ScriptedProxy):
        def score(self, prompt, values, targets, *, adapter=None):
            assert [v["gold"] for v in values] == ["Paris; Paname", "Rome", "Oslo"]
            nan = float("nan")
            return [TargetScores(s, 1) for s in ((-0.1, -3.0), (-3.0, -0.1), (nan, nan))]

    found = judge(
        Judge(),
        ["a?", "b?", "c?", "d?", "e?"],
        [["Paris", "Paname"], ["Rome"], ["x"], ["x"], ["Oslo"]],
        ["Paris", "Oslo", "I don't know that.", " ", "Oslo"],
    )
    assert found.labels == (True, False, None, None, None)
    assert (found.refused, found.unparsable) == (2, 1)


def test_pairs_of_each_gate():
    drafts = [Draft(text="Bacon")]
    (yes,) = pairs_for("ik", [example()], drafts)
    assert (yes.target, yes.weight, yes.values["draft"], yes.ends) == ("Yes", 1.0, "Bacon", False)
    (no,) = pairs_for("slimplm", [example(known=False)], drafts)
    assert (no.target, no.ends) == ("Known(False)", True)
    soft = pairs_for("boundary", [example(target=0.75)], None)
    assert [(p.target, p.weight) for p in soft] == [("known", 0.75), ("unknown", 0.25)]
    (answer,) = pairs_for("adapt", [example(gold=("Bacon",))], None)
    assert answer.target == "Bacon"
    asks, reads = pairs_for("adapt", [example(known=False, gold=("Marlowe",), context="Marlowe did.")], None)
    assert (asks.target, reads.target, reads.values["context"]) == (RET, "Marlowe", "Marlowe did.")
    with pytest.raises(DataFormatError, match="gold_answers"):
        pairs_for("adapt", [example()], None)


def test_labels_other_than_the_default(tmp_path):
    path = tmp_path / "soft.jsonl"
    path.write_text('{"question": "a?", "certainty": 0.25}\n{"question": "b?", "certainty": 1.0}\n')
    (found,) = read_examples([path], "certainty")
    assert [(e.target, e.known) for e in found.examples] == [(0.25, False), (1.0, True)]
    with pytest.raises(DataFormatError, match="line 1: no gold_answers"):
        read_examples([path], "match_ratio")
    path.write_text('{"question": "a?", "gold_answers": ["Rome"], "closed_book_text": "It is Rome."}\n')
    (found,) = read_examples([path], "match_ratio")
    assert found.examples[0].known


def test_rewriter_pairs(tmp_path):
    path = tmp_path / "claims.jsonl"
    claims = [{"claim": "Paris is big.", "needs_search": True, "query": "size of Paris"}]
    path.write_text(json.dumps({"question": "q?", "closed_book_text": "t", "claims": claims}) + "\n")
    (pair,) = rewriter_pairs([path])
    assert "<Query(size of Paris)>" in pair.target
    path.write_text('{"question": "q?"}\n')
    with pytest.raises(DataFormatError, match="line 1: no claims"):
        rewriter_pairs([path])


SUMS = [(f"What is {a} plus {a}?", a % 2 == 0) for a in range(1, 13)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    lines = [
        {"question": q, "closed_book_correct": k, "closed_book_text": "Even." if k else "Odd."}
        for q, k in SUMS
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(data, out, *more):
    code = "from rgate_integrations.cli.main import app; app()"
    options = ["train", "--gate", "ik", "--draft", "recorded", "--data", str(data), "--out", str(out)]
    options += ["--batch-size", "4", "--epochs", "4", "--learning-rate", "2e-3", *more]
    return [sys.executable, "-c", code, *options]


@pytest.mark.model
def test_a_killed_run_resumes_to_the_same_weights(smollm2, sums, tmp_path):
    whole = tmp_path / "whole"
    subprocess.run(command(sums, whole), check=True, capture_output=True)
    out = tmp_path / "killed"
    running = subprocess.Popen(command(sums, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / ".killed-checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("checkpoint-[3-9]/trainer_state.json")):
        assert running.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not out.exists()
    subprocess.run(command(sums, out, "--resume"), check=True, capture_output=True)
    weights = [(d / "adapter_model.safetensors").read_bytes() for d in (whole, out)]
    assert weights[0] == weights[1]
    assert not checkpoints.exists()

    gate = load_gate(str(whole))
    assert (gate.proxy, gate.source, gate.tokens) == (smollm2.name, "recorded", 32)
    decisions = gate.decide_batch([q for q, _ in SUMS], drafts=["Even." if k else "Odd." for _, k in SUMS])
    known = [d.p_known for d, (_, k) in zip(decisions, SUMS, strict=True) if k]
    unknown = [d.p_known for d, (_, k) in zip(decisions, SUMS, strict=True) if not k]
    assert min(known) > max(unknown)

    config = json.loads((whole / "gate.json").read_text())
    (whole / "gate.json").write_text(json.dumps(config | {"fingerprint": "0" * 16}))
    refused = load_gate(str(whole)).with_options(adapter=str(whole) + "/.").decide("who?", draft="Even.")
    assert refused.retrieve
    assert "was trained on" in refused.reason
    (whole / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="checksum"):
        load_gate(str(whole))


@pytest.mark.model
def test_an_activated_adapter_learns_to_judge_after_the_draft(smollm2, sums, tmp_path):
    out = tmp_path / "activated"
    subprocess.run(command(sums, out, "--activated"), check=True, capture_output=True)
    gate = load_gate(str(out))
    assert gate.follow_up
    drafts = ["Even." if k else "Odd." for _, k in SUMS]
    p = [d.p_known for d in gate.decide_batch([q for q, _ in SUMS], drafts=drafts)]
    known = [k for _, k in SUMS]
    assert min(v for v, k in zip(p, known, strict=True) if k) > max(
        v for v, k in zip(p, known, strict=True) if not k
    )
    own, before = load_gate(str(out), source="proxy", tokens=4), smollm2.calls
    assert all(d.error is None for d in own.decide_batch([q for q, _ in SUMS]))
    assert smollm2.calls - before == 1, "draft and judgment in one batch"


def test_recipes_follow_the_papers():
    assert (RECIPES["slimplm"].epochs, RECIPES["slimplm"].learning_rate) == (2, 1e-4)
    assert (RECIPES["ik"].epochs, RECIPES["ik"].learning_rate) == (1, 1e-4)
    adapt, boundary = RECIPES["adapt"], RECIPES["boundary"]
    assert (adapt.rank, adapt.alpha, adapt.dropout, adapt.batch_size) == (8, 16, 0.05, 128)
    assert (boundary.learning_rate, boundary.schedule, boundary.warmup) == (1e-5, "cosine", 0.02)
    assert RECIPES["ik"].with_options(epochs=None, batch_size=2).batch_size == 2


def test_what_cannot_be_trained(sums):
    from rgate_integrations.training.adapters import AdapterOptions, train_adapter

    with pytest.raises(ConfigurationError, match="not trained"):
        train_adapter("perplexity", read_examples([sums]), "smollm2-135m-instruct", sums.parent / "x")
    with pytest.raises(ConfigurationError, match="acts after a draft"):
        train_adapter(
            "slimplm",
            read_examples([sums]),
            "smollm2-135m-instruct",
            sums.parent / "x",
            AdapterOptions(activated=True),
        )
