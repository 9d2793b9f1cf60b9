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
from tests.fake_server import Fake, answer, serving

VALUES = [{"question": "What is the capital of France?"}, {"question": "Who wrote Hamlet?"}]
KEY = "sk-very/secret"
LOGIN = "ann:p%40ss-word"


@pytest.fixture
def fake():
    with serving() as proxy:
        yield proxy


def chain(error):
    """An exception and all that it carries along."""
    if error is None:
        return []
    return [error, *chain(error.__cause__), *chain(error.__context__)]


def assert_harmless(errors, caplog):
    """Neither the errors, nor what they carry, nor the log has a secret of these tests."""
    texts = [caplog.text, *(r.getMessage() for r in caplog.records)]
    for error in errors:
        for link in chain(error):
            texts += [str(link), repr(link), repr(link.args)]
    for text in texts:
        assert "secret" not in text
        assert "ss-word" not in text


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}\r\n", f"\t{KEY}"])
def test_white_space_around_a_key_is_not_sent(fake, key, caplog):
    caplog.set_level(logging.DEBUG)
    decision = load_gate("ik", tokens=0, proxy=fake(answer(tops={"Yes": -0.1}), api_key=key)).decide("who?")
    assert decision.error is None
    assert Fake.seen[-1][2] == f"Bearer {KEY}"
    assert_harmless([], caplog)


@pytest.mark.parametrize(
    "key", [f"{KEY}\nX-Other: 1", f"sk\x00{KEY}", f"\ufeff{KEY}", f"{KEY}é", KEY.encode()]
)
def test_a_key_that_cannot_be_sent_is_refused_without_being_quoted(key, caplog):
    with pytest.raises(ConfigurationError, match=r"(?i)api.key") as caught:
        ServedProxy("http://127.0.0.1:9/v1", "m", api_key=key)
    assert_harmless([caught.value], caplog)


def test_an_empty_key_is_none(fake):
    fake(answer(), api_key=" \n").generate(ANSWER, VALUES[:1], tokens=3)
    assert Fake.seen[-1][2] is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500])
@pytest.mark.parametrize(
    "said", [KEY, "sk-very%2Fsecret", "sk-very%2fsecret", f"logprobs {KEY}", "x" * 290 + KEY]
)
def test_a_server_that_echoes_the_key_is_not_quoted_with_it(fake, status, said, caplog):
    caplog.set_level(logging.DEBUG)
    reply = (status, f'{{"error": "bad key {said}"}}')
    proxy = fake(reply, api_key=KEY, retries=0)
    with pytest.raises((ServerError, EvidenceError)) as caught:
        proxy.score(IK_QUESTION, VALUES[:1], ("Yes", "No"))
    decision = load_gate("ik", tokens=0, proxy=fake(reply, api_key=KEY, retries=0)).decide("who?")
    assert decision.error is not None
    assert "sk-" not in decision.model_dump_json(), "not the beginning of one that was cut off either"
    assert "sk-" not in str(caught.value)
    assert_harmless([caught.value], caplog)


@pytest.mark.parametrize("body", [f"<html>{KEY}", json.dumps({"error": KEY}), json.dumps([KEY])])
def test_an_unreadable_answer_is_not_carried_along(fake, body, caplog):
    with pytest.raises(ServerError, match="does not answer as") as caught:
        fake((200, body), api_key=KEY).generate(ANSWER, VALUES[:1], tokens=3)
    assert chain(caught.value) == [caught.value], "a JSONDecodeError has the whole answer"
    assert_harmless([caught.value], caplog)


def test_a_lost_connection_tells_no_secret(caplog):
    caplog.set_level(logging.DEBUG)
    for url, key in (("http://127.0.0.1:9/v1", KEY), (f"http://{LOGIN}@127.0.0.1:9/v1", None)):
        proxy = ServedProxy(url, "m", api_key=key, retries=0)
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1 could not be used") as caught:
            proxy.generate(ANSWER, VALUES[:1], tokens=1)
        assert_harmless([caught.value], caplog)
        decision = load_gate("ik", proxy=proxy).decide("who?")
        assert decision.error.type == "ServerError"
        assert "ss-word" not in decision.model_dump_json()
    assert_harmless([], caplog)


def test_a_transport_error_that_quotes_the_key_is_redacted(fake, monkeypatch, caplog):
    """As httpx did with a header that it held for illegal."""
    import httpx

    async def refuse(*args, **kwargs):
        raise httpx.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'")

    proxy = fake(answer(), api_key=KEY, retries=0)
    monkeypatch.setattr(httpx.AsyncClient, "send", refuse)
    with pytest.raises(ServerError, match="Illegal header value") as caught:
        proxy.generate(ANSWER, VALUES[:1], tokens=1)
    assert_harmless([caught.value], caplog)


def test_a_login_in_the_url_is_sent_and_shown_nowhere(fake, caplog):
    caplog.set_level(logging.DEBUG)
    host = fake(answer()).url.removeprefix("http://")
    proxy = ServedProxy(f"http://{LOGIN}@{host}", "m", retries=0)
    proxy.generate(ANSWER, VALUES[:1], tokens=3)
    assert Fake.seen[-1][2] == f"Basic {base64.b64encode(b'ann:p@ss-word').decode()}"
    assert proxy.url == f"http://{host}"
    assert "ss-word" not in repr(proxy)
    echo = f"{LOGIN} p@ss-word {Fake.seen[-1][2]} http://bob:ss-word@elsewhere/"
    Fake.script = [(400, echo)]
    with pytest.raises(EvidenceError, match=r"http://\*\*\*@elsewhere/") as caught:
        proxy.generate(ANSWER, VALUES[:1], tokens=3)
    assert base64.b64encode(b"ann:p@ss-word").decode() not in str(caught.value)
    assert_harmless([caught.value], caplog)


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
    with pytest.raises(ConfigurationError) as caught:
        ServedProxy(url, "m")
    assert_harmless([caught.value], caplog)


def test_a_key_beside_a_login_is_refused(caplog):
    with pytest.raises(ConfigurationError, match="only one of them") as caught:
        ServedProxy(f"http://{LOGIN}@host/v1", "m", api_key=KEY)
    assert_harmless([caught.value], caplog)


@pytest.mark.parametrize(("login", "key"), [("", KEY), (f"{LOGIN}@", None)])
def test_a_pickle_has_the_credentials_and_its_repr_has_not(fake, login, key):
    host = fake(answer()).url.removeprefix("http://")
    proxy = ServedProxy(f"http://{login}{host}", "m", api_key=key, retries=1, max_concurrency=2)
    proxy.generate(ANSWER, VALUES, tokens=3)  # open connections do not travel
    sent = Fake.seen[-1][2]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        reduced = repr(proxy.__reduce_ex__(protocol))
        assert "secret" not in reduced
        assert "ss-word" not in reduced
    shown = [repr(proxy), repr(vars(proxy))]
    assert not [text for text in shown if "secret" in text or "ss-word" in text]
    again = pickle.loads(pickle.dumps(proxy))  # noqa: S301
    assert (again.url, again.name) == (proxy.url, "m")
    again.generate(ANSWER, VALUES, tokens=3)
    assert sent
    assert Fake.seen[-1][2] == sent
