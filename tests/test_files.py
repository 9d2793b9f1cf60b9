"""Files: what a kill leaves, what damaged files say, and lines that hold more than ASCII."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError, WriteError
from rgate_integrations.index import PassageIndex
from rgate_integrations.runtime.files import (
    check_output,
    find_folder,
    locked,
    read_file,
    read_folder,
    write_atomically,
    write_folder,
)
from rgate_integrations.runtime.jsonl import JsonlLog, read_jsonl
from rgate_integrations.tuning.collection import answers_file
from tests.test_index import Letters, passages


def contents(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in find_folder(folder).iterdir()}


def test_a_file_or_folder_is_replaced(tmp_path):
    for text in ("old", "é"):
        assert write_atomically(tmp_path / "new" / "a.json", text) == tmp_path / "new" / "a.json"
    assert contents(tmp_path / "new") == {"a.json": "é"}
    for files in ({"a": "1", "b": b"2"}, {"a": "3"}):
        assert contents(write_folder(tmp_path / "new" / "g", files)).keys() == files.keys()
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.json", "g"]


def test_a_file_keeps_its_permissions_and_a_link_to_it_stays(tmp_path):
    """Regression: a private file became readable by all, and a link was replaced, and the file kept the old."""
    file, link = tmp_path / "a.json", tmp_path / "link"
    write_atomically(file, "old")
    file.chmod(0o600)
    link.symlink_to("a.json")
    write_atomically(link, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o600, True)


def test_what_killed_saves_left_long_ago_goes_with_the_next_save(tmp_path):
    """Regression: hidden copies stayed beside a profile forever."""
    target, mark = tmp_path / "g[1]", "0123456789ab"
    for name in (f".g[1]-{mark}", f".g[1]-new{mark}", f".g1-{mark}", ".g[1]-before", f".g[1]-{mark[::-1]}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").touch()
        if name[-1] != "0":  # the last may belong to a process that is writing now
            os.utime(tmp_path / name, (0, 0))
    with pytest.raises(WriteError):
        write_folder(target, {"a/b": "1", "a": "2"})
    assert (tmp_path / f".g[1]-{mark}").exists()
    write_atomically(target, "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["g[1]", f".g[1]-new{mark}", f".g1-{mark}", ".g[1]-before", f".g[1]-{mark[::-1]}"]
    )


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(tmp_path):
    folder, reads = write_folder(tmp_path / "g", {"a": "0"}), []

    def read(replacements):
        reads.append(contents(folder)["a"])
        if len(reads) <= replacements:
            write_folder(folder, {"a": str(len(reads))})
            raise ValueError("torn")
        return reads[-1]

    assert read_folder(folder, lambda: read(2)) == "2"
    reads.clear()
    with pytest.raises(ValueError, match="torn"):
        read_folder(folder, lambda: read(99))
    assert len(reads) == 5


@pytest.mark.parametrize("name", ["", "missing", "a" * 5_000, "nul\0"])
def test_a_folder_that_is_not_replaced_is_read_once(name):
    read = Mock(side_effect=ValueError)
    with pytest.raises(ValueError):  # noqa: PT011
        read_folder(name, read)
    read.assert_called_once_with()


def test_a_folder_does_not_replace_a_file_or_something_else(tmp_path):
    mine = {"chapter.md": "years of work", "README.md": "years of work"}
    thesis = write_folder(tmp_path / "thesis", mine)
    gate = {"gate.json": "{}", "README.md": "a card"}
    with pytest.raises(ConfigurationError, match="is a file"):
        write_folder(thesis / "README.md", gate)
    with pytest.raises(ConfigurationError, match=r"contains other files, such as 'README\.md'"):
        write_folder(thesis, gate)
    assert contents(thesis) == mine
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert contents(write_folder(tmp_path / "empty", gate)) == gate


def test_a_link_stays_and_the_folder_that_it_points_to_is_replaced(tmp_path):
    """Regression: the link was replaced, and the folder kept what was old."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to("disk/g")
    for text in ("old", "new"):
        check_output(link, files=("a",))
        assert contents(write_folder(link, {"a": text})) == {"a": text}
        assert contents(tmp_path / "disk" / "g") == {"a": text}
    (tmp_path / "disk" / "g").rename(tmp_path / "disk" / ".g-before")  # as a kill leaves it
    assert contents(link) == {"a": "new"}
    (tmp_path / "disk" / ".g-before").rename(tmp_path / "disk" / "g")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["g"]
    assert link.is_symlink()
    (tmp_path / "here").symlink_to(".")
    with pytest.raises(ConfigurationError, match="contains other files"):
        write_folder(tmp_path / "here", {"a": "new"})


def test_what_is_below_the_home_is_found_where_it_was_written(tmp_path, monkeypatch):
    """Regression: below a folder that is called ``~``. A shell leaves the ``~`` in ``--out=~/gate``."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    write_folder("~/mine", {"a": "content"})
    assert (find_folder("~/mine") / "a").read_text() == "content"
    assert os.listdir(home) == ["mine"]
    write_atomically("~/a.jsonl", '{"a": 1}\n')
    with locked("~unknown/b"):  # not a home, so it is a name like any other
        JsonlLog("~/a.jsonl").append([{"a": 2}])
    assert read_file("~/a.jsonl") == b'{"a": 1}\n{"a": 2}\n'
    assert [value for _, value in read_jsonl("~/a.jsonl")] == [{"a": 1}, {"a": 2}]
    assert answers_file("~/gate") == home / "gate.answers.jsonl"
    saved = PassageIndex.build(passages(), Letters()).save("~/index")
    assert saved == PassageIndex.load("~/index", Letters()).folder == home / "index"


@pytest.mark.parametrize("name", [".", "/", "..", "missing/..", "HERE"])
def test_the_current_folder_is_no_place_to_write_a_folder_to(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    # Regression: written out, the current folder was replaced.
    name = name.replace("HERE", str(tmp_path))
    with pytest.raises(ConfigurationError, match="Cannot write to"):
        write_folder(name, {"a": "1"})
    # Regression: an empty current folder passed the check, and the work was lost at its end.
    with pytest.raises(ConfigurationError, match="Cannot write to"):
        check_output(name, files=("a",))
    # Regression: of a folder that is only read, the error was that it cannot be written.
    assert find_folder(name) == Path(name)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file' is not a folder"):
        check_output(tmp_path / "file" / "new" / "out")
    check_output(tmp_path / "new" / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(WriteError, match="not a folder that you may write to"):
        check_output(tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("problem", [FileNotFoundError, PermissionError])
def test_a_folder_that_another_process_replaces_and_a_hidden_current_folder_are_no_failure(
    tmp_path, monkeypatch, problem
):
    """Regression: whether the folder is the current one was asked, and a bare error was the answer."""
    monkeypatch.setattr(os.path, "samefile", Mock(side_effect=problem))
    for content in "12":
        write_folder(tmp_path / "out", {"a": content})
    assert (tmp_path / "out" / "a").read_text() == "2"


def test_what_another_process_wrote_while_this_one_waited_is_not_replaced(tmp_path, monkeypatch):
    """Regression: a folder was checked before the wait."""

    @contextlib.contextmanager
    def wait(*_, **__):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        yield

    monkeypatch.setattr("rgate_integrations.runtime.files.locked", wait)
    with pytest.raises(ConfigurationError, match=r"contains other files, such as 'notes\.txt'"):
        write_folder(tmp_path / "out", {"a": "1"})
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


WHOLE = gzip.compress(b'{"a": 1}\n' * 1_000, mtime=0)


def test_jsonl_is_read_line_by_line_gzipped_or_not(tmp_path):
    plain = write_atomically(tmp_path / "a.jsonl", '\n{"a": 1}\n  \n[2]\n')
    assert list(read_jsonl(plain)) == [(2, {"a": 1}), (4, [2])]
    packed = write_atomically(tmp_path / "a.jsonl.gz", WHOLE)
    assert len(list(read_jsonl(packed))) == 1_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"1\n{cut", r"a\.jsonl, line 2: not JSON \(Exp[^:]*\)\. Hint: one number a line"),
        ("a.jsonl", b'"\xff"\n', r"a\.jsonl, line 1: byte 2 of the line is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"line 1: not JSON \(it is nested too deeply"),
        ("a.jsonl", None, r"a\.jsonl.* cannot be read"),
        ("a.jsonl.gz", WHOLE[:-9], "cannot be read"),
        ("a.jsonl.gz", WHOLE[:12] + b"\x00\xff" * 4 + WHOLE[20:], "cannot be read"),
        ("a.jsonl.gz", b"plain", "cannot be read"),
    ],
    ids=range(7),
)
def test_damaged_jsonl_names_what_is_wrong(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        list(read_jsonl(tmp_path / name, hint="one number a line"))


# Other separators than line feeds stay in their line, half a surrogate pair is escaped, and a kill may cut an é.
ROWS = [{"a": "one\u2028two\x85 and half a\ud800b"}, {"a": "é"}]


def test_a_log_goes_on_after_its_last_whole_line(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    assert JsonlLog(path).values() == []
    JsonlLog(path).append(ROWS)
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o600, "only its owner may read it"
    whole = path.read_bytes()
    assert b"a\\ud800b" in whole
    for torn, left in ((whole[: whole.index("é".encode()) + 1], 1), (whole[:5], 0)):
        path.write_bytes(torn)
        log = JsonlLog(path)
        assert log.values() == ROWS[:left]
        log.append(ROWS[left:])
        assert path.read_bytes() == whole
        assert log.values() == ROWS


ONE, TWO = b'{"n": 1}\n', b'{"n": 2}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ONE + TWO[:-1], ONE + TWO),  # an editor saved it without the last line feed
        (ONE[:-1], ONE),
        (ONE + b"\n  \n", ONE + b"\n  \n"),
        (ONE + TWO[:-1] + b"  ", ONE + TWO[:-1] + b"  \n"),
        (ONE + b"  ", ONE + b"  \n"),
        (b"\xef\xbb\xbf" + ONE, b"\xef\xbb\xbf" + ONE),
        (b"x" * 200_000 + b"\n" + ONE, b"x" * 200_000 + b"\n" + ONE),  # of a long file the end is read
        (ONE + b'{"n": "' + b"2" * 200_000 + b'"}', ONE + b'{"n": "' + b"2" * 200_000 + b'"}\n'),
        (ONE + b'{"n": "' + b"2" * 200_000, ONE),  # torn
    ],
)
def test_a_whole_object_is_kept_with_or_without_its_line_feed(tmp_path, content, expected):
    path = write_atomically(tmp_path / "log.jsonl", content)
    JsonlLog(path, keys=["n"]).append([{"n": 3}])
    assert path.read_bytes() == expected + b'{"n": 3}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"all that I know, on one line",
        b'{"question": "who?"}\n{"question": "what?"}',
        b'{"question": "who?"}',
        b"\x08\x00\x00\x00\x00\x00\x00\x00{}\n\xff\x00\x01tail",
        *(b'{"x', ONE + b"# ann was here", ONE + b'{"other": 1}', ONE + b"7", b"[]\n", b"x" * 300_000),
    ],
    ids=range(10),
)
def test_a_file_that_is_no_log_is_neither_changed_nor_cut(tmp_path, content):
    """Regression: a typo in ``answers=`` emptied a file of one line, and cost others their last one."""
    path = write_atomically(tmp_path / "mine", content)
    with contextlib.suppress(DataFormatError):
        JsonlLog(path).values()
    assert path.read_bytes() == content
    with pytest.raises(DataFormatError, match="cannot be continued"):
        JsonlLog(path, keys=["n"]).append([{"n": 3}])
    assert path.read_bytes() == content


def test_a_log_goes_on_without_its_folder_or_says_so(tmp_path):
    """Regression: after a rotation that moved the folder, each append raised a `FileNotFoundError`."""
    path = tmp_path / "logs" / "log.jsonl"
    log = JsonlLog(path)
    path.parent.rename(tmp_path / "old")
    log.append([{"n": 1}])
    assert log.values() == [{"n": 1}]
    path.unlink()
    path.mkdir()
    with pytest.raises(WriteError, match=r"log\.jsonl' could not be written"):
        log.append([{"n": 2}])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "pipe"])
def test_a_device_or_a_pipe_is_no_log(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="not a regular file"):
        JsonlLog(tmp_path / path)


# --- a full disk ---------------------------------------------------------------------------------------------

FULL = """
import json, resource, signal, sys
from rgate_integrations.errors import WriteError
from rgate_integrations.runtime.files import write_atomically, write_folder
from rgate_integrations.runtime.jsonl import JsonlLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # no file may become longer
path, folder = sys.argv[1:]
log = JsonlLog(path)
log.append([{"n": 1, "text": "x" * 50}])
for write in (
    lambda: log.append([{"n": 2, "text": "y" * 50}]),
    lambda: write_atomically(folder + "/a.json", "z" * 200),
    lambda: write_folder(folder + "/gate", {"a": "z", "b": "z" * 200}),
):
    try:
        write()
    except WriteError as error:
        print(json.dumps([error.message, error.hint]))
log.append([{"n": 3}])
"""


def test_a_full_disk_loses_nothing_and_says_so(tmp_path):
    path = tmp_path / "log.jsonl"
    write_folder(tmp_path / "gate", {"a": "old"})
    write_atomically(tmp_path / "a.json", "old")
    done = subprocess.run(
        [sys.executable, "-c", FULL, path, tmp_path], capture_output=True, text=True, check=True
    )
    for name, line in zip(("log.jsonl", "a.json", "gate"), done.stdout.splitlines(), strict=True):
        message, hint = json.loads(line)
        assert message.endswith(f"{name}' could not be written: File too large.")
        assert "Free some space" in hint
    # What did not fit left no half line behind, and a shorter one still went in.
    assert JsonlLog(path).values() == [{"n": 1, "text": "x" * 50}, {"n": 3}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "gate", "log.jsonl"]
    assert (tmp_path / "a.json").read_text() == "old"
    assert contents(tmp_path / "gate") == {"a": "old"}


KILLED_AT = """
import os, shutil, sys
from pathlib import Path
from rgate_integrations.runtime.files import write_folder

root, stop = sys.argv[1], int(sys.argv[2])
steps = 0

def killing(function):
    def step(*arguments, **options):
        global steps
        if steps == stop:
            os.kill(os.getpid(), 9)
        steps += 1
        return function(*arguments, **options)
    return step

for name in ("mkdir", "rename", "replace", "unlink", "open"):
    setattr(Path, name, killing(getattr(Path, name)))
shutil.rmtree, os.unlink, os.rmdir = killing(shutil.rmtree), killing(os.unlink), killing(os.rmdir)
write_folder(root, {"a": "new", "b": "new"})
print(steps)
"""


def test_killed_at_any_step_a_folder_is_the_old_or_the_new(tmp_path):
    seen, done = [], b""
    while not done:
        folder = write_folder(tmp_path / str(len(seen)) / "g", {"a": "old", "b": "old"})
        command = [sys.executable, "-c", KILLED_AT, folder, str(len(seen))]
        done = subprocess.run(command, capture_output=True, check=False).stdout
        seen.append(contents(folder))
        write_folder(folder, {"a": "next"})
        assert contents(folder) == {"a": "next"}
    # One a step: first the old one, from some step on the new one, and nothing else.
    old, new = {"a": "old", "b": "old"}, {"a": "new", "b": "new"}
    assert len(seen) == int(done) + 1
    assert seen == [old] * seen.count(old) + [new] * seen.count(new)
    assert 0 < seen.count(old) < len(seen)
