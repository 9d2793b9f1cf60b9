"""A server that drips, lies, or answers in any shape: a draft or a typed error, in time, and no secret in either."""

import base64
import gzip
import json
import logging
import pickle
import socketserver
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError
from rgate_integrations.gates.papers.verdicts import IK_QUESTION
from rgate_integrations.models.served import LONGEST_BODY, ServedProxy, read_completion
from rgate_integrations.prompts import ANSWER
from tests.fake_server import Fake, answer
from tests.test_hostile_files import changed

VALUES = [{"question": "What is the capital of France?"}]
KEY = "sk-very/secret"
LOGIN = "ann:p%40ss-word"
BASIC = base64.b64encode(b"ann:p@ss-word").decode()
NOWHERE = "127.0.0.1:9/v1"


def shown(error):
    """All that a traceback shows of an exception."""
    if error is None:
        return ""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{error} {error!r} {error.args} {shown(before)}"


def assert_no_secret(text):
    assert [secret for secret in ("sk-", "secret", "ss-word", BASIC) if secret in text] == []


def failed(proxy, caplog, error=(ServerError, EvidenceError), match=None):
    """Ask what fails, both ways: neither error nor log nor decision has a secret."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(error, match=match) as caught:
        proxy.score(IK_QUESTION, VALUES, ("Yes", "No"))
    decision = load_gate("ik", tokens=0, proxy=proxy).decide("who?")
    assert (decision.retrieve, decision.error.type) == (True, type(caught.value).__name__)
    assert_no_secret(shown(caught.value) + caplog.text + decision.model_dump_json())


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
    proxy = ServedProxy(f"http://{login}{host}", "m", api_key=key)
    for each in (proxy, pickle.loads(pickle.dumps(proxy))):  # noqa: S301
        each.generate(ANSWER, VALUES, tokens=3)
        assert Fake.seen[-1][2] == sent
        assert each.url == f"http://{host}"
    assert_no_secret(f"{proxy!r} {vars(proxy)} {caplog.text}")


@pytest.mark.parametrize(
    "url",
    [
        "ann:ss-word@localhost:8000",
        "ftp://ann:ss-word@localhost/v1",
        "http://ann:ss-word@[::1/v1",
        "http://ann:ss-word/x@host/v1",
        "http://ann:1/ss-word@host/v1",
        "http://ann:ss-word#x@host/v1",
        "http://ann:ss-word@host\u2100/v1",
        "http://ann:ss-word@/v1",
        "http://host/v1?key=secret",
    ],
)
def test_a_broken_url_is_refused_without_its_secrets(url):
    with pytest.raises(ConfigurationError, match="is no URL") as caught:
        ServedProxy(url, "m")
    assert_no_secret(shown(caught.value))


@pytest.mark.parametrize("key", [f"{KEY}\nX-Other: 1", f"\ufeff{KEY}", KEY.encode()])
def test_a_key_that_cannot_be_sent_is_refused(key):
    with pytest.raises(ConfigurationError, match="API key is no text") as caught:
        ServedProxy("http://host/v1", "m", api_key=key)
    assert_no_secret(shown(caught.value))


def test_a_key_beside_a_login_is_refused():
    with pytest.raises(ConfigurationError, match="only one of them") as caught:
        ServedProxy(f"http://{LOGIN}@host/v1", "m", api_key=KEY)
    assert_no_secret(shown(caught.value))


@pytest.mark.parametrize("status", [400, 401, 404, 500])
@pytest.mark.parametrize("said", [f"logprobs {KEY}", "x" * 290 + KEY], ids=["whole", "cut"])
def test_a_server_that_echoes_the_key_is_not_quoted_with_it(fake, status, said, caplog):
    failed(fake((status, f'{{"error": "bad key {said}"}}'), api_key=KEY, retries=0), caplog)


def test_a_server_that_echoes_the_login_is_not_quoted_with_it(fake, caplog):
    host = fake((400, f"p@ss-word Basic {BASIC}")).url.removeprefix("http://")
    failed(ServedProxy(f"http://{LOGIN}@{host}", "m"), caplog, EvidenceError, r"\*\*\* Basic \*\*\*")


@pytest.mark.parametrize(("login", "key"), [("", KEY), (f"{LOGIN}@", None)])
def test_a_lost_connection_tells_no_secret(login, key, caplog):
    proxy = ServedProxy(f"http://{login}{NOWHERE}", "m", api_key=key, retries=0)
    failed(proxy, caplog, ServerError, r"127\.0\.0\.1:9/v1 could not be used")


def test_a_transport_error_that_quotes_the_key_is_redacted(fake, monkeypatch, caplog):
    """As httpx did with a header that it held for illegal."""
    import httpx

    async def refuse(*args, **kwargs):
        raise httpx.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")

    monkeypatch.setattr(httpx.AsyncClient, "send", refuse)
    failed(fake(answer(), api_key=KEY, retries=0), caplog, ServerError, "Illegal header value")


@pytest.mark.parametrize("login_and_host", ["ann:p4ss-word/x@proxy.test:3128", "ann:ss-word#x@proxy.test"])
def test_a_login_in_the_environments_proxy_server_is_not_quoted(monkeypatch, caplog, login_and_host):
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", f"http://{login_and_host}")
    proxy = ServedProxy(f"http://{NOWHERE}", "m", retries=0, timeout=5)
    failed(proxy, caplog, ConfigurationError, "proxy server that the environment names")


# --- how it answers ---------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n"


@contextmanager
def dripping(first, piece, pause):
    """A server that sends something, and then a piece again and again, until the test is over.

    Gives its URL, and a list of how many bytes were taken on each connection.
    """
    over, taken = threading.Event(), []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(first)
            taken.append(0)
            while not over.wait(pause):
                try:
                    self.request.sendall(piece)
                except OSError:
                    return
                taken[-1] += len(piece)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", taken
        finally:
            over.set()
            server.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("first", "piece"),
    [(b"", b"H"), (HEAD, b"X-More: 1\r\n"), (HEAD + b"\r\n{", b" ")],
    ids=["the status", "headers", "the body"],
)
def test_a_dripping_server_does_not_outlast_the_timeout(first, piece, caplog):
    """Each of its pieces comes in time. Without a deadline for all of them this would not end."""
    with dripping(first, piece, pause=0.01) as (url, _):
        proxy = ServedProxy(url, "m", timeout=0.3, retries=1)
        failed(proxy, caplog, ServerError, r"no whole answer within 0\.3 s|RemoteProtocolError")


@pytest.mark.parametrize(
    ("header", "piece", "why"),
    [
        (b"\r\n", b" " * 65536, "more than 16 MiB"),
        (b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b" " * 1_000_000), "packed its answer"),
    ],
    ids=["endless", "packed"],
)
def test_no_more_of_an_answer_is_read_than_an_answer_can_have_and_none_is_unpacked(header, piece, why):
    """1.5 MB of gzip became 3.1 GB and 23 s against a timeout of 20."""
    with dripping(HEAD + header, piece, pause=0) as (url, taken), pytest.raises(ServerError, match=why):
        ServedProxy(url, "m", retries=3).generate(ANSWER, VALUES, tokens=3)
    assert len(taken) == 1
    assert taken[0] < 3 * LONGEST_BODY, "what the sockets hold may have been sent on"


CHAT = answer(tops={"Yes": -0.1, "No": -2.5})
LISTS = {"tokens": ["Yes"], "token_logprobs": [-0.1], "top_logprobs": [{"Yes": -0.1, "No": -2.5}]}
TEXT = {
    "choices": [{"text": "Yes", "finish_reason": "stop", "logprobs": LISTS}],
    "usage": {"prompt_tokens": 7},
}


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
def test_both_shapes_are_read(body):
    found = read_completion(json.dumps(body).encode())
    draft = found.draft
    assert (draft.text, draft.tokens, draft.logprobs) == ("Yes", ("Yes",), (-0.1,))
    assert (draft.finished, draft.prompt_tokens) == (True, 7)
    assert found.likeliest == {"Yes": -0.1, "No": -2.5}


@settings(max_examples=400, deadline=None)
@given(body=changed(CHAT) | changed(TEXT))
def test_an_answer_of_any_shape_is_read_or_refused(body):
    found = read_completion(json.dumps(body).encode())
    if found is None:
        return
    found.draft.text.encode()  # raises if it is no text
    assert found.draft.prompt_tokens >= 0
    assert max((0.0, *(found.draft.logprobs or ()), *found.likeliest.values())) == 0.0


@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_a_message_without_content_is_an_empty_draft(fake, message):
    """As when a model calls a tool, or says nothing."""
    (draft,) = fake({"choices": [{"message": message}]}).generate(ANSWER, VALUES, tokens=3)
    assert draft.text == ""


LIES = [
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
    {**CHAT, "usage": {"prompt_tokens": KEY}},
    {**CHAT, "usage": KEY},
    (200, "[" * 100_000),
    (200, f"<html>{KEY}"),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:40])
def test_what_is_no_answer_is_refused_and_not_quoted(fake, lie, caplog):
    failed(fake(lie, api_key=KEY), caplog, ServerError, "does not answer as")


@pytest.mark.parametrize(
    "logprobs",
    [{"content": KEY}, {"content": [{"token": "Yes", "logprob": KEY}]}, {**LISTS, "top_logprobs": [KEY]}],
)
def test_log_probabilities_that_cannot_be_read_are_no_evidence(fake, logprobs, caplog):
    lie = {"choices": [{"text": "Yes", "logprobs": logprobs}]}
    failed(fake(lie, api_key=KEY), caplog, (ServerError, EvidenceError), "does not answer as|no log-prob")
