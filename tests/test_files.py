"""Files: what a kill leaves, what damaged files say, and lines that hold more than ASCII."""

import gzip
import os
import stat

import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.files import (
    JsonlLog,
    existing_folder,
    read_jsonl,
    rename_folder,
    write_atomically,
    write_folder,
)


class Killed(BaseException):
    """Stands for a kill: nothing after it runs in the function that it hits."""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.json"
    assert write_atomically(path, "é") == path
    assert path.read_bytes() == "é".encode()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"other")
    assert path.read_text(encoding="utf-8") == "é"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_others_may_read_what_was_written(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    written = write_atomically(tmp_path / "written", "x")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "g", {"a": "1", "b": b"2"})
    write_folder(folder, {"a": "3"})
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"a": "3"}
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        write_folder(folder, {"a": "4"})
    assert (folder / "a").read_text() == "3"
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "g", {"a": "old"})
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").write_text("new")
    rename = type(folder).rename

    def killed_at_the_second(self, target):
        if self == made:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(folder), "rename", killed_at_the_second)
        with pytest.raises(Killed):
            rename_folder(made, folder)
    assert not folder.exists()
    assert (existing_folder(folder) / "a").read_text() == "old"
    rename_folder(made, folder)
    assert (existing_folder(folder) / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_a_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "g").write_text("mine")
    with pytest.raises(ConfigurationError, match="is a file"):
        write_folder(tmp_path / "g", {"a": "1"})
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_jsonl_names_the_line_that_is_wrong(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n  \n[2]\n', encoding="utf-8")
    assert list(read_jsonl(path)) == [(2, {"a": 1}), (4, [2])]
    path.write_text("1\n{cut", encoding="utf-8")
    with pytest.raises(DataFormatError, match=r"a\.jsonl, line 2: not JSON .* Hint: one"):
        list(read_jsonl(path, hint="one number a line"))
    path.write_bytes(b'"\xff"\n')
    with pytest.raises(DataFormatError, match="cannot be read"):
        list(read_jsonl(path))
    assert list(read_jsonl(path, errors="replace")) == [(1, "\ufffd")]
    with pytest.raises(DataFormatError, match=r"missing\.jsonl"):
        list(read_jsonl(tmp_path / "missing.jsonl"))


def test_a_truncated_gzip_file_is_no_crash(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n' * 1_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole)
    assert len(list(read_jsonl(path))) == 1_000
    for damaged in (whole[:-9], whole[:12] + b"\x00\xff" * 4 + whole[20:], b"plain"):
        path.write_bytes(damaged)
        with pytest.raises(DataFormatError, match="cannot be read"):
            list(read_jsonl(path))


def test_a_log_goes_on_after_its_last_whole_line(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    log = JsonlLog(path)
    assert log.values() == []
    # Separators that are no line feed stay in their line, and a kill may cut a character in two.
    log.append([{"a": "one\u2028two\x85"}, {"a": "é"}])
    assert JsonlLog(path).values() == [{"a": "one\u2028two\x85"}, {"a": "é"}]
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("é".encode()) + 1])
    again = JsonlLog(path)
    assert again.values() == [{"a": "one\u2028two\x85"}]
    again.append([{"a": "é"}])
    assert path.read_bytes() == whole
