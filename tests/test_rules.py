"""Rules of the user's own: what they catch, what they say, and that they cost no pass of their own."""

import json
import pickle
import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from langchain_core.load import dumpd, load
from llama_index.core.llms import MockLLM
from typer.testing import CliRunner

from rgate_integrations import LookFirst, Override, Request, load_gate
from rgate_integrations.cli import app
from rgate_integrations.engine import decision_engine
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates import rules as rules_module
from rgate_integrations.gates.rules import ALIKE, Rules
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from rgate_integrations.models.encoder import ENCODER
from tests.begun_answers import COVERED, Shelf, Writer
from tests.langchain_fakes import Judge
from tests.llama_index_parts import Rag, both_ways
from tests.scripted_proxy import ScriptedProxy

CONTRACT = re.compile("contracts?", re.IGNORECASE)
ASKED = "Who signed the Contract?"
ABSTAINS = LookFirst(model=COVERED, on_abstain="direct", abstain_below=1.0)


def is_support(question, metadata):
    return metadata.get("channel") == "support"


@pytest.mark.parametrize(
    ("name", "rules", "retrieve"),
    [
        ("constant:never", {"always": CONTRACT}, True),
        ("constant:always", {"never": [CONTRACT]}, False),
        ("constant:never", {"always": [CONTRACT], "never": [CONTRACT]}, True),
    ],
)
def test_a_pattern_decides_before_the_gate_and_says_so(name, rules, retrieve):
    gate = load_gate(name, **rules)
    found = gate.decide(ASKED)
    assert (found.retrieve, found.p_known, found.gate) == (retrieve, float(not retrieve), "constant")
    assert found.reason == f"A rule in {next(iter(rules))}= matches: the pattern 'contracts?'."
    assert found.override == Override(retrieve=retrieve, reason=found.reason)
    for threshold in (0.0, 1.5):
        assert gate.decide(ASKED, threshold=threshold).retrieve is retrieve
    assert gate.decide("Who wrote Hamlet?").reason.startswith("This gate")


def test_a_function_sees_the_question_and_its_metadata_and_retrieves_where_it_fails():
    gate = load_gate("constant:never", always=is_support)
    channels = [{"channel": "support"}, {"channel": "web"}, None]
    found = gate.decide_batch([Request("Who wrote Hamlet?", metadata=each) for each in channels])
    assert [decision.retrieve for decision in found] == [True, False, False]
    assert "is_support returned true" in found[0].reason
    brief = load_gate("constant:always", never=lambda question: len(question) < 8)
    assert [brief.decide(question).retrieve for question in ("thanks", "Who wrote Hamlet?")] == [False, True]
    leaves = load_gate("constant:never", never=sys.exit).decide("Who wrote Hamlet?")
    assert leaves.override.retrieve
    assert "SystemExit: Who wrote Hamlet?" in leaves.warnings[0]
    fails = load_gate("constant:never", never=lambda question: 1 / 0)
    failed = fails.decide("Who wrote Hamlet?", threshold=0.0)
    reason = "A function in never= failed, so the gate retrieves: ZeroDivisionError: division by zero"
    assert (failed.retrieve, failed.warnings) == (True, (reason,))


async def answers_later(question):
    return question == "hi"


@pytest.mark.parametrize(
    "rules",
    [
        [3],
        ["  "],
        [None],
        [["nested"]],
        [answers_later],
        [partial(answers_later)],
        [lambda: True],
        [lambda question, meta: True],
        # Regression: these were accepted. The first failed at each question, and the second matched each.
        [re.compile(b"contract")],
        [re.compile("")],
    ],
)
def test_what_is_no_rule_is_refused_at_once(rules):
    with pytest.raises(ConfigurationError, match="always="):
        load_gate("constant:always", always=rules)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    "rule",
    [
        lambda question: answers_later(question),
        lambda question: (word in question for word in ("a", "b")),
        lambda question: filter(question.startswith, ("a", "b")),
    ],
)
def test_a_result_that_is_no_answer_yet_counts_as_a_failure(rule):
    """Regression: it is true whatever it would yield, so each question was skipped."""
    decision = load_gate("constant:never", never=rule).decide(ASKED)
    assert (decision.retrieve, "failed" in decision.reason) == (True, True)


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (lambda question, words=("Contract", "lease"): any(word in question for word in words), True),
        (lambda question, *words: not words, True),
        (re.compile("who", re.IGNORECASE).search, True),
        ("contract".__contains__, False),
        (ASKED.__eq__, True),
        (partial(is_support), False),
        (lambda question, metadata=(): "channel" in metadata, True),
    ],
)
def test_metadata_goes_only_to_a_function_that_wants_it(rule, matches):
    """Regression: it took the place of a second argument's default, and no word of the question was in it."""
    decision = load_gate("constant:never", always=rule).decide(ASKED, metadata={"channel": "web"})
    assert (decision.retrieve, decision.warnings) == (matches, ())


# --- examples ---------------------------------------------------------------------------------------------------


class Directions(ScriptedProxy):
    """A model with one direction for each first word of a question; it counts the questions that it reads."""

    name = ENCODER

    def __init__(self):
        super().__init__()
        self.read = []

    def hidden(self, prompt, values, drafts, layers):
        self.read += [each["question"] for each in values]
        states = []
        for given, found in zip(values, super().hidden(prompt, values, drafts, layers), strict=True):
            row = np.eye(4)[["Translate", "Which", "Unlike"].index(given["question"].split()[0])]
            states.append(replace(found, states=np.tile(row, (len(layers), 1))))
        return states


@pytest.fixture(autouse=True)
def plain_directions(request, monkeypatch):
    if "model" not in request.keywords:
        monkeypatch.setattr(rules_module, "known_directions", lambda: (np.zeros(4), np.eye(4)))


def test_what_is_like_an_example_is_decided_by_its_rule_and_what_cannot_be_compared_retrieves():
    proxy = Directions()
    gate = load_gate("constant:always", proxy=proxy, never=["Translate it."], always=["Which clause?"])
    decision = gate.decide("Translate the letter.")
    assert (decision.retrieve, decision.p_known) == (False, 1.0)
    assert decision.reason == "A rule in never= matches: the example “Translate it.” (cosine 1.00)."
    read = proxy.read.count("Which clause?")
    assert gate.decide("Which page?").reason.startswith(
        "A rule in always= matches: the example “Which clause?”"
    )
    assert gate.decide("Unlike both?").retrieve is True
    assert gate.decide("Translate it. Which page?").reason.startswith("A rule in always=")
    assert gate.decide("Translate it. Unlike that.").retrieve is True, "each part has to be like the example"
    assert proxy.read.count("Which clause?") == read, "the examples are read once"
    failed = gate.decide("no such word")
    assert (failed.retrieve, failed.error.type) == (True, "ValueError")


def test_an_example_of_always_wins_over_a_pattern_of_never():
    """Regression: the pattern decided first, so the request skipped."""
    proxy = Directions()
    gate = load_gate(
        "constant:never", proxy=proxy, always=["Which clause?"], never=[re.compile("page|letter")]
    )
    retrieved, skipped = gate.decide_batch(["Which page?", "Translate the letter."])
    assert (retrieved.retrieve, skipped.retrieve) == (True, False)
    assert skipped.reason == "A rule in never= matches: the pattern 'page|letter'."
    assert retrieved.reason.startswith("A rule in always= matches: the example “Which clause?”")


def test_a_gate_on_another_model_asks_the_encoder(monkeypatch):
    encoder = Directions()
    monkeypatch.setattr(decision_engine, "gate_proxy", {ENCODER: encoder}.__getitem__)
    gate = load_gate("constant:never", proxy="another model", always=["Which clause?"])
    assert gate.decide("Which page?").retrieve is True
    assert set(encoder.read) == {"Which clause?", "Which page?"}


@pytest.mark.model
def test_an_example_catches_what_says_the_same_in_one_pass():
    rules = ["How can a customer ask for the deletion of their data?", "Who is our data protection officer?"]
    gate = load_gate(always=rules, never=["Make up a fairy tale about a princess who cannot sleep."])
    asked = {
        "A customer wants his data deleted, what is the procedure?": 0.0,
        "Who is responsible for privacy?": 0.0,
        "Tell a fairy story about a sleepless princess.": 1.0,
        "What is the capital of France?": load_gate().decide("What is the capital of France?").p_known,
    }
    gate.decide("The examples are read with the first question.")
    found = gate.decide_batch(list(asked))
    assert [each.p_known for each in found] == list(asked.values())
    assert [each.cost.model_calls for each in found] == [1] * 4, "rules and gate share the pass"


@pytest.mark.model
def test_an_example_does_not_match_another_request_for_its_language():
    """Regression: outside English, most requests resembled each other; "Where is my parcel?" matched a joke."""
    jokes = ["Kennst du einen Witz?", "احك لي نكتة", "冗談を言って", "Opowiedz mi dowcip"]
    gate = load_gate(never=jokes)
    private = [
        "Welche Passwortregel gilt in unserer Firma?",
        "كم رصيدي؟",
        "私の荷物はどこですか？",
        "Gdzie jest moja paczka?",
    ]
    assert all(decision.retrieve for decision in gate.decide_batch(private))
    same = [
        "Weißt du einen Witz?",
        "هل لديك نكتة أخرى لي؟",
        "面白い冗談を聞かせて",
        "Opowiedz dobry dowcip",
        "Tell me a joke",
    ]
    assert all(decision.override for decision in gate.decide_batch(same))


@pytest.mark.model
@pytest.mark.parametrize(
    ("question", "retrieve"),
    [
        ("Tell me a joke, please.", False),
        ("Tell me a joke about cats and dogs!", False),
        ("Tell me a joke - a short one", False),
        ("Tell me a joke, and what does our contract with Kessler say?", True),
        ("Hi! Tell me a joke\nTell me a joke and then tell me my colleague's phone number", True),
        ("Tell me a joke (what does our contract with Kessler say?)", True),
        ("I want to hear a joke - and who is our contact at Kessler?", True),
        ("Tell me a joke but first what does our contract with Kessler say about delays", True),
        ("Erzähl mir einen Witz und sag mir, was unser Vertrag mit Kessler sagt", True),
    ],
)
def test_an_example_of_never_is_not_like_what_a_sentence_joins_to_it(question, retrieve):
    """Regression: the second request in a sentence was skipped with the first."""
    never = [
        "Tell me a joke",
        "Do you know a joke?",
        "Make me laugh",
        "Say something funny",
        "I want to hear a joke",
    ]
    assert load_gate(never=never, on_error="raise").decide(question).retrieve == retrieve


# --- written and carried --------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_rule_for_a_question_that_retrieves_holds_for_its_retry_too():
    """Regression: only examples did, not patterns and functions."""
    hamlet = re.compile("Hamlet")
    for rule in (hamlet, lambda question: "Hamlet" in question):
        gate = load_gate(always=rule, llm_name="gpt-4o")
        assert gate.decide("Try again.", history=["user: Who wrote Hamlet?", "assistant: Marlowe."]).override
    offer = ["user: Hello!", "assistant: Shall I recite from Hamlet?"]
    question = "No. What does our contract say about delays?"
    assert load_gate(never=hamlet, llm_name="gpt-4o").decide(question, history=offer).retrieve


def test_rules_stay_with_a_changed_engine_and_a_pickled_one():
    gate = load_gate("constant:never", always=[CONTRACT])
    for other in (gate.with_options(threshold=0.3), pickle.loads(pickle.dumps(gate))):  # noqa: S301
        assert other.decide(ASKED).retrieve is True
    assert gate.with_options(always=()).decide(ASKED).retrieve is False


@pytest.mark.parametrize("name", ["always", "never"])
@pytest.mark.parametrize("threshold", [None, 0.0, 9.0])
@pytest.mark.parametrize("answer_first", [False, True], ids=["", "answer first"])
@pytest.mark.parametrize("look_first", [False, ABSTAINS], ids=["", "look first"])
def test_a_rule_decides_in_a_router_whatever_is_found_or_begun(name, threshold, answer_first, look_first):
    gate = RetrievalGate(load_gate("answer:default,default-answer"), **{name: CONTRACT})
    options = {"answer_first": answer_first, "look_first": look_first}
    router = gate.route(
        retrieve=Shelf() | (lambda _: "searched"), direct=Writer() | (lambda _: "answered"), **options
    )
    config = {"configurable": {"retrieval_threshold": threshold}}
    assert router.invoke(ASKED, config) == ("searched" if name == "always" else "answered")


def test_langchain_takes_rules_and_keeps_them():
    gate = RetrievalGate("constant:never", always=["Which clause?", CONTRACT])
    assert gate.for_llm("gpt-4o").invoke(ASKED).override.retrieve
    replaced = RetrievalGate(gate.gate, always=re.compile("lease"), never=CONTRACT)
    assert replaced.invoke(ASKED).retrieve is False
    examples = RetrievalGate("constant:never", always=["Which clause?"])
    again = load(dumpd(examples), allowed_objects=[RetrievalGate], valid_namespaces=["rgate_integrations"])
    assert again.gate.rules == examples.gate.rules


@pytest.mark.parametrize("make", [RetrievalGate, partial(GatedQueryEngine, Rag(), Rag())])
def test_what_takes_no_rules_or_is_none_is_refused(make):
    with pytest.raises(ConfigurationError, match="accepts no rules"):
        make(Judge(), always=CONTRACT)
    for no_rule in (3, False):
        with pytest.raises(ConfigurationError, match="must be an example"):
            make("constant:never", never=no_rule)
    with pytest.raises(TypeError, match="alwyas"):
        make("constant:never", alwyas=CONTRACT)


@both_ways
def test_llama_index_takes_rules(call):
    engine = GatedQueryEngine.from_defaults(
        Rag(), "constant:never", MockLLM(), always=CONTRACT, never="a joke"
    )
    assert str(call(engine, "query", ASKED)) == f"read about {ASKED}"
    assert engine.decider.gate.rules.never == ("a joke",)
    assert call(engine.with_threshold(0.0), "query", ASKED).metadata["rgate"]["override"]["retrieve"]


def test_rules_of_a_file(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"always": ["Which clause?", {"pattern": "(?i)contract"}]}))
    rules = Rules.read(path)
    assert rules.always == ("Which clause?", re.compile("(?i)contract"))
    (likeness,) = rules.likeness_for(load_gate().gate)
    assert likeness.compare(np.array([[ALIKE - 0.01]])) is None
    path.write_text(json.dumps({"always": [{"pattern": "contract"}]}))
    options = ["--gate", "constant:never", "--rules", str(path)]
    found = CliRunner().invoke(app, ["decide", *options, "the contract", "it"])
    assert (found.exit_code, "A rule in always=" in found.output) == (0, True)


def test_rules_in_langchain_see_the_metadata_of_the_call():
    gate = RetrievalGate(load_gate("constant:never", always=[CONTRACT, is_support]))
    assert gate.invoke("Who wrote Hamlet?").retrieve is False
    assert gate.invoke("Who wrote Hamlet?", {"metadata": {"channel": "support"}}).retrieve is True


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "rules") for text in ("", "[]", '{"always": "x"}', '{"sometimes": []}', '{"never": [{}]}')),
        ('{"alway": []}', r"read: alway.*should be 'always' or 'never'\. Hint"),
        ('{"never": ["x", {"patern": "x"}]}', r"never\.1\.pattern\.patern.*'pattern'\. Hint"),
        ('{"never": ["x", {"pattern": "("}]}', r"never\.1.*should be a valid regular expression\. Hint"),
    ],
)
def test_one_problem_of_a_file_that_holds_no_rules_is_named(tmp_path, text, why):
    """Regression: pydantic's dump, which began with the wrong one."""
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(DataFormatError, match=why):
        Rules.read(tmp_path / "rules.json")
