"""Agents of both frameworks whose LLM really calls tools: OpenAI's clients on a server that follows rules."""

import asyncio

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.tools import FunctionTool

from rgate_integrations import Decision
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from rgate_integrations.llama_index.agents import ANSWER_YOURSELF, GatedTool
from tests.begun_answers import KNOWN
from tests.langchain_fakes import INVOKES, Judge, each
from tests.llama_index_parts import ScriptedGate
from tests.tool_server import tool_server

langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
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


AGENTS = {
    "FunctionAgent": lambda tools, llm: FunctionAgent(tools=tools, llm=llm),
    "AgentWorkflow": lambda tools, llm: AgentWorkflow.from_tools_or_functions(tools, llm=llm),
}


@pytest.mark.parametrize("made", AGENTS.values(), ids=list(AGENTS))
def test_a_llama_index_agent_calls_a_guarded_tool(server, made):
    url, _ = server
    llm = openai_like.OpenAILike(
        api_base=url,
        api_key="none",
        model="rules",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )

    async def asked(gate, question):
        guarded = GatedTool(FunctionTool.from_defaults(search_docs.func, name="search_docs"), gate)
        return str(await made([guarded, FunctionTool.from_defaults(add.func, name="add")], llm).run(question))

    gate = ScriptedGate()
    assert "Read a passage" in asyncio.run(asked(gate, "an unknown one?"))
    assert called == [("search_docs", "an unknown one?")]
    assert gate.calls == [["an unknown one?"]]
    assert ANSWER_YOURSELF in asyncio.run(asked("constant:never", "an unknown one?"))
    assert len(called) == 1
    assert asyncio.run(asked(gate, "a known one?")).strip() == KNOWN
    assert "Read 3" in asyncio.run(asked(gate, "the sum of one and two?"))
    assert called[1:] == [("add", 1, 2)]
