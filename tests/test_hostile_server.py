"""A server that drips, lies, or answers in any shape: a draft or a typed error, in time, and no secret in either."""

import gzip
import json
import socketserver
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given, settings

from rgate_integrations.errors import ConfigurationError, RGateError, ServerError
from rgate_integrations.models.served import ServedProxy
from rgate_integrations.models.server import LONGEST_BODY, read_completion
from rgate_integrations.prompts import ANSWER
from tests.fake_server import answer
from tests.patience import PATIENCE
from tests.test_hostile_files import changed
from tests.test_served_secrets import KEY, VALUES, chain, failed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n"


@contextmanager
def dripping(first, piece, pause=0.01):
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
    [(b"", b"H"), (HEAD, b"X-More: 1\r\n"), (HEAD + b"\r\n{", b" "), (HEAD, b"x")],
    ids=["the status", "headers", "the body", "one header"],
)
def test_a_dripping_server_does_not_outlast_the_timeout(first, piece, caplog):
    """Each of its pieces comes in time. Without a deadline for all of them this would not end."""
    with dripping(first, piece) as (url, _):
        proxy = ServedProxy(url, "m", timeout=0.3, retries=1)
        failed(proxy, caplog, ServerError, r"no whole answer within 0\.3 s|RemoteProtocolError")
        proxy.close()


@pytest.mark.timeout(120)
def test_who_waits_while_the_connection_is_closed_gets_an_error():
    with dripping(HEAD + b"\r\n", b" ") as (url, taken):
        proxy, errors = ServedProxy(url, "m", timeout=30, retries=0), []

        def ask():
            try:
                proxy.generate(ANSWER, VALUES[:1], tokens=3)
            except RGateError as error:
                errors.append(type(error))

        thread = threading.Thread(target=ask)
        thread.start()
        while not taken:
            time.sleep(0.01)
        proxy.close()
        thread.join(PATIENCE)
        assert errors == [ServerError]


@pytest.mark.parametrize(
    ("header", "piece", "why"),
    [
        (b"\r\n", b" " * 65536, "more than 16 MiB"),
        (b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b" " * 1_000_000), r"packed its answer \(gzip\)"),
    ],
    ids=["endless", "packed"],
)
def test_no_more_of_an_answer_is_read_than_an_answer_can_have_and_none_is_unpacked(header, piece, why):
    """1.5 MB of gzip became 3.1 GB and 23 s against a timeout of 20."""
    with dripping(HEAD + header, piece, pause=0) as (url, taken):
        proxy = ServedProxy(url, "m", retries=3)
        with pytest.raises(ServerError, match=why):
            proxy.generate(ANSWER, VALUES[:1], tokens=3)
        proxy.close()
    assert len(taken) == 1
    assert taken[0] < 3 * LONGEST_BODY, "what the sockets hold may have been sent on"


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


@pytest.mark.parametrize(("given_answer", "prompt_tokens"), [(CHAT, 7), (TEXT, 3)])
def test_both_shapes_are_read(given_answer, prompt_tokens):
    completion = read_completion(json.dumps(given_answer).encode())
    assert (completion.text, completion.finished, completion.prompt_tokens) == ("Yes", True, prompt_tokens)
    (token,) = completion.tokens
    assert (token.text, token.logprob, token.likeliest["Yes"]) == ("Yes", -0.1, -0.1)


NO_ANSWERS = [
    {},
    {"choices": []},
    {"choices": [{}]},
    {"choices": [{"message": None}]},
    {"choices": [{"text": None}]},
    (200, "[" * 100_000),
]


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


@pytest.mark.parametrize("lie", [*places(KEY), *NO_ANSWERS], ids=lambda lie: str(lie)[:40])
def test_an_answer_with_the_key_in_the_wrong_place_is_not_quoted(fake, lie, caplog):
    error = failed(fake(lie, api_key=KEY), caplog, ServerError, "does not answer as")
    assert chain(error) == [error]


@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_a_message_without_content_is_an_empty_draft(fake, message):
    """As when a model calls a tool, or says nothing."""
    (draft,) = fake({"choices": [{"message": message}]}).generate(ANSWER, VALUES[:1], tokens=3)
    assert draft.text == ""


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
    for each in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.lower(), raising=False)
    monkeypatch.setenv(name, proxy_url)
    proxy = ServedProxy("http://127.0.0.1:9/v1", "m", retries=0, timeout=5)
    failed(proxy, caplog, (ConfigurationError, ServerError))
