"""``rgate mcp``: advice for agents, over the Model Context Protocol."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rgate_integrations.cli.options import DEFAULT_GATE, GateName
from rgate_integrations.errors import missing_dependency


def mcp(
    gate: GateName = DEFAULT_GATE,
    llm_name: Annotated[str, typer.Option(help="The LLM whose knowledge is judged.")] = "",
    http: Annotated[
        bool, typer.Option("--http", help="Listen at /mcp, in place of standard input and output.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine, with --http.")] = 8378,
) -> None:
    """Serve the tools should_retrieve and search_queries to agents of any framework.

    With --http, the bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.agents import make_mcp_server
        from rgate_integrations.serving.server import make_server
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "mcp", "mcp") from error
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.models.decision_server import TOKEN

    server = make_mcp_server(load_gate(gate, llm_name=llm_name))
    if not http:
        server.run()
        return
    app = server.streamable_http_app()
    make_server(app, "127.0.0.1", port, token=os.environ.get(TOKEN, "")).run()
