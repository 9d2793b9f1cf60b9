"""Collected answers: what a full disk leaves, and that answers of two kinds never stand in one file."""

import errno
import json
import os
import shutil
import subprocess

import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError, WriteError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.runtime import files
from rgate_integrations.tuning.collect import collect
from rgate_integrations.tuning.paired import read_paired
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import TEXTS, Words

QUESTIONS = [{"id": str(i), "question": f"What is {i}?", "gold_answers": ["Answer"]} for i in range(40)]


class Model(ScriptedProxy):
    """Has a name and weights."""

    def __init__(self, name="one", weights="w1"):
        super().__init__()
        self.name = name
        self.weights = weights
        self.asked = []

    def generate(self, prompt, values, **options):
        self.asked += [each["question"] for each in values]
        return super().generate(prompt, values, **options)

    @property
    def fingerprint(self):
        return self.weights


def index(texts=TEXTS):
    return PassageIndex.build([Passage(i, t) for i, t in texts.items()], Words())


class FullDisk:
    """Takes the place of the write to a file: once there is no room, half a line goes out, then nothing."""

    def __init__(self, room):
        self.room = room

    def __call__(self, file, content):
        taken = content[: self.room]
        self.room -= len(taken)
        file.write(taken)
        if len(taken) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_collecting_goes_on_after_a_full_disk(tmp_path, monkeypatch):
    whole = collect(QUESTIONS, Model(), tmp_path / "whole.jsonl").read_text()
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(files, "_write_all", FullDisk(len(whole) * 3 // 4))
        with pytest.raises(WriteError, match="No space left") as caught:
            collect(QUESTIONS, Model(), out)
    assert "Free some space" in caught.value.hint
    kept = out.read_text()
    assert kept
    assert whole.startswith(kept)
    assert kept.endswith("\n"), "no half line"
    again = Model()
    collect(QUESTIONS, again, out)
    assert out.read_text() == whole
    assert again.asked == [q["question"] for q in QUESTIONS[kept.count("\n") :]], (
        "what is there is not asked again"
    )


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a few kilobytes, and what makes it larger; where none can be mounted, the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if shutil.which("mount") is None or not mount("size=16k"):
        pytest.skip("no disk can be mounted here")
    try:
        yield folder, lambda: mount("remount,size=1m")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_collecting_goes_on_when_a_real_disk_has_room_again(tmp_path, small_disk):
    disk, enlarge = small_disk
    whole = collect(QUESTIONS, Model(), tmp_path / "whole.jsonl").read_text()
    out = disk / "out.jsonl"
    for _ in range(2):  # as long as it is full, it says so and changes nothing
        with pytest.raises(WriteError, match="No space left"):
            collect(QUESTIONS, Model(), out)
        kept = out.read_text()
        assert whole.startswith(kept)
        there = kept.count("\n")
        assert 0 < there < len(QUESTIONS)
        assert kept.endswith("\n")
    assert enlarge()
    again = Model()
    collect(QUESTIONS, again, out)
    assert out.read_text() == whole
    assert len(again.asked) == len(QUESTIONS) - there


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llm": Model("two")}, "llm='one'; now it is 'two'"),
        ({"llm": Model(weights="w2")}, "weights='w1'; now it is 'w2'"),
        ({"tokens": 32}, "tokens=64; now it is 32"),
        ({"k": 2}, "k=3; now it is 2"),
        ({"index": None}, "index=.* now it is None"),
        ({"index": index({"1": "Bread is baked."})}, "2 passages.* now .*1 passages"),
        ({"judge": Model("judge")}, "judge=''; now it is 'judge'"),
    ],
)
def test_answers_that_were_made_otherwise_are_not_mixed(tmp_path, change, named):
    out, texts = tmp_path / "out.jsonl", {"1": "Bread is baked.", "2": "Rain falls."}
    given = {"llm": Model(), "index": index(texts)}
    collect(QUESTIONS[:2], out=out, **given)
    before = out.read_text()
    with pytest.raises(ConfigurationError, match=named) as caught:
        collect(QUESTIONS, out=out, **given | change)
    assert "another file" in caught.value.hint
    assert out.read_text() == before
    collect(QUESTIONS[:4], out=out, **given)
    assert len(out.read_text().splitlines()) == 4


def test_another_prompt_is_another_run(tmp_path, monkeypatch):
    out = collect(QUESTIONS[:2], Model(), tmp_path / "out.jsonl")
    changed = out.read_text().replace(
        json.loads(out.read_text().splitlines()[0])["made_with"]["prompt"], "old"
    )
    out.write_text(changed)
    with pytest.raises(ConfigurationError, match="prompt='old'"):
        collect(QUESTIONS, Model(), out)


def test_a_file_of_an_earlier_version_has_the_name_of_the_llm_alone(tmp_path):
    out = collect(QUESTIONS[:2], Model(), tmp_path / "out.jsonl")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for record in records:
        del record["made_with"]
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ConfigurationError, match="llm='one'; now it is 'two'"):
        collect(QUESTIONS[:4], Model("two"), out)
    collect(QUESTIONS[:4], Model(), out)
    (file,) = read_paired([out], rag=False)
    assert [record.id for record in file.records] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("line", ["5", "null", '{"question": "no id"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    out = tmp_path / "notes.jsonl"
    out.write_text(line + "\n")
    with pytest.raises(DataFormatError, match="something else"):
        collect(QUESTIONS, Model(), out)
    assert out.read_text() == line + "\n"
