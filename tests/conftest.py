"""Fixtures: a scripted proxy for tests without a model, and the real small models."""

import asyncio
import gc
import os
import shutil
import ssl
import threading

import pytest
from hypothesis import HealthCheck, settings

from rgate_integrations import load_gate
from rgate_integrations.index.embedder import DEFAULT_EMBEDDER
from rgate_integrations.models.catalog import READER
from rgate_integrations.models.download import OFFLINE, cached_path, download
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.remote import RemoteModel
from tests.fake_server import Fake, Server, running
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import shipped

# Fixtures download what a test needs by its name: nothing else is fetched, whatever a test asks for.
os.environ["RGATE_OFFLINE"] = "1"

# No example fails for being slow: on a busy machine all are.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

SMOLLM2 = "smollm2-135m-instruct"


def pytest_configure():
    gc.disable()  # nothing that is imported is garbage


def pytest_collection_finish():
    """Leave out of every collection of garbage what was imported, two million objects that take 0.4 s to look at."""
    gc.freeze()
    gc.set_threshold(
        10_000
    )  # by default every 700 objects: 7 % of the time, as what a test imports is looked at again
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_authorities():
    """Clients in this process read no list of authorities, 20 ms each: they ask this machine, without TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
        yield


CALLS = {
    "decide": lambda gate, question, **options: gate.decide(question, **options),
    "adecide": lambda gate, question, **options: asyncio.run(gate.adecide(question, **options)),
}


@pytest.fixture(params=CALLS)
def call(request):
    """Decides for one question, from a thread or a task."""
    return CALLS[request.param]


@pytest.fixture
def scripted() -> ScriptedProxy:
    return ScriptedProxy()


@pytest.fixture(scope="module")
def default_gate():
    """The default gate; what goes wrong in it is raised."""
    return load_gate(on_error="raise")


@pytest.fixture(scope="session")
def smollm2() -> TransformersProxy:
    download(ENCODER)  # the shipped gates look at its states, and at those of the reader
    download(READER)
    download(SMOLLM2)
    proxy = shared_proxy(SMOLLM2)
    assert proxy.runner.num_layers == 30, "it is loaded"
    return proxy


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """Two narrow layers with random weights, and the tokenizer of smollm2: a training step takes milliseconds."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    download(SMOLLM2)
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(cached_path(SMOLLM2))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,  # wide: with the usual 0.02 attention carries next to nothing
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def embedder_model() -> str:
    download(DEFAULT_EMBEDDER)
    return DEFAULT_EMBEDDER


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The test's folder is the cache."""
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path))


@pytest.fixture
def online(monkeypatch):
    """A process that may fetch what is missing on first use."""
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rgate_integrations.models.download._serving", threading.Event())


@pytest.fixture
def gate():
    """The scripted gate of the LlamaIndex tests, anew for each."""
    from tests.llama_index_parts import ScriptedGate

    return ScriptedGate()


@pytest.fixture
def prior(tmp_path) -> str:
    """A saved gate that knows nothing, to be tuned."""
    return shipped(tmp_path)


@pytest.fixture
def fake():
    """A scripted server; the fixture is a function that returns a proxy for it: ``fake(*script, **options)``."""

    def proxy(*script, **options):
        Fake.script = list(script)
        return RemoteModel(f"{url}/v1", "m", **options)

    Fake.seen.clear()
    with running(Server(("127.0.0.1", 0), Fake)) as url:
        yield proxy


@pytest.fixture(scope="module")
def words():
    """A gate that knows what has "known" in it."""
    from tests.http_servers import Words

    return Words()


@pytest.fixture(scope="module")
def url(words):
    """Where a decision server with that gate listens."""
    from tests.http_servers import serving_gate

    with serving_gate(words) as url:
        yield url


@pytest.fixture(scope="module")
def served(smollm2):
    """A LangChain chat model, smollm2, on a real llama.cpp server with two slots."""
    pytest.importorskip("xllamacpp", reason="the llama.cpp server comes with the dev extra")
    import llama_server

    file = llama_server.gguf("smollm2-135m-instruct")
    with llama_server.serving(file, slots=2, context=2048, threads=1) as url:
        yield llama_server.ServedChat(url=url, tokens=16)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A real headless Chromium; tests that use it are skipped without one."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no Chromium with its driver on this machine")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    profile = tmp_path_factory.mktemp("profile")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()
