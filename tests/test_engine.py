"""The engine: nothing that a caller gives can stop it, and whatever fails retrieves."""

import gc
import math
import pickle
import shutil
import threading
import weakref
from dataclasses import FrozenInstanceError, replace
from functools import partial
from unittest.mock import ANY, Mock

import pytest
from pydantic import ValidationError

from rgate_integrations import (
    AnswerFirst,
    Decision,
    Draft,
    Gate,
    LookFirst,
    Override,
    Request,
    load_gate,
)
from rgate_integrations.decision import valid_count
from rgate_integrations.engine.decider import read_item
from rgate_integrations.engine.follow_ups import REFERS_BACK, UNREAD
from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError
from rgate_integrations.gates import Score
from rgate_integrations.gates.folder import save_gate
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


HAMLET, CAPITAL = "Who wrote Hamlet?", "What is the capital of France?"


@pytest.mark.parametrize(
    ("use", "error", "why"),
    [
        (lambda: load_gate("ik", threshold=True), ConfigurationError, "threshold"),
        (
            lambda: Decision(question="who?", retrieve=True, p_known=0.2, threshold=True),
            ValidationError,
            "threshold must be a finite number",
        ),
        (lambda: RetrievalGate("constant:never", threshold=True), ConfigurationError, "not True"),
        (
            lambda: RetrievalGate("constant:never").invoke(
                "who?", {"configurable": {"retrieval_threshold": True}}
            ),
            ConfigurationError,
            "not True",
        ),
        *(
            (
                partial(load_gate, "ik", timeout=timeout),
                ConfigurationError,
                "timeout must be a number of seconds",
            )
            for timeout in (True, 0, -1, math.nan, "soon")
        ),
        (lambda: AnswerFirst(retrieve_below=True), ConfigurationError, None),
        (lambda: AnswerFirst(prefetch="no"), ConfigurationError, None),
        (lambda: load_gate("constant:random", rate=True), ConfigurationError, None),
        (lambda: AnswerFirst(answer_above=float("nan")), ConfigurationError, None),
        (lambda: LookFirst(min_gain=True), ConfigurationError, None),
        (lambda: valid_count(True, "k"), ConfigurationError, None),
        (lambda: load_gate("prompt", on_error="ignore"), ConfigurationError, "on_error"),
        (lambda: load_gate("ik").with_options(tokenz=3), ConfigurationError, "are invalid: tokenz"),
        (lambda: load_gate("ik").decide_batch("one string"), ConfigurationError, "list of questions"),
        (lambda: load_gate("ik").decide_batch(Request(HAMLET)), ConfigurationError, "list of questions"),
    ],
)
def test_options_are_checked_and_true_is_no_number(use, error, why):
    with pytest.raises(error, match=why):
        use()


@pytest.mark.parametrize(("threshold", "turned"), [(0.5, False), (0.0, True), (None, False)])
def test_a_reason_says_so_if_the_threshold_of_the_call_turns_the_decision(threshold, turned):
    found = load_gate("constant:always").decide(HAMLET, threshold=threshold)
    assert found.retrieve is not turned
    own = "This gate always retrieves."
    assert found.reason == own + turned * " But P(known) is 0.00, and the caller's threshold is 0.00."


@pytest.mark.parametrize(
    ("field", "value", "error", "why"),
    [
        *(
            ("threshold", value, ConfigurationError, "threshold must be a finite number of at least 0")
            for value in (math.nan, -0.1, math.inf, "high", True, Unprintable(), 10**400)
        ),
        *(
            ("timeout", value, ConfigurationError, "timeout must be a number of seconds above 0")
            for value in (math.nan, 0, -1, "soon", Unprintable())
        ),
        *(("draft", value, EvidenceError, "draft must be") for value in (5, Unprintable())),
        *(
            ("popularity", value, EvidenceError, "must be a number of at least 0")
            for value in ("much", Unprintable(), 10**400, math.nan, -1)
        ),
        ("metadata", "a text", EvidenceError, "must be a mapping"),
        *(
            ("history", value, EvidenceError, "list of strings")
            for value in ("user: Who?", [3], [None], [("user", "Who?")], 5)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_request_with_a_field_that_makes_no_sense_is_refused_at_once(
    scripted, call, field, value, error, why
):
    with pytest.raises(error, match=why):
        Request(HAMLET, **{field: value})
    with pytest.raises(error, match=why):
        call(load_gate("prompt", proxy=scripted), HAMLET, **{field: value})
    assert scripted.calls == [], "it never reached the worker"


def test_a_request_is_immutable():
    given = ["user: Hi", " ", "assistant: Hello"]
    request = Request(f"  {HAMLET} ", given, "It was", None, threshold=1, timeout=math.inf)
    given.clear()
    assert request == Request(
        HAMLET, ("user: Hi", "assistant: Hello"), Draft(text="It was"), {}, threshold=1.0, timeout=math.inf
    )
    assert len({request, replace(request)}) == 1
    assert Request.coerce(request, history=None, threshold=0.2) == replace(request, history=(), threshold=0.2)
    with pytest.raises(FrozenInstanceError):
        request.threshold = 0.3
    with pytest.raises(TypeError, match="histories"):
        load_gate("ik").decide(HAMLET, histories=[])


def test_a_batch_may_mix_strings_requests_and_what_is_neither(scripted):
    gate = load_gate("constant:random", proxy=scripted)
    items = [HAMLET, Request(HAMLET, threshold=0.0), None, Request(HAMLET, threshold=1.5), "", 5]
    found = gate.decide_batch(iter(items))
    plain, never, *_ = found
    known = plain.p_known
    assert [(d.threshold, d.retrieve, d.p_known) for d in found] == [
        (0.5, known < 0.5, known),
        (0.0, False, known),
        (0.5, True, 0.0),
        (1.5, True, known),
        (0.5, True, 0.0),
        (0.5, True, 0.0),
    ]
    assert [d.error and d.error.type for d in found] == [None, None, "InvalidQuestionError", None] + [
        "InvalidQuestionError"
    ] * 2
    assert gate.decide(Request(HAMLET, threshold=1.5), threshold=0.0) == never.model_copy(
        update={"cost": ANY}
    )
    with pytest.raises(InvalidQuestionError):
        gate.with_options(on_error="raise").decide_batch(items)


@pytest.mark.parametrize("question", [None, 5, b"who?", "", " \n\t", "\0", ["who?"], Unprintable()], ids=type)
def test_an_invalid_question_is_refused_and_the_others_are_decided(scripted, call, question):
    gate = load_gate("prompt", proxy=scripted)
    with pytest.raises(InvalidQuestionError, match=r" Hint: "):
        call(gate, question)
    bad, good = gate.decide_batch([question, HAMLET])
    assert (bad.retrieve, bad.error.type, good.error) == (True, "InvalidQuestionError", None)


def test_nul_bytes_of_pasted_data_are_white_space():
    """Regression: one of them in an earlier turn made an empty question of the last one, so nothing was searched."""
    request = Request("Which\0contract?\0", history=["user: a\0b", "assistant: ok"])
    assert (request.question, request.history) == ("Which contract?", ("user: a b", "assistant: ok"))


def test_of_a_request_that_cannot_be_judged_the_question_is_known():
    """Regression: with a wrong popularity, for example, a plan had nothing to search for."""
    failed = read_item(HAMLET, popularity=-1)
    assert (failed.question, read_item(Request(HAMLET), popularity=-1).question) == (HAMLET, HAMLET)
    assert isinstance(failed.error, EvidenceError)


def test_a_thread_that_cannot_be_started_fails_its_call_and_no_later_one(scripted, monkeypatch, call):
    gate = load_gate("prompt", proxy=scripted)
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        first = call(gate, HAMLET)
    assert (first.retrieve, first.error.message) == (True, "can't start new thread")
    assert call(gate, HAMLET).error is None


def test_an_engine_that_is_dropped_is_gone_at_once(scripted):
    """Regression: its queue referred back to it, so it and its model lived until a full garbage collection."""
    gc.disable()
    try:
        gate = load_gate("ik", proxy=scripted)
        gate.decide("who?")
        dropped = weakref.ref(gate)
        del gate
        assert dropped() is None
    finally:
        gc.enable()


of_weights = partial(ScriptedProxy, None)

# --- gates that were made for a model --------------------------------------------------------------------------


@pytest.fixture(params=[0, 8])
def probe(request, tmp_path):
    """A probe that finds everything known: of the question, or of question and draft."""
    artifact = replace(PROBE, bias=9.0, tokens=request.param, fingerprint="its own")
    return str(save_gate(artifact, tmp_path / "probe"))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_wrapped_probe_checks_the_model_whose_states_it_was_given(probe, depth):
    """Regression: the inner gate asked its own proxy for a fingerprint, so a foreign model skipped silently."""
    gate = load_gate(probe).gate
    for _ in range(depth):
        gate = load_gate("calibrated", inner=gate).gate
    assert (gate.threshold, gate.proxy) == (0.4, "scripted"), "those of the inner gate"
    weights = ("its own", "another", "")
    own, foreign, unknown = (load_gate(gate, proxy=of_weights(each)).decide(HAMLET) for each in weights)
    assert (own.error, own.retrieve, own.warnings) == (None, False, ())
    assert (foreign.retrieve, foreign.error.type) == (True, "ModelLoadError")
    assert "weights another" in foreign.reason
    assert (unknown.error, unknown.retrieve, len(unknown.warnings)) == (None, False, 1)
    assert "calibrated on 'scripted'" in unknown.warnings[0]


@pytest.mark.parametrize("inner", ["prompt", "ik", "token_probability"])
def test_a_calibrated_gate_refuses_another_model_than_it_was_calibrated_with(inner):
    another = load_gate("calibrated", inner=inner, fingerprint="its own", proxy=of_weights("another"))
    assert another.decide(HAMLET).error.type == "ModelLoadError"
    read = another.decide(HAMLET, draft=Draft(text="a", tokens=("a",), logprobs=(-0.1,)))
    assert (read.error is None) == (inner == "token_probability"), "then no model has read anything"


def test_calibration_stores_the_model_that_made_the_evidence():
    rows = [Example(Question(f"question {i}?"), float(i % 2 == 0), True) for i in range(60)]
    questions = [DataFile("x", "0" * 64, tuple(rows))]
    found = calibrate(load_gate("prompt", proxy=of_weights("its own")), questions, Budget(0.9))
    assert found.gate.gate.fingerprint == "its own"


def test_a_gate_reads_its_artefact_once_when_it_is_made(probe):
    gate = load_gate(probe, proxy=of_weights("its own"))
    shutil.rmtree(probe)
    for again in (gate, gate.with_options(threshold=0.2), pickle.loads(pickle.dumps(gate))):  # noqa: S301
        assert again.decide(HAMLET).error is None


# --- conversations ---------------------------------------------------------------------------------------------

EARLIER = ["user: Who wrote Hamlet?", "assistant: Shakespeare."]


def test_a_gate_that_does_not_read_the_turns_before_retrieves_and_says_so(call):
    engine = load_gate("constant:never")
    decision = call(engine, HAMLET, history=EARLIER)
    assert (decision.retrieve, decision.p_known, decision.error) == (True, 1.0, None)
    assert decision.override == Override(retrieve=True, reason=UNREAD)
    assert decision.reason == f"{UNREAD} This gate never retrieves."
    found = engine.decide_batch([HAMLET, Request(CAPITAL, EARLIER), "And when?"])
    assert [d.override and d.override.reason for d in found] == [None, UNREAD, REFERS_BACK]


# --- overrides ---------------------------------------------------------------------------------------------------


class Overriding(Gate):
    """Overrides what it says of questions with a name in them, once for each word "retrieve" or "direct"."""

    @property
    def specs(self):
        return ()

    def score(self, evidence):
        score = Score(0.6, "Because.")
        for number, word in enumerate(evidence.question.split()):
            if word in ("retrieve", "direct"):
                score = score.overridden(f"Reason {number}.", retrieve=word == "retrieve")
        return score


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(
    ("question", "retrieve", "reason"),
    [
        ("retrieve x", True, "Reason 0."),
        ("direct x", False, "Reason 0."),
        ("direct retrieve", True, "Reason 1."),
        ("retrieve direct", True, "Reason 0."),
        ("retrieve retrieve", True, "Reason 0."),
        ("direct direct", False, "Reason 0."),
    ],
)
def test_no_threshold_beats_an_override_and_p_known_stays(question, retrieve, reason, threshold):
    found = load_gate(Overriding()).decide(question, threshold=threshold)
    assert (found.retrieve, found.p_known, found.threshold) == (retrieve, 0.6, threshold)
    assert found.override == Override(retrieve=retrieve, reason=reason)
    assert found.reason == f"{reason} Because."
