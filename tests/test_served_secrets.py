"""The API key and the login of a served proxy are sent, and stand in no error, log or repr."""

import base64
import json
import logging
import pickle

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError
from rgate_integrations.gates.papers.ik import IK_QUESTION
from rgate_integrations.models.served import ServedProxy
from rgate_integrations.prompts import ANSWER
from tests.fake_server import Fake, answer

VALUES = [{"question": "What is the capital of France?"}, {"question": "Who wrote Hamlet?"}]
KEY = "sk-very/secret"
LOGIN = "ann:p%40ss-word"
BASIC = base64.b64encode(b"ann:p@ss-word").decode()


def chain(error):
    """An exception and all that it carries along."""
    return [error, *chain(error.__cause__), *chain(error.__context__)] if error else []


def assert_harmless(error, caplog):
    """Neither the error, nor what it carries, nor the log has a secret of these tests."""
    texts = [caplog.text, *(r.getMessage() for r in caplog.records)]
    for link in chain(error):
        texts += [str(link), repr(link), repr(link.args)]
    shown = "\n".join(texts)
    assert [secret for secret in ("secret", "ss-word", BASIC) if secret in shown] == []


def failed(proxy, caplog, error=(ServerError, EvidenceError), match=None):
    """Ask what fails, both ways; returns the error, which is harmless, as is a decision's."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(error, match=match) as caught:
        proxy.score(IK_QUESTION, VALUES[:1], ("Yes", "No"))
    assert_harmless(caught.value, caplog)
    decision = load_gate("ik", tokens=0, proxy=proxy).decide("who?")
    assert (decision.retrieve, decision.error.type) == (True, type(caught.value).__name__)
    assert [secret for secret in ("sk-", "ss-word") if secret in decision.model_dump_json()] == []
    return caught.value


@pytest.mark.parametrize(
    ("key", "sent"), [(f" {KEY}\r\n", f"Bearer {KEY}"), (f"\t{KEY}", f"Bearer {KEY}"), (" \n", None)]
)
def test_white_space_around_a_key_is_not_sent(fake, key, sent, caplog):
    caplog.set_level(logging.DEBUG)
    fake(answer(), api_key=key).generate(ANSWER, VALUES[:1], tokens=3)
    assert Fake.seen[-1][2] == sent
    assert_harmless(None, caplog)


@pytest.mark.parametrize(
    "key", [f"{KEY}\nX-Other: 1", f"sk\x00{KEY}", f"\ufeff{KEY}", f"{KEY}é", KEY.encode()]
)
def test_a_key_that_cannot_be_sent_is_refused_without_being_quoted(key, caplog):
    with pytest.raises(ConfigurationError, match=r"(?i)api.key") as caught:
        ServedProxy("http://127.0.0.1:9/v1", "m", api_key=key)
    assert_harmless(caught.value, caplog)


@pytest.mark.parametrize("status", [400, 401, 404, 500])
@pytest.mark.parametrize("said", [KEY, "sk-very%2fsecret", f"logprobs {KEY}", "x" * 290 + KEY])
def test_a_server_that_echoes_the_key_is_not_quoted_with_it(fake, status, said, caplog):
    error = failed(fake((status, f'{{"error": "bad key {said}"}}'), api_key=KEY, retries=0), caplog)
    assert "sk-" not in str(error), "not the beginning of one that was cut off either"


@pytest.mark.parametrize("body", [f"<html>{KEY}", json.dumps({"error": KEY}), json.dumps([KEY])])
def test_an_unreadable_answer_is_not_carried_along(fake, body, caplog):
    error = failed(fake((200, body), api_key=KEY), caplog, match="does not answer as")
    assert chain(error) == [error], "a JSONDecodeError has the whole answer"


@pytest.mark.parametrize(
    ("url", "key"), [("http://127.0.0.1:9/v1", KEY), (f"http://{LOGIN}@127.0.0.1:9/v1", None)]
)
def test_a_lost_connection_tells_no_secret(url, key, caplog):
    proxy = ServedProxy(url, "m", api_key=key, retries=0)
    failed(proxy, caplog, ServerError, r"127\.0\.0\.1:9/v1 could not be used")


def test_a_transport_error_that_quotes_the_key_is_redacted(fake, monkeypatch, caplog):
    """As httpx did with a header that it held for illegal."""
    import httpx

    async def refuse(*args, **kwargs):
        raise httpx.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")

    monkeypatch.setattr(httpx.AsyncClient, "send", refuse)
    failed(fake(answer(), api_key=KEY, retries=0), caplog, ServerError, "Illegal header value")


def test_a_login_in_the_url_is_sent_and_shown_nowhere(fake, caplog):
    caplog.set_level(logging.DEBUG)
    host = fake(answer()).url.removeprefix("http://")
    proxy = ServedProxy(f"http://{LOGIN}@{host}", "m", retries=0)
    proxy.generate(ANSWER, VALUES[:1], tokens=3)
    assert Fake.seen[-1][2] == f"Basic {BASIC}"
    assert proxy.url == f"http://{host}"
    assert "ss-word" not in repr(proxy)
    Fake.script = [(400, f"{LOGIN} p@ss-word Basic {BASIC} http://bob:ss-word@elsewhere/")]
    failed(proxy, caplog, EvidenceError, r"http://\*\*\*@elsewhere/")


@pytest.mark.parametrize(
    "url",
    [
        "ann:ss-word@localhost:8000",
        "ftp://ann:ss-word@localhost/v1",
        "http://ann:ss-word@[::1/v1",
        "http://ann:ss-word@host:port/v1",
        "http://ann:ss-word/x@host/v1",
        "http://ann:1/ss-word@host/v1",
        "http://ann:ss-word?x@host/v1",
        "http://ann:ss-word#x@host/v1",
        "http://ann:ss-word@ho st/v1",
        "http://ann:ss-word@host\n.org/v1",
        "http://ann:ss-word@host\u2100/v1",
        "http://ann:ss-word@/v1",
        "http://host/v1?key=secret",
    ],
)
def test_a_broken_url_is_refused_without_its_secrets(url, caplog):
    with pytest.raises(ConfigurationError, match="is no URL") as caught:
        ServedProxy(url, "m")
    assert_harmless(caught.value, caplog)


def test_a_key_beside_a_login_is_refused(caplog):
    with pytest.raises(ConfigurationError, match="only one of them") as caught:
        ServedProxy(f"http://{LOGIN}@host/v1", "m", api_key=KEY)
    assert_harmless(caught.value, caplog)


@pytest.mark.parametrize(("login", "key"), [("", KEY), (f"{LOGIN}@", None)])
def test_a_pickle_has_the_credentials_and_its_repr_has_not(fake, login, key):
    host = fake(answer()).url.removeprefix("http://")
    proxy = ServedProxy(f"http://{login}{host}", "m", api_key=key, retries=1, max_concurrency=2)
    proxy.generate(ANSWER, VALUES, tokens=3)  # open connections do not travel
    sent = Fake.seen[-1][2]
    shown = repr([proxy, vars(proxy), proxy.__reduce_ex__(2), proxy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)])
    assert [secret for secret in ("secret", "ss-word") if secret in shown] == []
    again = pickle.loads(pickle.dumps(proxy))  # noqa: S301
    assert (again.url, again.name) == (proxy.url, "m")
    again.generate(ANSWER, VALUES, tokens=3)
    assert sent
    assert Fake.seen[-1][2] == sent
