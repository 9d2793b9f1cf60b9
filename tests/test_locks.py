"""Two processes at one place: the second is told, and a killed one locks nobody out."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from rgate_integrations.cli.train import train
from rgate_integrations.errors import LockedError, WriteError
from rgate_integrations.index.building import build_resumable
from rgate_integrations.runtime.locks import locked
from rgate_integrations.training.drafts import cached_drafts
from rgate_integrations.tuning.collect import collect
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import Words

HOLDER = """
import sys
from rgate_integrations.runtime.locks import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock of a place until it is killed, or its standard input ends."""
    started = []

    def start(place):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_the_second_is_told_who_has_it(tmp_path, holder):
    process = holder(tmp_path / "out.jsonl")
    told = pytest.raises(LockedError, match=rf"\({process.pid}\) is writing to .*out\.jsonl")
    with told as caught, locked(tmp_path / "out.jsonl"):
        pytest.fail("two have it")
    assert "Wait" in caught.value.hint
    with locked(tmp_path / "other.jsonl"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "out.jsonl")
    with pytest.raises(LockedError), locked(tmp_path / "link"):
        pytest.fail("by another name, two have it")


def test_a_killed_process_locks_nobody_out(tmp_path, holder):
    process = holder(tmp_path / "out.jsonl")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".out.jsonl.lock").exists()
    with locked(tmp_path / "out.jsonl"):
        assert (tmp_path / ".out.jsonl.lock").read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_it_is_free_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "new" / "out"):
            raise ZeroDivisionError
    assert list((tmp_path / "new").iterdir()) == []


def test_who_is_willing_to_wait_gets_it_next(tmp_path, holder):
    process, asked = holder(tmp_path / "out"), threading.Event()

    def end_it():
        asked.set()
        process.stdin.close()

    with locked(tmp_path / "out", waiting=end_it):
        assert asked.is_set()
        with pytest.raises(LockedError, match=str(os.getpid())), locked(tmp_path / "out"):
            pytest.fail("two have it")


def test_collecting_building_and_training_are_refused_while_another_does_it(tmp_path, holder):
    process = holder(tmp_path / "out")
    before = sorted(p.name for p in tmp_path.iterdir())
    (tmp_path / "passages.jsonl").write_text('{"text": "x"}\n')
    question = {"id": "1", "question": "who?", "gold_answers": ["x"]}
    for work in (
        lambda: collect([question], ScriptedProxy(), tmp_path / "out"),
        lambda: build_resumable(tmp_path / "passages.jsonl", tmp_path / "out", Words()),
        lambda: train(data=[tmp_path / "passages.jsonl"], out=tmp_path / "out"),
    ):
        with pytest.raises(LockedError, match=str(process.pid)):
            work()
    (tmp_path / "passages.jsonl").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_two_that_collect_at_once_write_each_row_once(tmp_path):
    questions = [{"id": str(i), "question": f"{i}?", "gold_answers": ["x"]} for i in range(40)]
    began, may_go_on = threading.Event(), threading.Event()

    class Slow(ScriptedProxy):
        def generate(self, *arguments, **options):
            began.set()
            assert may_go_on.wait(PATIENCE)
            return super().generate(*arguments, **options)

    first = threading.Thread(target=collect, args=(questions, Slow(), tmp_path / "out.jsonl"))
    first.start()
    assert began.wait(PATIENCE)
    with pytest.raises(LockedError):
        collect(questions, ScriptedProxy(), tmp_path / "out.jsonl")
    may_go_on.set()
    first.join(PATIENCE)
    collect(questions, ScriptedProxy(), tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [question["id"] for question in questions]


def test_two_trainings_that_need_the_same_drafts_write_them_once(tmp_path, monkeypatch):
    monkeypatch.setattr("rgate_integrations.training.drafts.cache_dir", lambda: tmp_path)
    began, may_go_on, waits = threading.Event(), threading.Event(), []
    questions = [f"What is {i}?" for i in range(5)]

    class Slow(ScriptedProxy):
        def generate(self, *arguments, **options):
            began.set()
            assert may_go_on.wait(PATIENCE)
            return super().generate(*arguments, **options)

    def told(what, done, total):
        waits.append(what)
        may_go_on.set()

    first = threading.Thread(target=cached_drafts, args=(Slow(), questions, 8))
    first.start()
    assert began.wait(PATIENCE)
    second = ScriptedProxy()
    assert len(cached_drafts(second, questions, 8, told)) == 5
    first.join(PATIENCE)
    assert second.calls == []
    assert waits == ["waiting for another training that writes the same drafts"]


def test_many_at_once_take_turns(tmp_path):
    inside, most, together = [], [], threading.Barrier(8, timeout=PATIENCE)

    def work():
        together.wait()
        for _ in range(20):
            with locked(tmp_path / "out", waiting=lambda: None):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert most == [1] * 160


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="cannot be written to") as caught, locked(tmp_path / "file" / "out"):
        pytest.fail("it is below a file")
    assert caught.value.hint


@pytest.mark.parametrize("make", ["a symbolic link", "a hard link", "a file", "a pipe"])
def test_what_is_no_lock_file_is_left_as_it_is(tmp_path, make):
    """In a shared folder another user's link to a file of ours emptied it."""
    precious, lock = tmp_path / "precious", tmp_path / ".out.lock"
    precious.write_text("years of work")
    if make == "a symbolic link":
        lock.symlink_to(precious)
    elif make == "a hard link":
        os.link(precious, lock)
    elif make == "a file":
        lock.write_text("years of work")
    else:
        os.mkfifo(lock)
    with pytest.raises(WriteError, match=r"symbolic links|is something else"), locked(tmp_path / "out"):
        pass
    assert precious.read_text() == "years of work"
    assert lock.exists()
    assert make == "a pipe" or lock.read_text() == "years of work"


def test_a_lock_file_that_a_killed_process_left_is_taken_over(tmp_path):
    (tmp_path / ".out.lock").write_text("12345678901")
    with locked(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_text() == str(os.getpid())
    assert not (tmp_path / ".out.lock").exists()
