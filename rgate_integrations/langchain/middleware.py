"""`RetrievalGateMiddleware`: hides an agent's retrieval tools if its LLM knows the answer."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NotRequired

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import Runnable

from rgate_integrations.decision import Decision, Override
from rgate_integrations.engine.decider import fallback_decision
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import (
    ConfigurationError,
    InvalidQuestionError,
    needs_extra,
    unknown_name,
)
from rgate_integrations.langchain.decisions import check_decision, emit_decision_event
from rgate_integrations.langchain.gate import as_gate_runnable
from rgate_integrations.langchain.graph import retrieves
from rgate_integrations.langchain.questions import has_images, is_summary
from rgate_integrations.runtime.flow import Call, Flow, arun, run

with needs_extra("langchain-agents"):
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import PrivateStateAttr, ToolCallRequest

SEARCH_NOT_NEEDED = "Search was not needed: answer from what you know."

_IMAGE = "The message has an image or a file, which the gate does not read."
_GENERIC_TYPES = ("function", "custom")  # types of a tool description that do not name the tool


class RetrievalGateState(AgentState[Any]):
    """An agent's state with the decision for the current user turn.

    ``retrieval_decision`` is the last decision of a `RetrievalGateMiddleware`, maybe in a sub-agent whose tool passes
    on its state. ``retrieval_decisions`` maps the name of each middleware to its decision, and
    ``retrieval_questions`` to the user's message that it is about. Both are private, because a sub-agent's decision,
    about another question, must not hide the tools of the agent that called it.
    """

    # Sub-agents may pass on several decisions at once, of which the last one stays.
    retrieval_decision: NotRequired[Annotated[Decision, lambda earlier, later: later]]
    retrieval_decisions: NotRequired[Annotated[dict[str, Decision], PrivateStateAttr, operator.or_]]
    retrieval_questions: NotRequired[Annotated[dict[str, str | None], PrivateStateAttr, operator.or_]]


class RetrievalGateMiddleware(AgentMiddleware[Any, Any, Any]):
    """Decides once per user turn, and hides retrieval tools from the model if the question is known.

    If the model calls a hidden tool anyway, the call is answered without searching. So the tools stay visible if no
    other is left, and the messages have results of tools: some LLMs accept these only with tools. A ``tool_choice``
    that forces a hidden tool is dropped, so put this after any middleware that sets it. The decision is in the
    agent's state under ``retrieval_decision``, and is emitted as an event ``retrieval_gate``. Nothing is
    hidden if the gate fails, if there is no human message, if it has an image or a file (unless a rule skips), if
    another one arrives while the agent runs, or once another tool has replied in this turn: the reply may be what the
    user wants, such as the answer to a question of an ``ask_user`` tool. An agent may have several of these, for
    different tools.

    Args:
        gate: A `RetrievalGate`, a ``gate`` argument for one, or any runnable from a question to a `Decision`; the
            default gate when None. In later turns of a conversation, tools are hidden only if the gate reads the
            earlier turns or has ``condense``.
        tools: The retrieval tools, at least one: names, tool objects, or a provider's own tools, such as
            ``{"type": "web_search"}`` or just ``"web_search"``. Names are checked at the first call of the model;
            pass the tool itself if another middleware may have removed it by then.

    Raises:
        ConfigurationError: The gate is invalid, or ``tools`` is not a list, tuple or set, is empty, or has a
            tool without a name. Raised by a call of the agent: the threshold in its config is invalid, or the gate
            does not return a `Decision`.
        UnknownNameError: No gate has that name. Raised by the first call of the model: the agent lacks a tool
            that is named in ``tools``.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.

    Examples:
        >>> middleware = RetrievalGateMiddleware("constant:never", tools=["search_docs"])
        >>> # agent = create_agent(model, [search_docs], middleware=[middleware])
    """

    state_schema = RetrievalGateState

    def __init__(
        self, gate: Runnable[Any, Decision] | GateLike | str | None = None, *, tools: Sequence[Any]
    ) -> None:
        super().__init__()
        if not isinstance(tools, list | tuple | set | frozenset) or not tools:
            raise ConfigurationError(
                f"tools must be a list of one or more tools, not {tools!r}.",
                hint='Pass a list such as ["search_docs"].',
            )
        self.gate = as_gate_runnable(gate)
        self.hidden = frozenset(_names(tool)[0] for tool in tools)
        self._unchecked = frozenset(tool for tool in tools if isinstance(tool, str))
        self._agent_tools: set[str] = set()  # names of all tools that the agent has had so far

    @property
    def name(self) -> str:
        """The middleware's name, which includes the tools, so that it is unique in an agent."""
        return f"{type(self).__name__}({', '.join(sorted(self.hidden))})"

    def before_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Decide about the last human message, and return the decision as a state update."""
        return run(self._decide(state["messages"]))

    async def abefore_agent(self, state: RetrievalGateState, runtime: Any) -> dict[str, Any]:
        """Do what `before_agent` does, without blocking the event loop."""
        return await arun(self._decide(state["messages"]))

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[Any], Any]) -> Any:
        """Call the model, without the retrieval tools if the question is known."""
        return handler(self._visible_tools(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Call the model, without the retrieval tools if the question is known."""
        return await handler(self._visible_tools(request))

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[Any], Any]) -> Any:
        """Call a tool. A call to a hidden tool gets a fixed reply instead."""
        return self._block_tool_call(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        """Call a tool. A call to a hidden tool gets a fixed reply instead."""
        return self._block_tool_call(request) or await handler(request)

    def _decide(self, messages: Sequence[Any]) -> Flow[dict[str, Any]]:
        try:
            decision: Any = check_decision((yield Call(self.gate.invoke, self.gate.ainvoke, messages)))
        except InvalidQuestionError as error:  # an agent may run without a question
            decision = fallback_decision(error)
        if not decision.retrieve and decision.override is None and has_images(messages):
            # The LLM reads the image, and may have to search for what it shows.
            override = Override(retrieve=True, reason=_IMAGE)
            reason = f"{_IMAGE} {decision.reason}".strip()
            decision = decision.with_retrieve(True, override=override, reason=reason)
        yield from emit_decision_event(decision)
        return {
            "retrieval_decision": decision,
            "retrieval_decisions": {self.name: decision},
            "retrieval_questions": {self.name: _last_turn(messages)[0]},
        }

    def _visible_tools(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """Return a request with the tools that the model may see.

        Raises:
            UnknownNameError: The agent lacks a tool that is named in ``tools``.
        """
        names: set[str] = set().union(*map(_names, request.tools))
        self._agent_tools |= names
        # Each name is checked only once, since another middleware may remove a tool later.
        self._unchecked -= names
        if self._unchecked:
            raise unknown_name("agent tool", min(self._unchecked), names)
        if not self._known(request.state):
            return request
        visible = [tool for tool in request.tools if self.hidden.isdisjoint(_names(tool))]
        choice = request.tool_choice
        if not visible and any(isinstance(message, ToolMessage) for message in request.messages):
            # Anthropic refuses earlier tool calls without tools. Calls of these are blocked, but no provider's own.
            visible, choice = [tool for tool in request.tools if not isinstance(tool, dict)], None
        # Providers reject a request whose tool_choice names a tool that is not in the list.
        if isinstance(choice, str | dict) and not self.hidden.isdisjoint(_names(choice)):
            choice = None
        return request.override(tools=visible, tool_choice=choice)

    def _block_tool_call(self, request: ToolCallRequest) -> ToolMessage | None:
        call = request.tool_call
        if call["name"] not in self.hidden or not self._known(request.state):
            return None
        return ToolMessage(SEARCH_NOT_NEEDED, tool_call_id=call["id"], name=call["name"])

    def _known(self, state: Any) -> bool:
        if retrieves((state.get("retrieval_decisions") or {}).get(self.name)) is not False:
            return False
        question, later = _last_turn(state["messages"])
        # What tools have said since, the gate has not judged, and it may be what the user wants.
        if any(isinstance(message, ToolMessage) and self._is_reply(message) for message in later):
            return False
        # Another middleware may have added a message of the user, or an application may have edited the question.
        return question is None or question == (state.get("retrieval_questions") or {}).get(self.name)

    def _is_reply(self, message: ToolMessage) -> bool:
        """Return whether a tool's message may be what the user wants, unlike ours, or an error for a missing tool."""
        # Other errors count, because a person's reason to reject a call is one.
        is_missing = message.status == "error" and message.name not in self._agent_tools
        # Before the first call of the model, as after a restart, the tools are not known.
        return message.text != SEARCH_NOT_NEEDED and not (is_missing and self._agent_tools)


def _last_turn(messages: Sequence[Any]) -> tuple[str | None, Sequence[Any]]:
    """Return the text of the user's last message, and what follows it.

    If there is none, or a summary has replaced it, these are None and all messages: a summary keeps the last ones.
    """
    for place in reversed(range(len(messages))):
        if isinstance(messages[place], HumanMessage) and not is_summary(messages[place]):
            return messages[place].text, messages[place + 1 :]
    return None, messages


def _names(tool: Any) -> list[str]:
    """Return all names of a tool, or of a tool choice; the main name comes first.

    Raises:
        ConfigurationError: The tool has no name.
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
            f"Tool {tool!r} has no name.", hint='Pass its name, as in tools=["search_docs"].'
        )
    return names
