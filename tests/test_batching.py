"""Concurrent callers share batches, none of them ever hangs, and each has a decision when its time is up."""

import asyncio
import functools
import math
import pickle
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures._base import _Waiter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rgate_integrations import Decision, Draft, Request, load_gate
from rgate_integrations.engine import batching
from rgate_integrations.engine.batching import Batcher
from rgate_integrations.errors import DecisionTimeoutError
from rgate_integrations.models.onnx_model import OnnxModel
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


@contextmanager
def failing_at(step, failed, is_traced):
    """Threads started meanwhile: the first that gets to a step, counted in traced frames, has no memory there."""
    steps = iter(range(step))

    def trace(frame, event, value):
        if not is_traced(frame.f_code):
            return None
        if next(steps, None) is None and not failed.is_set():
            failed.set()
            raise MemoryError
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(before)


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


def test_without_memory_for_a_moment_every_caller_of_a_batcher_is_answered():
    """Regression: the worker ended, and the callers of its batch waited forever."""
    is_traced = lambda code: code.co_filename == batching.__file__ and code.co_name != "_work"  # noqa: E731
    for step in range(1000):
        failed, batcher, right = threading.Event(), Batcher(lambda items: list(items), max_size=2), []
        with failing_at(step, failed, is_traced):
            for items in ([1, 2, 3], [4], [5]):
                results = [future.result(PATIENCE) for future in batcher.submit(items)]
                assert all(
                    result == item or isinstance(result, MemoryError)
                    for item, result in zip(items, results, strict=True)
                )
                right.append(results == items)
        assert sum(right) >= 2, "only one call gets an error"
        if not failed.is_set():
            break
    assert step > 50


def test_a_result_that_cannot_be_handed_over_leaves_no_other_caller_waiting(monkeypatch):
    """Regression: the first result took the worker down, so that the others never came."""
    failing, set_result = [MemoryError], Future.set_result

    def fail_once(future, result):
        if failing and threading.current_thread().name == "rgate-batcher":
            raise failing.pop()
        set_result(future, result)

    batcher = Batcher(lambda items: list(items))
    monkeypatch.setattr(Future, "set_result", fail_once)
    first, second = batcher.submit([1, 2])
    assert [first.result(PATIENCE), second.result(PATIENCE)] == [1, 2]
    assert batcher.submit([3])[0].result(PATIENCE) == 3


class Forgetful:
    """A method that raises a `MemoryError` in its first calls."""

    def __init__(self, owner, name, times):
        self.method, self.times = getattr(owner, name), times

    def __get__(self, instance, owner):
        return functools.partial(self, instance)

    def __call__(self, *arguments, **options):
        if self.times:
            self.times -= 1
            raise MemoryError
        return self.method(*arguments, **options)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("method", ["add_result", "set_result"])
def test_a_caller_that_cannot_be_woken_looks_for_its_results(monkeypatch, method, times):
    """Regression: without memory for a moment, the caller waited forever."""
    monkeypatch.setattr(batching, "_MAX_SLEEP", SHORT)
    owner = Future if method == "set_result" else _Waiter
    go = threading.Event()
    futures = Batcher(lambda items: [item for item in items if go.wait(PATIENCE)]).submit([1, 2, 3])
    monkeypatch.setattr(owner, method, Forgetful(owner, method, times))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(batching.wait_results, futures, None)
        while not all(future._waiters for future in futures):  # it waits
            pass
        go.set()
        assert waiting.result(PATIENCE) == [1, 2, 3]


async def test_an_event_loop_that_cannot_be_woken_looks_for_its_results(monkeypatch):
    """Regression: without memory for a moment, the task waited forever."""
    monkeypatch.setattr(batching, "_MAX_SLEEP", SHORT)
    loop, go = asyncio.get_running_loop(), threading.Event()
    futures = Batcher(lambda items: [item for item in items if go.wait(PATIENCE)]).submit([1, 2, 3])
    waiting = asyncio.create_task(batching.await_results(futures, None))
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", Forgetful(loop, "call_soon_threadsafe", 2))
    go.set()
    assert await asyncio.wait_for(waiting, PATIENCE) == [1, 2, 3]


def test_texts_of_a_thread_that_dies_are_read_by_its_caller(monkeypatch):
    """Regression: a pool's thread that had no memory lost its batch, and the gate waited for it forever."""
    monkeypatch.setattr(threading, "excepthook", lambda problem: None)
    texts = [f"text {i}" for i in range(8)]
    for step in range(30):
        failed = threading.Event()

        def run(batch, failed=failed):
            if threading.current_thread().name == "rgate-batcher":  # the caller
                assert failed.wait(PATIENCE)
            return [text.upper() for text in batch]

        def read(items, run=run):
            with failing_at(step, failed, lambda code: True):  # noqa: B023
                return [OnnxModel._run_batches(SimpleNamespace(threads=2), texts, [1] * 8, 1, run)]

        (outcome,) = Batcher(read).submit([0])
        assert outcome.result(PATIENCE) == [text.upper() for text in texts]


def test_a_text_that_no_thread_can_read_is_an_error():
    threads = set()

    def run(batch):
        threads.add(threading.current_thread())
        if batch == ["bad"]:
            raise ValueError("bad")
        return batch

    model = SimpleNamespace(threads=3)
    with pytest.raises(ValueError, match="bad"):
        OnnxModel._run_batches(model, ["a", "b", "bad", "c"], [1] * 4, 1, run)
    assert not any(thread.is_alive() for thread in threads - {threading.current_thread()})


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
