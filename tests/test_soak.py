"""The soak itself: a few steps of each scenario, the same for the same seed, and none that overlooks a fault."""

import subprocess
import sys

import pytest

from rgate_integrations.index import PassageIndex
from tests.soak.machine import Allowance, Held
from tests.soak.runner import SCENARIOS, Soak
from tests.soak.scenario import chance_of

_MARKS = dict.fromkeys(("real-gate", "served", "gateway"), pytest.mark.slow)
MINUTES = 30  # that nothing here takes: the steps end these runs


def soak_of(folder, *names):
    return Soak(3, folder, names, pause=0.01)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in SCENARIOS])
def test_a_few_steps_bring_what_must_come(tmp_path, name):
    soak = soak_of(tmp_path, name)
    assert soak.run(MINUTES, steps=3) == []
    assert soak.steps == {name: 3}
    assert soak.scenarios[0].counts


def test_a_step_draws_the_same_for_the_same_seed():
    assert chance_of(1, "index", 5).random() == chance_of(1, "index", 5).random()
    assert chance_of(1, "index", 5).random() != chance_of(2, "index", 5).random()


def test_an_index_that_loses_a_passage_is_found_out(tmp_path, monkeypatch):
    add = PassageIndex.add
    monkeypatch.setattr(PassageIndex, "add", lambda self, passages: add(self, list(passages)[1:]))
    (wrong,) = soak_of(tmp_path, "index").run(MINUTES, steps=20)
    assert wrong.scenario == "index"
    assert "passages are there, not" in wrong.text


def test_what_grows_beyond_the_allowance_is_named():
    first = Held(memory=500, threads=10, descriptors=20)
    leaking = Held(memory=900, threads=11, descriptors=200)
    grown = Allowance().exceeded(first, leaking)
    assert grown == ["memory grew from 500 to 900", "descriptors grew from 20 to 200"]
    assert Allowance().exceeded(first, first) == []


# It ends with what it began with. Four threads have an arena each, and a larger block was freed before: then glibc
# keeps what they free. In a process of its own, since what is set there concerns all of it.
_THREADS_THAT_FREE = """
import threading
from tests.soak.machine import Held, give_back_at_once

give_back_at_once()
block = b"x" * (24 << 20)
del block
all_have_one = threading.Barrier(4)

def work():
    block = b"x" * (16 << 20)
    all_have_one.wait()

before = Held.by().memory
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(Held.by().memory - before)
"""


def test_what_threads_have_freed_is_not_counted_as_held():
    command = [sys.executable, "-c", _THREADS_THAT_FREE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 8
