"""The engine: nothing that a caller gives can stop it, and whatever fails retrieves."""

import asyncio
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from rgate_integrations import Gate, load_gate
from rgate_integrations.artifacts.folder import save_gate
from rgate_integrations.artifacts.probe import EarlyExit, ProbeArtifact
from rgate_integrations.engine.follow_ups import UNREAD
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.evidence.base import EvidenceSpec, Piece
from rgate_integrations.gates import Score
from rgate_integrations.tuning import Budget, calibrate
from rgate_integrations.tuning.paired import Paired, PairedFile
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

BAD_THRESHOLDS = [float("nan"), -1, -0.1, float("inf"), "high", object()]


class Waiting(ScriptedProxy):
    """Scores when it is told to, so that a question can be made to wait for its turn."""

    def __init__(self):
        super().__init__()
        self.busy = threading.Event()
        self.go_on = threading.Event()

    def score(self, prompt, values, targets, *, adapter=None):
        self.busy.set()
        assert self.go_on.wait(PATIENCE)
        return super().score(prompt, values, targets, adapter=adapter)


CALLS = {
    "decide": lambda gate, **options: gate.decide("who?", **options),
    "adecide": lambda gate, **options: asyncio.run(gate.adecide("who?", **options)),
    "decide_batch": lambda gate, **options: gate.decide_batch(["who?"], **options)[0],
    "adecide_batch": lambda gate, **options: asyncio.run(gate.adecide_batch(["who?"], **options))[0],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize("threshold", BAD_THRESHOLDS, ids=lambda value: f"{value!r}"[:8])
def test_a_bad_threshold_is_refused_when_it_is_given_and_harms_nobody(scripted, call, threshold):
    gate = load_gate("prompt", proxy=scripted)
    with pytest.raises(ConfigurationError, match="threshold must be a number"):
        call(gate, threshold=threshold)
    assert scripted.calls == [], "it never reached the worker"
    assert call(load_gate("prompt", proxy=scripted), threshold=0.3).error is None


def test_an_overdue_question_with_a_bad_threshold_does_not_end_the_worker():
    """It raised in the worker, which died with its place still taken: every later call waited for ever."""
    proxy = Waiting()
    gate = load_gate("prompt", proxy=proxy)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gate.decide, "first?")
        assert proxy.busy.wait(PATIENCE)
        assert gate.decide("second?", timeout=0.01).error.type == "OverloadedError"
        with pytest.raises(ConfigurationError):
            gate.decide("third?", threshold=float("nan"))
        proxy.go_on.set()
        assert first.result(PATIENCE).error is None
        assert pool.submit(gate.decide, "after?").result(PATIENCE).error is None


class Unprintable:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("question", [None, 5, b"who?", "", "  ", "who\0", Unprintable()], ids=type)
def test_what_is_no_question_is_refused_and_harms_nobody(scripted, question):
    gate = load_gate("prompt", proxy=scripted)
    with pytest.raises(InvalidQuestionError):
        gate.decide(question)
    bad, good = gate.decide_batch([question, "who?"])
    assert (bad.retrieve, bad.error.type, good.error) == (True, "InvalidQuestionError", None)


@pytest.mark.parametrize("given", [{"drafts": [5]}, {"popularity": ["much"]}, {"drafts": [Unprintable()]}])
def test_what_is_no_evidence_is_an_error_of_its_question(scripted, given):
    (decision,) = load_gate("ik", proxy=scripted).decide_batch(["who?"], **given)
    assert (decision.retrieve, decision.error.type) == (True, "EvidenceError")
    assert scripted.calls == []


def test_a_thread_that_cannot_be_started_fails_its_call_and_no_later_one(scripted, monkeypatch, call):
    gate = load_gate("prompt", proxy=scripted)
    start = threading.Thread.start
    refused = []

    def once(thread):
        if thread.name == "rgate-batcher" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    first = call(gate)
    assert (first.retrieve, first.error.message) == (True, "can't start new thread")
    assert call(gate).error is None


class OtherModel(ScriptedProxy):
    """The same shapes, other weights."""

    fingerprint = "another model's"


class OwnModel(ScriptedProxy):
    fingerprint = "the probe's own"


@pytest.fixture
def probe(tmp_path):
    """A probe that finds everything known."""
    artifact = ProbeArtifact(
        weight=np.zeros((1, 4), dtype=np.float32),
        bias=9.0,
        layers=((1, "question", "mean"),),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="a test",
        fingerprint="the probe's own",
        provenance={"data": [], "metrics": {"auc": {}, "auc_mean": 0.5, "auc_pooled": 0.5}},
    )
    return str(save_gate(artifact, tmp_path / "probe"))


@pytest.fixture
def drafting_probe(tmp_path):
    """A probe of question and draft, with a first look at the question alone."""
    artifact = ProbeArtifact(
        weight=np.zeros((2, 4), dtype=np.float32),
        bias=9.0,
        layers=((1, "draft", "mean"), (1, "question", "mean")),
        tokens=8,
        source="proxy",
        base_model="scripted",
        llm="a test",
        early_exit=EarlyExit(np.zeros((1, 4), dtype=np.float32), 9.0, 0.5),
        fingerprint="the probe's own",
        provenance={"data": [], "metrics": {"auc": {}, "auc_mean": 0.5, "auc_pooled": 0.5}},
    )
    return str(save_gate(artifact, tmp_path / "drafting"))


WRAPPED = {
    "bare": lambda probe, **o: load_gate(probe, **o),
    "calibrated": lambda probe, **o: load_gate("calibrated", inner=probe, **o),
    "nested": lambda probe, **o: load_gate("calibrated", inner=load_gate("calibrated", inner=probe), **o),
}


@pytest.mark.parametrize("kind", ["probe", "drafting_probe"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_wrapped_probe_checks_the_model_whose_states_it_was_given(request, kind, wrapped):
    """The inner gate asked its own proxy for a fingerprint, so a foreign model skipped silently."""
    make, folder = WRAPPED[wrapped], request.getfixturevalue(kind)
    own = make(folder, proxy=OwnModel()).decide("who?")
    assert (own.error, own.retrieve) == (None, False)
    foreign = make(folder, proxy=OtherModel()).decide("who?")
    assert (foreign.retrieve, foreign.error.type) == (True, "ModelLoadError")
    assert "another model's" in foreign.reason


@pytest.mark.parametrize("kind", ["probe", "drafting_probe"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_model_of_unknown_weights_is_no_silent_match(request, kind, wrapped, scripted):
    (decision,) = WRAPPED[wrapped](request.getfixturevalue(kind), proxy=scripted).decide_batch(["who?"])
    assert (decision.error, decision.retrieve) == (None, False)
    assert len(decision.warnings) == 1
    assert "'scripted' is the model" in decision.warnings[0]
    assert "cannot be checked" in decision.warnings[0]


@pytest.mark.parametrize("inner", ["prompt", "ik", "token_probability"])
def test_a_calibrated_gate_refuses_another_model_than_it_was_calibrated_with(inner):
    gate = load_gate("calibrated", inner=inner, fingerprint="the probe's own", proxy=OwnModel())
    own = gate.decide("who?")
    assert (own.error, own.warnings) == (None, ())
    foreign = gate.with_options(proxy=OtherModel()).decide("who?")
    assert (foreign.retrieve, foreign.error.type) == (True, "ModelLoadError")
    assert "cannot be checked" in gate.with_options(proxy=ScriptedProxy()).decide("who?").warnings[0]


def test_calibration_stores_the_model_that_made_the_evidence():
    def questions(dataset):
        rows = []
        for i in range(60):
            rows.append(Paired(str(i), f"question {i}?", dataset, i % 2 == 0, True))
        return [PairedFile(dataset, "0" * 64, tuple(rows))]

    found = calibrate(load_gate("prompt", proxy=OwnModel()), questions("x"), Budget(0.9), method="none")
    assert found.gate.gate.fingerprint == "the probe's own"
    assert found.gate.decide("who?").error is None
    without = calibrate(load_gate("constant:always"), questions("x"), Budget(1.0), method="none")
    assert without.gate.gate.fingerprint == ""


def test_a_gate_reads_its_artefact_once_when_it_is_made(probe, monkeypatch):
    gate = load_gate(probe, proxy=OwnModel())
    shutil.rmtree(probe)
    assert gate.decide("who?").error is None
    assert gate.with_options(threshold=0.2).decide("who?").error is None
    assert pickle.loads(pickle.dumps(gate)).decide("who?").error is None  # noqa: S301


def test_a_wrapping_gate_decides_by_the_inner_threshold_and_proxy(probe):
    inner = load_gate(probe, threshold=0.3).gate
    calibrated = load_gate("calibrated", inner=inner)
    assert (calibrated.threshold, calibrated.proxy) == (0.3, "scripted")
    assert load_gate("calibrated", inner=inner, threshold=0.6).threshold == 0.6
    assert load_gate("calibrated", inner=calibrated).proxy == "scripted", "however deep it stands"


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


def test_a_gate_that_reads_the_turns_before_gets_them():
    engine = load_gate(CountsTurns())
    assert engine.reads_history
    assert engine.decide("And when?", history=EARLIER).retrieve is False
    assert asyncio.run(engine.adecide("And when?", history=EARLIER)).retrieve is False
    for found in (
        engine.decide_batch(["And when?"] * 3, histories=[EARLIER, None, ["", " "]]),
        asyncio.run(engine.adecide_batch(["And when?"] * 3, histories=[EARLIER, None, []])),
    ):
        assert [d.retrieve for d in found] == [False, True, True]


def test_a_gate_that_does_not_read_the_turns_before_retrieves_and_says_so():
    engine = load_gate("constant:never")
    assert not engine.reads_history
    decision = engine.decide("And when?", history=EARLIER)
    assert (decision.retrieve, decision.warnings, decision.error) == (True, (UNREAD,), None)
    assert [d.retrieve for d in engine.decide_batch(["a", "b"], histories=[None, EARLIER])] == [False, True]


@pytest.mark.parametrize("history", ["user: Who?", [3], [("user", "Who?")], 3, ["a\0b"]])
def test_what_is_no_history_is_an_error_of_its_question(history):
    found = load_gate("constant:never").decide_batch(["a", "b"], histories=[history, None])
    assert [d.retrieve for d in found] == [True, False]
    assert found[0].error.type in ("EvidenceError", "InvalidQuestionError")
    with pytest.raises(ConfigurationError, match="2 questions do not match 1 histories"):
        load_gate("constant:never").decide_batch(["a", "b"], histories=[EARLIER])


def test_options_of_the_engine_are_checked():
    with pytest.raises(ConfigurationError, match="on_error"):
        load_gate("prompt", on_error="ignore")
    for timeout in (0, -1, float("nan"), "soon"):
        with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
            load_gate("prompt", timeout=timeout)
    with pytest.raises(ConfigurationError, match="cannot take tokenz"):
        load_gate("ik").with_options(tokenz=3)
