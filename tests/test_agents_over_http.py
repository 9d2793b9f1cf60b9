"""LangChain: agents whose LLM really calls tools, OpenAI's client on a server that follows rules."""

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from rgate_integrations import Decision
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from tests.begun_answers import KNOWN
from tests.langchain_fakes import INVOKES, Judge, each
from tests.tool_server import tool_server

langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
called = []


@pytest.fixture
def server():
    called.clear()
    with tool_server() as (url, rules):
        yield url, rules


@tool
def search_docs(query: str) -> str:
    """Search the documents."""
    called.append(("search_docs", query))
    return "a passage"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(("add", a, b))
    return a + b


def agent_on(url, judge, *, before=(), **options):
    chat = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="rules", max_retries=0)
    middleware = RetrievalGateMiddleware(RetrievalGate(judge), tools=[search_docs])
    return create_agent(chat, [search_docs, add], middleware=[*before, middleware], **options)


def ask(call, agent, question, config=None):
    return call(agent, {"messages": [HumanMessage(question)]}, config)


def shown(rules):
    """The tools that the LLM was shown at each request."""
    return [[each["function"]["name"] for each in body.get("tools") or []] for body in rules.requests]


@each(INVOKES)
def test_an_agent_calls_its_tools(server, call):
    url, rules = server
    agent = agent_on(url, Judge())
    assert ask(call, agent, "a known one?")["messages"][-1].text.strip() == KNOWN
    assert called == []
    known = ask(call, agent, "the sum of one and two?")
    assert known["messages"][-1].text.strip() == "Read 3 ."
    assert called == [("add", 1, 2)]
    assert not any("search_docs" in tools for tools in shown(rules))
    unknown = ask(call, agent, "an unknown one?")
    assert unknown["messages"][-1].text.strip() == "Read a passage ."
    assert called[1:] == [("search_docs", "an unknown one?")]
    assert (known["retrieval_decision"].retrieve, unknown["retrieval_decision"].retrieve) == (False, True)


@each(INVOKES)
def test_a_person_approves_of_a_search(server, call):
    url, _ = server
    gate = Judge()
    approving = HumanInTheLoopMiddleware(interrupt_on={"search_docs": True})
    agent = agent_on(url, gate, before=[approving], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    stopped = ask(call, agent, "an unknown one?", config)
    assert "__interrupt__" in stopped
    assert called == []
    found = call(agent, Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert found["messages"][-1].text.strip() == "Read a passage ."
    assert called == [("search_docs", "an unknown one?")]
    assert isinstance(found["retrieval_decision"], Decision)
    assert len(gate.calls) == 1
