"""Rules of the user's own: what they catch, what they say, and that they cost no pass of their own."""

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations import load_gate
from rgate_integrations.cli.main import app
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates import rules as rules_module
from rgate_integrations.gates.evidence.base import Inputs
from rgate_integrations.gates.rules import ALIKE, Rules
from rgate_integrations.models.reader import READS
from tests.scripted_proxy import ScriptedProxy

CONTRACT = re.compile("contracts?", re.IGNORECASE)


def is_support(question, metadata):
    return metadata.get("channel") == "support"


def test_a_pattern_decides_before_the_gate_and_says_so():
    gate = load_gate("constant:never", always=CONTRACT)
    decision = gate.decide("Who signed the Contract?")
    assert (decision.retrieve, decision.p_known, decision.gate) == (True, 0.0, "constant")
    assert decision.reason == "The rule always=: it matches 'contracts?'."
    assert gate.decide("Who wrote Hamlet?").retrieve is False
    other = load_gate("constant:always", never=[CONTRACT]).decide("Who signed the contract?")
    assert (other.retrieve, other.p_known) == (False, 1.0)


def test_what_always_retrieves_goes_before_what_never_does():
    gate = load_gate("constant:never", always=[CONTRACT], never=[CONTRACT])
    assert gate.decide("Who signed the contract?").retrieve is True


def test_a_function_sees_the_question_and_its_metadata():
    gate = load_gate("constant:never", always=is_support)
    asked = ["Who wrote Hamlet?"] * 3
    found = gate.decide_batch(asked, metadata=[{"channel": "support"}, {"channel": "web"}, None])
    assert [decision.retrieve for decision in found] == [True, False, False]
    assert "is_support says so" in found[0].reason
    assert gate.decide(asked[0], metadata={"channel": "support"}).retrieve is True
    brief = load_gate("constant:always", never=lambda question: len(question) < 8)
    assert [brief.decide(question).retrieve for question in ("thanks", "Who wrote Hamlet?")] == [False, True]


def test_a_function_that_fails_retrieves_and_says_so():
    decision = load_gate("constant:never", never=lambda question: 1 / 0).decide("Who wrote Hamlet?")
    assert decision.retrieve is True
    assert "ZeroDivisionError" in decision.warnings[0]


@pytest.mark.parametrize("rules", [[3], ["  "], [None], [["nested"]]])
def test_what_is_no_rule_is_refused_at_once(rules):
    with pytest.raises(ConfigurationError, match=r"always="):
        load_gate("constant:never", always=rules)


# --- examples ---------------------------------------------------------------------------------------------------


class Directions(ScriptedProxy):
    """A model with one direction for each first word of a question; it counts the questions that it reads."""

    name = READS

    def __init__(self):
        super().__init__()
        self.read = []

    def hidden(self, prompt, values, drafts, layers):
        self.read += [each["question"] for each in values]
        found = super().hidden(prompt, values, drafts, layers)
        return [
            replace(each, states=np.tile(self.direction(v["question"]), (len(layers), 1)))
            for each, v in zip(found, values, strict=True)
        ]

    def direction(self, question):
        return np.eye(4)[["Translate", "Which", "Unlike"].index(question.split()[0])]


@pytest.fixture
def plain_directions(monkeypatch):
    monkeypatch.setattr(rules_module, "reader_directions", lambda: (np.zeros(4), np.eye(4)))


@pytest.mark.usefixtures("plain_directions")
def test_what_is_like_an_example_is_decided_by_its_rule():
    proxy = Directions()
    gate = load_gate("constant:always", proxy=proxy, never=["Translate it."], always=["Which clause?"])
    decision = gate.decide("Translate the letter.")
    assert (decision.retrieve, decision.p_known) == (False, 1.0)
    assert decision.reason == "The rule never=: it is like 'Translate it.' (1.00)."
    assert gate.decide("Which page?").reason.startswith("The rule always=: it is like 'Which clause?'")
    assert gate.decide("Unlike both?").retrieve is True
    assert proxy.read.count("Translate it.") == 1, "the examples are read once"


@pytest.mark.usefixtures("plain_directions")
def test_a_request_that_cannot_be_compared_retrieves():
    class Broken(Directions):
        def hidden(self, *given):
            raise RuntimeError("no states")

    decision = load_gate("constant:never", proxy=Broken(), always=["Which clause?"]).decide(
        "Who wrote Hamlet?"
    )
    assert decision.retrieve is True
    assert decision.error is not None


def test_a_gate_on_another_model_asks_the_reader(monkeypatch):
    reader = Directions()
    monkeypatch.setattr(rules_module, "reader_directions", lambda: (np.zeros(4), np.eye(4)))
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda name: reader)
    gate = load_gate("constant:never", proxy="another model", always=["Which clause?"])
    assert gate.decide("Which page?").retrieve is True
    assert reader.read == ["Which clause?", "Which page?"]


@pytest.mark.model
def test_an_example_catches_what_says_the_same_in_one_pass():
    rules = ["How can a customer ask for the deletion of their data?", "Who is our data protection officer?"]
    gate = load_gate(always=rules, never=["Make up a fairy tale about a princess who cannot sleep."])
    plain = load_gate()
    for question in (
        "A customer wants his data deleted, what is the procedure?",
        "Who is responsible for privacy?",
    ):
        found = gate.decide(question)
        assert (found.retrieve, found.p_known) == (True, 0.0)
        assert found.cost.model_calls <= 1
    assert gate.decide("Tell a fairy story about a sleepless princess.").p_known == 1.0
    other = gate.decide("What is the capital of France?")
    assert other.p_known == plain.decide("What is the capital of France?").p_known
    assert other.cost.model_calls == 1, "rules and gate share the pass"


# --- written and carried --------------------------------------------------------------------------------------


def test_rules_stay_with_a_changed_engine_a_pickled_one():
    gate = load_gate("constant:never", always=[CONTRACT])
    asked = "Who signed the contract?"
    copied = pickle.loads(pickle.dumps(gate))  # noqa: S301
    for other in (gate.with_options(threshold=0.3), copied):
        assert other.decide(asked).retrieve is True
    assert gate.with_options(always=()).decide(asked).retrieve is False


def test_rules_of_a_file(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"always": ["Which clause?", {"pattern": "(?i)contract"}]}))
    rules = Rules.read(path)
    assert rules.examples == ("Which clause?",)
    assert rules.score(Inputs("The CONTRACT"), None).p_known == 0.0
    assert rules.score(Inputs("Which page?"), np.array([[ALIKE - 0.01]])) is None
    path.write_text(json.dumps({"always": [{"pattern": "contract"}]}))
    options = ["--gate", "constant:never", "--rules", str(path)]
    found = CliRunner().invoke(app, ["decide", *options, "the contract", "it"])
    assert found.exit_code == 0
    assert "The rule always=" in found.output


@pytest.mark.parametrize(
    "text", ["", "[]", '{"always": "x"}', '{"sometimes": []}', '{"never": [{"pattern": "("}]}']
)
def test_a_file_that_holds_no_rules_is_a_typed_error(tmp_path, text):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(DataFormatError, match="rules"):
        Rules.read(path)


# --- in LangChain -----------------------------------------------------------------------------------------------


def test_rules_in_langchain_see_the_metadata_of_the_call():
    langchain = pytest.importorskip("rgate_integrations.langchain")
    gate = langchain.RetrievalGate(load_gate("constant:never", always=[CONTRACT, is_support]))
    assert gate.invoke("the contract?").retrieve is True
    assert gate.invoke("Who wrote Hamlet?").retrieve is False
    assert gate.invoke("Who wrote Hamlet?", {"metadata": {"channel": "support"}}).retrieve is True
