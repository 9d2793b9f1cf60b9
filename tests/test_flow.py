"""Logic that is written once runs with threads and with asyncio."""

import asyncio
import contextvars
import threading

import pytest

from rgate_integrations.runtime.flow import Call, Gather, NextInput, PushDriver, Start, arun, run
from tests.patience import PATIENCE

DRIVERS = {"sync": run, "async": lambda flow: asyncio.run(arun(flow))}


@pytest.fixture(params=DRIVERS)
def drive(request):
    return DRIVERS[request.param]


async def later(value, *, error=None):
    await asyncio.sleep(0)
    return now(value, error=error)


def now(value, *, error=None):
    if error is not None:
        raise error
    return value


def test_a_flow_gets_the_result_of_each_step(drive):
    def adding():
        one = yield Call(now, later, 1)
        two = yield Call(now, later, 2)
        return one + two

    assert drive(adding()) == 3


def test_a_flow_without_a_step_returns(drive):
    def nothing():
        return 5
        yield

    assert drive(nothing()) == 5


def test_what_a_step_raises_is_raised_inside_the_flow(drive):
    def careful():
        try:
            yield Call(now, later, 1, error=ValueError("no"))
        except ValueError as error:
            return f"caught {error}"

    assert drive(careful()) == "caught no"

    def careless():
        yield Call(now, later, 1, error=ValueError("no"))

    with pytest.raises(ValueError, match="no"):
        drive(careless())


def test_several_steps_keep_their_order(drive):
    def several():
        return (yield Gather([Call(now, later, i) for i in range(5)]))

    assert drive(several()) == [0, 1, 2, 3, 4]


def test_a_call_without_an_awaitable_form_leaves_the_event_loop_free():
    async def both():
        loop_ran = threading.Event()

        def waits():
            return loop_ran.wait(timeout=PATIENCE)

        def flow():
            return (yield Call(waits, None))

        asyncio.get_running_loop().call_soon(loop_ran.set)
        return await arun(flow())

    assert asyncio.run(both()) is True


def test_background_jobs_are_waited_for_or_dropped(drive, caplog):
    def flow(wait):
        job = yield Start(Call(now, later, 7))
        broken = yield Start(Call(now, later, 7, error=OSError("gone")))
        try:
            return (yield job) if wait else None
        finally:
            job.drop()
            broken.drop()

    assert drive(flow(wait=True)) == 7
    assert drive(flow(wait=False)) is None


async def test_a_cancelled_flow_cleans_up_and_leaves_no_task():
    cleaned = []

    async def forever():
        await asyncio.sleep(3600)

    def flow():
        job = yield Start(Call(print, forever))
        try:
            yield Call(print, forever)
        finally:
            job.drop()
            cleaned.append(True)

    task = asyncio.ensure_future(arun(flow()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert cleaned == [True]
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


def test_several_steps_run_side_by_side(drive):
    barrier = threading.Barrier(3)

    def meets(value):
        barrier.wait(timeout=PATIENCE)
        return value

    def flow():
        return (yield Gather([Call(meets, None, i) for i in range(3)]))

    assert drive(flow()) == [0, 1, 2]


def test_steps_side_by_side_see_the_callers_context(drive):
    name = contextvars.ContextVar("name")

    def flow():
        return (yield Gather([Call(name.get, None), Call(name.get, None)]))

    def with_a_name():
        name.set("ada")
        return drive(flow())

    assert contextvars.copy_context().run(with_a_name) == ["ada", "ada"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_of_several_steps_raises_is_raised(drive, place):
    steps = [Call(now, later, i, error=ValueError(f"no {i}") if i == place else None) for i in range(3)]

    def flow():
        return (yield Gather(steps))

    with pytest.raises(ValueError, match=f"no {place}"):
        drive(flow())


def test_no_steps_and_one_step(drive):
    def flow(n):
        return (yield Gather([Call(threading.current_thread, None) for _ in range(n)]))

    assert drive(flow(0)) == []
    assert len(drive(flow(1))) == 1
    assert run(flow(1)) == [threading.current_thread()], "one step needs no thread"


def test_dropped_jobs_that_do_not_end_hold_no_others():
    """They shared eight threads with all other jobs."""
    go, started = threading.Event(), threading.Semaphore(0)

    def stuck():
        started.release()
        assert go.wait(PATIENCE)

    def dropping():
        job = yield Start(Call(stuck, None))
        job.drop()

    def waiting():
        job = yield Start(Call(now, later, 7))
        return (yield job)

    for _ in range(20):
        run(dropping())
    for _ in range(8):
        assert started.acquire(timeout=PATIENCE)
    assert run(waiting()) == 7
    go.set()


def test_a_fed_flow_goes_on_with_what_it_is_brought(drive):
    def doubling(value):
        return 2 * value

    def adding():
        total = 0
        while (value := (yield NextInput())) is not None:
            total += yield Call(doubling, None, value)
        return total

    fed = PushDriver(adding())
    drive(fed.start())
    for value in (1, 2, 3):
        drive(fed.feed(value))
        assert not fed.done
    drive(fed.feed(None))
    assert (fed.done, fed.result) == (True, 12)


def test_a_fed_flow_decides_what_a_failure_means(drive):
    def failing():
        raise OSError("no step")

    def patient():
        reasons = []
        try:
            yield Call(failing, None)
        except OSError as error:
            reasons.append(str(error))
        try:
            yield NextInput()
        except TimeoutError as error:
            reasons.append(str(error))
        return reasons

    fed = PushDriver(patient())
    drive(fed.start())
    drive(fed.fail(TimeoutError("no arrival")))
    assert fed.result == ["no step", "no arrival"]
    impatient = PushDriver(iter_of(NextInput()))
    drive(impatient.start())
    with pytest.raises(TimeoutError, match="no arrival"):
        drive(impatient.fail(TimeoutError("no arrival")))
    assert not impatient.done


def iter_of(step):
    yield step


def test_a_flow_that_nobody_feeds_says_so(drive):
    with pytest.raises(RuntimeError, match="Nobody brings"):
        drive(iter_of(NextInput()))
