"""Concurrent callers share batches, and none of them ever hangs."""

import asyncio
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from rgate_integrations import Decision, load_gate
from rgate_integrations.engine.batching import Batcher
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy


class Held(ScriptedProxy):
    """Its calls wait until they are let go, so that callers pile up behind the first."""

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


async def test_concurrent_coroutines_and_threads_share_batches():
    proxy = Held()
    gate = load_gate("prompt", proxy=proxy)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gate.decide, "first?")
        assert await asyncio.to_thread(proxy.busy.wait, PATIENCE)
        questions = [f"question {i}?" for i in range(100)]
        tasks = [asyncio.create_task(gate.adecide(q)) for q in questions]
        await until_submitted(tasks)
        proxy.go.set()
        found = await asyncio.gather(*tasks)
        assert first.result(PATIENCE).error is None
    assert [d.question for d in found] == questions
    assert proxy.sizes == [1, 64, 36]


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
    done = await asyncio.gather(first, *tasks, return_exceptions=True)
    decided = [d.question for d in done if isinstance(d, Decision)]
    assert decided == ["first?", *(f"q{i}?" for i in range(200) if i % 3)]
    assert sum(proxy.sizes) == len(decided), "who has left is not judged"


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
    decided = {i: d for i, d in enumerate(done) if not isinstance(d, asyncio.CancelledError)}
    assert set(range(1_000)) - leavers <= set(decided)
    assert all(d.question == f"q{i}?" for i, d in decided.items())
    failed = [d for d in decided.values() if d.error is not None]
    assert all(d.retrieve and d.error.type == "RuntimeError" for d in failed)
    assert len(failed) < 300  # a batch that fails is tried again, each question alone
    decision = weakref.ref(next(iter(decided.values())))
    del tasks, done, decided, failed
    gc.collect()
    assert decision() is None


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError("full")], ids=type
)
def test_whatever_ends_a_batch_its_callers_get_an_error_and_the_next_call_goes_on(error):
    failing = [error]

    def run(items):
        if failing:
            raise failing.pop()
        return items

    batcher = Batcher(run)
    for future in batcher.submit([1, 2]):
        assert isinstance(future.exception(PATIENCE), Exception)
    assert batcher.submit([3])[0].result(PATIENCE) == 3


def test_a_result_too_few_is_an_error():
    with pytest.raises(RuntimeError, match="2 items gave 1 results"):
        Batcher(lambda items: items[:1]).submit([1, 2])[0].result(timeout=PATIENCE)


def test_an_idle_worker_ends_and_the_next_call_starts_another():
    batcher = Batcher(lambda items: [(i, threading.current_thread()) for i in items], max_idle=0.01)
    (first,) = batcher.submit([1])
    worker = first.result(timeout=PATIENCE)[1]
    assert worker.daemon
    worker.join(timeout=PATIENCE)
    assert not worker.is_alive()
    item, other = batcher.submit([2])[0].result(timeout=PATIENCE)
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


def test_items_submitted_together_are_one_batch():
    sizes = []

    def run(items):
        sizes.append(len(items))
        return items

    for _ in range(50):
        for future in Batcher(run).submit(range(10)):
            future.result(PATIENCE)
    assert sizes == [10] * 50


def test_what_waits_when_the_process_ends_gets_an_error():
    started, go = threading.Event(), threading.Event()

    def run(items):
        started.set()
        assert go.wait(PATIENCE)
        return items

    batcher = Batcher(run)
    (running,) = batcher.submit([1])
    assert started.wait(PATIENCE)
    (waiting,) = batcher.submit([2])
    batcher.close()
    (late,) = batcher.submit([3])
    go.set()
    assert running.result(PATIENCE) == 1
    for future in (waiting, late):
        with pytest.raises(RuntimeError, match="ending"):
            future.result(PATIENCE)
