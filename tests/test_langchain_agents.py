"""LangChain: agents whose search tool is hidden while the LLM knows."""

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, before_model, wrap_model_call
from langchain.tools import ToolRuntime
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, interrupt
from pydantic import Field

from rgate_integrations.decision import Decision, Override
from rgate_integrations.engine.follow_ups import UNREAD
from rgate_integrations.errors import ConfigurationError, UnknownNameError
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from rgate_integrations.langchain.middleware import SEARCH_NOT_NEEDED
from tests.begun_answers import EventRecorder
from tests.langchain_fakes import INVOKES, Judge, ReadsHistory, each


class Agent(GenericFakeChatModel):
    """Calls the search tool, once, and remembers which tools it was shown.

    Attributes:
        shown: The tools of each call.
        choices: The ``tool_choice`` of each call.
        stubborn: Whether it calls the search tool even if it is hidden.
        tasks: Questions that it passes to the tool ``task``, instead of searching.
    """

    messages: object = Field(default_factory=lambda: iter(()))
    shown: list = Field(default_factory=list)
    choices: list = Field(default_factory=list)
    stubborn: bool = False
    tasks: list = Field(default_factory=list)

    def bind_tools(self, tools, **kwargs):
        self.shown.append([t if isinstance(t, dict) else t.name for t in tools])
        self.choices.append(kwargs.get("tool_choice"))
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        message = AIMessage(f"answer after {messages[-1].text}")
        if messages[-1].type == "human" and self.tasks:
            calls = [ToolCall(name="task", args={"question": q}, id=q) for q in self.tasks]
            message = AIMessage("", tool_calls=calls)
        elif messages[-1].type == "human" and (self.stubborn or "search_docs" in self.shown[-1]):
            message = AIMessage("", tool_calls=[ToolCall(name="search_docs", args={"query": "q"}, id="1")])
        return ChatResult(generations=[ChatGeneration(message=message)])


searched = []


@tool
def search_docs(query: str) -> str:
    """Search the documents."""
    searched.append(query)
    return "found"


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def ask(agent, *messages):
    return agent.invoke({"messages": [HumanMessage(m) if isinstance(m, str) else m for m in messages]})


@pytest.mark.parametrize("stubborn", [False, True])
@each(INVOKES)
def test_agents_search_only_when_they_need_to(call, stubborn):
    model, judge, events = Agent(stubborn=stubborn), Judge(), EventRecorder()
    agent = agent_of(model, gate=RetrievalGate(judge)).with_config(callbacks=[events])
    searched.clear()
    known = call(agent, {"messages": [HumanMessage("known?")]})
    assert (searched, model.shown[-1], known["retrieval_decision"].retrieve) == ([], ["add"], False)
    assert ("not needed" in known["messages"][-1].text) is stubborn
    assert call(agent, {"messages": [HumanMessage("unknown?")]})["messages"][-1].text == "answer after found"
    assert judge.questions == ["known?", "unknown?"]  # once a turn
    decided = [(event["retrieve"], event["warnings"]) for event in events.events]
    assert decided == [(False, []), (True, [])]
    failed = call(agent, {"messages": [HumanMessage("RAISE")]})
    assert failed["retrieval_decision"].error.message == "gate down"
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
def test_what_a_tool_may_be_named_by(hidden, given):
    others = [add, {"type": "function", "function": {"name": "other"}}, {"type": "code_interpreter"}]
    model = Agent()
    middleware = RetrievalGateMiddleware(Judge(), tools=[hidden])
    agent = create_agent(model, [given, *others], middleware=[middleware])
    ask(agent, "known?")
    assert model.shown[-1] == ["add", *others[1:]]
    ask(agent, "unknown?")
    assert len(model.shown[-1]) == 4


def changing(change):
    """A middleware that changes the request of each model call."""
    return wrap_model_call(lambda request, handler: handler(request.override(**change(request))))


def agent_of(model, *before, tools=("search_docs",), gate=None, after=(), **options):
    middleware = RetrievalGateMiddleware(gate or Judge(), tools=list(tools))
    return create_agent(model, [search_docs, add], middleware=[*before, middleware, *after], **options)


GRAPHS = {
    "alone": lambda agent: agent,
    "as a step": lambda agent: RunnableLambda(dict) | agent,
    "retried": lambda agent: agent.with_retry(),
    "as a fallback": lambda agent: agent.with_fallbacks([agent]) | RunnableLambda(dict),
    "in parallel": lambda agent: {"it": agent} | RunnableLambda(lambda answers: answers["it"]),
}


@pytest.mark.parametrize("wrap", GRAPHS.values(), ids=list(GRAPHS))
def test_a_graph_cannot_be_judged_by_its_first_words(wrap):
    """Regression: the router returned the last update of the agent's state as its answer."""
    gate, graph = RetrievalGate(Judge()), create_agent(Agent(), [add])
    agent, function = wrap(graph), RunnableLambda(lambda state: graph.invoke(state)["messages"][-1].text)
    with pytest.raises(ConfigurationError, match=r"a graph streams .* Hint: .*agent\.invoke, agent\.ainvoke"):
        gate.route(retrieve=agent, direct=agent, answer_first=True)
    state = {"messages": [HumanMessage("known?")]}
    judged = gate.route(retrieve=agent, direct=function, answer_first=True)
    assert judged.invoke(state) == "answer after known?"


def test_a_misspelt_name_is_an_error_and_a_tool_that_was_taken_away_is_none():
    with pytest.raises(UnknownNameError, match=r"'serch_docs'.*Did you mean search_docs\?"):
        ask(agent_of(Agent(), tools=["serch_docs"]), "unknown?")
    without = changing(lambda request: {"tools": [t for t in request.tools if t.name != "search_docs"]})
    agent = agent_of(Agent(), without, tools=[search_docs])
    assert ask(agent, "known?")["retrieval_decision"].retrieve is False


def test_earlier_tool_calls_are_not_sent_without_tools():
    """Regression: after a search, Anthropic refused each known question, because the only tool was hidden."""
    searched.clear()
    model, web = Agent(), {"type": "web_search"}
    middleware = RetrievalGateMiddleware(ReadsHistory(), tools=[search_docs, web])
    forcing = changing(lambda request: {"tool_choice": "any"})
    agent = create_agent(
        model, [search_docs, web], middleware=[forcing, middleware], checkpointer=InMemorySaver()
    )
    thread = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [HumanMessage("unknown?")]}, thread)
    found = agent.invoke({"messages": [HumanMessage("known?")]}, thread)
    assert model.shown == [["search_docs", web]] * 2 + [["search_docs"]] * 2
    assert model.choices == ["any"] * 2 + [None] * 2
    assert (searched, "not needed" in found["messages"][-1].text) == (["q"], True)


NOTHING_ASKED = "The messages include no human message."


@pytest.mark.parametrize(
    ("messages", "error", "override"),
    [
        ([], NOTHING_ASKED, None),
        ([SystemMessage("Report the weather.")], NOTHING_ASKED, None),
        ([AIMessage("Hello.")], NOTHING_ASKED, None),
        (["Who wrote Hamlet?", AIMessage("Shakespeare."), "And when?"], None, UNREAD),
    ],
    ids=["nothing", "a system message", "an answer", "a later turn"],
)
def test_an_agent_whose_question_cannot_be_judged_keeps_its_tools(messages, error, override):
    model, judge = Agent(), Judge()
    greeting = changing(lambda request: {"messages": request.messages or [AIMessage("Hello.")]})
    decision = ask(agent_of(model, gate=judge, after=[greeting]), *messages)["retrieval_decision"]
    assert (decision.retrieve, getattr(decision.override, "reason", None)) == (True, override)
    assert getattr(decision.error, "message", None) == error
    assert model.shown[0] == ["search_docs", "add"]


SCREENSHOT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
MANUAL = {"type": "file", "base64": "AA", "mime_type": "application/pdf"}
WITH_FILES = {
    "image": ([HumanMessage([{"type": "text", "text": "fix this, known?"}, SCREENSHOT])], False),
    "file before the text": ([HumanMessage([MANUAL]), HumanMessage("known?")], False),
    "image after the text": ([HumanMessage("known?"), HumanMessage([SCREENSHOT])], False),
    "in an earlier turn": ([HumanMessage([SCREENSHOT]), AIMessage("An error."), "known?"], True),
}


@pytest.mark.parametrize(("messages", "hidden"), WITH_FILES.values(), ids=list(WITH_FILES))
def test_an_image_that_the_gate_does_not_read_hides_nothing(messages, hidden):
    """Regression: for "fix this" with a screenshot of an error, the LLM could not search for the error."""
    model, events = Agent(), EventRecorder()
    agent = agent_of(model, gate=RetrievalGate(ReadsHistory())).with_config(callbacks=[events])
    decision = ask(agent, *messages)["retrieval_decision"]
    assert model.shown[0] == (["add"] if hidden else ["search_docs", "add"])
    assert (decision.retrieve, decision.p_known, decision.override is None) == (not hidden, 0.8, hidden)
    assert [event["retrieve"] for event in events.events] == [not hidden]
    if not hidden:
        assert decision.reason == f"{decision.override.reason} because"


def test_a_rule_of_the_application_hides_tools_from_a_message_with_an_image():
    model, rule = Agent(), Override(retrieve=False, reason="It asks about the image alone.")
    decision = Decision(question="Describe it.", retrieve=False, p_known=0.2, override=rule)
    gate = RunnableLambda(lambda messages: decision)
    ask(agent_of(model, gate=gate), HumanMessage([{"type": "text", "text": "Describe it."}, SCREENSHOT]))
    assert model.shown == [["add"]]


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
def test_a_hidden_tool_is_not_forced(choice, left):
    model = Agent()
    agent = agent_of(model, changing(lambda request: {"tool_choice": choice}))
    ask(agent, "known?")
    assert (model.shown[-1], model.choices[-1]) == (["add"], left)
    ask(agent, "unknown?")
    assert model.choices[-1] == choice


@each(INVOKES)
def test_a_person_approves_of_a_search_that_was_decided_once(call):
    searched.clear()
    judge, thread = Judge(), {"configurable": {"thread_id": "1"}}
    approving = HumanInTheLoopMiddleware(interrupt_on={"search_docs": True})
    agent = agent_of(Agent(), approving, gate=judge, checkpointer=InMemorySaver())
    assert "__interrupt__" in call(agent, {"messages": [HumanMessage("unknown?")]}, thread)
    assert searched == []
    found = call(agent, Command(resume={"decisions": [{"type": "approve"}]}), thread)
    assert (found["messages"][-1].text, searched) == ("answer after found", ["q"])
    assert (found["retrieval_decision"].retrieve, len(judge.calls)) == (True, 1)


@each(INVOKES)
def test_two_gates_hide_each_its_own_tools(call):
    model = Agent()
    gates = [
        RetrievalGateMiddleware(Judge(), tools=["search_docs"]),
        RetrievalGateMiddleware("constant:always", tools=["web_search"]),
    ]
    tools, thread = [search_docs, add, {"type": "web_search"}], {"configurable": {"thread_id": "1"}}
    agent = create_agent(model, tools, middleware=gates, checkpointer=InMemorySaver())
    found = call(agent, {"messages": [HumanMessage("known?")]}, thread)
    assert model.shown[-1] == ["add", {"type": "web_search"}]
    decisions = agent.get_state(thread).values["retrieval_decisions"]
    assert {name: d.retrieve for name, d in decisions.items()} == {
        "RetrievalGateMiddleware(search_docs)": False,
        "RetrievalGateMiddleware(web_search)": True,
    }
    assert found["retrieval_decision"].retrieve is True


@each(INVOKES)
def test_sub_agents_that_pass_on_their_state_do_not_hide_the_tools_of_their_agent(call):
    """Regression: two at once failed with an InvalidUpdateError; a single one's decision hid its agent's tools."""
    judge, model = Judge(), Agent(tasks=["known one?", "known two?"])
    inner = agent_of(Agent(), gate=judge)

    @tool
    def task(question: str, runtime: ToolRuntime) -> Command:
        """Ask a sub-agent, and pass on its state as Deep Agents do."""
        state = inner.invoke({**runtime.state, "messages": [HumanMessage(question)]})
        reply = ToolMessage(state.pop("messages")[-1].text, tool_call_id=runtime.tool_call_id)
        return Command(update={**state, "messages": [reply]})

    middleware = RetrievalGateMiddleware(judge, tools=[search_docs])
    agent = create_agent(model, [search_docs, task], middleware=[middleware])
    found = call(agent, {"messages": [HumanMessage("unknown?")]})
    assert sorted(judge.questions) == ["known one?", "known two?", "unknown?"]
    assert model.shown == [["search_docs", "task"]] * 2
    assert found["retrieval_decision"].question in ("known one?", "known two?")


@each(INVOKES)
def test_a_message_that_arrives_while_the_agent_runs_hides_nothing(call):
    """Regression: the decision about the user's first message also hid the tools for one that was sent meanwhile."""
    judge, model, queue = Judge(), Agent(tasks=["x"]), ["unknown now?"]

    @tool
    def task(question: str) -> str:
        """Work while the user writes on."""
        model.tasks = []
        return "done"

    @before_model
    def steer(state, runtime):
        if state["messages"][-1].type == "tool" and queue:
            return {"messages": [HumanMessage(queue.pop())]}

    middleware = RetrievalGateMiddleware(judge, tools=[search_docs])
    agent = create_agent(model, [search_docs, task], middleware=[middleware, steer])
    found = call(agent, {"messages": [HumanMessage("known?")]})
    assert model.shown == [["task"], ["search_docs", "task"], ["search_docs", "task"]]
    assert (found["messages"][-1].text, judge.questions) == ("answer after found", ["known?"])


@each(INVOKES)
@pytest.mark.parametrize("message", [HumanMessage("unknown?", id="1"), HumanMessage("unknown?")])
def test_a_question_that_is_edited_before_the_model_reads_it_hides_nothing(call, message):
    """Regression: the search tool stayed hidden for the edited question."""
    model, thread = Agent(), {"configurable": {"thread_id": "1"}}
    agent = agent_of(model, checkpointer=InMemorySaver(), interrupt_before=["model"])
    call(agent, {"messages": [HumanMessage("known?", id="1")]}, thread)
    edited = agent.update_state(thread, {"messages": [message]})
    call(agent, None, edited)
    assert model.shown == [["search_docs", "add"]]


def test_a_summary_that_replaces_the_question_while_the_agent_runs_leaves_the_decision():
    model = Agent()
    summary = HumanMessage("Summary.", additional_kwargs={"lc_source": "summarization"})

    @before_model
    def summarize(state, runtime):
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), summary]}

    ask(agent_of(model, summarize), "known?")
    assert model.shown == [["add"]]


# --- what the user wants may be in the result of a tool ------------------------------------------------------


class Scripted(Agent):
    """Calls tools as a script says, whatever it was shown, and then answers.

    Attributes:
        script: The names of the tools of each call of the model.
    """

    script: list

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        names = self.script.pop(0) if self.script else []
        args = {"search_docs": {"query": "q"}, "search": {"query": "q"}, "add": {"a": 1, "b": 2}}
        calls = [ToolCall(name=name, args=args.get(name, {}), id=f"{name} {len(messages)}") for name in names]
        message = AIMessage(f"answer after {messages[-1].text}", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def ask_user() -> str:
    """Ask the user."""
    return interrupt("How can I help?")


@tool
def read_ticket() -> str:
    """Read the next ticket."""
    return "unknown?"


REJECTED = {"decisions": [{"type": "reject", "message": "No, unknown?"}]}
REQUESTS = {
    "an answer of the user": ("ask_user", "unknown?"),
    "a ticket": ("read_ticket", None),
    "a rejection with a reason": ("add", REJECTED),
}


@each(INVOKES)
@pytest.mark.parametrize("beside", [[], ["search_docs"]], ids=["alone", "beside a search"])
@pytest.mark.parametrize(("name", "resume"), REQUESTS.values(), ids=list(REQUESTS))
def test_a_request_that_arrives_as_the_result_of_a_tool_hides_nothing(call, name, resume, beside):
    """Regression: after "Hi there!", the search stayed hidden for what the user replied to the tool's question."""
    model, judge, thread = Scripted(script=[[name, *beside], ["search_docs"]]), Judge(), {"thread_id": "1"}
    middleware = [
        RetrievalGateMiddleware(judge, tools=["search_docs"]),
        HumanInTheLoopMiddleware(interrupt_on={"add": True}),
    ]
    tools = [search_docs, add, ask_user, read_ticket]
    agent = create_agent(model, tools, middleware=middleware, checkpointer=InMemorySaver())
    searched.clear()
    found = call(agent, {"messages": [HumanMessage("known?")]}, {"configurable": thread})
    assert ("__interrupt__" in found) is (resume is not None)
    if resume is not None:
        found = call(agent, Command(resume=resume), {"configurable": thread})
    assert model.shown == [["add", "ask_user", "read_ticket"], *[[t.name for t in tools]] * 2]
    assert found["messages"][-1].text == "answer after found"
    assert (searched[-1], len(judge.calls)) == ("q", 1)
    replies = [message.text for message in found["messages"] if message.type == "tool"]
    # A search beside the tool's call is judged before there is a result; a rejection is there before any tool runs.
    assert (SEARCH_NOT_NEEDED in replies) is (bool(beside) and name != "add")


@each(INVOKES)
def test_only_results_of_other_tools_in_this_turn_count(call):
    """The fixed replies of this and other gates are no results, nor is what tools said in earlier turns."""
    searches = [["search_docs"], ["search"], ["search_docs", "search"]]
    model, thread = Scripted(script=[["read_ticket"], [], *searches]), {"configurable": {"thread_id": "1"}}
    gates = [RetrievalGateMiddleware(ReadsHistory(), tools=[hidden]) for hidden in ("search_docs", "search")]
    agent = create_agent(
        model, [search_docs, search, read_ticket], middleware=gates, checkpointer=InMemorySaver()
    )
    call(agent, {"messages": [HumanMessage("known?")]}, thread)
    found = call(agent, {"messages": [HumanMessage("known too?")]}, thread)
    every = ["search_docs", "search", "read_ticket"]
    assert model.shown == [["read_ticket"], every, *[["read_ticket"]] * 4]
    replies = [message.text for message in found["messages"] if message.type == "tool"]
    assert replies == ["unknown?", *[SEARCH_NOT_NEEDED] * 4]


def test_a_tools_result_behind_a_summary_of_the_question_hides_nothing():
    model = Scripted(script=[["read_ticket"]])
    summary = HumanMessage("Summary.", additional_kwargs={"lc_source": "summarization"})

    @before_model
    def summarize(state, runtime):
        if state["messages"][-1].type == "tool":
            return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), summary, *state["messages"][1:]]}

    middleware = [summarize, RetrievalGateMiddleware(Judge(), tools=[search_docs])]
    ask(create_agent(model, [search_docs, read_ticket], middleware=middleware), "known?")
    assert model.shown == [["read_ticket"], ["search_docs", "read_ticket"]]


@each(INVOKES)
@pytest.mark.parametrize("missing", ["nonexistent", "search_web"])
def test_a_call_to_a_tool_that_the_agent_lacks_is_no_reply(call, missing):
    """Regression: after the error, the search was no longer hidden."""
    model = Scripted(script=[[missing], ["search_docs"], ["add"], ["search_docs"]])
    searched.clear()
    found = call(agent_of(model), {"messages": [HumanMessage("known?")]})
    replies = [message.text for message in found["messages"] if message.type == "tool"]
    assert replies[1:] == [SEARCH_NOT_NEEDED, "3", "found"], "what another tool says still counts"
    assert f"{missing} is not a valid tool" in replies[0]
    assert (model.shown[:3], searched) == ([["add"]] * 3, ["q"])


def test_the_fixed_reply_is_recognised_as_content_blocks():
    """Regression: LLMs' adapters and stores write a text as a list of blocks, which counted as a tool's reply."""
    call_id, block = "1", {"type": "text", "text": SEARCH_NOT_NEEDED}
    asked = AIMessage("", tool_calls=[ToolCall(name="search_docs", args={"query": "q"}, id=call_id)])
    model = Scripted(script=[["search_docs"]])
    replied = ToolMessage([block], tool_call_id=call_id, name="search_docs")
    found = ask(agent_of(model), "known?", asked, replied)
    assert found["messages"][-2].text == SEARCH_NOT_NEEDED
    assert model.shown == [["add"]] * 2
