"""LangChain: agents whose search tool is hidden while the LLM knows, and gates as decision models."""

import asyncio

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from pydantic import Field

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from tests.langchain_fakes import INVOKES, Judge, each


class Agent(GenericFakeChatModel):
    """Calls the tool it is told to, once, and remembers which tools it was shown."""

    messages: object = Field(default_factory=lambda: iter(()))
    shown: list = Field(default_factory=list)
    stubborn: bool = False

    def bind_tools(self, tools, **kwargs):
        self.shown.append([t.name for t in tools])
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        calls = []
        visible = self.shown and "search_docs" in self.shown[-1]
        if messages[-1].type == "human" and (visible or self.stubborn):
            calls = [ToolCall(name="search_docs", args={"query": "q"}, id="1")]
        text = "" if calls else f"answer after {messages[-1].text}"
        message = AIMessage(text, tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Events(BaseCallbackHandler):
    """Remembers custom events."""

    def __init__(self):
        self.seen = []

    def on_custom_event(self, name, data, **kwargs):
        self.seen.append((name, data["retrieve"]))


searched = []


@pytest.fixture(autouse=True)
def nothing_searched():
    searched.clear()


@tool
def search_docs(query: str) -> str:
    """Search the documents."""
    searched.append(query)
    return "found"


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def ask(call, agent, question, **config):
    return call(agent, {"messages": [HumanMessage(question)]}, config)


@pytest.mark.parametrize("stubborn", [False, True])
@each(INVOKES)
def test_agents_search_only_when_they_need_to(call, stubborn):
    model, judge, events = Agent(stubborn=stubborn), Judge(), Events()
    middleware = RetrievalGateMiddleware(RetrievalGate(judge), tools=["search_docs"])
    agent = create_agent(model, [search_docs, add], middleware=[middleware])

    known = ask(call, agent, "known?", callbacks=[events])
    assert searched == []
    assert model.shown[-1] == ["add"]
    assert known["retrieval_decision"]["retrieve"] is False
    if stubborn:
        assert "not needed" in known["messages"][-1].text

    unknown = ask(call, agent, "unknown?", callbacks=[events])
    assert searched == ["q"]
    assert unknown["messages"][-1].text == "answer after found"
    assert judge.questions == ["known?", "unknown?"]  # once a turn
    assert events.seen == [("retrieval_gate", False), ("retrieval_gate", True)]


@each(INVOKES)
def test_a_failing_gate_hides_nothing(call):
    model = Agent()
    agent = create_agent(
        model, [search_docs, add], middleware=[RetrievalGateMiddleware(Judge(), tools=["search_docs"])]
    )
    assert ask(call, agent, "RAISE")["retrieval_decision"]["retrieve"] is True
    assert searched == ["q"]


def test_tools_are_a_list_of_names():
    for tools in ("search_docs", []):
        with pytest.raises(ConfigurationError):
            RetrievalGateMiddleware(Judge(), tools=tools)


@pytest.mark.parametrize("style", ["sync", "async"])
def test_outside_of_a_run_there_is_nobody_to_tell(style):
    middleware = RetrievalGateMiddleware(Judge(), tools=["search_docs"])
    state = {"messages": [HumanMessage("unknown?")]}
    if style == "sync":
        update = middleware.before_agent(state, None)
    else:
        update = asyncio.run(middleware.abefore_agent(state, None))
    assert update["retrieval_decision"]["retrieve"] is True


@each(INVOKES)
def test_a_gate_is_a_decision_model_where_langchain_has_them(call):
    pytest.importorskip("langchain_core.decisions", reason="langchain-core >= 1.8")
    from rgate_integrations.langchain.decisions import KNOWS, ROUTE, GateDecisionModel

    model = GateDecisionModel(gate=Judge())
    asked = {"knows": KNOWS, "route": ROUTE}
    known = call(model, {"state": "known?", "questions": asked})
    assert known.nouls["knows"].noul == known.choices["route"].probabilities["direct"] == 0.8
    unknown = call(model, {"state": [HumanMessage("unknown?")], "questions": asked})
    assert (unknown.choices["route"].choice, unknown.choices["route"].confidence) == ("retrieve", 0.8)
    failed = call(model, {"state": "RAISE", "questions": asked})
    assert (failed.choices["route"].choice, failed.nouls["knows"].noul) == ("retrieve", 0.0)
    bug = KNOWS.model_copy(update={"instructions": "A bug?"})
    with pytest.raises(ConfigurationError, match="'bug' is not one"):
        call(model, {"state": "x?", "questions": {"bug": bug}})
