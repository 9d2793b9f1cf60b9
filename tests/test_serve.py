"""The decision server: what it answers, to its own clients and to those of System One, and what it refuses."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from rgate_integrations import Decision, load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.serving.guard import Limits
from rgate_integrations.serving.server import make_server
from tests.http_servers import Blocking, Words, listening, serving_gate

typesafe = pytest.importorskip("typesafe_sdk", reason="comes with the dev extra")
CLIENT = httpx.Client(timeout=60)  # one for all: each new one reads the certificates of all authorities
ROUTE = {"type": "choice", "instructions": "?", "criteria": {"retrieve": "Look it up.", "direct": None}}
KNOWN = {"type": "noul", "instructions": "Does the LLM know?"}


@pytest.fixture(scope="module")
def words():
    return Words()


@pytest.fixture(scope="module")
def url(words):
    with serving_gate(words) as url:
        yield url


def decide(url, *questions, **more):
    response = CLIENT.post(f"{url}/v1/decide", json={"questions": list(questions), **more}, timeout=60)
    response.raise_for_status()
    return [Decision.model_validate(each) for each in response.json()["decisions"]]


def test_decisions_are_in_order_and_whole(url):
    known, empty, unknown = decide(url, "known", {"question": "known", "threshold": 0.95}, "who?")
    assert (known.question, known.retrieve, known.p_known) == ("known", False, 0.9)
    assert (empty.retrieve, empty.threshold) == (True, 0.95)
    assert unknown.retrieve


def test_what_came_with_a_question_reaches_the_gate(words, url):
    decide(url, {"question": "known", "draft": "It is.", "history": ["user: Hello"]})
    assert words.asked[-1] == (["known"], ["It is."], [["user: Hello"]])


def test_passages_are_compared_with_what_the_llm_knows(url):
    passage = {"text": "Hamlet was written by William Shakespeare.", "title": "Hamlet"}
    (decision,) = decide(url, {"question": "who wrote hamlet?", "passages": [passage]})
    assert decision.outcome == "retrieve"
    assert decision.p_helps > decision.p_known


def test_queries_are_the_question_and_the_claims_of_its_draft(url):
    asked = {"question": "Who wrote Hamlet?", "draft": "William Shakespeare wrote Hamlet in 1601."}
    answer = CLIENT.post(f"{url}/v1/queries", json={"questions": ["known", asked]}).json()
    known, unknown = answer["plans"]
    assert known["queries"] == []
    assert unknown["queries"][0]["text"] == "Who wrote Hamlet?"


@pytest.mark.model
def test_the_server_decides_as_the_gate_in_process_does():
    gate = load_gate(timeout=600.0)
    questions = ["Who wrote Hamlet?", "What does our contract say about delays?", " ", "Is it raining now?"]
    histories = [None, None, None, ["user: I am in Paris.", "assistant: Lovely."]]
    with serving_gate(gate, timeout=600.0) as url:
        items = [
            {"question": question, "history": history or []}
            for question, history in zip(questions, histories, strict=True)
        ]
        served = decide(url, *items)
        (named,) = decide(url, questions[0], llm="gpt-4o")
    here = gate.decide_batch(questions, histories=histories)
    free = {"cost": here[0].cost}
    assert [each.model_copy(update=free) for each in served] == [
        each.model_copy(update=free) for each in here
    ]
    assert "gpt-4o" in named.llm


# --- System One, asked by a client that is not ours ---------------------------------------------------------------


def test_system_one_is_answered_to_the_reference_client(url):
    with typesafe.TypeSafeClient(api_key="none", base_url=url, model="rgate") as client:
        answer = client.system_one(
            state="known",
            questions={
                "known": typesafe.Noul(instructions="Does the LLM know?"),
                "route": typesafe.Choice(instructions="?", criteria={"retrieve": None, "direct": None}),
            },
        )
    assert answer.nouls["known"].noul == 0.9
    assert answer.choices["route"].choice == "direct"
    assert answer.choices["route"].probabilities == pytest.approx({"retrieve": 0.1, "direct": 0.9})
    assert answer.model == "rgate"


@pytest.mark.parametrize(
    "state",
    [
        "who wrote it all?",
        {"question": "who wrote it all?"},
        {"messages": [{"role": "user", "content": "who wrote it all?"}]},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who wrote it all?"}],
        [{"role": "user", "content": [{"type": "text", "text": "who wrote it all?"}]}],
    ],
)
async def test_a_state_is_a_question_an_object_with_one_or_messages(url, words, state):
    async with typesafe.AsyncTypeSafeClient(api_key="none", base_url=url, model="m") as client:
        answer = await client.system_one(state=state, questions={"retrieve": ROUTE})
    assert answer.choices["retrieve"].choice == "retrieve"
    assert words.asked[-1][0] == ["who wrote it all?"]


def test_earlier_turns_go_to_the_gate_as_history(url, words):
    turns = [("user", "Hello"), ("assistant", "Hi"), ("tool", "42"), ("user", "known")]
    state = [{"role": role, "content": content} for role, content in turns]
    CLIENT.post(
        f"{url}/v1/systemone", json={"state": state, "questions": {"known": KNOWN}}
    ).raise_for_status()
    assert words.asked[-1][2] == [("user: Hello", "assistant: Hi")]


@pytest.mark.parametrize(
    "questions",
    [
        {"urgent": KNOWN},
        {"known": {"type": "score", "criteria": ["a", "b"]}},
        {"retrieve": {"type": "choice", "criteria": {"yes": None, "no": None}}},
    ],
)
def test_other_questions_are_refused_with_a_list_of_what_can_be_asked(url, questions):
    with (
        typesafe.TypeSafeClient(api_key="none", base_url=url, model="m") as client,
        pytest.raises(typesafe.TypeSafeUnprocessableEntityError) as refused,
    ):
        client.system_one(state="known", questions=questions)
    assert "noul" in refused.value.body["error"]["hint"]


@pytest.mark.parametrize("state", ["", " ", {"text": "who?"}, [], [{"role": "assistant", "content": "who?"}]])
def test_a_state_without_a_question_is_refused(url, state):
    body = {"state": state, "questions": {"known": KNOWN}}
    assert CLIENT.post(f"{url}/v1/systemone", json=body).status_code == 422


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b'{"questions": []}', 422),
        (b'{"questions": [7]}', 422),
        (b'{"questions": ["who?"], "more": 1}', 422),
        (b'{"questions": ["who?"], "llm": "../../etc\\n"}', 422),
        (b'{"questions": [{"question": "who?", "threshold": NaN}]}', 422),
        (b"[" * 100_000, 400),
        (b'{"questions": [' + b",".join([b'"known"'] * 10_000) + b"]}", 422),
        (b'{"questions": ["' + b"x" * (17 << 20) + b'"]}', 413),
    ],
    ids=[
        "cut",
        "no text",
        "none",
        "number",
        "unknown field",
        "path",
        "nan",
        "deep",
        "10,000 questions",
        "17 MiB",
    ],
)
def test_what_is_malformed_or_too_much_gets_its_status_and_the_server_goes_on(url, words, body, status):
    before = len(words.asked)
    headers = {"content-type": "application/json"}
    response = CLIENT.post(f"{url}/v1/decide", content=body, headers=headers, timeout=60)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert len(words.asked) == before
    assert decide(url, "known")


def test_who_has_no_token_is_refused_and_health_needs_none(words):
    with serving_gate(words, token="s3cret") as url:  # noqa: S106
        body = {"questions": ["known"]}
        for given in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cret"},
            {"authorization": "Bearer é"},
        ):
            headers = {name: value.encode("latin-1") for name, value in given.items()}
            response = CLIENT.post(f"{url}/v1/decide", json=body, headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert CLIENT.get(f"{url}/metrics", headers=headers).status_code == 401
        allowed = CLIENT.post(f"{url}/v1/decide", json=body, headers={"authorization": "Bearer s3cret"})
        assert allowed.status_code == 200
        assert CLIENT.get(f"{url}/health").status_code == 200


def test_other_machines_are_not_served_without_a_token():
    with pytest.raises(ConfigurationError, match="token"):
        make_server(lambda *_: None, "0.0.0.0", 0)  # noqa: S104
    make_server(lambda *_: None, "0.0.0.0", 0, token="s3cret")  # noqa: S104, S106


def test_a_web_page_cannot_ask_the_server_of_its_visitor(url):
    assert (
        CLIENT.post(
            f"{url}/v1/decide", json={"questions": ["x"]}, headers={"host": "evil.example"}
        ).status_code
        == 400
    )


def talk(url, *parts):
    """Send each part, the next one after an answer to the last; return all that comes until the server hangs up."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            received += (chunk := connection.recv(65536))
        while chunk:
            received += (chunk := connection.recv(65536))
    return received


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/decide HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ",
        b"POST /v1/decide HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half the headers", "half the body"],
)
def test_who_is_too_slow_is_hung_up_on(words, begun):
    with serving_gate(words, limits=Limits(seconds=0.2)) as url:
        assert talk(url, begun).startswith(b"HTTP/1.1 408 ")
        assert decide(url, "known")


def test_a_second_request_on_a_connection_must_be_in_time_too(words):
    get = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with serving_gate(words, limits=Limits(seconds=0.2)) as url:
        received = talk(url, get, b"GET /hea")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in received


@pytest.mark.parametrize(
    "headers",
    [
        b"x-a: b\r\n" * 5_000,
        b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"x-a\0: b\r\n\r\n",
        b": b\r\n\r\n",
    ],
)
def test_headers_that_are_too_many_or_wrong_are_refused(url, headers):
    received = talk(url, b"POST /v1/decide HTTP/1.1\r\nhost: 127.0.0.1\r\n" + headers)
    assert received.startswith(b"HTTP/1.1 400 ")


# --- load ---------------------------------------------------------------------------------------------------------


def test_past_its_queue_it_refuses_at_once_and_then_goes_on():
    gate = Blocking()
    with serving_gate(gate, queue=3) as url:
        waiting = threading.Thread(target=decide, args=(url, "known 1", "known 2"))
        waiting.start()
        gate.is_asked.wait()
        refused = CLIENT.post(f"{url}/v1/decide", json={"questions": ["known 3", "known 4"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (529, "1")
        assert "rgate_waiting_questions 2.0" in CLIENT.get(f"{url}/metrics").text
        gate.may_decide.set()
        waiting.join()
        assert decide(url, "known 3", "known 4")[0].question == "known 3"


def test_who_leaves_makes_room_for_others():
    gate = Blocking()
    with serving_gate(gate, queue=1) as url:
        with pytest.raises(httpx.TimeoutException):
            CLIENT.post(f"{url}/v1/decide", json={"questions": ["known"]}, timeout=0.5)
        gate.is_asked.wait()
        gate.may_decide.set()
        while "rgate_waiting_questions 0.0" not in CLIENT.get(f"{url}/metrics").text:
            pass
        assert decide(url, "known")


@pytest.mark.model
def test_a_deadline_retrieves():
    with serving_gate(load_gate()) as url:
        headers = {"x-rgate-timeout-ms": "0.001"}
        body = {"questions": ["Who wrote Hamlet?"]}
        answer = CLIENT.post(f"{url}/v1/decide", json=body, headers=headers, timeout=60).json()
        assert answer["decisions"][0]["error"]["type"] == "OverloadedError"
        assert answer["decisions"][0]["retrieve"]
        wrong = CLIENT.post(f"{url}/v1/decide", json=body, headers={"x-rgate-timeout-ms": "-1"})
        assert wrong.status_code == 422


async def test_many_clients_get_their_own_answers():
    gate = load_gate("constant:random:0.5")
    questions = [f"question {number}" for number in range(200)]
    expected = [each.p_known for each in gate.decide_batch(questions)]
    with serving_gate(gate) as url:
        async with httpx.AsyncClient(timeout=60) as client:

            async def ask(question):
                response = await client.post(f"{url}/v1/decide", json={"questions": [question]})
                return response.json()["decisions"][0]["p_known"]

            found = await asyncio.gather(*map(ask, questions))
    assert found == expected


# --- operations ---------------------------------------------------------------------------------------------------


def test_metrics_count_outcomes_and_every_answer_says_what_it_took(words):
    with serving_gate(words) as url:
        response = CLIENT.post(f"{url}/v1/decide", json={"questions": ["known", "who?", "what?"]})
        assert re.fullmatch(r"gate;dur=[\d.]+, total;dur=[\d.]+", response.headers["server-timing"])
        text = CLIENT.get(f"{url}/metrics").text
    assert (
        'rgate_decisions_total{gate="",kind="",outcome="retrieve"} 3.0' in text
    )  # and the first, for its model
    assert 'rgate_decisions_total{gate="",kind="",outcome="direct"} 1.0' in text
    assert "rgate_decision_seconds_count 2.0" in text


def test_questions_are_in_the_log_only_if_asked(words, caplog):
    caplog.set_level("INFO")
    with serving_gate(words) as url:
        decide(url, "a known secret")
    assert "1 questions, 0 to retrieve" in caplog.text
    assert "secret" not in caplog.text
    with serving_gate(words, log_questions=True) as url:
        decide(url, "a known secret\n2026-01-01 ERROR forged")
    assert r"'a known secret\n2026-01-01 ERROR forged'" in caplog.text


def test_openapi_names_every_route(url):
    paths = CLIENT.get(f"{url}/openapi.json").json()["paths"]
    assert set(paths) == {"/v1/systemone", "/v1/decide", "/v1/queries", "/health", "/ready", "/metrics"}
    assert CLIENT.get(f"{url}/nothing").status_code == 404
    assert CLIENT.get(f"{url}/v1/decide").status_code == 405


@pytest.mark.model
def test_the_command_serves_and_ends_when_it_is_told_to():
    code = "from rgate_integrations.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        while CLIENT.get(f"{url}/ready").status_code != 200:
            pass
        (decision,) = decide(url, "Who wrote Hamlet?")
        assert decision.error is None
    finally:
        process.terminate()
        process.stderr.read()
    assert process.wait() in (0, -15)


def test_a_gate_that_fails_retrieves_and_is_counted():
    class Broken(Words):
        async def adecide_batch(self, questions, **options):
            raise OSError("no disk")

    with serving_gate(Broken()) as url:
        (decision,) = decide(url, "known")
        assert decision.retrieve
        assert decision.error.type == "OSError"
        assert CLIENT.get(f"{url}/ready").status_code == 503
        assert 'rgate_errors_total{type="OSError"}' in CLIENT.get(f"{url}/metrics").text


def test_an_application_that_breaks_says_nothing_of_itself():
    async def app(scope, receive, send):
        if scope["type"] == "http":
            raise RuntimeError("secret")
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    with listening(app) as url:
        response = CLIENT.get(url)
    assert response.status_code == 500
    assert "secret" not in response.text


def test_without_the_extra_the_command_names_it():
    code = "import sys; sys.modules['fastapi'] = None\nfrom rgate_integrations.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "rgate-integrations[serve]" in done.stderr
