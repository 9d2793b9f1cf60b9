"""What a quick look settles waits for no draft, and whoever asked has a decision when the time is up."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from rgate_integrations import load_gate
from rgate_integrations.decision import Cost
from rgate_integrations.engine.judging import Begun, judge_together, look_first, look_on
from rgate_integrations.engine.loading import gate_from_json
from rgate_integrations.errors import ConfigurationError, OverloadedError
from rgate_integrations.evidence.base import EvidenceSpec, Inputs, Piece
from rgate_integrations.evidence.collector import Sources
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.gates.base import Gate, Score
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

SHORT = 0.05  # a deadline that passes: what it interrupts is held until then

CALLS = {
    "decide": lambda gate, question, **options: gate.decide(question, **options),
    "adecide": lambda gate, question, **options: asyncio.run(gate.adecide(question, **options)),
    "decide_batch": lambda gate, question, **options: gate.decide_batch([question], **options)[0],
    "adecide_batch": lambda gate, question, **options: asyncio.run(gate.adecide_batch([question], **options))[
        0
    ],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@dataclass(frozen=True)
class FirstLook(EvidenceSpec[bool]):
    """Whether a question says that it is known."""

    def compute(self, context):
        context.proxy.looked += [each.question for each in context.inputs]
        return [Piece("known" in each.question, Cost(model_calls=1)) for each in context.inputs]


class TwoLooks(Gate):
    """Known questions are known at once; a draft is written for the others."""

    @property
    def specs(self):
        return (FirstLook(), DraftSpec(4))

    def looks(self, inputs):
        return ((FirstLook(),), (DraftSpec(4),))

    def score(self, evidence):
        if DraftSpec(4) in evidence:
            return Score(0.1, "From the draft.", evidence[DraftSpec(4)])
        return Score(0.9, "At once.") if evidence[FirstLook()] else None


class Held(ScriptedProxy):
    """Its drafts, or its scores, wait until they are let go."""

    def __init__(self, holds="generate"):
        super().__init__()
        self.holds = holds
        self.busy, self.go = threading.Event(), threading.Event()
        self.looked, self.drafted = [], []

    def _called(self, name, values):
        super()._called(name, values)
        if name == "generate":
            self.drafted += [v["question"] for v in values]
        if name == self.holds:
            self.busy.set()
            assert self.go.wait(PATIENCE)


@pytest.fixture
def held():
    proxy = Held()
    yield proxy
    proxy.go.set()


def test_a_known_question_does_not_wait_for_a_draft_that_is_being_written(held, call):
    gate = load_gate(TwoLooks(), proxy=held)
    with ThreadPoolExecutor(1) as pool:
        drafted = pool.submit(gate.decide_batch, [f"what {i}?" for i in range(10)])
        assert held.busy.wait(PATIENCE)
        known = call(gate, "known?", timeout=PATIENCE)
        assert (known.error, known.retrieve, known.cost.model_calls) == (None, False, 1)
        assert not drafted.done()
        held.go.set()
        assert [d.retrieve for d in drafted.result(PATIENCE)] == [True] * 10


async def test_a_decision_is_there_as_soon_as_it_is_made_and_not_when_its_batch_ends(held):
    gate = load_gate(TwoLooks(), proxy=held)
    questions = ["what 0?", "known 1?", "what 2?", "known 3?"]
    tasks = [asyncio.ensure_future(gate.adecide(q, timeout=PATIENCE)) for q in questions]
    done, _ = await asyncio.wait([tasks[1], tasks[3]])
    assert {task.result().reason for task in done} == {"At once."}
    assert not tasks[0].done()
    assert not tasks[2].done()
    held.go.set()
    assert [d.question for d in await asyncio.gather(*tasks)] == questions
    assert sorted(held.drafted) == ["what 0?", "what 2?"]
    assert sorted(held.looked) == sorted(questions), "nothing is looked at twice"


def test_drafts_of_many_callers_still_share_a_batch(held):
    gate = load_gate(TwoLooks(), proxy=held)
    held.go.set()
    decisions = gate.decide_batch([f"what {i}?" for i in range(10)])
    assert held.calls == ["generate"]
    assert decisions[0].draft.text
    assert decisions[0].cost.model_calls == 2


GATES = {
    "two looks": TwoLooks(),
    "prompt": "prompt",
    "ik": "ik",
    "ik, question alone": "ik:0",
    "slimplm": "slimplm",
    "self_eval": "self_eval",
    "token_probability": "token_probability",
    "sampled": "semantic_sets",
    "calibrated": "calibrated",
    "constant": "constant:never",
}


@pytest.mark.parametrize("name", GATES)
def test_two_lanes_find_what_one_does(name):
    given, options = GATES[name], {}
    if given == "ik:0":
        given, options = "ik", {"tokens": 0}
    gate = load_gate(given, **options).gate
    proxy = Held(holds=None)
    batch = [
        Inputs("known?"),
        Inputs("what?"),
        Inputs("RAISE?"),
        Inputs("NAN?"),
        Inputs("drafted?", load_gate("ik", proxy=proxy).decide("a?").draft),
        Inputs("known?"),
    ]
    (whole,) = judge_together([gate], batch, Sources(lambda: proxy, None, {}))
    sources = Sources(lambda: proxy, None, {})
    found = look_first(gate, batch, sources)
    begun = [place for place, each in enumerate(found) if isinstance(each, Begun)]
    for place, judged in zip(begun, look_on(gate, [found[p] for p in begun], sources), strict=True):
        found[place] = judged
    for one, two in zip(whole, found, strict=True):
        assert _what_matters(one) == _what_matters(two)


def _what_matters(judged):
    score = judged.score
    said = (type(score), str(score)) if isinstance(score, Exception) else score
    return said, judged.cost.model_copy(update={"milliseconds": 0}), judged.warnings


def test_evidence_that_can_do_without_a_draft_is_not_made_without_it_because_it_is_not_there_yet(held):
    class Tolerant(EvidenceSpec[str]):
        @property
        def may_need(self):
            return (DraftSpec(4),)

        def compute(self, context):
            found = context.find(DraftSpec(4))
            return [Piece("none" if isinstance(each, Exception) else "read") for each in found]

    spec = Tolerant()

    class Reads(Gate):
        @property
        def specs(self):
            return (spec,)

        def score(self, evidence):
            return Score(0.5, evidence[spec])

    held.go.set()
    gate = load_gate(Reads(), proxy=held)
    assert gate.decide("what?").reason == "read"
    assert gate.decide("RAISE?").reason == "none"


# --- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["waiting", "being looked at", "waiting for a draft", "being drafted"])
def test_a_call_ends_when_its_time_is_up_wherever_the_question_is(call, where):
    proxy = Held("generate" if "draft" in where else "score")
    gate = load_gate(TwoLooks() if "draft" in where else "prompt", proxy=proxy)
    with ThreadPoolExecutor(1) as pool:
        others = ["what else?"] if where.startswith("waiting") else []
        before = pool.submit(gate.decide_batch, others)
        assert not others or proxy.busy.wait(PATIENCE)
        late = call(gate, "what?", timeout=SHORT)
        assert (late.retrieve, late.p_known, late.error.type) == (True, 0.0, "OverloadedError")
        assert late.question == "what?"
        assert "0.05 s" in late.error.message
        proxy.go.set()
        assert [d.error for d in before.result(PATIENCE)] == [None] * len(others)
        assert gate.decide("known after?", timeout=PATIENCE).error is None
    if where == "waiting for a draft":
        assert proxy.drafted == ["what else?"], "what nobody waits for is not begun"


def test_the_gate_has_a_deadline_of_its_own(held, call):
    gate = load_gate(TwoLooks(), proxy=held, timeout=SHORT)
    assert call(gate, "what?").error.type == "OverloadedError"
    assert call(gate, "known?", timeout=PATIENCE).error is None
    held.go.set()
    assert call(gate.with_options(timeout=PATIENCE), "what?").error is None


def test_with_on_error_raise_the_deadline_is_raised(held, call):
    gate = load_gate(TwoLooks(), proxy=held, on_error="raise")
    with pytest.raises(OverloadedError, match="no decision after"):
        call(gate, "what?", timeout=SHORT)


def test_in_a_batch_what_is_decided_in_time_is_kept(held):
    gate = load_gate(TwoLooks(), proxy=held)
    gate.decide("known already?", timeout=PATIENCE)
    known, late = gate.decide_batch(["known?", "what?"], timeout=1.0)
    assert (known.error, known.retrieve) == (None, False)
    assert late.error.type == "OverloadedError"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_bad_timeout_is_refused(held, call, timeout):
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
        call(load_gate(TwoLooks(), proxy=held), "known?", timeout=timeout)


def test_the_deadline_is_kept_with_the_gate():
    gate = load_gate("prompt", timeout=2.5)
    assert gate.timeout == 2.5
    assert pickle.loads(pickle.dumps(gate)).timeout == 2.5  # noqa: S301
    assert gate_from_json(gate.to_json()).timeout == 2.5
    assert gate.with_options(threshold=0.3).timeout == 2.5
    assert load_gate("prompt", timeout=float("inf")).timeout is None


async def test_many_deadlines_and_cancellations_at_once_leave_a_gate_that_works(held):
    gate = load_gate(TwoLooks(), proxy=held)
    tasks = [asyncio.ensure_future(gate.adecide(f"what {i}?", timeout=SHORT)) for i in range(60)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(d, asyncio.CancelledError) for d in done[::3])
    rest = [d for i, d in enumerate(done) if i % 3]
    assert {d.error.type for d in rest} == {"OverloadedError"}
    held.go.set()
    assert (await gate.adecide("what then?", timeout=PATIENCE)).error is None


# --- a gate that is called while it judges -----------------------------------------------------------------


@pytest.mark.parametrize("inside", ["decide", "asyncio"])
def test_a_gate_that_its_own_drafter_calls_retrieves_instead_of_hanging(call, inside):
    seen = []

    class Chain:
        """An LLM behind the very gate that it drafts for."""

        def draft(self, questions, tokens):
            ask = gate.decide if inside == "decide" else lambda q: asyncio.run(gate.adecide(q))
            seen.extend(ask(q) for q in questions)
            raise RuntimeError("no draft")

    gate = load_gate("ik", source="llm", llm=Chain(), proxy=ScriptedProxy())
    decision = call(gate, "what?", timeout=PATIENCE)
    assert (decision.retrieve, decision.error.message) == (True, "no draft")
    assert {(d.retrieve, d.error.type) for d in seen} == {(True, "ConfigurationError")}
    assert "its own drafter" in seen[0].reason
