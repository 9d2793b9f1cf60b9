"""`RetrievalGateMiddleware`: an agent's retrieval tools are hidden while its LLM knows the answer."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NotRequired

from rgate_integrations.decision import Decision
from rgate_integrations.engine.decider import Failed
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import (
    ConfigurationError,
    InvalidQuestionError,
    missing_dependency,
    unknown_name,
)
from rgate_integrations.langchain.bound_decision import emit_decision_event
from rgate_integrations.langchain.gate import RetrievalGate, as_gate_runnable
from rgate_integrations.langchain.graph import retrieves
from rgate_integrations.runtime.flow import Call, Flow, arun, run

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import ToolCallRequest
    from langchain_core.messages import ToolMessage
except ImportError as error:
    raise missing_dependency(error.name or "langchain", "langchain-agents") from error

SEARCH_NOT_NEEDED = "Search was not needed: answer from what you know."

_GENERIC_TYPES = ("function", "custom")
"""Types that say how a tool is described and not which one it is."""


class RetrievalGateState(AgentState[Any]):
    """An agent's state with what was decided for the current user turn.

    ``retrieval_decision`` is the decision; with several middlewares that of the last one. ``retrieval_decisions``
    has each middleware's under its name.
    """

    retrieval_decision: NotRequired[Decision]
    retrieval_decisions: NotRequired[Annotated[dict[str, Decision], operator.or_]]


class RetrievalGateMiddleware(AgentMiddleware[RetrievalGateState, Any, Any]):
    """Gates once a user turn, and hides retrieval tools from the model when the question is known.

    A call to a hidden tool that the model makes all the same is answered without searching, and a ``tool_choice``
    that forces one is dropped; put this after a middleware that sets it. The decision is in the agent's state under
    ``retrieval_decision``, and an event ``retrieval_gate``. When the gate fails, or there is no human message,
    nothing is hidden. An agent may have several, for different tools.

    Args:
        gate: A `RetrievalGate`, or its ``gate`` argument. Later turns of a conversation need one that reads the turns
            before, or its ``condense``: without either they are retrieved for.
        tools: The retrieval tools, at least one: names, tool objects, or a provider's own tools, such as
            ``{"type": "web_search"}`` or just ``"web_search"``. Names are checked at the first call of the model;
            pass the tool itself where another middleware may have taken it away by then.

    Raises:
        ConfigurationError: ``tools`` is no list of tools, or empty.
        UnknownNameError: Raised by the first call of the model: the agent has no tool of that name.

    Example:
        >>> middleware = RetrievalGateMiddleware("constant:never", tools=["search_docs"])
        >>> # agent = create_agent(model, [search_docs], middleware=[middleware])
    """

    state_schema = RetrievalGateState

    def __init__(self, gate: RetrievalGate | GateLike | str | None = None, *, tools: Sequence[Any]) -> None:
        super().__init__()
        if not isinstance(tools, list | tuple | set | frozenset) or not tools:
            raise ConfigurationError("tools is a list of tools or their names.", hint='tools=["search_docs"]')
        self.gate = as_gate_runnable(gate)
        self._without_question = resolve_gate("constant:always")
        self.hidden = frozenset(_names(tool)[0] for tool in tools)
        self._unseen = frozenset(tool for tool in tools if isinstance(tool, str))

    @property
    def name(self) -> str:
        """The name of this middleware among those of an agent, which has its tools in it."""
        return f"{type(self).__name__}({', '.join(sorted(self.hidden))})"

    def before_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Decide for the last human message."""
        return run(self._decide(state["messages"]))

    async def abefore_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Decide for the last human message without blocking the event loop."""
        return await arun(self._decide(state["messages"]))

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[Any], Any]) -> Any:
        """Hide the retrieval tools when the question is known."""
        return handler(self._visible_tools(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Hide the retrieval tools when the question is known."""
        return await handler(self._visible_tools(request))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[Any], Any]) -> Any:
        """Answer a stray call to a hidden tool without searching."""
        return self._block_tool_call(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Answer a stray call to a hidden tool without searching."""
        return self._block_tool_call(request) or await handler(request)

    def _decide(self, messages: Sequence[Any]) -> Flow[dict[str, Any]]:
        decision: Decision
        try:
            decision = yield Call(self.gate.invoke, self.gate.ainvoke, messages)
        except InvalidQuestionError as error:  # an agent may run without a question
            (decision,) = yield from self._without_question.flow([Failed(error)])
        yield from emit_decision_event(decision)
        return {"retrieval_decision": decision, "retrieval_decisions": {self.name: decision}}

    def _visible_tools(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """Return the request with the tools that the model is to see."""
        names: set[str] = set().union(*map(_names, request.tools))
        self._unseen -= names  # once seen, another middleware may take it away
        if self._unseen:
            raise unknown_name("tool of this agent", min(self._unseen), names)
        if not self._known(request.state):
            return request
        visible = [tool for tool in request.tools if self.hidden.isdisjoint(_names(tool))]
        choice = request.tool_choice
        if isinstance(choice, str | dict) and not self.hidden.isdisjoint(_names(choice)):
            choice = None
        return request.override(tools=visible, tool_choice=choice)

    def _block_tool_call(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        if call["name"] not in self.hidden or not self._known(request.state):
            return None
        return ToolMessage(SEARCH_NOT_NEEDED, tool_call_id=call["id"], name=call["name"])

    def _known(self, state: Any) -> bool:
        decisions = state.get("retrieval_decisions") or {}
        return retrieves(decisions.get(self.name)) is False


def _names(tool: Any) -> list[str]:
    """Return every name that a tool, or the choice of one, goes by; the one by which it is hidden comes first.

    Raises:
        ConfigurationError: It is neither a name nor a tool.
    """
    if isinstance(tool, dict):
        described = tool.get("function", tool)
        candidates = [described.get("name"), described.get("server_label"), tool.get("type")]
        names = [name for name in candidates if name and name not in _GENERIC_TYPES]
        names = names or list(tool)  # some providers write {"google_search": {}}
    elif isinstance(tool, str):
        names = [tool]
    else:
        names = [getattr(tool, "name", getattr(tool, "__name__", ""))]
    if not any(names):
        raise ConfigurationError(
            f"A tool has a name; {tool!r} has none.", hint='tools=["search_docs"], or the tools themselves.'
        )
    return names
