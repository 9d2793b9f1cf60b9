"""Fixtures: a scripted proxy for tests without a model, and the real small models."""

import pytest

from rgate_integrations.proxy.download import download
from rgate_integrations.proxy.local import LocalProxy, shared_proxy
from tests.scripted_proxy import ScriptedProxy

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture
def scripted() -> ScriptedProxy:
    return ScriptedProxy()


@pytest.fixture(scope="session")
def smollm2() -> LocalProxy:
    download(SMOLLM2)
    return shared_proxy(SMOLLM2).load()


@pytest.fixture(scope="session")
def minilm() -> str:
    download("all-minilm-l6-v2")
    return "all-minilm-l6-v2"
