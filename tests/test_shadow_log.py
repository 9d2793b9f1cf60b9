"""The log of a gateway that only watches: each decision is in it when the server ends."""

import asyncio
import json

import pytest

from rgate_integrations.engine.loading import WARM_UP
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream
from tests.http_servers import Words, listening, serving_gateway
from tests.scripted_upstream import ScriptedUpstream
from tests.test_gateway import CLIENT


class Slow(Words):
    """Decides when the server ends."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    async def adecide_batch(self, requests):
        if requests[0].question != WARM_UP:
            self.waiting.append(asyncio.Event())
            await self.waiting[-1].wait()
        return self.decide_batch(requests)


def test_decisions_that_are_under_way_when_the_server_ends_are_logged(tmp_path, monkeypatch):
    """Regression: of 62 decisions 8 were in the log after SIGTERM."""
    gate, log = Slow(), tmp_path / "shadow.jsonl"
    close = Gateway.close

    async def decide_and_close(gateway):
        for event in gate.waiting:
            event.set()
        await close(gateway)

    monkeypatch.setattr(Gateway, "close", decide_and_close)
    with listening(ScriptedUpstream().app) as behind, serving_gateway(gate, behind, shadow=log) as url:
        for number in range(20):
            body = {"messages": [{"role": "user", "content": f"known {number}"}]}
            CLIENT.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        while len(gate.waiting) < 20:
            pass
    logged = [json.loads(line)["question"] for line in log.read_text().splitlines()]
    assert sorted(logged) == sorted(f"known {number}" for number in range(20))


def test_a_decision_that_never_comes_does_not_keep_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr("rgate_integrations.serving.gateway._FLUSH_SECONDS", 0.0)
    gate, log = Slow(), tmp_path / "shadow.jsonl"
    with listening(ScriptedUpstream().app) as behind, serving_gateway(gate, behind, shadow=log) as url:
        body = {"messages": [{"role": "user", "content": "known"}]}
        CLIENT.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        while not gate.waiting:
            pass
    assert log.read_text() == ""


@pytest.mark.parametrize("content", ["all that I know\n", '{"question": "who?"}\n', "[1]"])
def test_a_file_that_is_no_shadow_log_is_refused_when_the_server_starts(tmp_path, content):
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(DataFormatError, match="cannot be continued"):
        Gateway(DecisionService(Words()), Upstream("http://x"), shadow=path)
    assert path.read_text() == content


@pytest.mark.parametrize("options", [{"k": 0}, {"look_first": True}])
def test_no_shadow_log_is_made_by_a_gateway_whose_other_options_are_refused(tmp_path, options):
    """Regression: an empty file stayed behind."""
    with pytest.raises(ConfigurationError):
        Gateway(DecisionService(Words()), Upstream("http://x"), shadow=tmp_path / "log.jsonl", **options)
    assert list(tmp_path.iterdir()) == []
