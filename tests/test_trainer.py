"""Labels, pairs, and LoRA fine-tuning: repeatable, resumable, and worth something."""

import json
import signal
import subprocess
import sys

import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, ModelLoadError
from rgate_integrations.gates.papers.adapt import RET
from rgate_integrations.tuning.training.adapters import AdapterOptions, train_adapter
from rgate_integrations.tuning.training.examples import Example, read_examples
from rgate_integrations.tuning.training.trainer import Recipe, pairs_for, rewriter_pairs


def example(question="who?", known=True, **more):
    return Example(question, known, "", "set", more.pop("target", float(known)), **more)


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


# --- fine-tuning ---------------------------------------------------------------------------------------------

SUMS = [(f"What is {a} plus {a}?", a % 2 == 0) for a in range(1, 13)]
SAID = ["Even." if known else "Odd." for _, known in SUMS]
RECIPE = Recipe(epochs=4, learning_rate=2e-3, batch_size=4)
LEARNS = Recipe(epochs=25, learning_rate=2e-2, batch_size=12, per_device=12, dropout=0.0)
"""Enough for the tiny model to tell "Even." from "Odd."."""


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    lines = [
        {"question": question, "closed_book_correct": known, "closed_book_text": said}
        for (question, known), said in zip(SUMS, SAID, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fitted(sums, model, out, **options):
    given = {"draft": "recorded", "recipe": RECIPE, **options}
    train_adapter("ik", read_examples([sums]), model, out, AdapterOptions(**given))
    return load_gate(str(out))


def assert_told_apart(gate):
    decisions = gate.decide_batch([question for question, _ in SUMS], drafts=SAID)
    assert [d.error for d in decisions] == [None] * len(SUMS)
    known = [d.p_known for d, (_, known) in zip(decisions, SUMS, strict=True) if known]
    unknown = [d.p_known for d, (_, known) in zip(decisions, SUMS, strict=True) if not known]
    assert min(known) > max(unknown)


# Trains like `fitted`, and kills itself when the fifth of twelve steps is done, before its checkpoint is written.
KILLED = """
import os, signal, sys
from pathlib import Path
from rgate_integrations.tuning.training.adapters import AdapterOptions, train_adapter
from rgate_integrations.tuning.training.examples import read_examples
from rgate_integrations.tuning.training.trainer import Recipe

def progress(what, done, total):
    if what.startswith("training") and done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

data, model, out, recipe = sys.argv[1:]
options = AdapterOptions(draft="recorded", recipe=eval(recipe))
train_adapter("ik", read_examples([data]), model, Path(out), options, progress=progress)
"""


@pytest.mark.model
def test_a_killed_run_resumes_to_the_same_weights(tiny, sums, tmp_path):
    gate = fitted(sums, tiny, tmp_path / "whole")
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(sums), tiny, str(killed), repr(RECIPE)]
    process = subprocess.run(command, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not killed.exists()
    checkpoints = tmp_path / ".killed-checkpoints"
    assert (checkpoints / "checkpoint-4").is_dir()
    steps = []
    options = AdapterOptions(draft="recorded", recipe=RECIPE, resume=True)
    train_adapter(
        "ik",
        read_examples([sums]),
        tiny,
        killed,
        options,
        progress=lambda what, done, total: steps.append(done),
    )
    assert (steps[0], steps[-1]) == (5, 12), "it went on from the fourth step"
    weights = [(tmp_path / d / "adapter_model.safetensors").read_bytes() for d in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert not checkpoints.exists()
    assert gate.config()["source"] == "recorded"
    assert gate.config()["tokens"] == 32


@pytest.mark.model
def test_a_trained_gate_tells_its_questions_apart(tiny, sums, tmp_path):
    out = tmp_path / "g"
    assert_told_apart(fitted(sums, tiny, out, recipe=LEARNS))
    config = json.loads((out / "gate.json").read_text())
    (out / "gate.json").write_text(json.dumps(config | {"fingerprint": "0" * 16}))
    # Under another name the adapter is not in the shared model yet, so it is checked.
    refused = load_gate(str(out)).with_options(adapter=str(out) + "/.").decide("who?", draft="Even.")
    assert refused.retrieve
    assert "was trained on" in refused.reason
    (out / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="checksum"):
        load_gate(str(out))


@pytest.mark.model
def test_a_boundary_gate_says_which_label_it_predicts(tiny, sums, tmp_path):
    recipe = RECIPE.with_options(epochs=1)
    options = AdapterOptions(draft="none", recipe=recipe, label="accuracy", labelled_by="30 answers of tiny")
    train_adapter("boundary", read_examples([sums]), tiny, tmp_path / "g", options)
    saved = json.loads((tmp_path / "g" / "gate.json").read_text())
    assert saved["provenance"]["label"] == "accuracy of 30 answers of tiny"
    gate = load_gate(str(tmp_path / "g"))
    assert gate.config()["label"] == "accuracy"
    assert "predicts accuracy" in gate.decide("Is 2 even?").reason


@pytest.mark.model
def test_folds_are_trained_and_measured(tiny, sums, tmp_path):
    lines = []
    options = AdapterOptions(draft="recorded", recipe=RECIPE.with_options(epochs=1), folds=2)
    files = read_examples([sums])
    metrics = train_adapter("ik", files, tiny, tmp_path / "g", options, show=lines.append)
    assert [line.split(":")[0] for line in lines] == ["fold 1 of 2", "fold 2 of 2"]
    assert metrics["auc"] == {"sums": metrics["auc_pooled"]}
    saved = json.loads((tmp_path / "g" / "gate.json").read_text())["provenance"]
    assert (saved["metrics"], saved["folds"]) == (metrics, 2)


@pytest.mark.model
@pytest.mark.slow
def test_the_real_proxy_learns_in_a_dozen_steps(smollm2, sums, tmp_path):
    assert_told_apart(fitted(sums, smollm2.name, tmp_path / "g"))


def test_what_cannot_be_trained(sums):
    with pytest.raises(ConfigurationError, match="not trained"):
        train_adapter("perplexity", read_examples([sums]), "smollm2-135m-instruct", sums.parent / "x")
