"""First use: what is missing is fetched once, unless that is forbidden. No network; what fetches is scripted."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import (
    ChecksumError,
    DownloadError,
    ModelLoadError,
    RGateError,
)
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models import download as download_module
from rgate_integrations.models.catalog import READER
from rgate_integrations.models.download import (
    OFFLINE,
    cache_dir,
    cached_path,
    download,
    fetch_path,
    find_download_obstacle,
    resolve_model,
)
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.encoder_file import adapter_digest
from rgate_integrations.models.local import TransformersProxy
from rgate_integrations.runtime.files import write_folder
from tests.patience import ENDS_SOON, Clock

MINILM = "all-minilm-l6-v2"
LINE = "rgate: downloading the embedder all-minilm-l6-v2 (84 MB), once, to {}\n"


FOLDERS = {ENCODER: f"{ENCODER}-{adapter_digest()}"}


class Fetcher:
    """Stands for the network: writes a folder into the cache, or raises.

    Args:
        cache: The cache folder.
        error: What to raise instead.
    """

    def __init__(self, cache: Path, error: BaseException | None = None) -> None:
        self.cache = cache
        self.error = error
        self.asked: list[str] = []
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, name: str) -> Path:
        self.asked.append(name)
        self.began.set()
        assert self.may_go_on.wait(60)
        if self.error is not None:
            raise self.error
        return write_folder(self.cache / FOLDERS.get(name, name), {"rgate.json": "{}"})


@pytest.fixture
def fetcher(tmp_path, monkeypatch, online) -> Fetcher:
    """What fetches in an empty cache, for all of the package."""
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    made = Fetcher(tmp_path / "cache")
    monkeypatch.setattr(download_module, "download", made)
    monkeypatch.setattr(download_module, "_failures", {})
    return made


def fails(look, error: type[Exception] = RGateError) -> RGateError:
    with pytest.raises(error) as caught:
        look()
    return caught.value


# --- what is said -------------------------------------------------------------------------------------------------


def test_what_is_missing_is_fetched_with_one_line_and_then_nothing_is_said(fetcher, capfd, caplog):
    for _ in range(3):
        assert resolve_model(MINILM, kind="embedder") == str(fetcher.cache / MINILM)
    assert fetcher.asked == [MINILM]
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", LINE.format(fetcher.cache / MINILM))
    assert not caplog.text


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_without_standard_error_it_is_fetched_all_the_same(fetcher, capfd, monkeypatch, stream):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    fetch_path(MINILM, "embedder")
    assert capfd.readouterr().out == ""


# --- forbidden downloads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_offline_nothing_is_fetched(fetcher, monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    error = fails(partial(resolve_model, MINILM), ModelLoadError)
    assert error.message == (
        f"The model 'all-minilm-l6-v2' is not downloaded yet, and {name}={value} forbids downloads."
    )
    assert error.hint == "Run `rgate download all-minilm-l6-v2`."
    assert (fetcher.asked, capfd.readouterr().err) == ([], "")


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_a_variable_that_says_no_forbids_nothing(fetcher, monkeypatch, value):
    monkeypatch.setenv("RGATE_OFFLINE", value)
    assert find_download_obstacle() == ""
    assert fetch_path(MINILM, "embedder") == fetcher.cache / MINILM


def test_the_decision_server_is_one_and_its_log_says_what_to_download(fetcher, caplog):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from rgate_integrations.serving.app import make_app
    from rgate_integrations.serving.service import DecisionService

    with TestClient(make_app(DecisionService(load_gate()))) as client:
        (decision,) = client.post("/v1/decide", json={"questions": ["Who wrote Hamlet?"]}).json()["decisions"]
        assert client.get("/ready").status_code == 503
    assert (decision["retrieve"], decision["error"]["type"]) == (True, "ModelLoadError")
    assert "a server downloads nothing while its clients wait" in decision["error"]["message"]
    assert fetcher.asked == []
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    warming = [line for line in warned if line.startswith("The gate is not ready yet")]
    assert warming[0].endswith(f"Hint: Run `rgate download {ENCODER}`.")
    assert warned[-1].endswith(f"Run `rgate download {ENCODER}`.")


def test_the_mcp_server_is_one(fetcher):
    pytest.importorskip("mcp")
    from rgate_integrations.serving.agents import make_mcp_server

    make_mcp_server(load_gate())
    assert find_download_obstacle()


# --- threads and failures -----------------------------------------------------------------------------------------


def test_of_many_threads_one_fetches_and_the_others_use_it(fetcher, capfd):
    fetcher.may_go_on.clear()
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(fetch_path, MINILM, "embedder") for _ in range(16)]
        assert fetcher.began.wait(60)
        other = pool.submit(fetch_path, READER, "gate's model")
        fetcher.may_go_on.set()
        assert {each.result() for each in waiting} == {fetcher.cache / MINILM}
        assert other.result() == fetcher.cache / READER
    assert sorted(fetcher.asked) == [MINILM, READER]
    assert capfd.readouterr().err.count(", once, to") == 2


def test_what_failed_is_not_tried_again_for_five_minutes(fetcher, monkeypatch, caplog):
    clock, fetcher.error = Clock(), ChecksumError("Not the pinned one.", hint="Do not use it.")
    monkeypatch.setattr(download_module, "time", SimpleNamespace(monotonic=clock))
    look = partial(fetch_path, MINILM, "embedder")
    assert fails(look, ChecksumError) is fetcher.error
    for seconds in (0, 299):
        clock.now += seconds
        again = fails(look, DownloadError)
        assert again.message.endswith("could not be downloaded less than 5 minutes ago: Not the pinned one.")
        assert again.hint == f"To try again now, run `rgate download {MINILM}`."
    assert len(fetcher.asked) == 1
    assert caplog.text.count("next attempt after 5 minutes") == 1
    clock.now += 1
    fetcher.error = None
    assert look() == fetcher.cache / MINILM
    assert len(fetcher.asked) == 2


def test_ctrl_c_is_no_failure(fetcher, caplog):
    fetcher.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetch_path(MINILM, "embedder")
    fetcher.error = None
    assert fetch_path(MINILM, "embedder") == fetcher.cache / MINILM
    assert not caplog.text


# --- decisions ----------------------------------------------------------------------------------------------------


def test_a_failed_download_retrieves_and_costs_one_attempt(fetcher):
    fetcher.error = DownloadError("No network.", hint="Get one.")
    gate = load_gate()
    decisions = [gate.decide("What is the capital of France?"), gate.decide("x " * 5_000)]
    decisions += gate.decide_batch(["a?", "b?"])
    assert {(each.retrieve, each.error.type) for each in decisions} == {(True, "DownloadError")}
    assert all("No network." in each.error.message for each in decisions)
    assert fetcher.asked == [ENCODER]


def test_the_deadline_of_a_decision_holds_while_it_is_fetched(fetcher, call):
    fetcher.may_go_on.clear()
    decision = call(load_gate(), "What is the capital of France?", timeout=0.05)
    assert fetcher.began.wait(60)
    assert (decision.retrieve, decision.error.type) == (True, "DecisionTimeoutError")
    assert fetcher.asked == [ENCODER]
    assert cached_path(ENCODER) is None
    fetcher.may_go_on.set()
    # The worker goes on: another caller waits for it, and begins nothing.
    assert fetch_path(ENCODER, "gate's model") == fetcher.cache / FOLDERS[ENCODER]
    assert fetcher.asked == [ENCODER]


@pytest.mark.model
def test_what_is_loaded_needs_no_cache(tmp_path, monkeypatch):
    """Regression: a gate retrieved for everything once its cache was gone or written by another release."""
    for name in (ENCODER, READER):
        download(name)
    cache = tmp_path / "cache"
    cache.symlink_to(cache_dir())
    monkeypatch.setenv("RGATE_CACHE", str(cache))
    monkeypatch.setattr("rgate_integrations.models.onnx_model._models", {})
    gate, embedder = load_gate(on_error="raise"), SentenceEmbedder()
    question = "Who wrote Hamlet?"
    before, vector = gate.decide(question), embedder.embed([question])
    cache.unlink()
    assert (cached_path(ENCODER), cached_path(READER)) == (None, None)
    after = gate.decide(question)
    assert (after.p_known, after.reason) == (before.p_known, before.reason)
    np.testing.assert_array_equal(SentenceEmbedder().embed([question]), vector)


def test_the_end_of_the_process_does_not_wait_for_a_local_model_that_is_fetched(fetcher):
    """Who holds a model's lock is waited for, 10 seconds long: it is taken when the model is there."""
    pytest.importorskip("torch")
    fetcher.may_go_on.clear()
    proxy = TransformersProxy("smollm2-135m-instruct")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lambda: proxy.runner)
        assert fetcher.began.wait(60)
        assert not proxy._lock.in_use.locked()
        fetcher.may_go_on.set()
        assert isinstance(loading.exception(), ModelLoadError), "the folder is empty"


SCRIPT = f"""
import sys, time
from rgate_integrations import load_gate
{ENDS_SOON}
from rgate_integrations.models import download

def never_ends(item, source, folder):
    (folder / "half").write_text("half")
    time.sleep(600)

download.fetch_files = never_ends
decision = load_gate().decide("What is the capital of France?", timeout=0.5)
print(decision.error.type)
"""


@pytest.mark.parametrize("end", ["", "raise KeyboardInterrupt"])
def test_a_script_that_ends_during_a_download_leaves_nothing_half_made(tmp_path, online, end):
    environment = {
        **os.environ,
        "RGATE_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "DecisionTimeoutError\n"
    assert done.returncode == (0 if not end else -2), done.stderr
    assert done.stderr.startswith(f"rgate: downloading the gate's model {ENCODER} (95 MB), once")
    assert {path.name for path in tmp_path.iterdir()} <= {
        f".tmp-{FOLDERS[ENCODER]}",
        f".{FOLDERS[ENCODER]}.lock",
    }
