"""Pairs, and LoRA fine-tuning: what it is given, and what comes out."""

import json
from dataclasses import replace

import pytest

from rgate_integrations import Draft, Request, load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.papers.verdicts import (
    BOUNDARY_QUESTION,
    CONTEXT_PROMPT,
    IK_DRAFT,
    JUDGMENT,
    PARAMETRIC_PROMPT,
    RET,
)
from rgate_integrations.tuning.fine_tuning import Pair, pairs_for, rewriter_pairs, train_adapter
from rgate_integrations.tuning.questions import Example, Question, read_examples
from rgate_integrations.tuning.training import Recipe, TrainingOptions
from tests.tuning_parts import write


def pairs(gate, target, draft=None, **question):
    return pairs_for(gate, Example(Question("who?", **question), target), draft)


def test_pairs_of_each_gate():
    asked, bacon = {"question": "who?"}, Draft(text="Bacon")
    drafted = {**asked, "draft": "Bacon"}
    assert pairs("ik", 1.0, bacon) == [Pair(IK_DRAFT, drafted, "Yes", ends=False)]
    assert pairs("slimplm", 0.0, bacon) == [Pair(JUDGMENT, drafted, "Known(False)")]
    assert pairs("boundary", 0.75) == [
        Pair(BOUNDARY_QUESTION, asked, "known", 0.75, False),
        Pair(BOUNDARY_QUESTION, asked, "unknown", 0.25, False),
    ]
    assert pairs("adapt", 1.0, gold=("Bacon",)) == [Pair(PARAMETRIC_PROMPT, asked, "Bacon")]
    assert pairs("adapt", 0.0, gold=("Marlowe",), context="Marlowe did.") == [
        Pair(PARAMETRIC_PROMPT, asked, RET),
        Pair(CONTEXT_PROMPT, {**asked, "context": "Marlowe did."}, "Marlowe"),
    ]
    with pytest.raises(DataFormatError, match="gold_answers"):
        pairs("adapt", 1.0)


def test_rewriter_pairs(tmp_path):
    empty = {"claim": ""}  # it is left out
    claims = [{"claim": "Paris is big.", "needs_search": True, "query": "size of Paris"}, empty]
    line = {"question": "q?", "closed_book_text": "t", "claims": claims}
    (pair,) = rewriter_pairs([write(tmp_path / "claims.jsonl", line)])
    assert "<Query(size of Paris)>" in pair.target
    # Regression: items that are no objects were left out without a word.
    for wrong, said in (
        (None, "claims is missing"),
        ([*claims, "Paris is old."], "claims is missing or not a list of objects"),
        ([{**claims[0], "needs_search": "no"}], "needs_search of a claim must be true, false or null"),
    ):
        with pytest.raises(DataFormatError, match=f"line 1: {said}"):
            rewriter_pairs([write(tmp_path / "claims.jsonl", line | {"claims": wrong})])


# --- fine-tuning ---------------------------------------------------------------------------------------------

SUMS = [f"What is {a} plus {a}?" for a in range(1, 13)]
SAID = ["Odd.", "Even."] * 6
RECIPE = Recipe(epochs=4, learning_rate=2e-3, batch_size=4)
LEARNS = Recipe(epochs=25, learning_rate=2e-2, batch_size=12, per_device=12, dropout=0.0)
"""Enough for the tiny model to tell "Even." from "Odd."."""


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    lines = [
        {"question": question, "closed_book_correct": said == "Even.", "closed_book_text": said}
        for question, said in zip(SUMS, SAID, strict=True)
    ]
    return write(tmp_path_factory.mktemp("sums") / "sums.jsonl", *lines)


def fitted(sums, model, out, recipe=RECIPE):
    options = TrainingOptions(draft="recorded", recipe=recipe)
    train_adapter("ik", read_examples([sums]), model, out, options)
    return load_gate(str(out))


@pytest.mark.model
def test_a_trained_gate_tells_its_questions_apart(tiny, sums, tmp_path):
    out = tmp_path / "g"
    gate = fitted(sums, tiny, out, LEARNS)
    assert (gate.gate.source, gate.gate.tokens) == ("recorded", 32)
    requests = [Request(question, draft=said) for question, said in zip(SUMS, SAID, strict=True)]
    decisions = gate.decide_batch(requests)
    assert {decision.error for decision in decisions} == {None}
    p_known = [decision.p_known for decision in decisions]
    assert min(p_known[1::2]) > max(p_known[::2])
    config = json.loads((out / "gate.json").read_text())
    (out / "gate.json").write_text(json.dumps(config | {"fingerprint": "0" * 16}))
    # Under another name the adapter is not in the shared model yet, so it is checked.
    refused = load_gate(str(out)).with_options(adapter=str(out) + "/.").decide("who?", draft="Even.")
    assert refused.retrieve
    assert "was trained or calibrated on" in refused.reason


@pytest.mark.model
def test_a_boundary_gate_says_which_label_it_predicts(tiny, sums, tmp_path):
    out = tmp_path / "g"
    options = TrainingOptions(
        draft="none",
        label="accuracy",
        labelled_by="30 answers of tiny",
        recipe=replace(RECIPE, epochs=1),
    )
    train_adapter("boundary", read_examples([sums]), tiny, out, options)
    saved = json.loads((out / "gate.json").read_text())["provenance"]
    assert saved["label"] == "accuracy of 30 answers of tiny"
    assert "predicts accuracy" in load_gate(str(out)).decide("Is 2 even?").reason


@pytest.mark.parametrize(
    ("gate", "why"), [("token_probability", "not trained"), ("slimplm", "cannot use draft=")]
)
def test_what_cannot_be_trained(sums, gate, why):
    with pytest.raises(ConfigurationError, match=why):
        train_adapter(
            gate, read_examples([sums]), "no-model", sums.parent / "x", TrainingOptions(draft="none")
        )
