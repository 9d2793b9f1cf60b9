"""An MCP server that advises agents of any framework: the tools ``should_retrieve`` and ``search_queries``."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import BaseModel
from starlette.types import ASGIApp

from rgate_integrations.answering.query_plan import plan_queries_flow
from rgate_integrations.engine.decider import Failed, read_item
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.models.download import forbid_downloads
from rgate_integrations.runtime.flow import arun
from rgate_integrations.serving.wire import likeliest_kind

_INSTRUCTIONS = (
    "Before you search or read documents for a question, ask should_retrieve. If it says false, answer from what you "
    "know. If it says true, it may name the corpora to search, and search_queries says what to search for. All of it "
    "is advice."
)


class Advice(BaseModel):
    """The advice of ``should_retrieve``.

    Attributes:
        retrieve: Whether to retrieve.
        p_known: Probability that the LLM answers correctly without retrieval.
        reason: The reason, in a few sentences.
        kind: The most likely kind of request, such as ``private``; empty if the decision has no kinds.
        p_covered: Probability that a corpus has something on the question; None if it was not estimated.
        corpus: Name of the corpus to search first; None if no retrieval is needed, or the gate names none.
        corpora: Names of the corpora to search if retrieval is needed, best first; may be empty.
    """

    retrieve: bool
    p_known: float
    reason: str
    kind: str
    p_covered: float | None
    corpus: str | None
    corpora: tuple[str, ...]


def make_mcp_server(gate: GateLike) -> MCPServer:
    """Return the MCP server with its two tools; its ``run`` or `make_mcp_app` serves it.

    Once this is called, the process downloads no models on first use: run ``rgate download`` beforehand.

    Args:
        gate: The gate. If it fails, the advice is to retrieve, unless its ``on_error`` is ``"raise"``.

    Raises:
        ConfigurationError: ``gate`` is not a gate.
    """
    forbid_downloads()
    decider = resolve_gate(gate)
    server = MCPServer("rgate", instructions=_INSTRUCTIONS)

    @server.tool()
    async def should_retrieve(question: str) -> Advice:
        """Return whether the LLM needs documents to answer a question, or already knows the answer."""
        (decision,) = await arun(decider.flow([question]))
        return Advice(
            retrieve=decision.retrieve,
            p_known=decision.p_known,
            reason=decision.reason,
            kind=likeliest_kind(decision),
            p_covered=decision.p_covered,
            corpus=decision.corpus,
            corpora=decision.corpora,
        )

    @server.tool()
    async def search_queries(question: str, draft: str | None = None) -> list[str]:
        """Return what to search for, given a question and perhaps a partial answer; empty if no search is needed."""
        gate = (decider.answer_gate() or decider) if draft else decider
        request = read_item(question, draft=draft or None)
        if isinstance(request, Failed):  # an empty list would say that no search is needed
            raise ToolError(str(request.error))
        decisions = await arun(gate.flow([request]))
        (plan,) = await arun(plan_queries_flow(decisions))
        return plan.texts

    return server


def make_mcp_app(server: MCPServer) -> ASGIApp:
    """Return the ASGI application that serves MCP at ``/mcp``.

    Run it behind `rgate_integrations.serving.server.make_server`, which checks clients and reads whole bodies.
    """
    # The library's own origin check would admit pages from other ports, and reject clients behind a proxy server.
    return server.streamable_http_app(
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False)
    )
