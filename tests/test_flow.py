"""Logic that is written once runs with threads and with asyncio."""

import asyncio
import contextvars
import threading

import pytest

from rgate_integrations.runtime.flow import Call, Gather, Start, arun, run
from tests.begun_answers import nothing_left
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
def test_a_flow_gets_the_result_of_each_step_or_what_it_raises(drive):
    def adding(numbers):
        total = 0
        try:
            for number in numbers:
                total += yield Call(now, later, number)
        except ValueError as error:
            return f"caught {error}"
        return total

    assert drive(adding([1, 2])) == 3
    assert drive(adding([])) == 0
    assert drive(adding([1, ValueError("no")])) == "caught no"
    with pytest.raises(ValueError, match="no"):
        drive(yielding(Call(now, later, ValueError("no"))))


async def test_a_call_without_an_awaitable_form_leaves_the_event_loop_free():
    loop_ran = threading.Event()
    asyncio.get_running_loop().call_soon(loop_ran.set)
    assert await arun(yielding(Call(lambda: loop_ran.wait(timeout=PATIENCE), None))) is True


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


@both_ways
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_of_several_steps_raises_is_raised(drive, place):
    steps = [Call(now, later, ValueError("no") if i == place else i) for i in range(3)]
    with pytest.raises(ValueError, match="no"):
        drive(yielding(Gather(steps)))


@both_ways
def test_background_tasks_are_waited_for_or_dropped(drive):
    def flow(wait):
        task = yield Start(Call(now, later, 7))
        broken = yield Start(Call(now, later, OSError("gone")))
        try:
            return (yield task) if wait else None
        finally:
            task.drop()
            broken.drop()

    assert drive(flow(wait=True)) == 7
    assert drive(flow(wait=False)) is None


def test_dropped_tasks_that_do_not_end_hold_no_others():
    """Regression: they shared eight threads with all other tasks."""
    go = threading.Event()
    for _ in range(40):
        run(yielding(Start(Call(go.wait, None, PATIENCE)))).drop()
    assert run(yielding(run(yielding(Start(Call(now, later, 7)))))) == 7
    go.set()


async def test_a_cancelled_flow_cleans_up_and_leaves_no_task():
    forever = Call(print, asyncio.Event().wait)

    def flow():
        task = yield Start(forever)
        try:
            yield forever
        finally:
            task.drop()

    task = asyncio.ensure_future(arun(flow()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await nothing_left()
