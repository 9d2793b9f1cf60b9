"""The gateway attacked: by clients, by web pages, and by an upstream that is not what it should be."""

import json
import re
from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream
from tests.http_servers import CLIENT, Words, listening, serving_gateway
from tests.scripted_upstream import ScriptedUpstream, Shelf, raw_request, raw_upstream, send_raw

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
    received: list
    shelf: Shelf
    other: str
    received_elsewhere: list

    def send(self, target, *headers, **options):
        return send_raw(self.url, raw_request(target.format(other=self.other), *headers, **options))


@pytest.fixture(scope="module")
def servers():
    shelf = Shelf()
    with (
        raw_upstream() as (other, received_elsewhere),
        raw_upstream() as (behind, received),
        serving_gateway(Words(), f"{behind}/tenant-a/v1", shelf, key=KEY) as url,
    ):
        yield Attacked(url, received, shelf, other.removeprefix("http://"), received_elsewhere)


@pytest.fixture
def attacked(servers):
    for requests in (servers.received, servers.received_elsewhere, servers.shelf.queries):
        requests.clear()
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
        assert status_of(attacked.send(target, JSON, method=method, body=CHAT))[0] in (400, 404)
    assert (attacked.received_elsewhere, attacked.received) == ([], [])


@pytest.mark.parametrize(
    "target", ["http://{other}/v1/models", "//{other}/v1/models", "/v1/ models", "/v1/\tx", "*"]
)
def test_no_target_names_another_host(attacked, target):
    attacked.send(target)
    assert attacked.received_elsewhere == []
    # `//host/` is a path of the upstream's own
    assert all(request.startswith(b"GET /tenant-a//127.0.0.1:") for request in attacked.received)


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
    (request,) = attacked.received
    assert request.startswith(f"GET /tenant-a{target.rstrip('?')} HTTP/1.1\r\n".encode())
    assert f"authorization: bearer {KEY}".encode() in request.lower()


def test_nothing_but_get_and_head_of_a_probe_is_open_without_a_token_also_when_pipelined():
    with raw_upstream() as (behind, received):
        with serving_gateway(Words(), behind, key=KEY, token=TOKEN) as url:
            for path in ("/health", "/ready", "/metrics", "/%68ealth", "/health?x=1"):
                for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                    assert status_of(send_raw(url, raw_request(path, JSON, method=method)))[0] == 401
            first = raw_request("/health").replace(b"Connection: close\r\n", b"")
            assert status_of(send_raw(url, first + raw_request("/v1/models"))) == [200, 401]
        assert received == []


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
    with raw_upstream() as (behind, received), serving_gateway(Words(), behind) as url:
        send_raw(url, raw_request("/v1/models", *named, *others))
    lines = received[0].decode().lower().split("\r\n")
    sent = {line.partition(":")[0] for line in lines[1:] if line}
    assert sent - {"accept", "accept-encoding", "user-agent", "connection"} == {"host", "x-kept"}
    assert "connection: keep-alive" in lines  # the gateway's own


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
    assert (attacked.received, attacked.shelf.queries) == ([], [])


def test_the_gateways_own_pages_and_clients_that_are_no_browser_are_served(attacked):
    host = attacked.url.removeprefix("http://")
    own = [f"Origin: {attacked.url}", "Sec-Fetch-Site: same-origin"]
    for headers in ([], own, ["Sec-Fetch-Site: none"]):
        assert status_of(attacked.send("/v1/models", *headers, host=host)) == [200]


@pytest.mark.parametrize(
    ("kind", "is_json"),
    [
        *((kind, True) for kind in ("application/json; charset=utf-8", "Application/JSON")),
        *((kind, False) for kind in ("text/plain", "application/x-www-form-urlencoded", "text/json", "")),
    ],
)
def test_only_application_json_is_taken_for_json_in_every_spelling(attacked, kind, is_json):
    headers = [f"Content-Type: {kind}"] if kind else []
    answer = attacked.send("/v1/chat/completions", *headers, method="POST", body=CHAT)
    assert (b"x-rgate-undecided: content-type\r\n" not in answer) == is_json
    assert attacked.shelf.queries == ["who wrote hamlet?"] * is_json
    answer = attacked.send("/v1/decide", *headers, method="POST", body=b'{"questions": ["known"]}')
    assert status_of(answer) == [200 if is_json else 422]
    assert is_json or b"Content-Type: application/json" in answer


PAGE = "http://localhost:3000"


def test_an_origin_that_the_operator_names_may_ask_and_read():
    service, upstream = DecisionService(Words()), ScriptedUpstream()
    cors = {"access-control-allow-origin": "*", "access-control-allow-credentials": "true"}
    upstream.own = {**cors, "x-own": "kept"}
    with listening(upstream.app, allow_origins=[PAGE]) as behind:
        app = make_app(service, Gateway(service, Upstream(behind)))
        with listening(app, token=TOKEN, allow_origins=[PAGE]) as url:
            headers = {"origin": PAGE, "sec-fetch-site": "cross-site", "content-type": "application/json"}
            refused = CLIENT.post(f"{url}/v1/chat/completions", content=CHAT, headers=headers)
            headers["authorization"] = f"Bearer {TOKEN}"
            answer = CLIENT.post(f"{url}/v1/chat/completions", content=CHAT, headers=headers)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert (answer.status_code, answer.headers["x-own"]) == (200, "kept")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers["access-control-expose-headers"] == "*"
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("allowed", [[], [PAGE]])
@pytest.mark.parametrize("origin", ["{own}", PAGE, "http://evil.example", "null", ""])
def test_no_preflight_reaches_the_upstream_and_only_an_allowed_origin_gets_its_headers(
    allowed, origin, token
):
    service = DecisionService(Words())
    with raw_upstream() as (behind, received):
        app = make_app(service, Gateway(service, Upstream(behind)))
        with listening(app, token=token, allow_origins=allowed) as url:
            headers = [f"Origin: {origin.format(own=url)}", "Access-Control-Request-Method: POST"]
            headers.append("Access-Control-Request-Headers: authorization")
            host = url.removeprefix("http://")
            answer = send_raw(url, raw_request("/v1/models", *headers, method="OPTIONS", host=host))
        refused = 400 if allowed else 403  # by CORS, or by the guard
        assert status_of(answer) == [200 if origin in allowed else refused]
        assert (f"access-control-allow-origin: {PAGE}".encode() in answer) == (origin in allowed)
        assert received == []


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


@pytest.mark.parametrize(("status", "through"), [(204, 204), (304, 304), (101, 502), (600, 502), (999, 502)])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_a_status_without_a_body_comes_through_and_one_that_no_client_knows_is_a_bad_gateway(
    status, through, path
):
    odd = f"HTTP/1.1 {status} Odd\r\ncontent-length: 0\r\n\r\n".encode()
    with raw_upstream(odd) as (behind, _), serving_gateway(Words(), behind) as url:
        answer = CLIENT.post(url + path, content=CHAT, headers={"content-type": "application/json"})
    assert answer.status_code == through
    assert through != 502 or answer.json()["error"]["type"] == "UpstreamError"


def test_an_upstream_cannot_speak_for_the_gateway():
    own = b"x-rgate-decision: direct\r\nX-RGate-Reason: mine\r\nx-rgate: off\r\nconnection: close, x-hop\r\nx-hop: 1"
    answer = b"HTTP/1.1 200 OK\r\ndate: x\r\n" + own + b"\r\ncontent-length: 2\r\n\r\nok"
    json_type = {"content-type": "application/json"}
    with raw_upstream(answer) as (behind, _), serving_gateway(Words(), behind) as url:
        other = CLIENT.get(f"{url}/v1/models")
        chat = CLIENT.post(f"{url}/v1/chat/completions", content=CHAT, headers=json_type)
    assert [name for name in other.headers if name.startswith("x-")] == []
    assert len(other.headers.get_list("date")) == 1
    assert (chat.headers["x-rgate-decision"], chat.headers["x-rgate-reason"]) == ("retrieve", "")
