"""The decision server: what it answers, to its own clients and to those of System One, and what it refuses."""

import asyncio
import gzip
import json
import logging
import math
import re
import socket
import threading
import time
from unittest.mock import patch

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from rgate_integrations import Decision, load_gate
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.ability import Ability, save_measured
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.server import Guard, make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.wire import DecideItem
from tests.http_servers import CLIENT, Blocking, Broken, Words, listening, serving_gate
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.scripted_upstream import send_raw

typesafe = pytest.importorskip("typesafe_sdk", reason="comes with the dev extra")
KNOWN = {"type": "noul", "instructions": "Does the LLM know?"}
TOKEN = "s3cret"  # noqa: S105


def post(url, path, body, **headers):
    kind = "json" if isinstance(body, dict) else "content"
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    return CLIENT.post(url + path, headers={"content-type": "application/json", **headers}, **{kind: body})


def decide(url, *questions, **more):
    response = post(url, "/v1/decide", {"questions": list(questions), **more})
    response.raise_for_status()
    return [Decision.model_validate(each) for each in response.json()["decisions"]]


def wait_until_ready(url):
    for _ in range(10 * PATIENCE):
        if CLIENT.get(f"{url}/ready").status_code == 200:
            return
        time.sleep(0.1)
    pytest.fail("it is never ready")


def metrics(url):
    return CLIENT.get(f"{url}/metrics").text


def test_decisions_are_in_order_and_what_came_with_a_question_reaches_the_gate(words, url):
    known, strict, unknown = decide(url, "known", {"question": "known", "threshold": 0.95}, "who?")
    assert (known.question, known.retrieve, known.p_known) == ("known", False, 0.9)
    assert (strict.retrieve, strict.threshold) == (True, 0.95)
    assert unknown.retrieve
    decide(url, {"question": "known", "draft": "It is.", "history": ["user: Hello"]})
    (request,) = words.asked[-1]
    assert (request.question, request.draft.text, request.history) == ("known", "It is.", ("user: Hello",))
    passage = {"text": "Hamlet was written by William Shakespeare.", "title": "Hamlet"}
    (looked,) = decide(url, {"question": "who wrote hamlet?", "passages": [passage]})
    assert looked.outcome == "retrieve"
    assert looked.p_helps > looked.p_known


def test_queries_are_the_question_and_the_claims_of_its_draft(url):
    asked = {"question": "Who wrote Hamlet?", "draft": "William Shakespeare wrote Hamlet in 1601."}
    known, unknown = post(url, "/v1/queries", {"questions": ["known", asked]}).json()["plans"]
    assert (known["queries"], unknown["queries"][0]["text"]) == ([], "Who wrote Hamlet?")
    asked = {"question": "And when was he born?", "history": ["user: Who was Ben Jonson?"]}
    (follow_up,) = post(url, "/v1/queries", {"questions": [asked]}).json()["plans"]
    assert follow_up["queries"][0]["text"] == "Who was Ben Jonson?\nAnd when was he born?"


@pytest.mark.model
def test_a_deadline_of_the_request_retrieves_and_one_that_is_none_is_refused():
    body = {"questions": ["Who wrote Hamlet?"]}
    with serving_gate(load_gate()) as url:
        (late,) = post(url, "/v1/decide", body, **{"x-rgate-timeout-ms": "0.001"}).json()["decisions"]
        assert post(url, "/v1/decide", body, **{"x-rgate-timeout-ms": "-1"}).status_code == 422
    assert (late["retrieve"], late["error"]["type"]) == (True, "DecisionTimeoutError")


# --- System One, asked by a client that is not ours ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "history"),
    [
        ("known", ()),
        ({"question": "known"}, ()),
        ({"messages": [{"role": "user", "content": "known"}]}, ()),
        ({"question": None, "messages": [{"role": "user", "content": "known"}]}, ()),
        ({"question": "", "messages": [{"role": "user", "content": "known"}]}, ()),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "known"}], ()),
        ([{"role": "user", "content": [{"type": "text", "text": "known"}]}], ()),
        (
            [
                {"role": "user", "content": "Hello"},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "known"},
            ],
            ("user: Hello", "assistant: Hi"),
        ),
    ],
)
def test_system_one_is_answered_to_the_reference_client(url, words, state, history):
    with typesafe.TypeSafeClient(api_key="none", base_url=url, model="rgate") as client:
        criteria = {"retrieve": "Look it up.", "direct": None}
        answer = client.system_one(
            state=state,
            questions={
                "known": typesafe.Noul(instructions="Does the LLM know?"),
                "route": typesafe.Choice(instructions="?", criteria=criteria),
            },
        )
    assert answer.nouls["known"].noul == 0.9
    assert answer.choices["route"].choice == "direct"
    assert answer.choices["route"].probabilities == pytest.approx({"retrieve": 0.1, "direct": 0.9})
    assert answer.model == "rgate"
    (request,) = words.asked[-1]
    assert (request.question, request.history) == ("known", history)


@pytest.mark.parametrize(
    ("state", "questions", "hint"),
    [
        *((state, {"known": KNOWN}, "messages") for state in ("", " ", {"text": "who?"}, [])),
        ([{"role": "assistant", "content": "who?"}], {"known": KNOWN}, "messages"),
        ("known", {"urgent": KNOWN}, "noul"),
        ("known", {"known": {"type": "score", "criteria": ["a", "b"]}}, "noul"),
        ("known", {"retrieve": {"type": "choice", "criteria": {"yes": None, "no": None}}}, "noul"),
    ],
)
def test_what_system_one_cannot_be_asked_is_refused_with_a_list_of_what_can(url, state, questions, hint):
    refused = post(url, "/v1/systemone", {"state": state, "questions": questions})
    assert refused.status_code == 422
    assert hint in refused.json()["error"]["hint"]


# --- limits -------------------------------------------------------------------------------------------------------


NO_OBJECT = [b"", b"{", b"[1]", b'"who?"', b"\xff\xfe", b'{"questions": ["caf\xe9"]}', b"[" * 100_000]
NO_OBJECT += [b'{"questions": [' + b"7" * 6_000 + b"]}", gzip.compress(b'{"questions": ["who?"]}', mtime=0)]
INVALID = [
    b'{"questions": []}',
    b'{"questions": [7]}',
    b'{"questions": ["who?"], "more": 1}',
    b'{"questions": ["who?"], "llm": 7}',
    b'{"questions": [{"question": "who?", "threshold": NaN}]}',
    b'{"questions": [{"question": "who?", "threshold": "' + b"x" * 100_000 + b'"}]}',
    b'{"questions": [' + b",".join([b'"known"'] * 10_000) + b"]}",
]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        # Regression: curl -d, without a content type, was told that its object was none; half an object, "1: ...".
        *((body, 422, "The body must be a JSON object") for body in NO_OBJECT),
        *((body, 422, "") for body in INVALID),
        (b'{"questions": ["' + b"x" * (17 << 20) + b'"]}', 413, "The body is larger"),
    ],
    ids=lambda value: str(value[-40:]) if isinstance(value, bytes) else None,
)
def test_what_is_malformed_or_too_much_gets_its_status_and_the_server_goes_on(
    url, words, body, status, message
):
    before = len(words.asked)
    response = post(url, "/v1/decide", body)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)
    assert len(response.content) < 1_000, "what was sent is not sent back"
    assert len(words.asked) == before
    assert decide(url, "known")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (7, "questions.0: Input should be a valid string, or: Input should be a valid dictionary"),
        ({"question": "who?", "threshold": -1}, "questions.0.threshold: A threshold must be"),
        ({"text": "who?"}, "questions.0.question: Field required; questions.0.text: Extra inputs are not"),
        ({"question": "who?", "history": ["a", 7]}, "questions.0.history.1: Input should be a valid string"),
        ({"question": "who?", "passages": [{"text": 7}]}, "questions.0.passages.0.text: Input should be"),
        (
            {"question": "who?", "draft": {"str": "It is"}},
            "questions.0.draft.text: Field required; questions.0",
        ),
        (
            {"question": "who?", "draft": {"text": "a", "tokens": ["a"], "logprobs": [-1, -2]}},
            "questions.0.draft: Input should be a valid string, or: tokens has 1 entries, but logprobs has 2",
        ),
    ],
)
def test_what_is_wrong_with_a_body_is_said_in_the_names_of_its_sender(url, question, message):
    """Regression: "questions.0.str: Input should be a valid string" came first, whatever was wrong."""
    refused = post(url, "/v1/decide", {"questions": [question]})
    assert refused.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("draft", [{"tokens": [7, 8]}, {"token_ids": ["a", "b"]}, {"logprobs": [1, 2]}])
def test_of_many_wrong_tokens_the_first_is_named_and_the_others_are_not_looked_at(url, draft):
    """Regression: 16 MB of them kept all other clients waiting for two minutes, and took gigabytes."""
    refused = post(url, "/v1/decide", {"questions": [{"question": "who?", "draft": {"text": "a", **draft}}]})
    message = refused.json()["error"]["message"]
    (name,) = draft
    assert message.startswith(f"questions.0.draft.{name}.0: ")
    assert ";" not in message


def test_of_a_very_long_history_the_last_thousand_lines_are_read(url, words):
    """Regression: a history of millions of lines kept all other clients waiting for half a minute."""
    history = [f"user: {number}" for number in range(1_200)]
    decide(url, {"question": "known", "history": history})
    (request,) = words.asked[-1]
    assert request.history == tuple(history[-1_000:])
    refused = post(url, "/v1/decide", {"questions": [{"question": "known", "history": "user: Hello"}]})
    assert refused.status_code == 422


def test_who_has_no_token_is_refused_and_probes_need_none():
    app = make_app(DecisionService(Words()))
    body, token = {"questions": ["known"]}, f"Bearer {TOKEN}"
    with listening(app, token=TOKEN) as url:
        wait_until_ready(url)
        for wrong in ("", "Bearer wrong", TOKEN, "Bearer é"):
            response = post(url, "/v1/decide", body, authorization=wrong)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        for right in (token, f"bearer {TOKEN}"):
            assert post(url, "/v1/decide", body, authorization=right).status_code == 200
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 401)):
            assert [CLIENT.request(method, url + path).status_code for method in ("GET", "HEAD")] == [
                status
            ] * 2
            head = CLIENT.head(url + path, headers={"authorization": token})
            assert (head.status_code, head.content) == (200, b"")
    below = Guard(app, token=TOKEN, allow_origins=(), receive_timeout=PATIENCE)
    with listening(Starlette(routes=[Mount("/gate", below)])) as url:
        paths = ("/gate/health", "/gate/metrics", "/health")
        assert [CLIENT.get(url + path).status_code for path in paths] == [200, 401, 404]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8377", "[::1]", "[::1]:8377")),
        *((host, 400) for host in ("", "evil.example", "localhost.evil.example", "evil.localhost")),
        *((host, 400) for host in ("127.0.0.1:a", "localhost:", "[::1", "127.0.0.1.", "é")),
    ],
)
def test_the_names_of_this_machine_need_no_token_and_what_only_looks_like_one_does(url, host, status):
    response = post(url, "/v1/decide", {"questions": ["known"]}, host=host)
    assert response.status_code == status
    # Regression: "Invalid host header", as plain text, also to a proxy that passes the host on.
    assert status == 200 or "RGATE_TOKEN" in response.json()["error"]["hint"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"host": host}, "no token is set") for host in ("0.0.0.0", "example.org")),  # noqa: S104
        *(({"token": token}, "not printable ASCII") for token in ("é", "a\nb", "a\x00b")),
        *(
            ({"allow_origins": [origin]}, "Invalid origin")
            for origin in (
                "*",
                "localhost",
                "http://a.example/",
                "http://a example",
                "",
                "http://*.a",
                "http://A.b",
            )
        ),
    ],
)
def test_a_server_that_would_let_others_in_does_not_start(options, match):
    with pytest.raises(ConfigurationError, match=match):
        make_server(make_app(DecisionService(Words())), **{"host": "127.0.0.1", "port": 0, **options})


@pytest.mark.parametrize(
    ("option", "values"), [("queue", (0, -1, "9")), ("timeout", (0.0, -1.0, math.nan, -math.inf))]
)
def test_limits_that_bound_nothing_are_refused_when_the_server_starts(option, values):
    """Regression: a queue without places rejected every question, or ended in a bare TypeError at the first one."""
    for value in values:
        with pytest.raises(ConfigurationError, match=option):
            DecisionService(Words(), **{option: value})


def test_names_over_the_wire_are_names_and_junk_does_not_displace_real_ones(tmp_path, monkeypatch):
    """Regression: a folder of that name in the server's folder was read; the 65th name counted as the default."""
    monkeypatch.chdir(tmp_path)
    save_measured(Ability("mine", 9.0, 0.1, "a test"), tmp_path / "measured")
    service = DecisionService(load_gate())
    assert service.gates("measured", "").question.gate.ability is None
    for number in range(300):
        service.gates(f"junk-{number}")
    real = service.gates("gpt-4o", "").question.gate
    assert real.ability == load_gate(llm_name="gpt-4o").gate.ability
    assert service.gates("gpt-4o", "").question.gate is real
    assert load_gate(llm_name="measured").gate.ability.theta == 9.0  # the user may name a folder
    # Regression: only what follows the last slash was read.
    for path in ("hub/models--openai--gpt-4o/snapshots/0e9e39f2", "models/gpt-4o/", "C:\\models\\gpt-4o"):
        assert service.gates(path).question.gate.ability == real.ability


def test_a_name_that_a_client_gives_goes_before_that_of_the_server_and_one_that_it_found_does_not():
    service = DecisionService(load_gate(llm_name="gpt-4o"))
    names = [
        service.gates("gpt-2", source).question.gate.llm_name for source in ("", "the client", "the chain")
    ]
    assert names == ["gpt-2", "gpt-2", "gpt-4o"]


POST = b"POST /v1/decide HTTP/1.1\r\nhost: 127.0.0.1\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([b""], [b"408"]),
        ([POST + b"x-a: "], [b"408"]),
        ([POST + b"content-length: 100\r\n\r\n{"], [b"408"]),
        ([GET, b"GET /hea"], [b"200", b"408"]),  # a second request on a connection
        ([POST + b"x-a: b\r\n" * 5_000], [b"400"]),
        ([POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"], [b"400"]),
        ([POST + b"x-a\0: b\r\n\r\n"], [b"400"]),
        ([POST + b": b\r\n\r\n"], [b"400"]),
    ],
    ids=["nothing", "half headers", "half a body", "half a request", "many", "two lengths", "NUL", "no name"],
)
def test_who_is_too_slow_or_sends_wrong_headers_is_hung_up_on(words, parts, statuses):
    with serving_gate(words, receive_timeout=0.2) as url:
        assert re.findall(rb"HTTP/1\.1 (\d+) ", send_raw(url, *parts)) == statuses
        assert decide(url, "known")


# --- load ---------------------------------------------------------------------------------------------------------


def test_past_its_queue_it_refuses_at_once_and_then_goes_on():
    gate = Blocking()
    with serving_gate(gate, queue=3) as url:
        waiting = threading.Thread(target=decide, args=(url, "known 1", "known 2"))
        waiting.start()
        gate.is_asked.wait()
        refused = post(url, "/v1/decide", {"questions": ["known 3", "known 4"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (529, "1")
        assert "rgate_waiting_questions 2.0" in metrics(url)
        gate.may_decide.set()
        waiting.join()
        assert decide(url, "known 3", "known 4")[0].question == "known 3"


def test_who_leaves_makes_room_for_others():
    gate = Blocking()
    with serving_gate(gate, queue=1) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            json_type = b"content-type: application/json\r\ncontent-length: 24\r\n\r\n"
            connection.sendall(POST + json_type + b'{"questions": ["known"]}')
            gate.is_asked.wait()
        gate.may_decide.set()
        while "rgate_waiting_questions 0.0" not in metrics(url):
            pass
        assert decide(url, "known")


# --- operations ---------------------------------------------------------------------------------------------------


def test_metrics_count_outcomes_and_the_log_has_no_questions(words, caplog):
    caplog.set_level("INFO")
    with serving_gate(words) as url:
        decide(url, "a known secret", "who?", "what?")
        text = metrics(url)
    # The question that loads the models is not counted.
    assert 'rgate_decisions_total{gate="",kind="",outcome="retrieve"} 2.0' in text
    assert 'rgate_decisions_total{gate="",kind="",outcome="direct"} 1.0' in text
    assert "rgate_decision_seconds_count 1.0" in text
    assert "questions: 3, to retrieve: 2, " in caplog.text
    assert "secret" not in caplog.text


QUESTION = "What is the salary of\nAnn Example?"


@pytest.mark.parametrize(
    "quote",
    [str, repr, json.dumps, lambda text: f"cannot parse {text[:30]}"],
    ids=["bare", "repr", "JSON", "cut"],
)
@pytest.mark.parametrize("raised", [RuntimeError, httpx.HTTPError])  # regression: taken for the upstream's
def test_a_failure_is_one_line_in_the_log_without_the_question(raised, quote, caplog, capfd):
    """A gate of the user's own may use any library, whose errors quote what it was given."""

    async def fail(requests):
        if requests[0].question == QUESTION:
            raise OSError(f"{quote(QUESTION)}\nERROR forged")
        return Words().decide_batch(requests)

    gate, message = Broken(), quote(QUESTION)
    gate.adecide_batch = fail
    caplog.set_level("DEBUG")
    logging.getLogger("httpcore").setLevel("WARNING")
    with serving_gate(gate) as url:
        (decision,) = decide(url, QUESTION)
    with (
        patch.object(DecisionService, "gates", side_effect=raised(message)),
        listening(make_app(DecisionService(Broken()))) as url,
    ):
        response = post(url, "/v1/decide", {"questions": [QUESTION]})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalError")
    assert decision.error.type == "OSError"
    text = caplog.text + capfd.readouterr().err + response.text
    assert "OSError" in text
    assert f"A request failed: {raised.__name__} at app.py:" in text
    assert [word for word in ("salary", "Ann", "Examp", "\nERROR forged") if word in text] == []


@pytest.mark.parametrize("question", ["known \\ud83d", "known \\uDE00\\uD83D"])
def test_an_emoji_that_javascript_has_cut_is_a_question_like_others(url, question):
    decided = post(url, "/v1/decide", f'{{"questions": ["{question}"]}}'.encode())
    assert decided.json()["decisions"][0]["question"].startswith("known ?")
    choice = '{"type": "choice", "criteria": {"retrieve": "", "direct": ""}}'
    state = f'{{"state": "{question}", "questions": {{"known": {{"type": "noul"}}, "\\ud83d": {choice}}}}}'
    answers = json.loads(post(url, "/v1/systemone", state.encode()).content)["answers"]
    assert (answers["known"]["noul"], list(answers)) == (0.9, ["known", "?"])


def test_a_server_that_ends_while_it_answers_logs_no_traceback(monkeypatch, caplog):
    """An answer of an LLM may take longer than the server waits for it."""
    monkeypatch.setattr("rgate_integrations.serving.server._SHUTDOWN_SECONDS", 0.05)
    is_asked, statuses = threading.Event(), []

    async def answer_never(request):
        is_asked.set()
        await asyncio.Event().wait()

    with listening(Starlette(routes=[Route("/", answer_never)])) as url:
        client = threading.Thread(target=lambda: statuses.append(CLIENT.get(url).status_code))
        client.start()
        is_asked.wait()
    client.join()
    assert statuses == [500]
    assert [record.message for record in caplog.records if record.exc_info] == []


def test_openapi_names_every_route(url):
    paths = CLIENT.get(f"{url}/openapi.json").json()["paths"]
    assert set(paths) == {"/v1/systemone", "/v1/decide", "/v1/queries", "/health", "/ready", "/metrics"}
    assert [CLIENT.get(url + path).status_code for path in ("/nothing", "/v1/decide")] == [404, 405]


class RaisesAtFirst(Words):
    """A gate with on_error="raise" whose model is missing at first."""

    on_error = "raise"
    missing = True

    async def adecide_batch(self, requests):
        if self.missing:
            self.missing = False
            raise ModelLoadError("No model.", hint="Mount it.")
        return await super().adecide_batch(requests)


class RaisesForOne:
    """An asynchronous gate that never decides about other questions than "bad", for which it raises."""

    on_error = "raise"
    running = 0

    def decide_batch(self, requests):
        raise NotImplementedError

    async def adecide_batch(self, requests):
        if requests[0].question == "bad":
            raise ValueError("bad")
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1


async def test_if_a_gate_raises_the_other_questions_end_before_their_places_are_free():
    """Regression: they went on, so more questions than the queue has places were at work."""
    gate = RaisesForOne()
    service = DecisionService(gate, queue=3)
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"):
            await service.decide([DecideItem(question=question) for question in ("one", "bad", "two")])
        assert gate.running == 0


def test_a_gate_that_judges_only_recorded_drafts_becomes_ready():
    """Regression: it never did, since it was tried without a draft."""
    with listening(
        make_app(DecisionService(load_gate("ik", source="recorded", proxy=ScriptedProxy())))
    ) as url:
        wait_until_ready(url)


def test_a_gate_that_raises_and_a_queue_that_is_full_do_not_keep_a_server_from_becoming_ready(caplog):
    """Regression: either error ended the attempts to load the models."""
    service = DecisionService(RaisesAtFirst(), queue=1)
    with service.counting(1), listening(make_app(service)) as url:
        wait_until_ready(url)
    assert "The gate is not ready yet: No model. Hint: Mount it." in caplog.text
