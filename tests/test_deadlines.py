"""Whoever asks has a decision when the time is up, and no gate waits for itself."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, OverloadedError
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

SHORT = 0.05  # a deadline that passes: what it interrupts is held until then

CALLS = {
    "decide": lambda gate, question, **options: gate.decide(question, **options),
    "adecide_batch": lambda gate, question, **o: asyncio.run(gate.adecide_batch([question], **o))[0],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


class Held(ScriptedProxy):
    """Its scores wait until they are let go."""

    max_batch_size = 2

    def __init__(self):
        super().__init__()
        self.busy, self.go = threading.Event(), threading.Event()
        self.asked = []

    def score(self, prompt, values, targets, *, adapter=None):
        self.asked += [v["question"] for v in values]
        if any("slow" in v["question"] for v in values):
            self.busy.set()
            assert self.go.wait(PATIENCE)
        return super().score(prompt, values, targets, adapter=adapter)


@pytest.fixture
def held():
    proxy = Held()
    yield proxy
    proxy.go.set()


@pytest.mark.parametrize("waiting", [True, False])
def test_a_call_ends_when_its_time_is_up_wherever_the_question_is(held, call, waiting):
    gate = load_gate("prompt", proxy=held)
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(gate.decide_batch, ["slow before?"] if waiting else [])
        assert not waiting or held.busy.wait(PATIENCE)
        late = call(gate, "slow?", timeout=SHORT)
        assert (late.retrieve, late.p_known, late.error.type) == (True, 0.0, "OverloadedError")
        assert late.question == "slow?"
        assert "0.05 s" in late.error.message
        with pytest.raises(ConfigurationError):
            gate.decide("third?", threshold=float("nan"))
        held.go.set()
        assert [d.error for d in before.result(PATIENCE)] == [None] * waiting
        assert gate.decide("after?", timeout=PATIENCE).error is None
    if waiting:
        assert held.asked == ["slow before?", "after?"], "what nobody waits for is not begun"


def test_the_gate_has_a_deadline_of_its_own(held, call):
    gate = load_gate("prompt", proxy=held, timeout=SHORT)
    assert call(gate, "slow?").error.type == "OverloadedError"
    held.go.set()
    assert call(gate, "slow?", timeout=PATIENCE).error is None
    assert call(gate.with_options(timeout=PATIENCE), "slow?").error is None


def test_with_on_error_raise_the_deadline_is_raised(held, call):
    with pytest.raises(OverloadedError, match="no decision after"):
        call(load_gate("prompt", proxy=held, on_error="raise"), "slow?", timeout=SHORT)


def test_in_a_batch_what_is_decided_in_time_is_kept(held):
    gate = load_gate("prompt", proxy=held)
    found = gate.decide_batch(["one?", "two?", "slow?"], timeout=1.0)
    assert [d.error is None for d in found] == [True, True, False]
    assert found[2].error.type == "OverloadedError"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_bad_timeout_is_refused(held, timeout):
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
        load_gate("prompt", timeout=timeout)
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
        load_gate("prompt", proxy=held).decide("q?", timeout=timeout)


def test_the_deadline_is_kept_with_the_gate():
    gate = load_gate("prompt", timeout=2.5)
    assert gate.timeout == 2.5
    assert pickle.loads(pickle.dumps(gate)).timeout == 2.5  # noqa: S301
    assert gate.with_options(threshold=0.3).timeout == 2.5
    assert load_gate("prompt", timeout=float("inf")).timeout is None


async def test_many_deadlines_and_cancellations_at_once_leave_a_gate_that_works(held):
    gate = load_gate("prompt", proxy=held)
    tasks = [asyncio.ensure_future(gate.adecide(f"slow {i}?", timeout=SHORT)) for i in range(60)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(d, asyncio.CancelledError) for d in done[::3])
    assert {d.error.type for i, d in enumerate(done) if i % 3} == {"OverloadedError"}
    held.go.set()
    assert (await gate.adecide("what then?", timeout=PATIENCE)).error is None


@pytest.mark.parametrize("inside", CALLS)
def test_a_gate_that_its_own_drafter_calls_retrieves_instead_of_hanging(call, inside):
    seen = []

    class Chain:
        """An LLM behind the very gate that it drafts for."""

        def draft(self, questions, tokens):
            seen.extend(CALLS[inside](gate, question) for question in questions)
            raise RuntimeError("no draft")

    gate = load_gate("ik", source="llm", llm=Chain(), proxy=ScriptedProxy())
    decision = call(gate, "what?", timeout=PATIENCE)
    assert (decision.retrieve, decision.error.message) == (True, "no draft")
    assert {(d.retrieve, d.error.type) for d in seen} == {(True, "ConfigurationError")}
    assert "its own drafter" in seen[0].reason
