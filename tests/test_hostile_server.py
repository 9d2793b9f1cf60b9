"""A server that drips, lies, or answers in any shape: a draft or a typed error, in time, and no secret in either."""

import base64
import gzip
import json
import logging
import math
import os
import pickle
import socketserver
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from unittest.mock import AsyncMock, patch

import httpx
import pytest
from hypothesis import given, settings

from rgate_integrations import load_gate
from rgate_integrations.corpus.sampling import collect_passages
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DecisionTimeoutError, EvidenceError, ServerError
from rgate_integrations.gates.papers.verdicts import IK_QUESTION
from rgate_integrations.models.bounded_http import LONGEST_BODY
from rgate_integrations.models.remote import RemoteModel, read_completion
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import ANSWER
from tests.fake_server import Fake, answer, running
from tests.test_hostile_files import changed

VALUES = [{"question": "What is the capital of France?"}]
KEY = "sk-very/secret"
LOGIN = "ann:p%40ss-word"
BASIC = base64.b64encode(b"ann:p@ss-word").decode()


def assert_no_secret(text, error=None):
    """Neither the text nor a traceback of the error, but for its lines of code, may show one."""
    text += "".join(traceback.format_exception(error, limit=0))
    assert [secret for secret in ("sk-", "secret", "ss-word", BASIC) if secret in text] == []


def failed(proxy, caplog, error, match):
    """Ask what fails, both ways: neither error nor log nor decision has a secret."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(error, match=match) as caught:
        proxy.score(IK_QUESTION, VALUES, ("Yes", "No"))
    decision = load_gate("ik", tokens=0, proxy=proxy).decide("who?")
    assert (decision.retrieve, decision.error.type) == (True, type(caught.value).__name__)
    assert_no_secret(caplog.text + decision.model_dump_json(), caught.value)


# --- what is sent, and what is not shown -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("login", "key", "sent"),
    [
        ("", f" {KEY}\r\n", f"Bearer {KEY}"),
        ("", " \n", None),
        (f"{LOGIN}@", None, f"Basic {BASIC}"),
    ],
)
def test_credentials_are_sent_and_travel_in_pickles_and_are_shown_nowhere(fake, login, key, sent, caplog):
    caplog.set_level(logging.DEBUG)
    host = fake(answer()).url.removeprefix("http://")
    proxy = RemoteModel(f"http://{login}{host}", "m", api_key=key)
    for each in (proxy, pickle.loads(pickle.dumps(proxy))):  # noqa: S301
        each.generate(ANSWER, VALUES, tokens=3)
        assert Fake.seen[-1][2] == sent
        assert each.url == f"http://{host}"
    assert_no_secret(f"{proxy!r} {vars(proxy)} {caplog.text}")


NO_URLS = [
    "ann:ss-word@localhost:8000",
    "ftp://ann:ss-word@localhost/v1",
    "http://ann:ss-word@[::1/v1",
    "http://ann:ss-word/x@host/v1",
    "http://ann:1/ss-word@host/v1",
    "http://ann:ss-word#x@host/v1",
    "http://ann:ss-word@host\u2100/v1",
    "http://ann:ss-word@/v1",
    "http://host/v1?key=secret",
]


@pytest.mark.parametrize(
    ("url", "key", "why"),
    [
        *((url, None, "URL is invalid") for url in NO_URLS),
        *(
            ("http://host/v1", key, "API key must be printable")
            for key in (f"{KEY}\nX-Other: 1", f"\ufeff{KEY}", KEY.encode())
        ),
        (f"http://{LOGIN}@host/v1", KEY, "Both an API key and a login"),
    ],
)
def test_what_cannot_be_sent_is_refused_without_its_secrets(url, key, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        RemoteModel(url, "m", api_key=key)
    assert_no_secret("", caught.value)


BOUNDLESS = (0, -1, math.nan, math.inf)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        *(
            (partial(RemoteModel, "http://host/v1", "m", timeout=timeout), "timeout must be a finite number")
            for timeout in ("5", *BOUNDLESS)
        ),
        *(
            (partial(load_gate, "http://host", request_seconds=s), "request_seconds: Input")
            for s in BOUNDLESS
        ),
        (lambda: RequestOptions(thinking_tokens="5"), "thinking_tokens must be a whole number"),
        (lambda: RequestOptions(think="much"), "think cannot be 'much'"),
        (lambda: RequestOptions(extra=[1]), "extra must be a mapping"),
        (lambda: collect_passages(None, searches="5"), "searches must be a whole number"),
    ],
)
def test_an_option_of_another_type_or_that_bounds_nothing_is_named(make, why):
    """Regression: numbers given as text were a bare TypeError."""
    with pytest.raises(ConfigurationError, match=why):
        make()


def test_a_server_that_echoes_the_login_or_a_lost_connection_tells_no_secret(fake, caplog):
    host = fake((400, f"p@ss-word Basic {BASIC}")).url.removeprefix("http://")
    failed(RemoteModel(f"http://{LOGIN}@{host}", "m"), caplog, EvidenceError, r"\*\*\* Basic \*\*\*")
    for login, key in (("", KEY), (f"{LOGIN}@", None)):
        unreachable = RemoteModel(f"http://{login}127.0.0.1:9/v1", "m", api_key=key, retries=0)
        failed(unreachable, caplog, ServerError, r"127\.0\.0\.1:9/v1 could not be used")


def test_a_transport_error_that_quotes_the_key_is_redacted(fake, monkeypatch, caplog):
    """As httpx did with a header that it held for illegal."""
    refused = httpx.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")
    monkeypatch.setattr(httpx.AsyncClient, "send", AsyncMock(side_effect=refused))
    failed(fake(answer(), api_key=KEY, retries=0), caplog, ServerError, "Illegal header value")


@pytest.mark.parametrize("login_and_host", ["ann:p4ss-word/x@proxy.test:3128", "ann:ss-word#x@proxy.test"])
def test_a_login_in_the_environments_proxy_server_is_not_quoted(caplog, login_and_host):
    proxy = RemoteModel("http://model.test:9/v1", "m", retries=0, timeout=5)
    with patch.dict(os.environ, {"ALL_PROXY": f"http://{login_and_host}"}, clear=True):
        failed(proxy, caplog, ConfigurationError, "proxy settings in the environment")


# --- how it answers ---------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n"


@contextmanager
def dripping(first, piece, pause):
    """A server that sends something, and then a piece again and again, until its client leaves.

    Gives its URL, and a list of how many bytes were taken on each connection.
    """
    taken = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(first)
            taken.append(0)
            with suppress(OSError):
                while True:
                    time.sleep(pause)
                    self.request.sendall(piece)
                    taken[-1] += len(piece)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with running(server) as url:
        yield f"{url}/v1", taken


each_drip = pytest.mark.parametrize(
    ("first", "piece"),
    [(b"", b"H"), (HEAD, b"X-More: 1\r\n"), (HEAD + b"\r\n{", b" ")],
    ids=["the status", "headers", "the body"],
)


@pytest.mark.timeout(120)
@each_drip
def test_a_dripping_server_does_not_outlast_the_timeout(first, piece, caplog, monkeypatch):
    """Each of its pieces comes in time. Without a deadline for all of them this would not end."""
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)  # no pause before it is asked again
    late = r"no complete answer within 0\.1 s|RemoteProtocolError"
    with dripping(first, piece, pause=0.01) as (url, _):
        failed(RemoteModel(url, "m", timeout=0.1, retries=1), caplog, ServerError, late)


@pytest.mark.parametrize(
    ("header", "piece"),
    [(b"\r\n", b" " * 65536), (b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b" " * 1_000_000, mtime=0))],
    ids=["endless", "packed"],
)
def test_no_more_of_an_answer_is_read_than_an_answer_can_have_and_none_is_unpacked(header, piece):
    """Regression: 1.5 MB of gzip became 3.1 GB and 23 s against a timeout of 20."""
    with (
        dripping(HEAD + header, piece, pause=0) as (url, taken),
        pytest.raises(ServerError, match="larger than 16 MiB"),
    ):
        RemoteModel(url, "m", retries=3).generate(ANSWER, VALUES, tokens=3)
    assert len(taken) == 1
    assert taken[0] < 3 * LONGEST_BODY, "what the sockets hold may have been sent on"


@pytest.mark.timeout(120)
@each_drip
@pytest.mark.parametrize("limit", [{"request_seconds": 0.3}, {"timeout": 0.1}])
def test_a_dripping_decision_server_holds_no_question_up(first, piece, limit):
    """Neither ``/v1/decide`` nor, after that, ``/ready`` ever ends."""
    with dripping(first, piece, pause=0.01) as (url, taken):
        gate = load_gate(url.removesuffix("/v1"), on_error="raise", **limit)
        for _ in range(3):
            with pytest.raises((ServerError, DecisionTimeoutError)):
                gate.decide("who?")
    if "request_seconds" in limit:
        assert 2 <= len(taken) <= 3, "no question waited for the one before"


def test_a_host_name_that_cannot_be_looked_up_in_time_holds_no_question_up(monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: is_over.wait())
    decision = load_gate("http://gate.test", request_seconds=0.1).decide("who?")
    assert "no complete answer within 0.1 s" in decision.error.message
    with pytest.raises(ServerError, match=r"no complete answer within 0\.1 s"):
        RemoteModel("http://model.test", "m", timeout=0.1, retries=1).generate(ANSWER, VALUES, tokens=3)
    is_over.set()


@pytest.mark.parametrize("charset", ["undefined", "idna", "unicode_escape", "\xff", "utf-16"])
def test_a_charset_of_the_servers_choice_decodes_nothing(charset):
    headers = (
        f"HTTP/1.1 500 X\r\nContent-Type: text/plain; charset={charset}\r\nContent-Length: 3\r\n\r\na\xffb"
    )
    with dripping(headers.encode("latin-1"), b"", pause=0.01) as (url, _):
        decision = load_gate(url.removesuffix("/v1")).decide("who?")
    assert decision.error.type == "ServerError"
    assert "answered 500: a\ufffdb" in decision.error.message


def test_a_servers_cookie_does_not_come_back_with_another_request(fake):
    Fake.cookies.clear()
    reply = (200, json.dumps(answer()), ("Set-Cookie", "session=of-somebody; Path=/"))
    fake((503, "later", reply[2]), reply, max_concurrency=1).generate(ANSWER, VALUES * 3, tokens=3)
    assert Fake.cookies == [None] * 4


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_this_machine_is_asked_without_the_environments_proxy_server(fake, host):
    """It would get the key, and has another idea of what this machine is."""
    port = fake(answer()).url.rpartition(":")[2]
    with patch.dict(os.environ, {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}):
        (draft,) = RemoteModel(f"http://{host}:{port}", "m", retries=0).generate(ANSWER, VALUES, tokens=3)
    assert draft.text == "Yes"


CHAT = answer(tops={"Yes": -0.1, "No": -2.5})
LISTS = {"tokens": ["Yes"], "token_logprobs": [-0.1], "top_logprobs": [{"Yes": -0.1, "No": -2.5}]}
TEXT = {
    "choices": [{"text": "Yes", "finish_reason": "stop", "logprobs": LISTS}],
    "usage": {"prompt_tokens": 7},
}


@settings(max_examples=400, deadline=None)
@given(body=changed(CHAT) | changed(TEXT))
def test_an_answer_of_any_shape_is_read_or_refused(body):
    draft, likeliest = read_completion(json.dumps(body).encode()) or (Draft(text=""), {})
    draft.text.encode()  # raises if it is not text
    assert draft.prompt_tokens >= 0
    assert max((0.0, *(draft.logprobs or ()), *likeliest.values())) == 0.0


NO_ANSWERS = [
    {},
    {"choices": []},
    {"choices": [{}]},
    {"choices": [{"message": None}]},
    {"choices": [{"text": None}]},
    {"choices": KEY},
    {"choices": [KEY]},
    {"choices": {KEY: 1}},
    {"choices": [{"message": KEY}]},
    {"choices": [{"message": {"content": [KEY]}}]},
    {"choices": [{"text": "Yes", "logprobs": KEY}]},
    {"choices": [{"text": "Yes", "logprobs": {"content": KEY}}]},
    {"choices": [{"text": "Yes", "logprobs": {**LISTS, "top_logprobs": [KEY]}}]},
    {**CHAT, "usage": {"prompt_tokens": KEY}},
    {**CHAT, "usage": KEY},
    (200, "[" * 100_000),
    (200, f"<html>{KEY}"),
]


REFUSALS = [
    (
        {"choices": [{"text": "Yes", "logprobs": {"content": [{"token": "Yes", "logprob": KEY}]}}]},
        EvidenceError,
        "sends no log-probabilities",
    ),
    (answer(logprobs=False), EvidenceError, "sends no log-probabilities"),
    # Both targets would get the same bound: P(known) 0.5, which is not below the threshold.
    (
        answer(tops={"<think>": -0.1, "Well": -3.0}),
        EvidenceError,
        "would start its answer with '<think>': its 2 likeliest first tokens include none of 'Yes', 'No'",
    ),
    ((400, f"no logprobs {KEY}"), EvidenceError, r"refused the request \(400\): no logprobs \*\*\*"),
    ((400, "x" * 290 + KEY), EvidenceError, r"refused the request \(400\): xxx"),
    ((401, f"bad key {KEY}"), ServerError, "refused the key"),
    ((404, f"no model {KEY}"), ServerError, "the path or the model"),
    ((404, "x" * 290 + KEY), ServerError, "the path or the model"),
    ((500, f"bad key {KEY}"), ServerError, "answered 500"),
]


@pytest.mark.parametrize(
    ("reply", "error", "why"),
    [*((reply, ServerError, "not in the format of OpenAI's API") for reply in NO_ANSWERS), *REFUSALS],
    ids=lambda given: str(given)[-60:],
)
def test_what_is_no_answer_is_a_clear_error_and_the_key_is_never_quoted(fake, reply, error, why, caplog):
    failed(fake(reply, api_key=KEY, retries=0), caplog, error, why)
