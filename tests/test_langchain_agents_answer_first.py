"""Agents whose model answers first, without its search tool, and is asked again with it if it does not know."""

import asyncio

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
from rgate_integrations.langchain.answer_first import STOPPED
from tests.begun_answers import (
    KNOWN,
    UNSURE,
    Reader,
    Runs,
    Stuck,
    TurnReader,
    Writer,
    answer_to,
    nothing_left,
)
from tests.langchain_fakes import INVOKES, each, gathered
from tests.patience import PATIENCE

searched = []


@pytest.fixture(autouse=True)
def nothing_searched():
    searched.clear()


@tool
def search_docs(query: str) -> str:
    """Search the documents."""
    searched.append(query)
    return "a passage"


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Agent(Writer):
    """Searches where it may; adds first where it is asked for a sum; else writes as a `Writer` does.

    Attributes:
        shown: The tools of each call.
        stubborn: Whether it searches also where it may not.
    """

    shown: list = Field(default_factory=list)
    stubborn: bool = False

    def bind_tools(self, tools, **kwargs):
        return self.bind(tools=[t.name for t in tools], **kwargs)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return generate_from_stream(self._tokens(messages, kwargs))

    def _tokens(self, messages, kwargs):
        tools, last = kwargs.get("tools") or [], messages[-1]
        self.shown.append(tools)
        call = None
        if last.type == "human" and ("search_docs" in tools or self.stubborn):
            call = {"name": "search_docs", "args": '{"query": "q"}', "id": "1", "index": 0}
        elif last.type == "human" and "sum" in last.text:
            call = {"name": "add", "args": '{"a": 1, "b": 2}', "id": "2", "index": 0}
        if call is not None:
            self.calls.append(kwargs)
            yield ChatGenerationChunk(message=AIMessageChunk("", tool_call_chunks=[call]))
            return
        asked = [message.text for message in messages if message.type == "human"]
        read = last.type == "tool" and last.name == "search_docs"
        yield from self._write(f"Read {last.text} ." if read else answer_to(str(asked[-1:])), kwargs)


class TellingAgent(Agent):
    """One that may be asked for log-probabilities."""

    logprobs: bool | None = None


class Whole(BaseChatModel):
    """A model that does not stream, and searches where it may."""

    calls: list = Field(default_factory=list)

    @property
    def _llm_type(self):
        return "whole"

    def bind_tools(self, tools, **kwargs):
        return self.bind(tools=[t.name for t in tools], **kwargs)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.calls.append(kwargs.get("tools"))
        message = AIMessage(answer_to(messages[-1].text))
        return ChatResult(generations=[ChatGeneration(message=message)])


def agent_of(model, *, judge=None, before=(), gate=None, agent=None, **options):
    options = {"tokens": 4, "question_gate": None} | options
    middleware = RetrievalGateMiddleware(
        gate or RetrievalGate(judge or Reader()), tools=["search_docs"], answer_first=AnswerFirst(**options)
    )
    return create_agent(model, [search_docs, add], middleware=[*before, middleware], **(agent or {}))


def ask(call, agent, question, **config):
    return call(agent, {"messages": [HumanMessage(question)]}, config)


MESSAGES = {
    "stream": lambda agent, value: list(agent.stream(value, stream_mode="messages")),
    "astream": lambda agent, value: asyncio.run(gathered(agent.astream(value, stream_mode="messages"))),
}


@each(INVOKES)
def test_a_known_answer_goes_on_and_an_unknown_one_is_asked_for_again_with_tools(call):
    model, judge = Agent(), Reader()
    agent = agent_of(model, judge=judge)
    known = ask(call, agent, "a known one?")
    assert [m.text.strip() for m in known["messages"][1:]] == [KNOWN]
    assert model.shown == [["add"]]
    assert model.ended == ["whole"]
    assert known["retrieval_decision"].retrieve is False
    assert known["retrieval_decision"].partial_answer.tokens_held == 4
    assert [d.text for (d,) in judge.drafts] == ["It is surely the"]

    model.shown.clear()
    model.written.clear()
    unknown = ask(call, agent, "an unknown one?")
    assert searched == ["q"]
    assert unknown["messages"][-1].text == "Read a passage . "
    assert UNSURE[:8] not in str(unknown["messages"])
    assert model.shown == [["add"], ["search_docs", "add"], ["search_docs", "add"]]
    assert model.written[:5] == ["Perhaps", "it", "is", "this", "Read"]
    assert model.ended[1] == "closed"
    assert unknown["retrieval_decision"].partial_answer.tokens_dropped == 4
    assert len(judge.calls) == 2


@tool
def search_web(query: str) -> str:
    """Search the web."""
    searched.append(f"web: {query}")
    return "a page"


@each(INVOKES)
def test_each_of_two_middlewares_lets_the_model_answer_first(call):
    judges = {"search_docs": Reader(), "search_web": Reader({UNSURE[:18]: 0.9})}
    options = AnswerFirst(tokens=4, question_gate=None)
    middlewares = [
        RetrievalGateMiddleware(RetrievalGate(judge), tools=[name], answer_first=options)
        for name, judge in judges.items()
    ]
    model = Agent()
    agent = create_agent(model, [search_docs, search_web, add], middleware=middlewares)
    known = ask(call, agent, "a known one?")
    assert known["messages"][-1].text.strip() == KNOWN
    assert known["retrieval_decision"].retrieve is False
    assert [d.retrieve for d in known["retrieval_decisions"].values()] == [False, False]
    assert model.shown == [["add"]]

    unknown = ask(call, agent, "an unknown one?")
    assert searched == ["q"]
    assert unknown["messages"][-1].text == "Read a passage . "
    found = {name: d.retrieve for name, d in unknown["retrieval_decisions"].items()}
    assert found == {
        "RetrievalGateMiddleware(search_docs)": True,
        "RetrievalGateMiddleware(search_web)": False,
    }


@each(MESSAGES)
def test_nobody_hears_of_an_answer_that_is_stopped(call):
    def shown(question):
        found = call(agent, {"messages": [HumanMessage(question)]})
        return [message.text for message, _ in found if message.type in ("AIMessageChunk", "ai")]

    agent = agent_of(Agent())
    assert "".join(shown("a known one?")).split() == KNOWN.split()
    assert len(shown("a known one?")) > 8
    assert "".join(shown("an unknown one?")).split() == ["Read", "a", "passage", "."]


async def test_events_are_those_of_the_answer_that_is_given():
    async def shown(question):
        events = agent.astream_events({"messages": [HumanMessage(question)]}, version="v2")
        found = [event async for event in events]
        decided = [e["data"]["retrieve"] for e in found if e["event"] == "on_custom_event"]
        texts = [e["data"]["chunk"].text for e in found if e["event"] == "on_chat_model_stream"]
        return decided, "".join(texts).split()

    agent = agent_of(Agent())
    assert await shown("a known one?") == ([False], KNOWN.split())
    assert await shown("an unknown one?") == ([True], ["Read", "a", "passage", "."])


def test_newer_streams_show_the_answer_that_is_given():
    """In one piece: LangChain has the model tell its tokens to the handlers of these streams only if it sees them."""

    def shown(question):
        streamed = agent.stream_events({"messages": [HumanMessage(question)]}, version="v3")
        return ["".join(map(str, message.text)).split() for message in streamed.messages]

    agent = agent_of(Agent())
    if not hasattr(agent, "stream_events"):
        pytest.skip("older LangGraph")
    assert shown("a known one?") == [KNOWN.split()]
    assert shown("an unknown one?") == [[], ["Read", "a", "passage", "."]]


async def test_released_tokens_are_shown_as_they_come():
    """The model goes on only when what it has written has been shown."""
    shown, goes_on = [], asyncio.Event()

    def pace(number):
        return asyncio.wait_for(goes_on.wait(), PATIENCE) if number == 6 else None

    agent = agent_of(Agent(pace=pace))
    value = {"messages": [HumanMessage("a known one?")]}
    async for message, _ in agent.astream(value, stream_mode="messages"):
        shown.append(message.text.strip())
        if len(shown) == 5:
            goes_on.set()
    assert shown[:6] == ["It", "is", "surely", "the", "one", "that"]


@each(INVOKES)
def test_a_stopped_model_is_a_cancelled_run_in_traces(call, caplog):
    runs = Runs()
    ask(call, agent_of(Agent()), "an unknown one?", callbacks=[runs])
    stopped, searching, reading = runs.named("Agent")
    assert stopped.error is None
    assert stopped.outputs["llm_output"] == {"cancelled": STOPPED, "tokens": 4}
    assert "cancelled" not in str(searching.outputs) + str(reading.outputs)
    assert "callback" not in caplog.text


@each(INVOKES)
def test_calls_of_other_tools_are_let_through_and_what_follows_is_judged(call):
    model, judge = Agent(), Reader()
    agent = agent_of(model, judge=judge)
    found = ask(call, agent, "a known sum?")
    assert [m.type for m in found["messages"]] == ["human", "ai", "tool", "ai"]
    assert found["messages"][-1].text.strip() == KNOWN
    assert model.shown == [["add"], ["add"]]
    model.shown.clear()
    found = ask(call, agent, "an unknown sum?")
    assert model.shown == [["add"], ["add"], ["search_docs", "add"]]
    assert found["retrieval_decision"].retrieve is True
    assert [d.text for (d,) in judge.drafts] == ["It is surely the", "Perhaps it is this"]


@each(INVOKES)
def test_a_model_that_asks_for_a_search_itself_gets_it(call):
    model, judge = Agent(stubborn=True), Reader()
    found = ask(call, agent_of(model, judge=judge), "a known one?")
    assert searched == ["q"]
    assert found["messages"][-1].text == "Read a passage . "
    assert found["retrieval_decision"].retrieve is True
    assert found["retrieval_decision"].question == "a known one?"
    assert model.shown == [["add"], ["search_docs", "add"]]
    assert judge.calls == []


@each(INVOKES)
def test_a_model_that_does_not_stream_is_judged_by_its_whole_answer(call):
    model, judge = Whole(), Reader()
    agent = agent_of(model, judge=judge)
    assert ask(call, agent, "a known one?")["messages"][-1].text == KNOWN
    assert model.calls == [["add"]]
    ask(call, agent, "an unknown one?")
    assert model.calls == [["add"], ["add"], ["search_docs", "add"]]
    assert [(d.text, d.finished) for (d,) in judge.drafts] == [(KNOWN, True), (UNSURE, True)]


@each(INVOKES)
def test_the_first_look_shows_the_tools_at_once(call):
    model, look = Agent(), Reader({"hopeless": 0.05, "open": 0.3})
    agent = agent_of(model, question_gate=look)
    found = ask(call, agent, "hopeless")
    assert model.shown == [["search_docs", "add"]] * 2
    assert found["retrieval_decision"].p_known == 0.05
    assert ask(call, agent, "open")["messages"][-1].text.strip() == KNOWN
    ask(call, agent, "a known sum?")
    assert look.calls == [["hopeless"], ["open"], ["a known sum?"]]  # once a turn


@each(INVOKES)
def test_a_model_is_not_judged_on_what_is_clearly_known(call):
    model, judge = Agent(), Reader()
    agent = agent_of(model, judge=judge, question_gate=Reader({"unknown, or easy?": 0.9}))
    found = ask(call, agent, "unknown, or easy?")
    assert found["messages"][-1].text.strip() == UNSURE
    assert (judge.calls, model.shown) == ([], [["add"]])
    assert (found["retrieval_decision"].retrieve, found["retrieval_decision"].p_known) == (False, 0.9)


# --- what fails ----------------------------------------------------------------------------------------------


@each(INVOKES)
def test_a_model_that_fails_before_it_is_judged_is_asked_with_tools(call):
    model = Agent(fails_at=2, fails=1)
    found = ask(call, agent_of(model), "a known one?")
    assert searched == ["q"]
    assert found["retrieval_decision"].error.type == "OSError"
    assert found["retrieval_decision"].question == "a known one?"


@each(INVOKES)
def test_a_model_that_fails_later_is_the_callers_error(call):
    with pytest.raises(OSError, match="connection lost"):
        ask(call, agent_of(Agent(fails_at=6)), "a known one?")


@each(INVOKES)
def test_a_model_that_is_retried_is_judged_by_what_it_says_then(call):
    judge = Reader()
    middleware = RetrievalGateMiddleware(
        RetrievalGate(judge), tools=["search_docs"], answer_first=AnswerFirst(tokens=4, question_gate=None)
    )
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    model = Agent(fails_at=2, fails=1)
    agent = create_agent(model, [search_docs, add], middleware=[middleware, retry])
    assert ask(call, agent, "a known one?")["messages"][-1].text.strip() == KNOWN
    assert [d.text for (d,) in judge.drafts] == ["It is surely the"]


@each(INVOKES)
def test_a_gate_that_fails_shows_the_tools_or_raises(call):
    judge = Reader()
    agent = agent_of(Agent(), judge=judge)
    assert ask(call, agent, "RAISE")["retrieval_decision"].error.type == "RuntimeError"
    assert searched == ["q"]
    judge.on_error = "raise"
    with pytest.raises(RuntimeError, match="gate down"):
        ask(call, agent, "RAISE")


@each(INVOKES)
def test_without_a_question_the_tools_are_shown(call):
    model = Agent()
    found = call(agent_of(model, question_gate=Reader()), {"messages": [AIMessage("Hello, unknown.")]})
    assert found["retrieval_decision"].error.type == "InvalidQuestionError"
    assert model.shown[-1] == ["search_docs", "add"]


class Fact(BaseModel):
    """A form."""

    name: str


@each(INVOKES)
def test_where_a_form_is_filled_in_the_question_decides(call):
    look = Reader({"a known one?": 0.6, "an unknown one?": 0.37})
    shown = []
    for question in look.scores:
        model, judge = Agent(), Reader()
        agent = agent_of(model, judge=judge, question_gate=look, agent={"response_format": Fact})
        ask(call, agent, question)
        shown.append("search_docs" in model.shown[0])
        assert judge.calls == []
    assert shown == [False, True]


# --- turns and callers ---------------------------------------------------------------------------------------


@each(INVOKES)
def test_each_turn_is_decided_anew(call):
    model = Agent()
    judge = TurnReader()
    agent = agent_of(model, judge=judge, agent={"checkpointer": InMemorySaver()})
    config = {"configurable": {"thread_id": "1"}}
    assert ask(call, agent, "an unknown one?", **config)["retrieval_decision"].retrieve is True
    model.shown.clear()
    found = ask(call, agent, "And a known one?", **config)
    assert found["retrieval_decision"].retrieve is False
    assert found["messages"][-1].text.strip() == KNOWN
    assert model.shown == [["add"]]
    assert judge.histories[-1][0] == "user: an unknown one?"


@each(INVOKES)
def test_a_later_turn_that_the_gate_does_not_read_shows_the_tools_at_once(call):
    model = Agent()
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And a known one?")]
    found = call(agent_of(model, question_gate=Reader()), {"messages": turns})
    assert found["retrieval_decision"].retrieve is True
    assert "search_docs" in model.shown[0]


async def test_callers_who_are_cancelled_leave_nothing_behind():
    stuck = Stuck()
    model = Agent(pace=stuck)
    agent = agent_of(model)
    kinds = ["known", "unknown"]
    asked = [{"messages": [HumanMessage(f"{kinds[n % 2]} {n}")]} for n in range(20)]
    found = await stuck.leave([agent.ainvoke(value) for value in asked], leaving=4)
    texts = [each["messages"][-1].text.strip() for each in found]
    assert texts == [KNOWN, "Read a passage ."] * 8
    assert len(searched) == 8
    assert await nothing_left()
    assert model.ended.count("closed") == 4 + 8


@each(INVOKES)
def test_a_model_that_has_log_probabilities_is_asked_for_them_where_its_answer_is_judged(call):
    model, judge = TellingAgent(), Reader()
    agent = agent_of(model, judge=judge)
    assert ask(call, agent, "a known one?")["messages"][-1].text.strip() == KNOWN
    ((draft,),) = judge.drafts
    assert draft.logprobs == (0.0, -0.25, -0.5, -0.75)
    ask(call, agent, "an unknown one?")
    # With its search tools it is asked as ever, and once more after the search.
    assert ["logprobs" in kwargs for kwargs in model.calls] == [True, True, False, False]
    failing = TellingAgent(fails_at=2, fails=1)  # and no error but a refusal has it asked without them
    assert ask(call, agent_of(failing), "a known one?")["retrieval_decision"].retrieve
    assert ["logprobs" in kwargs for kwargs in failing.calls] == [True, False, False]
    told = TellingAgent(logprobs=False)  # what the user has set is left as it is
    ask(call, agent_of(told), "a known one?")
    assert ["logprobs" in kwargs for kwargs in told.calls] == [False]


@each(INVOKES)
def test_a_model_that_refuses_log_probabilities_is_asked_without_from_then_on(call):
    model, judge = TellingAgent(refuses=("logprobs",)), Reader()
    agent = agent_of(model, judge=judge)
    for _ in range(2):
        assert ask(call, agent, "a known one?")["messages"][-1].text.strip() == KNOWN
    assert ["logprobs" in kwargs for kwargs in model.calls] == [True, False, False]
    assert [draft.logprobs for (draft,) in judge.drafts] == [None, None]
