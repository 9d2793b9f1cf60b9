"""LangChain: agents whose search tool is hidden while the LLM knows."""

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.engine.follow_ups import UNREAD
from rgate_integrations.errors import ConfigurationError, UnknownNameError
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from tests.begun_answers import Told
from tests.langchain_fakes import INVOKES, Judge, each


class Agent(GenericFakeChatModel):
    """Calls the search tool that it is shown, once, and remembers which tools it was shown.

    Attributes:
        shown: The tools of each call.
        choices: The ``tool_choice`` of each call.
        stubborn: Whether it calls the search tool also where it is not shown.
    """

    messages: object = Field(default_factory=lambda: iter(()))
    shown: list = Field(default_factory=list)
    choices: list = Field(default_factory=list)
    stubborn: bool = False

    def bind_tools(self, tools, **kwargs):
        self.shown.append([t if isinstance(t, dict) else t.name for t in tools])
        self.choices.append(kwargs.get("tool_choice"))
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        calls = []
        visible = self.shown and "search_docs" in self.shown[-1]
        if messages[-1].type == "human" and (visible or self.stubborn):
            calls = [ToolCall(name="search_docs", args={"query": "q"}, id="1")]
        text = "" if calls else f"answer after {messages[-1].text}"
        message = AIMessage(text, tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


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
    model, judge, events = Agent(stubborn=stubborn), Judge(), Told()
    agent = agent_of(model, gate=RetrievalGate(judge))

    known = ask(call, agent, "known?", callbacks=[events])
    assert searched == []
    assert model.shown[-1] == ["add"]
    assert known["retrieval_decision"].retrieve is False
    if stubborn:
        assert "not needed" in known["messages"][-1].text

    unknown = ask(call, agent, "unknown?", callbacks=[events])
    assert searched == ["q"]
    assert unknown["messages"][-1].text == "answer after found"
    assert judge.questions == ["known?", "unknown?"]  # once a turn
    told = [(event["retrieve"], event["warnings"]) for event in events.events]
    assert told == [(False, []), (True, [])]
    assert ask(call, agent, "RAISE")["retrieval_decision"].error.message == "gate down"
    assert searched == ["q", "q"], "a failing gate hides nothing"


@pytest.mark.parametrize("tools", ["search_docs", [], None, search_docs, [""], [3], [{}]])
def test_tools_are_a_list_of_tools_or_names(tools):
    with pytest.raises(ConfigurationError):
        RetrievalGateMiddleware(Judge(), tools=tools)


def search(query: str) -> str:
    """Search."""
    return "found"


WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
HIDDEN = {
    "a name": ("search_docs", search_docs),
    "the tool": (search_docs, search_docs),
    "a function": (search, search),
    "a function's name": ("search", search),
    "a built-in tool": ({"type": "web_search"}, {"type": "web_search"}),
    "its type": ("web_search", {"type": "web_search"}),
    "one with a name": (WEB, WEB),
    "its name": ("web_search", WEB),
    "its dated type": ("web_search_20250305", WEB),
    "one without a type": ("google_search", {"google_search": {}}),
    "a server": ("docs", {"type": "mcp", "server_label": "docs"}),
    "a function in OpenAI's form": ("look", {"type": "function", "function": {"name": "look"}}),
}


@pytest.mark.parametrize(("hidden", "given"), HIDDEN.values(), ids=list(HIDDEN))
@each(INVOKES)
def test_what_a_tool_may_be_named_by(call, hidden, given):
    others = [add, {"type": "function", "function": {"name": "other"}}, {"type": "code_interpreter"}]
    model = Agent()
    middleware = RetrievalGateMiddleware(Judge(), tools=[hidden])
    agent = create_agent(model, [given, *others], middleware=[middleware])
    ask(call, agent, "known?")
    assert model.shown[-1] == ["add", *others[1:]]
    ask(call, agent, "unknown?")
    assert len(model.shown[-1]) == 4


class Changing(AgentMiddleware):
    """Changes the request of each model call."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def wrap_model_call(self, request, handler):
        return handler(request.override(**self.change(request)))

    async def awrap_model_call(self, request, handler):
        return await handler(request.override(**self.change(request)))


def agent_of(model, *before, tools=("search_docs",), gate=None, after=()):
    middleware = RetrievalGateMiddleware(gate or Judge(), tools=list(tools))
    return create_agent(model, [search_docs, add], middleware=[*before, middleware, *after])


@each(INVOKES)
def test_a_misspelt_name_is_an_error_and_a_tool_that_was_taken_away_is_none(call):
    for question in ("known?", "unknown?"):
        with pytest.raises(UnknownNameError, match=r"'serch_docs'.*Did you mean search_docs\?"):
            ask(call, agent_of(Agent(), tools=["serch_docs"]), question)
    without = Changing(lambda request: {"tools": [t for t in request.tools if t.name != "search_docs"]})
    agent = agent_of(Agent(), without, tools=[search_docs])
    assert ask(call, agent, "known?")["retrieval_decision"].retrieve is False


NOBODY = {
    "no messages": [],
    "instructions": [SystemMessage("Report the weather.")],
    "an answer": [AIMessage("Hello.")],
}


@pytest.mark.parametrize("messages", NOBODY.values(), ids=list(NOBODY))
@each(INVOKES)
def test_an_agent_without_a_human_message_keeps_its_tools(call, messages):
    model, judge = Agent(), Judge()
    greeting = Changing(lambda request: {"messages": request.messages or [AIMessage("Hello.")]})
    decision = call(agent_of(model, gate=judge, after=[greeting]), {"messages": messages})[
        "retrieval_decision"
    ]
    assert (decision.retrieve, decision.error.type) == (True, "InvalidQuestionError")
    assert model.shown[-1] == ["search_docs", "add"]
    assert judge.calls == []


CHOICES = [
    ("search_docs", None),
    ({"type": "function", "function": {"name": "search_docs"}}, None),
    ({"type": "tool", "name": "search_docs"}, None),
    ("add", "add"),
    ("any", "any"),
    ({"type": "auto"}, {"type": "auto"}),
    (True, True),
    (None, None),
]


@pytest.mark.parametrize(("choice", "left"), CHOICES)
@each(INVOKES)
def test_a_hidden_tool_is_not_forced(call, choice, left):
    model = Agent()
    agent = agent_of(model, Changing(lambda request: {"tool_choice": choice}))
    ask(call, agent, "known?")
    assert (model.shown[-1], model.choices[-1]) == (["add"], left)
    ask(call, agent, "unknown?")
    assert model.choices[-1] == choice


@each(INVOKES)
def test_two_gates_hide_each_its_own_tools(call):
    model, docs, web = Agent(), Judge(), Judge()
    gates = [
        RetrievalGateMiddleware(docs, tools=["search_docs"]),
        RetrievalGateMiddleware(RetrievalGate(web), tools=["web_search"]),
    ]
    agent = create_agent(model, [search_docs, add, {"type": "web_search"}], middleware=gates)
    web.decide_batch = lambda questions, **options: [
        Decision(question=q, retrieve=True, p_known=0.1) for q in questions
    ]
    found = ask(call, agent, "known?")
    assert model.shown[-1] == ["add", {"type": "web_search"}]
    assert {name: d.retrieve for name, d in found["retrieval_decisions"].items()} == {
        "RetrievalGateMiddleware(search_docs)": False,
        "RetrievalGateMiddleware(web_search)": True,
    }
    assert found["retrieval_decision"].retrieve is True


@each(INVOKES)
def test_a_later_turn_is_marked_and_hides_nothing_unless_it_is_condensed(call):
    model, events = Agent(), Told()
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]
    found = call(agent_of(model), {"messages": turns}, {"callbacks": [events]})
    assert found["retrieval_decision"].warnings == (UNREAD,)
    (event,) = events.events
    assert (event["retrieve"], event["warnings"]) == (True, [UNREAD])
    assert "search_docs" in model.shown[-1]

    gate = RetrievalGate(Judge(), condense=lambda messages: "When was Hamlet written?")
    found = call(agent_of(model, gate=gate), {"messages": turns})
    assert found["retrieval_decision"].warnings == ()
    assert model.shown[-1] == ["add"]
