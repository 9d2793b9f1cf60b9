"""Logic that is written once runs with threads and with asyncio."""

import asyncio
import contextvars
import threading

import pytest

from rgate_integrations.runtime.flow import Call, Gather, Start, arun, run
from tests.patience import PATIENCE

both_ways = pytest.mark.parametrize(
    "drive", [run, lambda flow: asyncio.run(arun(flow))], ids=["sync", "async"]
)


def now(value):
    if isinstance(value, Exception):
        raise value
    return value


async def later(value):
    await asyncio.sleep(0)
    return now(value)


def yielding(step):
    return (yield step)


@both_ways
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_of_several_steps_raises_is_raised(drive, place):
    steps = [Call(now, later, ValueError("no") if i == place else i) for i in range(3)]
    with pytest.raises(ValueError, match="no"):
        drive(yielding(Gather(steps)))


@both_ways
def test_gathered_steps_run_side_by_side_in_their_order_and_the_callers_context(drive):
    barrier = threading.Barrier(3)
    name = contextvars.ContextVar("name")

    def meets(value):
        barrier.wait(timeout=PATIENCE)
        return name.get(), value

    context = contextvars.copy_context()
    context.run(name.set, "ada")
    three = yielding(Gather([Call(meets, None, i) for i in range(3)]))
    assert context.run(drive, three) == [("ada", 0), ("ada", 1), ("ada", 2)]
    assert drive(yielding(Gather([]))) == []
    one = yielding(Gather([Call(threading.current_thread, None)]))
    assert run(one) == [threading.current_thread()], "one step needs no thread"


def test_dropped_tasks_that_do_not_end_hold_no_others():
    """Regression: they shared eight threads with all other tasks."""
    go = threading.Event()
    for _ in range(40):
        run(yielding(Start(Call(go.wait, None, PATIENCE)))).drop()
    assert run(yielding(run(yielding(Start(Call(now, later, 7)))))) == 7
    go.set()
