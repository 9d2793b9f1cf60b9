"""Concurrent callers share batches, none of them ever hangs, and each has a decision when its time is up."""

import asyncio
import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from rgate_integrations import Decision, Draft, Request, load_gate
from rgate_integrations.engine import batching
from rgate_integrations.engine.batching import Batcher
from rgate_integrations.errors import DecisionTimeoutError
from tests.conftest import CALLS
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

SHORT = 0.05  # a deadline that passes: what it interrupts is held until then


class Held(ScriptedProxy):
    """Calls about something slow wait until they are let go, so that callers pile up behind them."""

    max_batch_size = 64

    def __init__(self):
        super().__init__()
        self.busy, self.go, self.asked = threading.Event(), threading.Event(), []

    def score(self, prompt, values, targets, *, adapter=None):
        questions = [each["question"] for each in values]
        self.asked.append(questions)
        if any("slow" in question for question in questions):
            self.busy.set()
            assert self.go.wait(PATIENCE)
        return super().score(prompt, values, targets, adapter=adapter)


@pytest.fixture
def held():
    proxy = Held()
    yield proxy
    proxy.go.set()


async def test_concurrent_callers_share_batches_and_those_who_leave_cost_nothing(held):
    gate = load_gate("prompt", proxy=held)
    tasks = [asyncio.create_task(gate.adecide("slow?"))]
    assert await asyncio.to_thread(held.busy.wait, PATIENCE)
    tasks += [asyncio.create_task(gate.adecide(f"q{i}?")) for i in range(150)]
    await asyncio.sleep(0)  # all wait now behind the slow question
    for task in tasks[3::3]:
        task.cancel()
    await asyncio.sleep(0)
    held.go.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    decided = [each.question for each in done if isinstance(each, Decision)]
    assert decided == ["slow?", *(f"q{i}?" for i in range(150) if i % 3 != 2)]
    assert [len(batch) for batch in held.asked] == [1, 64, 36], "who has left is not judged"


# --- the batcher ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError("full"), None], ids=type
)
def test_whatever_ends_a_batch_its_callers_get_an_error_and_the_next_call_goes_on(error):
    failing = [error]

    def run(items):
        if failing and failing.pop() is not None:
            raise error
        return items[:1]

    batcher = Batcher(run)
    for future in batcher.submit([1, 2]):
        assert isinstance(future.result(PATIENCE), Exception)
    assert batcher.submit([3])[0].result(PATIENCE) == 3


def test_a_long_call_lets_the_calls_that_came_meanwhile_go_first():
    """Regression: one question waited 24 s behind a batch of 3,000."""
    batches, go = [], threading.Event()

    def run(items):
        batches.append(list(items))
        assert go.wait(PATIENCE)
        return [item.upper() for item in items]

    batcher = Batcher(run, max_size=4)
    long = batcher.submit(f"a{i}" for i in range(14))
    assert not batcher.submit([])
    while not batches:  # until the first batch runs
        time.sleep(0.001)
    calls = [batcher.submit(names) for names in (["b"], [f"c{i}" for i in range(7)], ["d"])]
    go.set()
    results = [[future.result(PATIENCE) for future in futures] for futures in (long, *calls)]
    assert results == [[f"A{i}" for i in range(14)], ["B"], [f"C{i}" for i in range(7)], ["D"]]
    assert [" ".join(batch) for batch in batches] == [
        "a0 a1 a2 a3",
        "b c0 c1 c2",
        "d a4 a5 a6",
        "c3 c4 c5 c6",
        "a7 a8 a9 a10",
        "a11 a12 a13",
    ]


def test_an_idle_worker_ends_and_the_next_call_starts_another(monkeypatch):
    monkeypatch.setattr(batching, "MAX_IDLE", 0.01)
    batcher = Batcher(lambda items: [threading.current_thread() for _ in items])
    worker = batcher.submit([1])[0].result(PATIENCE)
    worker.join(timeout=PATIENCE)
    assert (worker.is_alive(), worker.daemon) == (False, True)
    assert batcher.submit([2])[0].result(PATIENCE) is not worker


def test_other_threads_get_nothing_more_once_the_process_is_ending():
    """Regression: a daemon thread that made decisions of its results took the process down at its end."""
    workers, started, go = [], threading.Event(), threading.Event()

    def run(items):
        workers.append(threading.current_thread())
        started.set()
        assert go.wait(PATIENCE)
        return items

    batcher = Batcher(run)
    (running,) = batcher.submit([0])
    assert started.wait(PATIENCE)
    (waiting,) = batcher.submit([1])
    batcher.close()
    go.set()
    workers[0].join(PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        (late,) = pool.submit(batcher.submit, [2]).result(PATIENCE)
    assert not any(future.done() for future in (running, waiting, late))
    with pytest.raises(RuntimeError, match="exiting"):
        batcher.submit([3])


def test_another_event_loop_than_asyncios_is_a_typed_error():
    """Regression: in trio, each decision retrieved because of a RuntimeError without a hint."""
    with pytest.raises(StopIteration) as end:
        load_gate("constant:never").adecide("Who wrote Hamlet?").send(None)  # runs without an event loop
    decision = end.value.value
    assert (decision.retrieve, decision.error.type) == (True, "ConfigurationError")
    assert "trio.to_thread.run_sync" in decision.error.hint


# --- deadlines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], ["slow before?"]])
def test_a_call_ends_when_its_time_is_up_wherever_the_question_is(held, call, before):
    gate = load_gate("prompt", proxy=held)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.decide_batch, before)
        assert not before or held.busy.wait(PATIENCE)
        late = call(gate, "slow?", timeout=SHORT)
        assert (late.retrieve, late.p_known, late.error.type) == (True, 0.0, "DecisionTimeoutError")
        assert "0.05 s" in late.error.message
        held.go.set()
        assert [d.error for d in waiting.result(PATIENCE)] == [None] * len(before)
        assert gate.decide("after?", timeout=PATIENCE).error is None
    if before:
        assert held.asked == [["slow before?"], ["after?"]], "work without a waiting caller is not started"


def test_the_gate_has_a_deadline_of_its_own_which_stays_with_it(held, call):
    gate = load_gate("prompt", proxy=held, timeout=SHORT)
    with pytest.raises(DecisionTimeoutError, match="No decision within"):
        call(gate.with_options(on_error="raise"), "slow?")
    held.go.set()
    for timeout in (PATIENCE, math.inf):
        assert call(gate, "slow?", timeout=timeout).error is None
    again = pickle.loads(pickle.dumps(load_gate("prompt", timeout=2.5)))  # noqa: S301
    assert again.with_options(threshold=0.3).timeout == 2.5
    assert again.with_options(timeout=None).timeout is None


def test_of_the_times_in_a_batch_the_longest_counts(held):
    """All are returned together, so whoever has less patience waits for who has more."""
    gate = load_gate("prompt", proxy=held)
    times = [SHORT / 10, None, SHORT]
    late = gate.with_options(timeout=SHORT).decide_batch([Request("slow?", timeout=each) for each in times])
    assert [d.error.type for d in late] == ["DecisionTimeoutError"] * 3
    assert all(f"{SHORT} s" in d.error.message for d in late)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.decide_batch, [Request("slow?", timeout=each) for each in times])
        assert held.busy.wait(PATIENCE)
        assert not wait([waiting], 2 * SHORT).done
        held.go.set()
        assert [d.error for d in waiting.result(PATIENCE)] == [None] * 3


def test_in_a_batch_what_is_decided_in_time_is_kept(held):
    held.max_batch_size = 2
    found = load_gate("prompt", proxy=held).decide_batch(
        [Request(question, timeout=3.0) for question in ("one?", "two?", "slow?")]
    )
    assert [d.error and d.error.type for d in found] == [None, None, "DecisionTimeoutError"]


@pytest.mark.parametrize("inside", CALLS)
def test_a_gate_that_its_own_drafter_calls_retrieves_instead_of_hanging(call, inside):
    class Chain:
        """An LLM behind the very gate that it drafts for."""

        def draft(self, questions, tokens):
            (question,) = questions
            return [Draft(text=CALLS[inside](gate, question).reason)]

    gate = load_gate("ik", source="llm", llm=Chain(), proxy=ScriptedProxy())
    decision = call(gate, "what?", timeout=PATIENCE)
    problem = "The gate failed, so it retrieves: llm= or a rule contains the gate itself"
    assert decision.draft.text.startswith(problem)


def test_no_call_is_lost_while_workers_end(monkeypatch):
    monkeypatch.setattr(batching, "MAX_IDLE", 0.0)
    batcher = Batcher(lambda items: list(items))
    for i in range(300):
        assert batcher.submit([i])[0].result(timeout=PATIENCE) == i
        time.sleep(0.0001 * (i % 3))
