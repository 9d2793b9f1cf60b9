"""Two processes write to the same place: the second gets an error, and a killed one leaves no lock."""

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rgate_integrations.cli.tune import train
from rgate_integrations.errors import LockedError, WriteError
from rgate_integrations.runtime.files import locked, write_atomically, write_folder
from rgate_integrations.runtime.jsonl import JsonlLog
from rgate_integrations.tuning import collect
from tests.scripted_proxy import ScriptedProxy

HOLDER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from rgate_integrations.runtime.files import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock of ``out`` until it is killed, or its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path, holder):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("out", "link"):
        with (
            pytest.raises(LockedError, match=f"Another process is writing to .*{name}.* Hint: Wait"),
            locked(tmp_path / name),
        ):
            pytest.fail("two have it")
    with locked(tmp_path / "other"):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_who_is_willing_to_wait_gets_it_next(tmp_path, holder):
    with locked(tmp_path / "out", waiting=holder.stdin.close):
        assert holder.stdin.closed
        with pytest.raises(LockedError), locked(tmp_path / "out"):
            pytest.fail("two have it")


def test_collecting_and_training_are_refused_while_another_does_it(tmp_path, holder):
    passages = write_atomically(tmp_path / "passages.jsonl", '{"text": "x"}\n')
    before = sorted(tmp_path.iterdir())
    with locked(tmp_path / "out.answers.jsonl"), pytest.raises(LockedError):
        collect([{"id": "1", "question": "who?", "gold_answers": ["x"]}], ScriptedProxy(), tmp_path / "out")
    with pytest.raises(LockedError):
        train(data=[passages], out=tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_many_at_once_take_turns_also_after_an_error(tmp_path):
    free = threading.Lock()

    def work(_):
        with contextlib.suppress(ZeroDivisionError), locked(tmp_path / "new" / "out", waiting=lambda: None):
            assert free.acquire(blocking=False), "another has it"
            free.release()
            raise ZeroDivisionError

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(400)))
    assert list((tmp_path / "new").iterdir()) == []


def test_writers_of_one_folder_take_turns(tmp_path):
    """Regression: where several processes saved one profile, some were told to check their permissions."""

    def work(writer):
        for _ in range(50):
            write_folder(tmp_path / "out", {"a": str(writer)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_gateways_that_append_to_one_log_at_once_take_turns(tmp_path):
    """Regression: of 20,000 lines of four processes 12,000 were left, some with zeros in them."""
    path, text = tmp_path / "log.jsonl", "x" * 5_000

    def work(writer):
        log = JsonlLog(path)
        for number in range(100):
            log.append([{"writer": writer, "number": number, "text": text}])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    rows = JsonlLog(path).values()
    for writer in range(4):
        assert [row["number"] for row in rows if row["writer"] == writer] == list(range(100))


def test_what_is_no_lock_file_is_neither_followed_nor_changed(tmp_path):
    """Regression: in a shared folder another user's link to a file of ours emptied it."""
    precious = tmp_path / "precious"
    lock = tmp_path / ".out.lock"
    precious.write_text("years of work")
    lock.symlink_to(precious)
    for place in (tmp_path / "out", precious / "below a file"):
        with pytest.raises(WriteError, match="could not be written") as caught, locked(place):
            pytest.fail("it cannot be locked")
        assert caught.value.hint
    assert precious.read_text() == "years of work"
    precious.replace(lock)
    with (
        pytest.raises(WriteError, match=r"the name of its lock file, .* is taken") as caught,
        locked(tmp_path / "out"),
    ):
        pytest.fail("it is somebody's file")
    assert str(caught.value).count("could not be written") == 1
    assert caught.value.hint.startswith("Move or rename '.out.lock'")
    assert lock.read_text() == "years of work"
