"""Two processes at one place: the second is told, and a killed one locks nobody out."""

import subprocess
import sys
import threading

import pytest

from rgate_integrations.cli.tune import train
from rgate_integrations.errors import LockedError, WriteError
from rgate_integrations.runtime.files import locked
from rgate_integrations.tuning import collect
from rgate_integrations.tuning.own import TrainingOptions, drafts_for
from rgate_integrations.tuning.questions import Question
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

HOLDER = """
import sys
from rgate_integrations.runtime.files import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock of ``out`` until it is killed, or its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_the_second_is_told_and_a_killed_first_locks_nobody_out(tmp_path, holder):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("out", "link"):
        told = pytest.raises(LockedError, match=rf"Another process is writing to .*{name}")
        with told as caught, locked(tmp_path / name):
            pytest.fail("two have it")
        assert "Wait" in caught.value.hint
    with locked(tmp_path / "other"):
        pass
    holder.kill()
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with locked(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_it_is_free_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "new" / "out"):
            raise ZeroDivisionError
    assert list((tmp_path / "new").iterdir()) == []


def test_who_is_willing_to_wait_gets_it_next(tmp_path, holder):
    with locked(tmp_path / "out", waiting=holder.stdin.close):
        assert holder.stdin.closed
        with pytest.raises(LockedError), locked(tmp_path / "out"):
            pytest.fail("two have it")


def test_collecting_and_training_are_refused_while_another_does_it(tmp_path, holder):
    passages = tmp_path / "passages.jsonl"
    passages.write_text('{"text": "x"}\n')
    before = sorted(tmp_path.iterdir())
    question = {"id": "1", "question": "who?", "gold_answers": ["x"]}
    for work in (
        lambda: collect([question], ScriptedProxy(), tmp_path / "out"),
        lambda: train(data=[passages], out=tmp_path / "out"),
    ):
        with pytest.raises(LockedError):
            work()
    assert sorted(tmp_path.iterdir()) == before


class Slow(ScriptedProxy):
    """Writes nothing before it may."""

    def __init__(self):
        super().__init__()
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def generate(self, *arguments, **options):
        self.began.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().generate(*arguments, **options)


def test_two_trainings_that_need_the_same_drafts_write_them_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path))
    questions, slow, waits = [Question(f"What is {i}?") for i in range(5)], Slow(), []
    options = TrainingOptions(tokens=8)

    def told(what, done, total):
        waits.append(what)
        slow.may_go_on.set()

    first = threading.Thread(target=drafts_for, args=(slow, questions, options))
    first.start()
    assert slow.began.wait(PATIENCE)
    second = ScriptedProxy()
    assert len(drafts_for(second, questions, options, told)) == 5
    first.join(PATIENCE)
    assert second.calls == []
    assert waits == ["waiting for another training that writes the same drafts"]


def test_many_at_once_take_turns(tmp_path):
    inside, most, together = [], [], threading.Barrier(4, timeout=PATIENCE)

    def work():
        together.wait()
        for _ in range(10):
            with locked(tmp_path / "out", waiting=lambda: None):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert most == [1] * 40


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="could not be written") as caught, locked(tmp_path / "file" / "out"):
        pytest.fail("it is below a file")
    assert caught.value.hint


def test_what_is_no_lock_file_is_neither_followed_nor_changed(tmp_path):
    """In a shared folder another user's link to a file of ours emptied it."""
    precious, lock = tmp_path / "precious", tmp_path / ".out.lock"
    precious.write_text("years of work")
    lock.symlink_to(precious)
    with pytest.raises(WriteError, match="could not be written"), locked(tmp_path / "out"):
        pytest.fail("it is a link")
    assert precious.read_text() == "years of work"
    precious.replace(lock)
    with locked(tmp_path / "out"):
        pass
    assert lock.read_text() == "years of work"
