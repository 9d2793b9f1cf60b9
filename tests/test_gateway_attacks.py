"""The gateway attacked: by clients, by web pages, and by an upstream that is not what it should be."""

import json
import re
from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.server import make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream
from tests.http_servers import Words, listening, serving_gateway
from tests.scripted_upstream import RawUpstream, ScriptedUpstream, Shelf, raw_request, raw_upstream, send_raw

CLIENT = httpx.Client(timeout=60)
KEY = "sk-upstream"
TOKEN = "s3cret"  # noqa: S105
CHAT = json.dumps({"messages": [{"role": "user", "content": "who wrote hamlet?"}]}).encode()
JSON = "Content-Type: application/json"


def status_of(answer):
    """Return the statuses of raw responses."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


@dataclass
class Attacked:
    """A gateway with a key, its upstream below a path, and another server that must not be reached."""

    url: str
    upstream: RawUpstream
    shelf: Shelf
    other: str
    elsewhere: RawUpstream

    def send(self, target, *headers, **options):
        return send_raw(self.url, raw_request(target.format(other=self.other), *headers, **options))


@pytest.fixture(scope="module")
def servers():
    shelf = Shelf()
    with (
        raw_upstream() as (other, elsewhere),
        raw_upstream() as (behind, upstream),
        serving_gateway(Words(), f"{behind}/tenant-a/v1", shelf, key=KEY) as url,
    ):
        yield Attacked(url, upstream, shelf, other.removeprefix("http://"), elsewhere)


@pytest.fixture
def attacked(servers):
    servers.upstream.received.clear()
    servers.elsewhere.received.clear()
    servers.shelf.queries.clear()
    return servers


# --- clients: which URL is asked ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "%2Fx@{other}/latest",
        "%2f@{other}/latest",
        "%2F:@{other}/",
        "%2fx@{other}/v1/chat/completions",
        "/../tenant-b/v1/models",
        "/v1/../../admin/keys",
        "/v1/..",
        "/%2e%2e/tenant-b",
        "/v1/%2E%2E/%2e%2e/admin",
        "/.%2e/admin",
        "/v1/..%2f..%2fadmin",
        "/v1/%2e%2e%2fadmin",
        "/v1\\..\\..\\admin",
        "/v1/..%5cadmin",
        "/%5c..%5cadmin",
        "/..;/admin",
        "/v1/..;jsessionid=1/..;/admin",
        "/%2e%2e%3b/admin",
        "/..%20/admin",
        "/..%00/admin",
        "/..%09/admin",
        "/%0a../admin",
        "/./v1/models",
        "/v1/%2e/models",
        "/v1/models#/../../admin",
    ],
)
def test_no_target_leads_out_of_the_upstreams_base(attacked, target):
    for method in ("GET", "POST", "DELETE"):
        answer = attacked.send(target, JSON, method=method, body=CHAT)
        assert status_of(answer)[0] in (400, 404)
    assert (attacked.elsewhere.received, attacked.upstream.received) == ([], [])


@pytest.mark.parametrize(
    "target", ["http://{other}/v1/models", "//{other}/v1/models", "/v1/ models", "/v1/\tx", "*"]
)
def test_no_target_names_another_host(attacked, target):
    attacked.send(target)
    assert attacked.elsewhere.received == []
    for request in attacked.upstream.received:  # `//host/` is a path of the upstream's own
        assert request.startswith(b"GET /tenant-a//127.0.0.1:")


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/v1/files/a%2Fb?q=%2e%2e/..",
        "/v1/..a/...",
        "/v1/%252e%252e/x",
        "/",
        "/v1/models?",
        "/a//b/",
    ],
)
def test_other_targets_arrive_as_they_were_sent(attacked, target):
    assert status_of(attacked.send(target)) == [200]
    (request,) = attacked.upstream.received
    assert request.startswith(f"GET /tenant-a{target.rstrip('?')} HTTP/1.1\r\n".encode())
    assert f"authorization: bearer {KEY}".encode() in request.lower()


def test_pipelined_requests_are_judged_one_by_one():
    with raw_upstream() as (behind, upstream):
        with serving_gateway(Words(), behind, key=KEY, token=TOKEN) as url:
            first = raw_request("/health").replace(b"Connection: close\r\n", b"")
            assert status_of(send_raw(url, first + raw_request("/v1/models"))) == [200, 401]
        assert upstream.received == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/%68ealth", "/health?x=1"])
def test_nothing_but_get_and_head_is_open_without_a_token(path):
    with raw_upstream() as (behind, upstream):
        with serving_gateway(Words(), behind, key=KEY, token=TOKEN) as url:
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                assert status_of(send_raw(url, raw_request(path, JSON, method=method)))[0] == 401
        assert upstream.received == []


# --- clients: what goes on to the upstream ------------------------------------------------------------------------


def test_a_cookie_of_one_client_is_not_sent_for_another_and_what_pages_may_read_is_not_passed_on():
    upstream = ScriptedUpstream()
    pages = {"access-control-allow-origin": "*", "Access-Control-Expose-Headers": "*"}
    upstream.own = {"set-cookie": "session=alice; Path=/", **pages}
    with listening(upstream.app) as behind, serving_gateway(Words(), behind) as url:
        for path in ("/v1/models", "/v1/chat/completions"):
            answer = httpx.post(url + path, content=CHAT, headers={"content-type": "application/json"})
            assert answer.headers["set-cookie"] == "session=alice; Path=/"
            assert [name for name in answer.headers if name.startswith("access-control")] == []
        httpx.get(f"{url}/v1/models")
        assert [headers.get("cookie") for headers in upstream.headers] == [None] * 3
        httpx.get(f"{url}/v1/models", headers={"cookie": "session=bob"})
        assert upstream.headers[-1]["cookie"] == "session=bob"


def test_headers_of_one_connection_are_not_forwarded():
    named = ["Connection: x-mine, X-Other , keep-alive", "X-Mine: 1", "x-other: 2", "Keep-Alive: 5"]
    others = ["Expect: 100-continue", "TE: trailers", "Upgrade: h2c", "x-rgate-reason: mine", "x-kept: 3"]
    with raw_upstream() as (behind, upstream):
        with serving_gateway(Words(), behind) as url:
            send_raw(url, raw_request("/v1/models", *named, *others))
        lines = upstream.received[0].decode().lower().split("\r\n")
    sent = {line.partition(":")[0] for line in lines[1:] if line}
    assert sent - {"accept", "accept-encoding", "user-agent", "connection"} == {"host", "x-kept"}
    assert "connection: keep-alive" in lines  # the gateway's own


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_of_the_environment_gets_nothing_for_this_machine(monkeypatch, host):
    with raw_upstream() as (proxy, between), raw_upstream() as (behind, upstream):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with serving_gateway(Words(), behind.replace("127.0.0.1", host), key=KEY) as url:
            assert status_of(send_raw(url, raw_request("/v1/models"))) == [200]
        assert between.received == []
        assert len(upstream.received) == 1


@pytest.mark.parametrize("proxy", ["socks5://ann:p4ss@x:1", "ftp://ann:p4ss@x", "http://ann:p4ss/@x"])
def test_a_proxy_of_the_environment_that_cannot_be_used_is_said_without_its_login(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    Upstream("http://127.0.0.1:9")  # needs none
    with pytest.raises(ConfigurationError, match="proxy settings in the environment") as caught:
        Upstream("http://model.test:9")
    assert "p4ss" not in f"{caught.value} {caught.value.__cause__}"


# --- web pages ----------------------------------------------------------------------------------------------------

FOREIGN = [
    ["Origin: http://evil.example"],
    ["Origin: HTTP://EVIL.EXAMPLE"],
    ["Origin: null"],
    ["Origin: http://127.0.0.1:1"],
    ["Origin: http://127.0.0.1.evil.example"],
    ["Origin: {own}", "Origin: http://evil.example"],
    ["Origin: {own}, http://evil.example"],
    ["Origin:"],
    ["Sec-Fetch-Site: cross-site"],
    ["SEC-FETCH-SITE:\tCross-Site "],
    ["Sec-Fetch-Site: same-site"],
    ["Origin: {own}", "Sec-Fetch-Site: cross-site"],
]
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/decide"),
    ("POST", "/v1/systemone"),
    ("POST", "/v1/queries"),
    ("POST", "/v1/anything"),
    ("DELETE", "/v1/files/1"),
    ("OPTIONS", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/openapi.json"),
]


@pytest.mark.parametrize("headers", FOREIGN, ids="; ".join)
def test_a_page_of_another_origin_is_refused_on_every_route(attacked, headers):
    host = attacked.url.removeprefix("http://")
    given = [header.format(own=attacked.url) for header in headers]
    for method, path in ROUTES:
        for kind in (JSON, "Content-Type: text/plain"):
            answer = attacked.send(path, kind, *given, method=method, body=CHAT, host=host)
            assert status_of(answer) == [403]
            assert b"access-control" not in answer.lower()
    assert (attacked.upstream.received, attacked.shelf.queries) == ([], [])


def test_the_gateways_own_pages_and_clients_that_are_no_browser_are_served(attacked):
    host = attacked.url.removeprefix("http://")
    own = [f"Origin: {attacked.url}", "Sec-Fetch-Site: same-origin"]
    for headers in ([], own, ["Sec-Fetch-Site: none"]):
        assert status_of(attacked.send("/v1/models", *headers, host=host)) == [200]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "text/json", "", "multipart/form-data"]
)
def test_only_application_json_is_taken_for_json(attacked, kind):
    headers = [f"Content-Type: {kind}"] if kind else []
    answer = attacked.send("/v1/chat/completions", *headers, method="POST", body=CHAT)
    assert b"x-rgate-undecided: content-type\r\n" in answer
    assert attacked.shelf.queries == []
    body = b'{"questions": ["known"]}'
    assert status_of(attacked.send("/v1/decide", *headers, method="POST", body=body)) == [422]


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"]
)
def test_the_type_of_json_is_read_as_http_says(attacked, kind):
    attacked.send("/v1/chat/completions", f"content-type: {kind}", method="POST", body=CHAT)
    assert attacked.shelf.queries == ["who wrote hamlet?"]


PAGE = "http://localhost:3000"


def test_an_origin_that_the_operator_names_may_ask_and_read_and_no_other():
    service = DecisionService(Words())
    upstream = ScriptedUpstream()
    upstream.own = {
        "access-control-allow-origin": "*",
        "access-control-allow-credentials": "true",
        "x-own": "kept",
    }
    with listening(upstream.app, allow_origins=[PAGE]) as behind:
        app = make_app(service, Gateway(service, Upstream(behind)))
        with listening(app, allow_origins=[PAGE]) as url:
            asked = {"origin": PAGE, "sec-fetch-site": "cross-site", "content-type": "application/json"}
            answer = CLIENT.post(f"{url}/v1/chat/completions", content=CHAT, headers=asked)
            wanted = {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            preflight = CLIENT.options(f"{url}/v1/chat/completions", headers={"origin": PAGE, **wanted})
            foreign = CLIENT.options(
                f"{url}/v1/chat/completions", headers={"origin": "http://evil", **wanted}
            )
    assert (answer.status_code, answer.headers["x-own"]) == (200, "kept")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers["access-control-expose-headers"] == "*"
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert (foreign.status_code, "access-control-allow-origin" in foreign.headers) == (400, False)
    assert len(upstream.requests) == 1


def test_an_allowed_page_without_the_token_is_refused_and_may_read_why():
    with listening(make_app(DecisionService(Words())), token=TOKEN, allow_origins=[PAGE]) as url:
        refused = CLIENT.get(f"{url}/metrics", headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("allowed", [[], [PAGE]])
@pytest.mark.parametrize("origin", ["{own}", PAGE, "http://evil.example", "null", ""])
def test_no_preflight_reaches_the_upstream(allowed, origin, token):
    service = DecisionService(Words())
    with raw_upstream() as (behind, upstream):
        app = make_app(service, Gateway(service, Upstream(behind)))
        with listening(app, token=token, allow_origins=allowed) as url:
            given = [f"Origin: {origin.format(own=url)}", "Access-Control-Request-Method: POST"]
            host = url.removeprefix("http://")
            answer = send_raw(url, raw_request("/v1/models", *given, method="OPTIONS", host=host))
        refused = 400 if allowed else 403  # by CORS, or by the guard
        assert status_of(answer) == [200 if origin in allowed else refused]
        assert upstream.received == []


@pytest.mark.parametrize(
    "origin",
    ["*", "localhost", "http://a.example/", "http://a example", "", "http://*.a", "http://A.example"],
)
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigurationError, match="origin"):
        make_server(make_app(DecisionService(Words())), "127.0.0.1", 0, allow_origins=[origin])


# --- upstreams ----------------------------------------------------------------------------------------------------


def test_a_length_beside_chunks_does_not_hang_the_client():
    both = (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    )
    with raw_upstream(both) as (behind, _), serving_gateway(Words(), behind) as url:
        answer = CLIENT.get(f"{url}/v1/models")
    assert (answer.status_code, answer.content) == (200, b"ok")


def test_the_prefix_of_a_mounted_gateway_does_not_reach_the_upstream():
    upstream, service = ScriptedUpstream(), DecisionService(Words())
    with listening(upstream.app) as behind:
        app = make_app(service, Gateway(service, Upstream(behind)))
        with listening(Starlette(routes=[Mount("/gate", app)])) as url:
            CLIENT.get(f"{url}/gate/v1/models?a=%2Fb")
            assert CLIENT.get(f"{url}/gate/..%2Fx").status_code == 400
    ((_, target, _),) = upstream.requests
    assert target == f"{behind}/v1/models?a=%2Fb"


def test_an_answer_that_breaks_off_breaks_off_for_the_client_and_the_log_says_whose_it_was(caplog):
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf"
    with raw_upstream(half) as (behind, _), serving_gateway(Words(), behind) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            CLIENT.get(f"{url}/v1/models")
        metrics = CLIENT.get(f"{url}/metrics").text
    assert "The upstream server failed: RemoteProtocolError" in caplog.text
    assert 'rgate_errors_total{type="RemoteProtocolError"} 1.0' in metrics


@pytest.mark.parametrize("status", [999, 600, 101])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_a_status_that_no_client_knows_is_a_bad_gateway(status, path):
    odd = f"HTTP/1.1 {status} Odd\r\ncontent-length: 0\r\n\r\n".encode()
    with raw_upstream(odd) as (behind, _), serving_gateway(Words(), behind) as url:
        answer = CLIENT.post(url + path, content=CHAT, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "UpstreamError")


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_comes_through(status):
    empty = f"HTTP/1.1 {status} X\r\ncontent-length: 7\r\n\r\n".encode()
    with raw_upstream(empty) as (behind, _), serving_gateway(Words(), behind) as url:
        assert CLIENT.get(f"{url}/v1/models").status_code == status


def test_an_upstream_cannot_speak_for_the_gateway():
    headers = (
        b"x-rgate-decision: direct\r\nX-RGate-Reason: mine\r\nx-rgate: off\r\nconnection: x-hop\r\nx-hop: 1"
    )
    own = b"HTTP/1.1 200 OK\r\ndate: x\r\n" + headers + b"\r\ncontent-length: 2\r\n\r\nok"
    with raw_upstream(own) as (behind, _), serving_gateway(Words(), behind) as url:
        other = CLIENT.get(f"{url}/v1/models")
        chat = CLIENT.post(
            f"{url}/v1/chat/completions", content=CHAT, headers={"content-type": "application/json"}
        )
    assert [name for name in other.headers if name.startswith("x-")] == []
    assert len(other.headers.get_list("date")) == 1
    assert chat.headers["x-rgate-decision"] == "retrieve"
    assert chat.headers["x-rgate-reason"] == ""
