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
from rgate_integrations.engine.batching import Batcher, Later
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy


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
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=PATIENCE)
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


def test_an_item_that_is_cancelled_while_its_batch_runs_harms_nobody():
    started, go = threading.Event(), threading.Event()

    def run(items):
        started.set()
        assert go.wait(PATIENCE)
        return items

    batcher = Batcher(run)
    left, stays = batcher.submit([1, 2])
    assert started.wait(PATIENCE)
    assert left.cancel()
    go.set()
    assert stays.result(PATIENCE) == 2
    assert left.cancelled()
    assert batcher.submit([3])[0].result(PATIENCE) == 3


def test_items_submitted_together_are_one_batch():
    sizes = []

    def run(items):
        sizes.append(len(items))
        return items

    for _ in range(50):
        for future in Batcher(run).submit(range(10)):
            future.result(PATIENCE)
    assert sizes == [10] * 50


def test_what_a_batcher_hands_on_is_finished_by_the_next_one():
    batches = []

    def halve(items):
        return [Later(item * 10) if item % 2 else item for item in items]

    def finish(items):
        batches.append(list(items))
        return [item + 1 for item in items]

    batcher = Batcher(halve, then=Batcher(finish))
    assert [f.result(PATIENCE) for f in batcher.submit([1, 2, 3, 4])] == [11, 2, 31, 4]
    assert batches == [[10, 30]], "together, as they came"


def test_what_is_handed_on_and_fails_is_an_error_of_its_caller():
    def fail(items):
        raise ValueError("no")

    batcher = Batcher(lambda items: [Later(item) for item in items], then=Batcher(fail))
    with pytest.raises(ValueError, match="no"):
        batcher.submit([1])[0].result(PATIENCE)
