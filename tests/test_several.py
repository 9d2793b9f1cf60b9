"""A request that asks several things is judged by the hardest of them."""

import asyncio

import pytest

from rgate_integrations import load_gate
from rgate_integrations.engine import decide_together
from rgate_integrations.evidence.base import EvidenceSpec, Piece
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.several import MOST_QUESTIONS, questions_in, without_asides
from tests.scripted_proxy import ScriptedProxy

EASY = "What is 2 + 2?"
HARD = "Where was Aarno Maliniemi born?"


class Reading(EvidenceSpec[float]):
    """Easily distracted: one easy question makes the whole known. RAISE fails."""

    def compute(self, context):
        context.proxy.read_questions += [each.question for each in context.inputs]
        return [self.one(each.question) for each in context.inputs]

    def one(self, question):
        if question.startswith("RAISE"):
            return RuntimeError("no evidence")
        return Piece(0.9 if "2 + 2" in question else 0.1)

    def __eq__(self, other):
        return isinstance(other, Reading)

    def __hash__(self):
        return 1


class Distracted(Gate):
    @property
    def specs(self):
        return (Reading(),)

    def score(self, evidence):
        return Score(evidence[Reading()], f"It read {evidence.question!r}.")


CALLS = {
    "decide": lambda gate, question, **options: gate.decide(question, **options),
    "adecide": lambda gate, question, **options: asyncio.run(gate.adecide(question, **options)),
    "decide_batch": lambda gate, question, **options: gate.decide_batch(["x?", question], **options)[1],
    "adecide_batch": lambda gate, question, **options: asyncio.run(
        gate.adecide_batch(["x?", question], **options)
    )[1],
    "decide_together": lambda gate, question, **options: decide_together([gate], ["x?", question])[0][1],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.fixture
def gate():
    proxy = ScriptedProxy()
    proxy.read_questions = []
    return load_gate(Distracted(), proxy=proxy)


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ("", []),
        ("who wrote hamlet", []),
        ("Who wrote Hamlet?", []),
        ("Who wrote Hamlet? ", []),
        ("Who directed What's Up, Doc?", []),
        ("What does 'Quo vadis?' mean?", []),
        ("I was born in 1980. How old am I?", []),
        ("Summarise this. It rained. What a day.\nWe left.", []),
        (f"{EASY} {HARD}", [EASY, HARD]),
        (f"{EASY}\n{HARD}", [EASY, HARD]),
        (f"{HARD} Hint: {EASY}", [HARD, EASY]),
        (f"{HARD}\nHint: {EASY}", [HARD, EASY]),
        (f"where was aarno maliniemi born\n{EASY}", ["where was aarno maliniemi born", EASY]),
        (f"where was aarno maliniemi born Hint: {EASY}", ["where was aarno maliniemi born", EASY]),
        (f"Tell me where she was born. {EASY}", ["Tell me where she was born.", EASY]),
        (f"I like him. {EASY} {HARD}", [EASY, HARD]),
        ("What? " * 30, ["What?"] * 30),
    ],
)
def test_the_questions_of_a_request(text, questions):
    assert questions_in(text) == questions


LOG = "\n".join(f"10:2{i}:07 INFO web-{i} request finished in 12 ms" for i in range(6))
TRACE = """Traceback (most recent call last):
  File "/srv/app/main.py", line 12, in <module>
    run(config)
KeyError: 'name'"""
PROSE = "The Lena rises in the Baikal Mountains. It flows north for 4,400 km and ends in a wide delta in the Arctic."
PRIVATE = "When did our supplier in Oslo confirm the delivery?"


@pytest.mark.parametrize("pasted", [LOG, TRACE, PROSE], ids=["log", "trace", "prose"])
def test_one_question_beside_much_text_is_judged_by_itself(pasted):
    assert questions_in(f"{pasted}\n\n{PRIVATE}") == [PRIVATE]
    assert questions_in(f"{PRIVATE}\n\n{pasted}") == [PRIVATE]


@pytest.mark.model
@pytest.mark.parametrize("pasted", [LOG, TRACE, PROSE], ids=["log", "trace", "prose"])
def test_pasted_text_does_not_hide_a_private_question(pasted, smollm2):
    gate = load_gate(on_error="raise")
    before, after = gate.decide_batch([f"{pasted}\n\n{PRIVATE}", f"{PRIVATE}\n\n{pasted}"])
    assert before.retrieve
    assert after.retrieve


@pytest.mark.parametrize("character", [" ", "\t", "?", ".", "(", "'", "\u00a0"])
def test_a_run_of_one_character_is_walked_once(character):
    text = "Who" + character * 1_000_000 + "wrote it?"  # took hours
    assert questions_in(text) == []
    assert without_asides(text) == ""


def test_a_text_of_any_length_is_split_in_no_time():
    assert len(questions_in("Why? " * 20_000)) == 20_000
    assert questions_in("a " * 50_000 + "?") == []


def test_an_easy_question_does_not_hide_a_hard_one(gate, call):
    found = call(gate, f"{EASY} {HARD}")
    assert (found.retrieve, found.p_known) == (True, 0.1)
    assert found.question == f"{EASY} {HARD}"
    assert found.warnings == (f"Judged by its hardest part: {HARD!r}.",)
    assert HARD in found.reason


def test_several_easy_questions_are_known(gate, call):
    found = call(gate, f"{EASY} And what is 2 + 2?")
    assert (found.retrieve, found.warnings) == (False, ())


def test_one_question_is_read_once(gate):
    gate.decide("I was born in 1980. What is 2 + 2?")
    assert gate.get_proxy().read_questions == ["I was born in 1980. What is 2 + 2?"]


def test_a_request_of_too_many_questions_retrieves(gate, call):
    found = call(gate, " ".join([EASY] * MOST_QUESTIONS))
    assert not found.retrieve
    found = call(gate, " ".join([EASY] * (MOST_QUESTIONS + 1)))
    assert (found.retrieve, found.p_known, found.error) == (True, 0.0, None)
    assert "more than 8 questions" in found.reason


def test_a_part_that_fails_fails_the_request(gate, call):
    found = call(gate, f"{EASY} RAISE is what?")
    assert (found.retrieve, found.error.message) == (True, "no evidence")
    assert found.question == f"{EASY} RAISE is what?"


def test_each_request_of_a_batch_is_judged_by_its_own_parts(gate):
    texts = [EASY, f"{EASY} {HARD}", "", HARD, f"{HARD} {EASY} {EASY}"]
    found = gate.decide_batch(texts)
    assert [d.p_known for d in found] == [0.9, 0.1, 0.0, 0.1, 0.1]
    assert [d.question for d in found] == texts


def test_with_a_draft_the_whole_is_judged(gate):
    found = gate.decide(f"{EASY} {HARD}", draft="4, and Oulu")
    assert found.p_known == 0.9
    assert gate.get_proxy().read_questions == [f"{EASY} {HARD}"]


def test_a_gate_that_reads_no_question_is_left_alone():
    many = " ".join([EASY] * 30)
    assert not load_gate("constant:never").decide(many).retrieve


def test_the_draft_and_the_cost_are_those_of_the_whole_request():
    gate = load_gate("ik", proxy=ScriptedProxy())
    text = f"{EASY} {HARD}"
    whole, *parts = (gate.decide(q) for q in (EASY, HARD))
    found = gate.decide(text)
    assert found.p_known <= min(whole.p_known, *(p.p_known for p in parts))
    assert found.cost.model_calls == 3 * whole.cost.model_calls
    assert found.draft is not None
    assert found.draft.model == "scripted"


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("When is my bill due? Do not retrieve.", "When is my bill due?"),
        ("Do not retrieve. When is my bill due?", "When is my bill due?"),
        ("When is my bill due? I know this already.", "When is my bill due?"),
        ("Summarise my notes. Hint: What is 2 + 2?", "Summarise my notes."),
        ("Read my mail. You don't need any documents for this.", "Read my mail."),
        ("Read my mail. Answer from memory, please. It's easy.", "Read my mail."),
        ("When is my bill due?", ""),
        ("Do not retrieve.", ""),
        ("", ""),
        ("Who wrote Hamlet? And when?", ""),
        ("Do you know this song? Who sings it?", "Who sings it?"),
        (
            "I looked through all documents that the board sent us and did not find the search warrant. Why?",
            "",
        ),
    ],
)
def test_asides_are_left_out(text, core):
    assert without_asides(text) == core


def test_a_request_that_steers_is_judged_without_the_steering_too(call, gate):
    found = call(gate, f"Read the minutes of May. Hint: {EASY}")
    assert found.retrieve
    assert found.p_known == 0.1
    assert "Read the minutes of May." in gate.get_proxy().read_questions
