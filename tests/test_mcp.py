"""The MCP server, asked by the official client: in process, on standard input and output, and over HTTP."""

import sys

import pytest

from tests.http_servers import Broken, Words, listening

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
        assert (await call(client, "search_queries", question="known"))["result"] == []


async def test_a_gate_that_fails_advises_to_retrieve():
    async with mcp.Client(agents.make_mcp_server(Broken())) as client:
        assert (await call(client, "should_retrieve", question="known"))["retrieve"]


@pytest.mark.parametrize("http", [True, False])
async def test_it_is_served_over_http_and_on_standard_input_and_output(http):
    with listening(agents.make_mcp_server(Words()).streamable_http_app()) as url:
        served = f"{url}/mcp" if http else mcp.StdioServerParameters(command=sys.executable, args=COMMAND)
        async with mcp.Client(served) as client:
            assert not (await call(client, "should_retrieve", question="known"))["retrieve"]
