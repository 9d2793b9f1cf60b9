"""A server that drips, lies, or answers in any shape: a draft or a typed error, in time, and no secret in either."""

import contextlib
import gzip
import json
import logging
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, RGateError, ServerError
from rgate_integrations.gates.papers.ik import IK_QUESTION
from rgate_integrations.models.completion import read_completion
from rgate_integrations.models.served import ServedProxy
from rgate_integrations.models.server import LONGEST_BODY
from rgate_integrations.prompts import ANSWER, PromptTemplate
from tests.fake_server import answer, serving
from tests.patience import PATIENCE
from tests.test_hostile_files import changed
from tests.test_served_secrets import KEY, VALUES, assert_harmless, chain

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"


@contextmanager
def dripping(first, piece):
    """A server that sends something, and then a piece again and again, until the test is over."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(first)
            while not over.wait(0.01):
                try:
                    self.request.sendall(piece)
                except OSError:
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            over.set()
            server.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("first", "piece"),
    [(b"", b"H"), (HEAD, b"X-More: 1\r\n"), (HEAD + b"\r\n{", b" "), (HEAD, b"x")],
    ids=["the status", "headers", "the body", "one header"],
)
def test_a_dripping_server_does_not_outlast_the_timeout(first, piece):
    """Each of its pieces comes in time. Without a deadline for all of them this would not end."""
    with dripping(first, piece) as url:
        proxy = ServedProxy(url, "m", timeout=0.3, retries=1)
        with pytest.raises(ServerError, match=r"no whole answer within 0\.3 s|RemoteProtocolError"):
            proxy.generate(ANSWER, VALUES[:1], tokens=3)
        decisions = load_gate("ik", tokens=0, proxy=proxy).decide_batch(["who?", "what?"])
        assert [(d.retrieve, d.error.type) for d in decisions] == [(True, "ServerError")] * 2
        proxy.close()


@pytest.mark.timeout(120)
def test_who_waits_while_the_connection_is_closed_gets_an_error():
    with dripping(HEAD + b"\r\n", b" ") as url:
        proxy = ServedProxy(url, "m", timeout=30, retries=0)
        failed = []

        def ask():
            try:
                proxy.generate(ANSWER, VALUES[:1], tokens=3)
            except RGateError as error:
                failed.append(type(error))

        thread = threading.Thread(target=ask)
        thread.start()
        while proxy._connection._client is None:
            threading.Event().wait(0.01)
        proxy.close()
        thread.join(PATIENCE)
        assert failed == [ServerError]


class Counted:
    """A body that goes on for as long as somebody reads, and how much of it was taken."""

    def __init__(self, headers, piece):
        self.headers = headers
        self.piece = piece
        self.sent = 0

    @contextmanager
    def serving(self):
        body = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                for name, value in body.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while body.sent < 20 * LONGEST_BODY:
                        self.wfile.write(body.piece)
                        body.sent += len(body.piece)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()


def test_no_more_of_an_answer_is_read_than_an_answer_can_have():
    """1.5 MB of gzip became 3.1 GB and 23 s against a timeout of 20."""
    endless = Counted({}, b" " * 65536)
    with endless.serving() as url:
        proxy = ServedProxy(url, "m", retries=3)
        with pytest.raises(ServerError, match="more than 16 MiB"):
            proxy.generate(ANSWER, VALUES[:1], tokens=3)
        proxy.close()
    assert endless.sent < 3 * LONGEST_BODY, "what the sockets hold may have been sent on"


def test_a_packed_answer_is_not_unpacked():
    packed = Counted({"Content-Encoding": "gzip"}, gzip.compress(b" " * 1_000_000))
    with packed.serving() as url:
        decision = load_gate("ik", tokens=0, proxy=ServedProxy(url, "m")).decide("who?")
    assert (decision.retrieve, decision.error.type) == (True, "ServerError")
    assert "packed its answer (gzip)" in decision.error.message


CHAT = answer(tops={"Yes": -0.1, "No": -2.5})
TEXT = {
    "choices": [
        {
            "text": "Yes",
            "finish_reason": "stop",
            "logprobs": {
                "tokens": ["Yes"],
                "token_logprobs": [-0.1],
                "top_logprobs": [{"Yes": -0.1, "No": -2.0}],
            },
        }
    ],
    "usage": {"prompt_tokens": 3},
}


@settings(max_examples=400, deadline=None)
@given(given_answer=changed(CHAT) | changed(TEXT))
def test_an_answer_of_any_shape_is_read_or_refused(given_answer):
    completion = read_completion(json.dumps(given_answer).encode())
    if completion is None:
        return
    completion.text.encode()  # raises if it is no text
    assert completion.prompt_tokens >= 0
    for token in completion.tokens:
        assert token.logprob <= 0
        assert all(logprob <= 0 for logprob in token.likeliest.values())


def test_both_shapes_are_read():
    for given_answer, prompt_tokens in ((CHAT, 7), (TEXT, 3)):
        completion = read_completion(json.dumps(given_answer).encode())
        assert (completion.text, completion.finished, completion.prompt_tokens) == (
            "Yes",
            True,
            prompt_tokens,
        )
        (token,) = completion.tokens
        assert (token.text, token.logprob) == ("Yes", -0.1)
        assert token.likeliest["Yes"] == -0.1


@pytest.fixture
def fake():
    with serving() as proxy:
        yield proxy


def places(secret):
    """Answers with a secret in the place of a number, a list, or anything that is not text."""
    yield {**CHAT, "usage": {"prompt_tokens": secret}}
    yield {**CHAT, "usage": secret}
    yield {**CHAT, "choices": secret}
    yield {**CHAT, "choices": [secret]}
    yield {**CHAT, "choices": {secret: 1}}
    for choice in (
        {"message": secret},
        {"message": {"content": [secret]}},
        {"message": {"content": "Yes"}, "logprobs": secret},
        {"message": {"content": "Yes"}, "logprobs": {"content": secret}},
        {"message": {"content": "Yes"}, "logprobs": {"content": [{"token": "Yes", "logprob": secret}]}},
        {"text": "Yes", "logprobs": {"tokens": ["Yes"], "token_logprobs": [secret]}},
        {
            "text": "Yes",
            "logprobs": {"tokens": ["Yes"], "token_logprobs": [-1], "top_logprobs": [{"Yes": secret}]},
        },
        {"text": {secret: secret}},
    ):
        yield {"choices": [choice]}


@pytest.mark.parametrize("lie", places(KEY))
def test_an_answer_with_the_key_in_the_wrong_place_is_not_quoted(fake, lie, caplog):
    caplog.set_level(logging.DEBUG)
    for ask in (
        lambda proxy: proxy.generate(ANSWER, VALUES[:1], tokens=3),
        lambda proxy: proxy.score(IK_QUESTION, VALUES[:1], ("Yes", "No")),
    ):
        with pytest.raises(ServerError, match="does not answer as") as caught:
            ask(fake(lie, api_key=KEY))
        assert chain(caught.value) == [caught.value]
        assert_harmless([caught.value], caplog)
    decision = load_gate("ik", tokens=0, proxy=fake(lie, api_key=KEY)).decide("who?")
    assert decision.retrieve
    assert "secret" not in decision.model_dump_json()


@pytest.mark.parametrize(
    "lie",
    [{"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}, {"choices": [{"text": None}]}, {}],
)
def test_choices_that_deviate_are_a_typed_error(fake, lie):
    raw = PromptTemplate(name="raw", version=1, user="{question}", raw=True)
    for prompt in (ANSWER, raw):
        with pytest.raises(ServerError, match="does not answer as"):
            fake(lie).generate(prompt, VALUES[:1], tokens=3)
    with pytest.raises((ServerError, EvidenceError)):
        fake(lie).score(IK_QUESTION, VALUES[:1], ("Yes", "No"))


def test_a_message_without_content_is_an_empty_draft(fake):
    """As when a model calls a tool, or says nothing."""
    for message in ({}, {"content": None}):
        (draft,) = fake({"choices": [{"message": message}]}).generate(ANSWER, VALUES[:1], tokens=3)
        assert draft.text == ""


def test_a_deeply_nested_answer_is_refused(fake):
    with pytest.raises(ServerError, match="does not answer as"):
        fake((200, "[" * 100_000)).generate(ANSWER, VALUES[:1], tokens=3)


@pytest.mark.parametrize(
    "proxy_url",
    [
        "http://ann:p4ss-word/x@proxy.test:3128",
        "http://ann:ss-word#x@proxy.test",
        "socksy://ann:ss-word@proxy.test",
    ],
)
@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_login_in_the_environments_proxy_server_is_not_quoted(monkeypatch, caplog, name, proxy_url):
    caplog.set_level(logging.DEBUG)
    for each in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.lower(), raising=False)
    monkeypatch.setenv(name, proxy_url)
    proxy = ServedProxy("http://127.0.0.1:9/v1", "m", retries=0, timeout=5)
    with pytest.raises((ConfigurationError, ServerError)) as caught:
        proxy.generate(ANSWER, VALUES[:1], tokens=1)
    assert_harmless([caught.value], caplog)
    decision = load_gate("ik", tokens=0, proxy=proxy).decide("who?")
    assert decision.retrieve
    assert "ss-word" not in decision.model_dump_json()
