"""The engine: nothing that a caller gives can stop it, and whatever fails retrieves."""

import pickle
import shutil
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest

from rgate_integrations import Decision, Draft, Gate, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.engine.follow_ups import UNREAD
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.gates import Score
from rgate_integrations.gates.evidence.base import EvidenceSpec, Piece
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.index.retriever import check_k
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.tuning import Budget, calibrate
from rgate_integrations.tuning.questions import DataFile, Example, Question
from tests.saved_gates import PROBE
from tests.scripted_proxy import ScriptedProxy


class Unprintable:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


# --- what callers give -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [float("nan"), -0.1, float("inf"), "high", True, object()], ids=type)
def test_a_bad_threshold_is_refused_when_it_is_given_and_harms_nobody(scripted, call, threshold):
    gate = load_gate("prompt", proxy=scripted)
    with pytest.raises(ConfigurationError, match="threshold must be a number"):
        call(gate, "who?", threshold=threshold)
    with pytest.raises(ConfigurationError, match="threshold must be a number"):
        gate.decide_batch(["who?", "what?"], threshold=[0.5, threshold])
    assert scripted.calls == [], "it never reached the worker"


def test_true_is_no_number(scripted):
    with pytest.raises(ConfigurationError, match="threshold"):
        load_gate("ik", threshold=True)
    with pytest.raises(ValueError, match="a threshold is a number"):
        Decision(question="who?", retrieve=True, p_known=0.2, threshold=True)
    with pytest.raises(ValueError, match="a threshold is a number"):
        RetrievalGate("constant:never", threshold=True)
    with pytest.raises(ConfigurationError, match="not a bool"):
        RetrievalGate("constant:never").invoke("who?", {"configurable": {"retrieval_threshold": True}})
    with pytest.raises(ConfigurationError, match="timeout"):
        load_gate("ik", proxy=scripted, timeout=True)
    for make in (
        lambda: AnswerFirst(retrieve_below=True),
        lambda: AnswerFirst(answer_above=float("nan")),
        lambda: LookFirst(min_gain=True),
        lambda: check_k(True),
    ):
        with pytest.raises(ConfigurationError):
            make()


@pytest.mark.parametrize(("threshold", "turned"), [(0.5, False), (0.0, True), (None, False)])
def test_a_reason_says_so_if_the_threshold_of_the_call_turns_the_decision(threshold, turned):
    found = load_gate("constant:always").decide("who?", threshold=threshold)
    assert found.retrieve is not turned
    own = "This gate always retrieves."
    assert found.reason == own + turned * " But P(known) is 0.00, and the caller's threshold 0.00."


def test_so_does_that_of_a_gate_that_takes_no_threshold():
    config = {"configurable": {"retrieval_threshold": 0.2}}
    found = RetrievalGate(OnlyQuestions()).invoke("Who wrote Hamlet?", config)
    assert found.retrieve is False
    assert found.reason == "Unknown. But P(known) is 0.30, and the caller's threshold 0.20."


class OnlyQuestions:
    """A gate of the user's own that takes no threshold."""

    def decide_batch(self, questions):
        return [Decision(question=each, retrieve=True, p_known=0.3, reason="Unknown.") for each in questions]

    async def adecide_batch(self, questions):
        return self.decide_batch(questions)


def test_each_question_may_have_its_own_threshold(scripted):
    gate = load_gate("constant:random", proxy=scripted)
    found = gate.decide_batch(["a?", "a?", "a?"], threshold=[0.0, None, 1.5])
    assert [(d.threshold, d.retrieve) for d in found] == [
        (0.0, False),
        (0.5, found[1].p_known < 0.5),
        (1.5, True),
    ]
    assert [d.threshold for d in gate.decide_batch(["a?", "b?"], threshold=0.3)] == [0.3, 0.3]


@pytest.mark.parametrize(
    "question", [None, 5, b"who?", "", " \n\t", "who\0", ["who?"], Unprintable()], ids=type
)
def test_what_is_no_question_is_refused_and_harms_nobody(scripted, call, question):
    gate = load_gate("prompt", proxy=scripted)
    with pytest.raises(InvalidQuestionError) as caught:
        call(gate, question)
    assert caught.value.hint
    bad, good = gate.decide_batch([question, "who?"])
    assert (bad.retrieve, bad.error.type, good.error) == (True, "InvalidQuestionError", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drafts", 5),
        ("drafts", Unprintable()),
        ("popularity", "much"),
        ("popularity", 10**400),
        ("metadata", "a text"),
        ("histories", "user: Who?"),
        ("histories", [3]),
        ("histories", [("user", "Who?")]),
    ],
)
def test_what_is_no_evidence_is_an_error_of_its_question(scripted, name, value):
    gate = load_gate("ik", proxy=scripted)
    bad, good = gate.decide_batch(["who?", "what?"], **{name: [value, None]})
    assert (bad.retrieve, bad.error.type, good.error) == (True, "EvidenceError", None)
    with pytest.raises(ConfigurationError, match="2 questions do not match 1"):
        gate.decide_batch(["who?", "what?"], **{name: [value]})


def test_lone_surrogates_do_not_break_json(scripted):
    decision = load_gate("ik", proxy=scripted).decide("who is \ud800 here?")
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


@pytest.mark.parametrize(
    ("misuse", "why"),
    [
        (lambda gate: load_gate("prompt", on_error="ignore"), "on_error"),
        (lambda gate: gate.with_options(tokenz=3), "cannot take tokenz"),
        (lambda gate: gate.decide_batch("one string"), "list of questions"),
    ],
)
def test_options_of_the_engine_are_checked(misuse, why):
    with pytest.raises(ConfigurationError, match=why):
        misuse(load_gate("ik"))


def test_a_thread_that_cannot_be_started_fails_its_call_and_no_later_one(scripted, monkeypatch, call):
    gate = load_gate("prompt", proxy=scripted)
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "rgate-batcher":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        first = call(gate, "who?")
    assert (first.retrieve, first.error.message) == (True, "can't start new thread")
    assert call(gate, "who?").error is None


of_weights = partial(ScriptedProxy, None)

# --- gates that were made for a model --------------------------------------------------------------------------


@pytest.fixture(params=[0, 8])
def probe(request, tmp_path):
    """A probe that finds everything known: of the question, or of question and draft."""
    artifact = replace(PROBE, bias=9.0, tokens=request.param, fingerprint="its own")
    return str(save_gate(artifact, tmp_path / "probe"))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_wrapped_probe_checks_the_model_whose_states_it_was_given(probe, depth):
    """The inner gate asked its own proxy for a fingerprint, so a foreign model skipped silently."""
    gate = load_gate(probe).gate
    for _ in range(depth):
        gate = load_gate("calibrated", inner=gate).gate
    assert (gate.threshold, gate.proxy) == (0.4, "scripted"), "those of the inner gate"
    weights = ("its own", "another", "")
    own, foreign, unknown = (load_gate(gate, proxy=of_weights(each)).decide("who?") for each in weights)
    assert (own.error, own.retrieve, own.warnings) == (None, False, ())
    assert (foreign.retrieve, foreign.error.type) == (True, "ModelLoadError")
    assert "has the weights another" in foreign.reason
    assert (unknown.error, unknown.retrieve, len(unknown.warnings)) == (None, False, 1)
    assert "'scripted' is the model" in unknown.warnings[0]


@pytest.mark.parametrize("inner", ["prompt", "ik", "token_probability"])
def test_a_calibrated_gate_refuses_another_model_than_it_was_calibrated_with(inner):
    gate = load_gate("calibrated", inner=inner, fingerprint="its own", proxy=of_weights("its own"))
    another = gate.with_options(proxy=of_weights("another"))
    own, foreign = gate.decide("who?"), another.decide("who?")
    assert (own.error, own.warnings) == (None, ())
    assert (foreign.retrieve, foreign.error.type) == (True, "ModelLoadError")
    assert "cannot be checked" in gate.with_options(proxy=of_weights("")).decide("who?").warnings[0]
    read = another.decide("who?", draft=Draft(text="a", tokens=("a",), logprobs=(-0.1,)))
    assert (read.error is None) == (inner == "token_probability"), "then no model has read anything"


def test_calibration_stores_the_model_that_made_the_evidence():
    rows = [Example(Question(f"question {i}?"), float(i % 2 == 0), True) for i in range(60)]
    questions = [DataFile("x", "0" * 64, tuple(rows))]
    found = calibrate(load_gate("prompt", proxy=of_weights("its own")), questions, Budget(0.9), method="none")
    assert found.gate.gate.fingerprint == "its own"
    assert found.gate.decide("who?").error is None
    without = calibrate(load_gate("constant:always"), questions, Budget(1.0), method="none")
    assert without.gate.gate.fingerprint == ""


def test_a_gate_reads_its_artefact_once_when_it_is_made(probe):
    gate = load_gate(probe, proxy=of_weights("its own"))
    shutil.rmtree(probe)
    for again in (gate, gate.with_options(threshold=0.2), pickle.loads(pickle.dumps(gate))):  # noqa: S301
        assert again.decide("who?").error is None


# --- conversations ---------------------------------------------------------------------------------------------

EARLIER = ["user: Who wrote Hamlet?", "assistant: Shakespeare."]


@dataclass(frozen=True)
class TurnsSpec(EvidenceSpec[int]):
    """The number of turns before a question."""

    reads_model: ClassVar[bool] = False
    reads_history: ClassVar[bool] = True

    def compute(self, context):
        return [Piece(len(inputs.history)) for inputs in context.inputs]


class CountsTurns(Gate):
    """Knows what follows something."""

    @property
    def specs(self):
        return (TurnsSpec(),)

    def score(self, evidence):
        return Score(0.9 if evidence[TurnsSpec()] else 0.1, "")


def test_a_gate_that_reads_the_turns_before_gets_them(call):
    engine = load_gate(CountsTurns())
    assert engine.reads_history
    assert call(engine, "And when?", history=EARLIER).retrieve is False
    found = engine.decide_batch(["And when?"] * 3, histories=[EARLIER, None, ["", " "]])
    assert [d.retrieve for d in found] == [False, True, True]


def test_a_gate_that_does_not_read_the_turns_before_retrieves_and_says_so(call):
    engine = load_gate("constant:never")
    assert not engine.reads_history
    decision = call(engine, "And when?", history=EARLIER)
    assert (decision.retrieve, decision.warnings, decision.error) == (True, (UNREAD,), None)
    assert [d.retrieve for d in engine.decide_batch(["a", "b"], histories=[None, EARLIER])] == [False, True]
