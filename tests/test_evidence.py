"""Evidence is computed once, shared, and fails one question at a time."""

import math
import re
from typing import ClassVar

import numpy as np
import pytest

from rgate_integrations import Draft, Gate, Request, load_gate
from rgate_integrations.engine.scoring import read_request
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates import Score
from rgate_integrations.gates.base import ScoreSpec
from rgate_integrations.gates.evidence import DraftSpec
from rgate_integrations.gates.evidence.base import Context, Evidence, Sources
from rgate_integrations.gates.papers.baselines import TokenProbabilityGate
from rgate_integrations.gates.papers.verdicts import IKGate
from tests.scripted_proxy import ScriptedProxy

QUESTIONS = ["who wrote hamlet?", "what is the capital of France?", "how deep is the sea?"]


def test_a_given_draft_is_used_as_it_is(scripted):
    given = Draft(text="Paris.", tokens=("Paris", "."), logprobs=(math.log(0.5), -0.01), source="llm")
    d = load_gate("token_probability", proxy=scripted).decide("capital of France?", draft=given)
    assert (d.p_known, d.draft, d.cost.model_calls) == (pytest.approx(0.5), given, 0)
    d = load_gate("token_probability", proxy=scripted).decide("who?", draft="no log-probabilities")
    assert (d.retrieve, d.error.type, d.cost.model_calls) == (True, "EvidenceError", 0)
    assert "no log-probabilities" in d.reason
    assert scripted.calls == []


def test_drafts_may_be_given_for_some_and_must_be_if_none_are_written(scripted):
    gate = load_gate("ik", proxy=scripted)
    found = gate.decide_batch([QUESTIONS[0], Request(QUESTIONS[1], draft="Paris"), QUESTIONS[2]])
    assert [d.draft.source for d in found] == ["proxy", "recorded", "proxy"]
    requests = [Request(*each) for each in zip(QUESTIONS, [(), (), ()], ["a", None, "c"], strict=True)]
    found = gate.with_options(source="recorded").decide_batch(requests)
    assert [(d.error is None, "recorded drafts" in d.reason) for d in found] == [
        (True, False),
        (False, True),
        (True, False),
    ]


class Llm:
    """Writes a draft for each question, or for the first few."""

    def __init__(self, most=None):
        self.asked, self.most = [], most

    def draft(self, questions, tokens):
        self.asked.append((list(questions), tokens))
        return [Draft(text=f"It is {q[:3]}", source="recorded") for q in questions[: self.most]]


def test_the_llm_writes_its_own_first_tokens(scripted):
    llm = Llm()
    gate = load_gate("ik", source="llm", tokens=16, proxy=scripted, llm=llm)
    assert [d.draft.source for d in gate.decide_batch(QUESTIONS)] == ["llm"] * 3
    assert llm.asked == [(QUESTIONS, 16)]
    assert "generate" not in scripted.calls
    silent = gate.with_options(llm=Llm(most=0)).decide("who?")
    assert "llm.draft() returned 0 drafts for 1 questions" in silent.reason
    without = load_gate("ik", source="llm", proxy=scripted).decide("who?")
    assert (without.error.type, "llm=" in without.error.hint) == ("EvidenceError", True)


def test_a_model_that_cannot_be_loaded_is_tried_once_not_once_a_question():
    tried = []

    def proxy(name):
        tried.append(name)
        raise ModelLoadError("no such model")

    asked = Context([Evidence(Request(q)) for q in QUESTIONS], Sources(proxy, None, {}))
    for _ in range(2):
        assert [str(error) for error in asked.find(DraftSpec())] == ["no such model"] * 3
    assert tried == [""]


class Both(Gate):
    """Looks at the scores of two gates that read the same draft."""

    gates: ClassVar = (TokenProbabilityGate(tokens=32), IKGate(tokens=32))

    @property
    def specs(self):
        return tuple(ScoreSpec(gate) for gate in self.gates)

    def score(self, evidence):
        return Score(min(evidence[spec].p_known for spec in self.specs), "the lower one")


def test_shared_evidence_is_paid_for_once(scripted):
    draft, judged, both = (
        load_gate(gate, proxy=scripted).decide("who?").cost for gate in ("token_probability", "ik", Both())
    )
    assert (draft.model_calls, judged.model_calls) == (1, 2)
    assert both.model_copy(update={"milliseconds": 0}) == judged.model_copy(update={"milliseconds": 0})


def test_gates_that_read_nothing_load_no_model_for_a_long_question():
    d = load_gate("popularity", proxy="/no/such/folder").decide("why " * 600, popularity=3000)
    assert (d.error, d.p_known) == (None, 0.75)


LOG = "\n".join(f"line {i} of the log says that all is well" for i in range(2_000))
ASKED = "When is my bill due?"


@pytest.mark.parametrize(
    "text",
    [f"{ASKED}\n{LOG}", f"{LOG[:40_000]}\n{ASKED}\n{LOG[40_000:]}", f"{LOG}\n{ASKED}"],
    ids=["first", "middle", "last"],
)
def test_of_a_long_request_what_asks_is_read_wherever_it_stands(text):
    read = read_request(Request(text))
    assert (ASKED in read.question, read.truncated, read.leaves_out) == (True, True, False)
    assert len(read.question) <= 1_800 + len(ASKED)
    whole = Request(" ".join(f"Is {i} due?" for i in range(200)))
    assert read_request(whole) == Evidence(whole)


def test_popularity_is_at_one_half_at_the_cutoff_and_numbers_of_arrays_are_numbers_too():
    columns = np.array([[1000.0, 3000.0, 0.0], [0.4, 0.9, 0.1]]).T
    requests = []
    for question, (popularity, threshold) in zip(QUESTIONS, columns, strict=True):
        requests.append(Request(question, popularity=popularity, threshold=threshold))
    found = load_gate("popularity").decide_batch(requests)
    assert [(d.p_known, d.retrieve) for d in found] == [(0.5, False), (0.75, True), (0.0, True)]


class Brief(ScriptedProxy):
    """Refuses longer texts, which it is given to cut or to read."""

    def truncate(self, text, tokens):
        assert len(text) <= 32 * 32
        return text[: tokens * 4] if len(text) > tokens * 4 else None

    def score(self, prompt, values, targets, *, adapter=None):
        assert max(len(each["draft"]) for each in values) <= 32 * 32
        return super().score(prompt, values, targets, adapter=adapter)


@pytest.mark.parametrize(
    "draft",
    [
        Draft(text="x" * 320_000),
        Draft(text="x" * 320_000, logprobs=(-0.1,) * 32),
        Draft(text="x" * 12_800, tokens=("x" * 400,) * 32, logprobs=(-0.1,) * 32),
        Draft(text="x" * 320_000, tokens=("x",), logprobs=(-0.1,)),
    ],
    ids=["one word", "with log-probabilities", "long tokens", "tokens that are not its own"],
)
def test_a_draft_is_cut_before_any_of_it_is_encoded(draft):
    """Regression: tokens of 400 characters took 32 s and held up all other callers, and longer ones 14 GB."""
    decision = load_gate("ik", proxy=Brief(), on_error="raise").decide("who?", draft=draft)
    assert len(decision.draft.text) <= 32 * 32
    assert not decision.draft.finished


PARAGRAPH = "The mill stands by the bridge. The road is closed in winter."
PROSE = "\n\n".join([PARAGRAPH] * 600)


@pytest.mark.parametrize(
    ("between", "leaves_out"),
    [
        ("our refund policy", False),
        ("- what is our refund policy\nThe mill stands.", False),
        ("> can you check our limit\nThe mill stands.", False),
        ("2) who signs it\nThe mill stands.", False),
        ("The mill stands.\n(By the way: is it due?)", False),
        ("The mill stands.\nShe asks: “Is it due?”.", False),
        ("The mill stands.\n“Is it due”, she asks.", False),
        ("The mill stands.\nΠότε λήγει ο λογαριασμός;", False),
        (" ".join([ASKED] * 200), True),
        ("\n\n".join(["our refund policy"] * 200), True),
    ],
    ids=[
        "a paragraph of its own",
        "an item",
        "a quote",
        "a number",
        "in brackets",
        "quoted",
        "begins with a quotation",
        "Greek",
        "too many questions",
        "too many paragraphs",
    ],
)
def test_what_may_ask_and_is_not_read_is_never_skipped_for(scripted, between, leaves_out):
    text = f"{PROSE}\n\n{between}\n\n{PROSE}"
    read = read_request(Request(text))
    asked = between.removeprefix("The mill stands.\n")[:17]
    assert (asked in read.question, read.leaves_out) == (True, leaves_out)
    decision = load_gate(Sure(), proxy=scripted).decide(text)
    assert (decision.retrieve, decision.p_known) == (leaves_out, 1.0)
    assert decision.warnings[0].endswith(f" of {len(text):,} characters were read.")


def test_of_a_long_text_in_an_earlier_message_all_characters_are_counted(scripted):
    """Regression: "Only 1,136 of 31 characters were read", of which the 31 were the last message's."""
    asked = Request("Summarise that in one sentence.", history=(f"user: {PROSE * 20}",))
    (warning,) = load_gate(SureOfChats(), proxy=scripted).decide_batch([asked])[0].warnings
    read, whole = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d", warning))
    assert read < whole > len(PROSE * 20)


class Sure(Gate):
    """Knows everything that a model reads."""

    @property
    def specs(self):
        return (DraftSpec(),)

    def score(self, evidence):
        return Score(1.0, "sure")


class SureOfChats(Sure):
    """Reads the earlier turns, too."""

    reads_history: ClassVar[bool] = True
