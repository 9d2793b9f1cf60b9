"""A gate on a server is a gate as any other; while the server is down, slow or wrong it retrieves."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.engine.gate_like import answer_first_gates, for_llm
from rgate_integrations.errors import ModelLoadError, ServerError
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.folder import save_gate
from tests.http_servers import Blocking, Words, listening, serving_gate
from tests.scripted_proxy import ScriptedProxy


@pytest.fixture(scope="module")
def words():
    return Words()


@pytest.fixture(scope="module")
def url(words):
    with serving_gate(words) as url:
        yield url


def test_it_decides_one_and_many_in_threads_and_on_a_loop(url):
    gate = load_gate(url)
    assert [gate.decide(question).retrieve for question in ("known", "who?")] == [False, True]
    questions = [f"{'known' if number % 3 else 'who'} {number}" for number in range(100)]
    found = asyncio.run(gate.adecide_batch(questions))
    assert [(each.question, each.retrieve) for each in found] == [(q, q.startswith("who")) for q in questions]


def test_the_servers_threshold_holds_unless_the_caller_gives_one():
    with serving_gate(load_gate("token_probability", proxy=ScriptedProxy(), threshold=0.999)) as url:
        gate = load_gate(url)
        own, given = gate.decide("who?"), gate.decide("who?", threshold=0.0)
    assert (own.retrieve, own.threshold) == (True, 0.999)
    assert (given.retrieve, given.threshold) == (False, 0.0)


def test_what_a_question_came_with_goes_along(words, url):
    draft = Draft(text="It is", tokens=("It", " is"), logprobs=(-0.1, -0.2), source="llm", model="m")
    load_gate(url).decide("known", draft=draft, history=["user: Hello"])
    assert words.asked[-1] == (["known"], [draft], [["user: Hello"]])


def test_turns_that_the_servers_gate_does_not_read_retrieve():
    with serving_gate(load_gate("constant:never")) as url:
        assert load_gate(url).decide("Is it?", history=["user: Hello"], threshold=0.0).retrieve


@pytest.mark.model
def test_it_equals_the_gate_in_process_for_questions_answers_and_llms():
    here, questions = load_gate(), ["Who wrote Hamlet?", "What does our contract say?", "Is rain wet?"]
    with serving_gate(here, timeout=600.0) as url:
        remote = load_gate(url, request_seconds=600.0)
        judge, question_gate = answer_first_gates(remote)
        assert (judge, question_gate) == (remote, remote)
        own_judge, _ = answer_first_gates(here)
        for mine, theirs, drafts in ((here, remote, None), (own_judge, judge, ["It was him."] * 3)):
            for llm, known_by in (("", ""), ("gpt-4o", ""), ("gpt-4o", "the chain")):
                expected = for_llm(mine, llm, known_by).decide_batch(questions, drafts=drafts)
                found = for_llm(theirs, llm, known_by).decide_batch(questions, drafts=drafts)
                same = {"cost": found[0].cost, "gate": "remote"}
                assert [each.model_copy(update=same) for each in found] == [
                    each.model_copy(update=same) for each in expected
                ]


def test_rules_are_applied_before_the_server_is_asked(words, url):
    gate = load_gate(url, always=[re.compile("contract")])
    before = len(words.asked)
    assert gate.decide("known contract").retrieve
    assert len(words.asked) == before


# --- failures -----------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def test_a_server_that_is_down_retrieves_and_is_asked_again_when_it_is_back(words):
    port = free_port()
    gate = load_gate(f"http://127.0.0.1:{port}")
    for _ in range(3):
        decision = gate.decide("known")
        assert (decision.retrieve, decision.error.type) == (True, "ServerError")
    from rgate_integrations.serving.app import make_app
    from rgate_integrations.serving.service import DecisionService

    with listening(make_app(DecisionService(words)), port=port) as url:
        while httpx.get(f"{url}/ready").status_code != 200:
            pass
        assert not gate.decide("known").retrieve


@contextmanager
def answering(respond):
    """Serve what ``respond(path)`` says: status and body; gives the URL and the paths that were asked for."""
    paths = []

    async def app(scope, receive, send):
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        paths.append(scope["path"])
        status, body = await respond(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    with listening(app) as url:
        yield url, paths


def test_a_server_that_hangs_is_not_sent_questions_until_it_is_ready():
    async def hang(path):
        await asyncio.sleep(3600)

    with answering(hang) as (url, paths):
        gate = load_gate(url, request_seconds=0.2)
        for _ in range(4):
            assert gate.decide("known").error.type == "ServerError"
    assert paths == ["/v1/decide", "/ready", "/ready", "/ready"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b""),
        (529, b"{}"),
        (401, b"{}"),
        (404, b"not here"),
        (302, b""),
        (200, b"{}"),
        (200, b"<html>"),
        (200, b'{"decisions": []}'),
        (200, b'{"decisions": [{"question": "known", "retrieve": false, "p_known": 7}]}'),
        (200, b"x" * (17 << 20)),
    ],
)
def test_whatever_else_it_answers_retrieves(status, body):
    async def respond(path):
        return status, body

    with answering(respond) as (url, _):
        decision = load_gate(url).decide("known")
        assert (decision.retrieve, decision.error.type) == (True, "ServerError")
        with pytest.raises(ServerError):
            load_gate(url, on_error="raise").decide("known")


def test_a_deadline_of_the_caller_holds(words):
    gate = Blocking()
    with serving_gate(gate) as url:
        decision = load_gate(url, timeout=0.2).decide("known")
        assert (decision.retrieve, decision.error.type) == (True, "OverloadedError")
        gate.may_decide.set()


def test_the_token_is_sent_and_never_shown(words, monkeypatch):
    with serving_gate(words, token="s3cret") as url:  # noqa: S106
        refused = load_gate(url, token="wr0ng")  # noqa: S106
        decision = refused.decide("known")
        assert decision.error.type == "ServerError"
        monkeypatch.setenv("RGATE_TOKEN", "s3cret")
        assert not load_gate(url).decide("known").retrieve
    assert "wr0ng" not in f"{refused!r} {refused.config()} {decision.model_dump_json()}"


def test_a_saved_gate_may_not_send_questions_to_a_server(tmp_path):
    inner = {"inner": {"gate": "remote", "url": "http://127.0.0.1:9"}}
    save_gate(SavedGate(method="calibrated", prompts={}, parameters=inner), tmp_path / "gate")
    with pytest.raises(ModelLoadError, match="ask a server"):
        load_gate(str(tmp_path / "gate"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_connections_of_its_own(url):
    gate = load_gate(url)
    assert not gate.decide("known").retrieve
    child = os.fork()
    if child == 0:
        os._exit(gate.decide("known").retrieve)
    assert os.waitpid(child, 0)[1] == 0
    assert not gate.decide("known").retrieve


@contextmanager
def serve(port):
    """Run the command; gives the process when it is ready."""
    code = "from rgate_integrations.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.model
def test_a_server_that_is_killed_under_load_costs_no_decision_and_its_successor_decides():
    port = free_port()
    gate = load_gate(f"http://127.0.0.1:{port}", timeout=60.0)
    with serve(port) as process, ThreadPoolExecutor(8) as pool:
        asked = [f"Who wrote book {number}?" for number in range(400)]
        callers = [pool.submit(gate.decide, question) for question in asked]
        first = callers[0].result()
        process.kill()
        found = [caller.result() for caller in callers]
    assert [each.question for each in found] == asked
    assert (first.error, found[-1].retrieve) == (None, True)
    assert {each.error.type for each in found if each.error} == {"ServerError"}
    with serve(port):
        assert gate.decide("Who wrote Hamlet?").error is None
