"""The MCP server, asked by the official client: in process, on standard input and output, and over HTTP."""

import sys

import pytest

from tests.http_servers import Words, listening

mcp = pytest.importorskip("mcp", reason="comes with the dev extra")
COMMAND = "from rgate_integrations.cli import main; main()"


async def advice(client, question):
    result = await client.call_tool("should_retrieve", {"question": question})
    return result.structured_content


async def test_the_tools_advise_and_say_what_to_search_for():
    from rgate_integrations.serving.agents import make_mcp_server

    async with mcp.Client(make_mcp_server(Words())) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {"should_retrieve", "search_queries"}
        assert all(tool.description for tool in tools)
        known = await advice(client, "known")
        assert (known["retrieve"], known["p_known"], known["kind"]) == (False, 0.9, "")
        asked = {"question": "Who wrote it all?", "draft": "William Shakespeare wrote Hamlet in 1601."}
        found = await client.call_tool("search_queries", asked)
        assert found.structured_content["result"][0] == "Who wrote it all?"
        nothing = await client.call_tool("search_queries", {"question": "known"})
        assert nothing.structured_content["result"] == []


async def test_a_gate_that_fails_advises_to_retrieve():
    from rgate_integrations.serving.agents import make_mcp_server

    class Broken(Words):
        async def adecide_batch(self, questions, **options):
            raise OSError("no disk")

    async with mcp.Client(make_mcp_server(Broken())) as client:
        assert (await advice(client, "known"))["retrieve"]


async def test_it_is_served_over_http():
    from rgate_integrations.serving.agents import make_mcp_server

    with listening(make_mcp_server(Words()).streamable_http_app()) as url:
        async with mcp.Client(f"{url}/mcp") as client:
            assert not (await advice(client, "known"))["retrieve"]


async def test_the_command_serves_standard_input_and_output():
    arguments = ["-c", COMMAND, "mcp", "--gate", "constant:never"]
    async with mcp.Client(mcp.StdioServerParameters(command=sys.executable, args=arguments)) as client:
        assert not (await advice(client, "known"))["retrieve"]
