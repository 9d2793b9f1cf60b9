"""Forks and ends of processes, while a model is busy in the background."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rgate_integrations.models.download import cache_dir
from tests.patience import ENDS_SOON, PATIENCE

FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
# In a background job of a shell, Ctrl-C is ignored, and a child would inherit that.
CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
SCRIPTED = "from tests.scripted_proxy import ScriptedProxy as Model"
TINY = """
from rgate_integrations.models.local import TransformersProxy
def Model():
    return TransformersProxy({tiny!r})
"""


def python(code, *, model=SCRIPTED):
    """Begin a script, in a process of its own."""
    command = [sys.executable, "-c", "\n".join((CTRL_C, model, textwrap.dedent(code)))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


REAL = (pytest.mark.model, pytest.mark.slow)


@pytest.fixture(params=["scripted", pytest.param("tiny", marks=REAL)])
def model(request):
    return SCRIPTED if request.param == "scripted" else TINY.format(tiny=request.getfixturevalue("tiny"))


def ended(process):
    """Wait for a script; returns its exit code and all that it printed."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


CLOSED = """
import asyncio, gc, threading
from rgate_integrations import load_gate
from rgate_integrations.runtime.flow import Call, Start, arun

is_asked, may_answer = threading.Event(), threading.Event()

class Slow(Model):
    def _called(self, name, values):
        is_asked.set()
        may_answer.wait()

def in_the_background():
    task = yield Start(Call(None, asyncio.sleep, 3600))
    try:
        yield Call(None, asyncio.sleep, 3600)
    finally:
        task.drop()

gate = load_gate("ik", proxy=Slow())
loop = asyncio.new_event_loop()
tasks = [loop.create_task(each) for each in (gate.adecide("who?"), gate.adecide("what?"), arun(in_the_background()))]
while not is_asked.is_set():
    loop.run_until_complete(asyncio.sleep(0))
loop.close()
del tasks
gc.collect()
may_answer.set()
print(gate.decide("when?").error)
"""


def test_a_loop_that_is_closed_while_it_decides_says_nothing_of_ours():
    code, out, err = ended(python(CLOSED))
    assert (code, out) == (0, "None\n")
    assert "Event loop is closed" not in err  # that a task was left pending is asyncio's own word


# --- forks -------------------------------------------------------------------------------------------------

FORKS = """
import os, signal, threading
from rgate_integrations import load_gate

gate = load_gate("ik", proxy=Model(), tokens=24)
expected = gate.decide("Who wrote Hamlet?").p_known
questions = [f"Where was person number {i} born?" for i in range(12)]
stop = threading.Event()
began = threading.Semaphore(0)

def busy():
    while not stop.is_set():
        began.release()
        gate.decide_batch(questions)

threads = [threading.Thread(target=busy, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for i in range(4):
    began.acquire()
    stop.wait(0.05 * i)
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        decisions = [gate.decide("Who wrote Hamlet?"), gate.decide("Who wrote Hamlet?", threshold=0.1)]
        good = all(d.error is None and abs(d.p_known - expected) < 1e-4 for d in decisions)
        os._exit(0 if good else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
stop.set()
for thread in threads:
    thread.join()
print(abs(gate.decide("Who wrote Hamlet?").p_known - expected) < 1e-4)
"""


@FORK
def test_a_child_that_is_forked_while_decisions_run_decides(model):
    code, out, err = ended(python(FORKS, model=model))
    assert (code, out) == (0, "0\n" * 4 + "True\n"), err


LOCKS = """
import os, signal, threading
from rgate_integrations.runtime.threads import ForkSafeLock

theirs, ours = ForkSafeLock(), ForkSafeLock()
held, go = threading.Event(), threading.Event()

def hold():
    with theirs:
        held.set()
        go.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
with ours:
    child = os.fork()
if child == 0:
    signal.alarm(600)
    with theirs, ours:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
"""

CACHED = """
import os, signal, threading
from rgate_integrations.runtime.threads import cached_property

began = threading.Event()

class Slow:
    @cached_property
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            threading.Event().wait()
        return 0

threading.Thread(target=lambda: Slow().value, daemon=True).start()
began.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(Slow().value)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


SEARCHES = """
import os, signal, threading
import numpy as np
from rgate_integrations.index import Passage, PassageIndex

class Lengths:
    name = identity = "lengths"
    def embed(self, texts):
        return np.array([[len(text), 1.0] for text in texts], np.float32)

index = PassageIndex(Lengths())
index.add([Passage(str(i), "x" * i) for i in range(1, 400)])
stop, began = threading.Event(), threading.Semaphore(0)

def busy():
    while not stop.is_set():
        began.release()
        index.search(["x" * 5] * 20, k=100)
        index.upsert([Passage(str(i), "x" * i) for i in range(100, 200)])

def searched():
    (hits,) = index.search(["x" * 7], k=1)
    index.upsert([Passage("7", "y" * 7)])
    (after,) = index.search(["x" * 7], k=1)
    return (hits[0].passage.id, after[0].passage.id, after[0].passage.text, len(index)) == ("7", "7", "y" * 7, 399)

threading.Thread(target=busy, daemon=True).start()
codes = []
for i in range(20):
    began.acquire()
    stop.wait(0.003 * i)
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        os._exit(0 if searched() else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes.count(0))
"""


LOADS = """
import os, signal, threading
from rgate_integrations import load_gate

gate = load_gate()
practical = ["Thanks!", "Tell me a joke. " * 30, "Where is my parcel?"]
expected = [decision.p_known for decision in gate.decide_batch(practical)]
fact = "In which year did the Battle of Cedynia take place?"
stop, began = threading.Event(), threading.Semaphore(0)

def busy():
    while not stop.is_set():
        began.release()
        gate.decide_batch(practical)

for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
codes = []
for i in range(4):
    began.acquire()
    stop.wait(0.003 * i)
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        decisions = gate.decide_batch([*practical, fact])
        good = [d.p_known for d in decisions[:-1]] == expected and decisions[-1].cost.model_calls == 2
        os._exit(0 if good and decisions[-1].error is None else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes.count(0), gate.decide(fact).cost.model_calls)
"""


ENDS = """
import os, signal, sys
from rgate_integrations import load_gate

gate = load_gate()
gate.decide("Who wrote Hamlet?")
for uses in (False, True):
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        sys.exit(gate.decide("What is the capital of France?").retrieve if uses else 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@FORK
@pytest.mark.parametrize(
    ("code", "printed_line"),
    [
        pytest.param(LOCKS, "0\n", id="every lock is free"),
        # Regression: in Python 3.11, a child that wrote into an index waited forever for the lock of a property.
        pytest.param(CACHED, "0\n", id="a property is computed"),
        pytest.param(SEARCHES, "20\n", id="an index is searched"),
        # The memory that sessions share may be locked at the fork.
        pytest.param(
            LOADS, "4 2\n", id="a model is read that the parent never loaded", marks=pytest.mark.model
        ),
        # Regression: the telemetry of ONNX Runtime hung, or aborted, a worker of `gunicorn --preload` at its end.
        pytest.param(ENDS, "0\n0\n", id="it ends as any other", marks=pytest.mark.model),
    ],
)
def test_in_a_forked_child(code, printed_line):
    assert ended(python(code))[:2] == (0, printed_line)


@pytest.mark.model
def test_no_telemetry_is_kept(tmp_path, monkeypatch):
    """Regression: ONNX Runtime kept a device id and a database of events in the user's cache folder."""
    monkeypatch.setenv("RGATE_CACHE", str(cache_dir()))
    monkeypatch.delenv("CI", raising=False)  # there, it keeps none anyway
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    code = "from rgate_integrations import load_gate; print(load_gate().decide('Thanks!').error)"
    assert ended(python(code))[:2] == (0, "None\n")
    assert list(tmp_path.rglob("*")) == []


# --- the end of the process --------------------------------------------------------------------------------

BUSY = """
import sys, threading
from rgate_integrations import load_gate

gate = load_gate("ik", proxy=Model(), tokens=128)
gate.decide("Who wrote Hamlet?")
questions = [f"Where was person number {i} born?" for i in range(500)]

def busy():
    gate.decide_batch(questions)

threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
"""


READY = """
import sys, threading, time
main_thread = threading.main_thread().ident

def ready_when_main_waits():
    # A signal that comes just before a thread begins to wait for a lock does not wake it: that is Python's own.
    waited = 0
    while waited < 10:
        waiting = sys._current_frames()[main_thread].f_code.co_name in ("wait", "join", "_wait_for_tstate_lock")
        waited = waited + 1 if waiting else 0
        time.sleep(0.02)
    print("ready", flush=True)

threading.Thread(target=ready_when_main_waits, daemon=True).start()
"""


def interrupted(code, **options):
    """Press Ctrl-C once a script is ready; returns its exit code and what it said."""
    process = python(code, **options)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    status, _, err = ended(process)
    return status, err


def test_a_script_that_ends_while_decisions_run_ends_with_0(model):
    code, out, err = ended(python(f"{BUSY}\nprint('end')", model=model))
    assert (code, out) == (0, "end\n"), err
    assert "Fatal" not in err
    assert "terminate called" not in err


@pytest.mark.parametrize(
    ("model", "waits"),
    [
        ("scripted", "[t.join() for t in threads]"),
        ("scripted", "gate.decide_batch(questions)"),
        pytest.param("tiny", "gate.decide_batch(questions)", marks=REAL),
    ],
    indirect=["model"],
)
def test_ctrl_c_while_decisions_run_ends_the_script_as_ctrl_c_does(model, waits):
    # A scripted model is too quick to be interrupted: it waits instead.
    slow = f"{ENDS_SOON}\nModel.score = lambda *a, **k: threading.Event().wait()" if model == SCRIPTED else ""
    body = BUSY.replace("questions =", f"{slow}\nquestions =")
    code, err = interrupted(f"{body}{READY}{waits}", model=model)
    assert code == -signal.SIGINT, err  # which a shell shows as 130
    assert "KeyboardInterrupt" in err
    assert "Fatal" not in err


def test_ctrl_c_ends_the_command_with_130():
    code = """
    import sys, threading
    from rgate_integrations.cli import main

    Model.score = lambda *arguments, **options: threading.Event().wait()
    import rgate_integrations.models.local as local
    local.shared_proxy = lambda *a, **k: Model()
    sys.argv = ["rgate", "decide", "--gate", "prompt", "Who wrote Hamlet?"]
    main()
    """
    status, err = interrupted(f"{ENDS_SOON}\n{READY}{textwrap.dedent(code)}")
    assert status == 130, err
    assert "Traceback" not in err


def test_the_end_waits_for_no_model_of_a_user_that_does_not_answer():
    code = """
    import threading
    from rgate_integrations import load_gate

    class Silent:
        def draft(self, questions, tokens):
            began.set()
            threading.Event().wait()

    began = threading.Event()
    gate = load_gate("ik", source="llm", llm=Silent(), proxy=Model())
    threading.Thread(target=gate.decide, args=("Who wrote Hamlet?",), daemon=True).start()
    began.wait()
    print("end")
    """
    assert ended(python(code)) == (0, "end\n", "")
