"""LangGraph: the gate as a node, its edge, its events, its decision in checkpoints, and what streams show."""

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.follow_ups import UNREAD
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.graph import gate_node, route_edge
from tests.langchain_fakes import INVOKES, Chat, Judge, Search, each, gathered

pytest.importorskip("langgraph")

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

STREAMS = {
    "stream": lambda graph, value, config=None, **options: list(graph.stream(value, config, **options)),
    "astream": lambda graph, value, config=None, **options: asyncio.run(
        gathered(graph.astream(value, config, **options))
    ),
}


class State(TypedDict, total=False):
    question: str
    retrieval_decision: Decision
    path: Annotated[list[str], operator.add]


class Model(BaseModel):
    question: str
    retrieval_decision: Any = None
    path: Annotated[list[str], operator.add] = []


@dataclass
class Data:
    question: str
    retrieval_decision: Any = None
    path: Annotated[list[str], operator.add] = ()


class Chatting(MessagesState):
    retrieval_decision: Decision
    path: Annotated[list[str], operator.add]


def search(state):
    return {"path": ["search"]}


def answer(state):
    return {"path": ["answer"]}


def graph_of(gate, state=State, *, search=search, answer=answer, **options):
    builder = StateGraph(state)
    builder.add_node("gate", gate_node(gate))
    builder.add_node("search", search)
    builder.add_node("answer", answer)
    builder.add_edge(START, "gate")
    builder.add_conditional_edges("gate", route_edge(retrieve="search", direct="answer"))
    builder.add_edge("search", "answer")
    builder.add_edge("answer", END)
    return builder.compile(**options)


@pytest.mark.parametrize("state", [State, Model, Data])
@each(INVOKES)
def test_the_graph_searches_only_when_it_needs_to(call, state):
    judge = Judge()
    graph = graph_of(judge, state)
    known = call(graph, {"question": "known?"})
    assert known["path"] == ["answer"]
    assert isinstance(known["retrieval_decision"], Decision)
    assert known["retrieval_decision"].p_known == 0.8
    assert call(graph, {"question": "unknown?"})["path"] == ["search", "answer"]
    assert judge.questions == ["known?", "unknown?"]


@each(INVOKES)
def test_the_question_of_a_conversation(call):
    judge = Judge()
    graph = graph_of(judge, Chatting)
    assert call(graph, {"messages": [HumanMessage("known?")]})["path"] == ["answer"]
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]
    found = call(graph, {"messages": turns})
    assert found["path"] == ["search", "answer"]
    assert found["retrieval_decision"].warnings == (UNREAD,)
    gate = RetrievalGate(judge, condense=RunnableLambda(lambda messages: "When was Hamlet written?"))
    assert call(graph_of(gate, Chatting), {"messages": turns})["path"] == ["answer"]


@each(INVOKES)
def test_a_failing_gate_searches(call):
    found = call(graph_of(Judge()), {"question": "RAISE"})
    assert found["path"] == ["search", "answer"]
    assert found["retrieval_decision"].error.message == "gate down"


@each(INVOKES)
def test_a_state_without_a_question_is_an_error(call):
    with pytest.raises(InvalidQuestionError, match="no key"):
        call(graph_of(Judge()), {"path": ["start"]})


def test_the_drawing_shows_both_ways():
    edges = {(edge.source, edge.target) for edge in graph_of(Judge()).get_graph().edges}
    assert {("gate", "search"), ("gate", "answer"), ("search", "answer")} <= edges
    assert len(edges) == 5


@pytest.mark.parametrize(
    "state", [{}, {"retrieval_decision": None}, {"retrieval_decision": {}}, Model(question="q")]
)
def test_an_edge_without_a_decision_is_an_error(state):
    with pytest.raises(ConfigurationError, match="'retrieval_decision'"):
        route_edge(retrieve="a", direct="b")(state)


def test_a_key_of_ones_own():
    node = gate_node("constant:never", decision_key="known")
    update = node.invoke({"question": "who wrote hamlet?"})
    assert list(update) == ["known"]
    assert route_edge(retrieve="a", direct="b", decision_key="known")(update) == "b"


# --- events ------------------------------------------------------------------------------------------------------


@each(STREAMS)
def test_the_custom_stream_tells_of_the_decision(call):
    (event,) = call(graph_of(Judge()), {"question": "unknown?"}, stream_mode="custom")
    assert event["retrieval_gate"]["question"] == "unknown?"
    assert (event["retrieval_gate"]["retrieve"], event["retrieval_gate"]["warnings"]) == (True, [])


EVENT_KEYS = {
    "version",
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "outcome",
    "llm",
}
ROUTERS = {
    "question alone": {},
    "answer first": {"answer_first": AnswerFirst(question_gate=None)},
    "look first": {"look_first": True},
    "both": {"answer_first": AnswerFirst(question_gate=None), "look_first": True},
}


@pytest.mark.parametrize("way", ROUTERS.values(), ids=list(ROUTERS))
@pytest.mark.parametrize("called", ["as the node", "in the node"])
@each(STREAMS)
def test_a_router_in_a_node_tells_the_custom_stream_once_and_with_every_key(call, called, way):
    answering = RunnableLambda(lambda found: {"path": ["read"]})
    router = RetrievalGate(Judge()).route(
        retrieve=Search() | answering, direct=RunnableLambda(lambda state: {"path": ["direct"]}), **way
    )
    nodes = {"as the node": router, "in the node": RunnableLambda(lambda state: router.invoke(state))}
    builder = StateGraph(State)
    builder.add_node("answer", nodes[called])
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    (event,) = call(builder.compile(), {"question": "unknown?"}, stream_mode="custom")
    assert event["retrieval_gate"].keys() == EVENT_KEYS
    assert (event["retrieval_gate"]["version"], event["retrieval_gate"]["retrieve"]) == (1, True)


# --- what streams show ---------------------------------------------------------------------------------------


def shown(chunks):
    return "".join(chunk.text for chunk, _ in chunks)


@each(STREAMS)
def test_the_draft_is_not_in_the_message_stream_of_a_node(call):
    llm = Chat()
    chain = RetrievalGate(Judge(), llm=llm, tokens=2).route(retrieve=llm, direct=llm)
    graph = StateGraph(MessagesState)
    asked = RunnableLambda(lambda state: state["messages"])
    graph.add_node("chain", asked | chain | (lambda message: {"messages": [message]}))
    graph.add_edge(START, "chain")
    chunks = call(graph.compile(), {"messages": [HumanMessage("known?")]}, stream_mode="messages")
    assert shown(chunks) == "It is me."
    assert len(llm.seen) == 2


# --- checkpoints -------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_a_graph_that_stops_after_the_decision_goes_on_with_it(call):
    judge, saver = Judge(), InMemorySaver()
    config = {"configurable": {"thread_id": "1"}}
    graph = graph_of(judge, checkpointer=saver, interrupt_after=["gate"])
    call(graph, {"question": "unknown?"}, config)
    assert graph.get_state(config).next == ("search",)
    resumed = graph_of(judge, checkpointer=saver)
    assert call(resumed, None, config)["path"] == ["search", "answer"]
    assert judge.calls == [["unknown?"]], "it is not decided again"


@each(INVOKES)
def test_each_turn_of_a_thread_is_decided(call):
    judge, saver = Judge(), InMemorySaver()
    config = {"configurable": {"thread_id": "1"}}
    gate = RetrievalGate(judge, condense=RunnableLambda(lambda messages: f"{messages[-1].text} condensed"))
    graph = graph_of(gate, Chatting, checkpointer=saver)
    call(graph, {"messages": [HumanMessage("known?")]}, config)
    found = call(graph, {"messages": [HumanMessage("unknown?")]}, config)
    assert judge.questions == ["known?", "unknown? condensed"]
    assert found["path"] == ["answer", "search", "answer"]


def test_a_router_in_a_graph_puts_nothing_into_checkpoints():
    gate, saver = RetrievalGate(Judge()), InMemorySaver()
    inner = graph_of(gate, checkpointer=saver)
    chain = gate.route(retrieve=inner, direct=inner)
    chain.invoke({"question": "known?"}, {"configurable": {"thread_id": "1"}})
    found = list(saver.list(None))
    assert found
    assert not [key for checkpoint in found for key in checkpoint.metadata if "decided" in key]
