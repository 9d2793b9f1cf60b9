"""The MCP server, asked by the official client: in process, on standard input and output, and over HTTP."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest

from rgate_integrations import load_gate
from tests.http_servers import Broken, Words, listening
from tests.patience import PATIENCE

mcp = pytest.importorskip("mcp", reason="comes with the dev extra")
agents = pytest.importorskip("rgate_integrations.serving.agents")
COMMAND = ["-c", "from rgate_integrations.cli import main; main()", "mcp", "--gate", "constant:never"]


async def call(client, tool, **arguments):
    return (await client.call_tool(tool, arguments)).structured_content


async def test_the_tools_advise_and_say_what_to_search_for():
    async with mcp.Client(agents.make_mcp_server(Words())) as client:
        tools = {tool.name: tool.description for tool in (await client.list_tools()).tools}
        assert set(tools) == {"should_retrieve", "search_queries"}
        assert all(tools.values())
        known = await call(client, "should_retrieve", question="known")
        assert (known["retrieve"], known["p_known"], known["kind"]) == (False, 0.9, "")
        draft = "William Shakespeare wrote Hamlet in 1601."
        found = await call(client, "search_queries", question="Who wrote it all?", draft=draft)
        assert found["result"][0] == "Who wrote it all?"
        assert (await call(client, "search_queries", question="known", draft=None))["result"] == []
        # Regression: an empty list, which means that no search is needed.
        empty = await client.call_tool("search_queries", {"question": " "})
        assert empty.is_error
        assert "The question is empty" in empty.content[0].text
    async with mcp.Client(agents.make_mcp_server(Broken())) as client:
        assert (await call(client, "should_retrieve", question="known"))["retrieve"]


@pytest.mark.model
async def test_a_draft_is_judged_with_the_question():
    """Regression: it was not read, so after "I do not know" nothing was searched for."""
    question = "Who wrote Hamlet?"
    async with mcp.Client(agents.make_mcp_server(load_gate())) as client:
        assert (await call(client, "search_queries", question=question))["result"] == []
        found = await call(client, "search_queries", question=question, draft="I do not know.")
        assert found["result"] == [question]


@pytest.mark.parametrize("http", [True, False])
async def test_it_is_served_over_http_and_on_standard_input_and_output(http):
    with listening(agents.make_mcp_app(agents.make_mcp_server(Words()))) as url:
        served = f"{url}/mcp" if http else mcp.StdioServerParameters(command=sys.executable, args=COMMAND)
        async with mcp.Client(served) as client:
            assert not (await call(client, "should_retrieve", question="known"))["retrieve"]


# --- without the official client, which sends nothing else than its own messages ---------------------------------

ASKED = {"name": "should_retrieve", "arguments": {"question": "known"}}
HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "a test", "version": "1"},
}


def message(method, number=None, **params):
    fields = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(fields if number is None else {**fields, "id": number}).encode() + b"\n"


def test_a_session_over_http_outlasts_its_first_answer_also_behind_a_proxy_server():
    """Regression: the session ended when the client had its first answer: what came then got 404.

    The MCP library's own check refused what a proxy server sends on, also with the token.
    """
    headers = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": HELLO["protocolVersion"],
        "host": "mcp.example",
        "origin": "https://mcp.example",
        "authorization": "Bearer secret",
    }
    with listening(agents.make_mcp_app(agents.make_mcp_server(Words())), token="secret") as url:  # noqa: S106

        def post(content):
            return httpx.post(f"{url}/mcp", content=content, headers=headers, timeout=PATIENCE)

        headers["mcp-session-id"] = post(message("initialize", 1, **HELLO)).headers["mcp-session-id"]
        assert post(message("notifications/initialized")).status_code == 202
        answered = post(message("tools/call", 2, **ASKED))
    (line,) = [line for line in answered.text.splitlines() if line.startswith("data:")]
    assert json.loads(line.removeprefix("data:"))["result"]["structuredContent"]["p_known"] == 0.9


def test_over_http_it_says_where_it_listens():
    """Regression: it said nothing, so that nobody knew which port --port 0 had found."""
    command = [sys.executable, *COMMAND, "--http", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr.readline, "")
        (url,) = next(found for line in lines if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
        assert httpx.post(f"{url}/mcp", content=b"?", timeout=PATIENCE).status_code == 400
        process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another Ctrl-C")
def test_ctrl_c_ends_it_while_it_waits_for_input():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *COMMAND], **pipes) as process:
        process.stdin.write(message("initialize", 1, **HELLO))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == -signal.SIGINT  # which a shell shows as 130


@pytest.mark.parametrize("header", [("origin", "http://127.0.0.1:1"), ("sec-fetch-site", "cross-site")])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_page_of_another_origin_is_refused(method, header):
    with listening(agents.make_mcp_app(agents.make_mcp_server(Words()))) as url:
        refused = httpx.request(method, f"{url}/mcp", headers=[header])
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "ForbiddenOrigin")
