"""`RetrievalGateMiddleware`: an agent's retrieval tools are hidden while its LLM knows the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NotRequired

from rgate_integrations.calling import DecidesBatches
from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.flow import Call, Flow, arun, run
from rgate_integrations.langchain.events import EVENT, event_of
from rgate_integrations.langchain.gate import RetrievalGate, as_retrieval_gate

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import ToolCallRequest
    from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
    from langchain_core.messages import ToolMessage
except ImportError as error:
    raise missing_dependency(error.name or "langchain", "langchain-agents") from error

KNOWN = "Search was not needed: answer from what you know."


class RetrievalGateState(AgentState[Any]):
    """An agent's state with the decision of the current user turn, as JSON values."""

    retrieval_decision: NotRequired[dict[str, Any]]


class RetrievalGateMiddleware(AgentMiddleware[RetrievalGateState, Any, Any]):
    """Gates once a user turn, and hides retrieval tools from the model when the question is known.

    A call to a hidden tool that the model makes all the same is answered without searching. The decision is in the
    agent's state under ``retrieval_decision``. When the gate fails, nothing is hidden.

    Args:
        gate: A `RetrievalGate`, or its ``gate`` argument.
        tools: Names of the retrieval tools, at least one.

    Example:
        >>> middleware = RetrievalGateMiddleware("constant:never", tools=["search_docs"])
        >>> # agent = create_agent(model, [search_docs], middleware=[middleware])
    """

    state_schema = RetrievalGateState

    def __init__(
        self, gate: RetrievalGate | DecidesBatches | str | None = None, *, tools: Sequence[str]
    ) -> None:
        super().__init__()
        if isinstance(tools, str) or not tools:
            raise ConfigurationError("tools is a list of tool names.", hint='tools=["search_docs"]')
        self.gate = as_retrieval_gate(gate)
        self.hidden = frozenset(tools)

    def before_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Decide for the last human message."""
        return run(self._deciding(state["messages"]))

    async def abefore_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Decide for the last human message without blocking the event loop."""
        return await arun(self._deciding(state["messages"]))

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[Any], Any]) -> Any:
        """Hide the retrieval tools when the question is known."""
        return handler(self._visible(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Hide the retrieval tools when the question is known."""
        return await handler(self._visible(request))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[Any], Any]) -> Any:
        """Answer a stray call to a hidden tool without searching."""
        return self._stray(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Answer a stray call to a hidden tool without searching."""
        return self._stray(request) or await handler(request)

    def _deciding(self, messages: Sequence[Any]) -> Flow[dict[str, Any]]:
        decision = yield Call(self.gate.invoke, self.gate.ainvoke, messages)
        shown = event_of(decision)
        with contextlib.suppress(RuntimeError):  # outside of a run there is nobody to tell
            yield Call(dispatch_custom_event, adispatch_custom_event, EVENT, shown)
        return {"retrieval_decision": shown}

    def _visible(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if not _known(request.state):
            return request
        kept = [tool for tool in request.tools if _name(tool) not in self.hidden]
        return request.override(tools=kept)

    def _stray(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        if call["name"] not in self.hidden or not _known(request.state):
            return None
        return ToolMessage(KNOWN, tool_call_id=call["id"], name=call["name"])


def _known(state: Any) -> bool:
    decision = state.get("retrieval_decision") if isinstance(state, dict) else None
    return decision is not None and not decision["retrieve"]


def _name(tool: Any) -> str:
    if isinstance(tool, dict):
        return str(tool.get("name") or tool.get("function", {}).get("name", ""))
    return str(getattr(tool, "name", ""))
