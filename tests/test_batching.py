"""Concurrent callers share batches."""

import asyncio
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from rgate_integrations import load_gate
from rgate_integrations.batching import Batcher
from rgate_integrations.errors import OverloadedError
from tests.scripted_proxy import ScriptedProxy

PATIENCE = 60  # seconds that nothing needs: a test that would hang fails instead


class Held(ScriptedProxy):
    """Its first call waits until it is let go, so that callers pile up behind it."""

    def __init__(self):
        super().__init__()
        self.busy, self.go = threading.Event(), threading.Event()
        self.sizes = []

    def score(self, prompt, values, targets, *, adapter=None):
        self.sizes.append(len(values))
        self.busy.set()
        assert self.go.wait(PATIENCE)
        return super().score(prompt, values, targets, adapter=adapter)


class Clock:
    """Stands in for the batcher's clock."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("rgate_integrations.batching.time", found)
    return found


async def until_submitted(tasks):
    """Let every task run up to where it waits for its decision."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_concurrent_coroutines_share_batches():
    proxy = Held()
    gate = load_gate("prompt", proxy=proxy)
    questions = [f"question {i}?" for i in range(100)]
    tasks = [asyncio.create_task(gate.adecide(q)) for q in questions]
    await until_submitted(tasks)
    proxy.go.set()
    found = await asyncio.gather(*tasks)
    assert [d.question for d in found] == questions
    assert sum(proxy.sizes) == 100
    assert len(proxy.sizes) <= 3  # what came before the first call, then at most 64 a batch


def test_concurrent_threads_share_batches():
    proxy = Held()
    gate = load_gate("prompt", proxy=proxy)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(gate.decide, "first?")]
        assert proxy.busy.wait(PATIENCE)
        asked += [pool.submit(gate.decide, f"q{i}?") for i in range(15)]
        waiting = threading.Event()
        for _ in range(PATIENCE * 100):
            if gate._batcher._queue.qsize() == 15:
                break
            waiting.wait(0.01)
        proxy.go.set()
        assert [future.result(PATIENCE).error for future in asked] == [None] * 16
    assert proxy.sizes == [1, 15]


async def test_cancelled_callers_cost_nothing_and_others_get_their_decision():
    proxy = Held()
    gate = load_gate("prompt", proxy=proxy)
    first = asyncio.create_task(gate.adecide("first?"))
    assert await asyncio.to_thread(proxy.busy.wait, PATIENCE)
    tasks = [asyncio.create_task(gate.adecide(f"q{i}?")) for i in range(200)]
    await until_submitted(tasks)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.sleep(0)
    proxy.go.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(d, asyncio.CancelledError) for d in done[::3])
    rest = [d for i, d in enumerate(done) if i % 3]
    assert [d.question for d in rest] == [f"q{i}?" for i in range(200) if i % 3]
    assert (await first).error is None
    assert sum(proxy.sizes) == 1 + len(rest), "who has left is not judged"


async def test_a_thousand_callers_some_of_whom_leave_and_a_model_that_fails_now_and_then():
    """Each gets a decision or its own cancellation, none hangs, and nothing of them is kept."""

    class Flaky(ScriptedProxy):
        def score(self, prompt, values, targets, *, adapter=None):
            time.sleep(0.001)
            if len(self.calls) % 7 == 3:
                self.calls.append("failed")
                raise RuntimeError("the model fell over")
            return super().score(prompt, values, targets, adapter=adapter)

    dice = random.Random(0)
    gate = load_gate("prompt", proxy=Flaky())
    tasks = [asyncio.create_task(gate.adecide(f"q{i}?")) for i in range(1_000)]
    leavers = set(dice.sample(range(1_000), 300))
    for i in leavers:
        await asyncio.sleep(dice.random() * 0.001)
        tasks[i].cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
    failed = 0
    for i, found in enumerate(done):
        if isinstance(found, asyncio.CancelledError):
            assert i in leavers
            continue
        assert found.question == f"q{i}?"
        if found.error is not None:
            failed += 1
            assert found.retrieve
            assert found.error.type == "RuntimeError"
    assert sum(not isinstance(d, asyncio.CancelledError) for d in done) >= 700
    assert failed < 300  # a batch that fails is tried again, each question alone
    decision = weakref.ref(next(d for d in done if not isinstance(d, asyncio.CancelledError)))
    del tasks, done, found
    gc.collect()
    assert decision() is None


@pytest.mark.parametrize("on_error", ["retrieve", "raise"])
async def test_questions_that_wait_too_long_retrieve(clock, on_error):
    proxy = Held()
    gate = load_gate("prompt", proxy=proxy, queue_timeout=2.0, on_error=on_error)
    first = asyncio.create_task(gate.adecide("first?"))
    assert await asyncio.to_thread(proxy.busy.wait, PATIENCE)
    tasks = [asyncio.create_task(gate.adecide(f"q{i}?")) for i in range(30)]
    await until_submitted(tasks)
    clock.now = 2.5
    proxy.go.set()
    assert (await first).error is None
    done = await asyncio.gather(*tasks, return_exceptions=True)
    if on_error == "raise":
        assert all(isinstance(d, OverloadedError) for d in done)
        assert "waited 2.5 s" in str(done[0])
    else:
        assert {(d.retrieve, d.error.type) for d in done} == {(True, "OverloadedError")}
        assert [d.question for d in done] == [f"q{i}?" for i in range(30)]
    assert (await gate.adecide("after?")).error is None
    assert proxy.sizes == [1, 1]


def test_an_exception_reaches_every_caller_of_its_batch():
    def run(items):
        raise ValueError("no")

    for future in Batcher(run).submit([1, 2]):
        with pytest.raises(ValueError, match="no"):
            future.result(timeout=PATIENCE)


def test_a_result_too_few_is_an_error():
    with pytest.raises(RuntimeError, match="2 items gave 1 results"):
        Batcher(lambda items: items[:1]).submit([1, 2])[0].result(timeout=PATIENCE)


def test_the_worker_is_one_daemon_thread():
    batcher = Batcher(lambda items: list(items))
    assert [f.result(timeout=PATIENCE) for f in batcher.submit([1, 2, 3])] == [1, 2, 3]
    assert [f.result(timeout=PATIENCE) for f in batcher.submit([4])] == [4]
    workers = [t for t in threading.enumerate() if t.name == "rgate-batcher"]
    assert workers
    assert all(t.daemon for t in workers)


def test_an_idle_worker_ends_and_the_next_call_starts_another():
    batcher = Batcher(lambda items: [(i, threading.current_thread()) for i in items], max_idle=0.01)
    (first,) = batcher.submit([1])
    worker = first.result(timeout=PATIENCE)[1]
    worker.join(timeout=PATIENCE)
    assert not worker.is_alive()
    (second,) = batcher.submit([2])
    item, other = second.result(timeout=PATIENCE)
    assert item == 2
    assert other is not worker


def test_no_call_is_lost_while_workers_end():
    batcher = Batcher(lambda items: list(items), max_idle=0.0)
    for i in range(300):
        assert batcher.submit([i])[0].result(timeout=PATIENCE) == i
        time.sleep(0.0001 * (i % 3))
