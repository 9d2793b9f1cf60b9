"""LangGraph: the gate as a node, its edge, its events, its decision in checkpoints, and what streams show."""

import operator
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from rgate_integrations import Decision, plan_queries
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.decision import Cost, Draft, Failure, PartialAnswerInfo
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.graph import CHECKPOINT_TYPES, gate_node, route_edge
from tests.begun_answers import LOOK, Reader
from tests.langchain_fakes import INVOKES, Chat, Judge, Search, each
from tests.langchain_fakes import STREAMS as ALL_STREAMS
from tests.patience import PATIENCE

pytest.importorskip("langgraph")

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

STREAMS = {name: ALL_STREAMS[name] for name in ("stream", "astream")}
THREAD = {"configurable": {"thread_id": "1"}}
THRESHOLD = {"configurable": {"retrieval_threshold": 0.5}}


class State(TypedDict, total=False):
    question: str
    messages: list
    retrieval_decision: Decision
    path: Annotated[list[str], operator.add]


class Model(BaseModel):
    question: str
    retrieval_decision: Any = None
    path: Annotated[list[str], operator.add] = []


@dataclass(slots=True)
class Slots:
    question: str
    retrieval_decision: Any = None
    path: Annotated[list[str], operator.add] = ()


@dataclass
class Data:
    question: str
    retrieval_decision: Any = None
    path: Annotated[list[str], operator.add] = ()


def search(state):
    return {"path": ["search"]}


def answer(state):
    return {"path": ["answer"]}


def graph_of(gate, state=State, **options):
    return (
        StateGraph(state)
        .add_node("gate", gate_node(gate))
        .add_node("search", search)
        .add_node("answer", answer)
        .add_edge(START, "gate")
        .add_conditional_edges("gate", route_edge(retrieve="search", direct="answer"))
        .add_edge("search", "answer")
        .add_edge("answer", END)
        .compile(**options)
    )


@pytest.mark.parametrize("state", [State, Model, Data, Slots])
@each(INVOKES)
def test_the_graph_searches_only_when_it_needs_to(call, state):
    judge = Judge()
    graph = graph_of(judge, state)
    known = call(graph, {"question": "known?"})
    assert (known["path"], known["retrieval_decision"].p_known) == (["answer"], 0.8)
    assert call(graph, {"question": "unknown?"})["path"] == ["search", "answer"]
    failed = call(graph, {"question": "RAISE"})
    assert (failed["path"], failed["retrieval_decision"].error.message) == (["search", "answer"], "gate down")
    assert judge.questions == ["known?", "unknown?", "RAISE"]


@each(INVOKES)
@pytest.mark.parametrize("state", [Model, Data])
def test_a_router_reads_the_same_states_as_the_node(call, state):
    """Regression: it found no question in a pydantic model or dataclass."""
    router = RetrievalGate(Judge()).route(retrieve=search, direct=answer)
    graph = StateGraph(state).add_node("chain", router).add_edge(START, "chain").compile()
    for question, path in (("known?", "answer"), ("unknown?", "search")):
        assert call(graph, {"question": question})["path"] == [path]


@pytest.mark.parametrize(
    ("node", "states", "error", "said"),
    [
        (
            route_edge(retrieve="a", direct="b"),
            [{}, {"retrieval_decision": None}, {"retrieval_decision": {}}, Model(question="q")],
            ConfigurationError,
            "'retrieval_decision'",
        ),
        (
            lambda state: graph_of(Judge()).invoke(state),
            [{"path": ["start"]}],
            InvalidQuestionError,
            "no key",
        ),
    ],
    ids=["an edge without a decision", "a graph without a question"],
)
def test_a_state_without_what_is_needed_is_an_error(node, states, error, said):
    for state in states:
        with pytest.raises(error, match=said):
            node(state)


# --- events ------------------------------------------------------------------------------------------------------


EVENT_KEYS = {
    "version",
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "override",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "p_covered",
    "corpus",
    "corpora",
    "outcome",
    "llm",
}


def router(**way):
    return RetrievalGate(Judge()).route(retrieve=Search() | (lambda found: search({})), direct=answer, **way)


TELLERS = {
    "the node": gate_node(Judge()),
    "called in a node": RunnableLambda(lambda state: router().invoke(state)),
    "called with a config": RunnableLambda(lambda state: router().invoke(state, THRESHOLD)),
    # Regression: LangGraph sets the context only of a chain's first step.
    "later in a chain": RunnableLambda(dict) | router(),
    "guarded in a chain": operator.itemgetter("question") | RetrievalGate(Judge()).guard(Search()) | search,
    "question alone": router(),
    "answer first": router(answer_first=AnswerFirst(question_gate=None)),
    "look first": router(look_first=True),
    "both": router(answer_first=AnswerFirst(question_gate=None), look_first=True),
}


@pytest.mark.parametrize("teller", TELLERS.values(), ids=list(TELLERS))
@each(STREAMS)
def test_the_custom_stream_tells_of_each_decision_once_and_with_every_key(call, teller):
    graph = StateGraph(State).add_node("answer", teller).add_edge(START, "answer").compile()
    (event,) = call(graph, {"question": "unknown?"}, stream_mode="custom")
    assert event["retrieval_gate"].keys() == EVENT_KEYS
    assert (event["retrieval_gate"]["version"], event["retrieval_gate"]["retrieve"]) == (1, True)
    outer = StateGraph(State).add_node("inner", graph).add_edge(START, "inner").compile()
    (((node,), _),) = call(outer, {"question": "unknown?"}, stream_mode="custom", subgraphs=True)
    assert node.startswith("inner:"), "it comes from the graph that it is in"


# --- what streams show ---------------------------------------------------------------------------------------


@each(STREAMS)
def test_the_draft_is_not_in_the_message_stream_of_a_node(call):
    llm = Chat()
    chain = RetrievalGate(Judge(), llm=llm, tokens=2).route(retrieve=llm, direct=llm)
    node = RunnableLambda(operator.itemgetter("messages")) | chain | (lambda message: {"messages": [message]})
    graph = StateGraph(MessagesState).add_node("chain", node).add_edge(START, "chain").compile()
    chunks = call(graph, {"messages": [HumanMessage("known?")]}, stream_mode="messages")
    assert "".join(chunk.text for chunk, _ in chunks) == "It is me."
    assert len(llm.seen) == 2


# --- checkpoints -------------------------------------------------------------------------------------------------

FULL = Decision(
    question="who wrote hamlet?",
    retrieve=True,
    p_known=0.25,
    partial_answer=PartialAnswerInfo(tokens_held=4, first_token=None),
    draft=Draft(
        text="It is", token_ids=(3, 4), tokens=("It", " is"), logprobs=(-0.5, -9_999.0), source="llm"
    ),
    cost=Cost(model_calls=2, tokens_in=10, tokens_out=3, milliseconds=1.5),
    error=Failure(type="OSError", message="down", hint="Try again."),
    warnings=("one", "two"),
)
(PLAN,) = plan_queries([FULL])
VALUES = [FULL, FULL.draft, FULL.cost, FULL.partial_answer, FULL.error, PLAN, {"deep": [FULL, {"in": FULL}]}]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_from_a_checkpoint_as_they_were(value, caplog):
    serde = JsonPlusSerializer(allowed_msgpack_modules=CHECKPOINT_TYPES)
    again = serde.loads_typed(serde.dumps_typed(value))
    assert (again, type(again)) == (value, type(value))
    assert caplog.records == []


@each(INVOKES)
def test_a_graph_that_stops_after_the_decision_goes_on_with_it(call, caplog):
    judge, saver = Judge(), InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=CHECKPOINT_TYPES))
    graph = graph_of(judge, checkpointer=saver, interrupt_after=["gate"])
    call(graph, {"question": "unknown?"}, THREAD)
    assert graph.get_state(THREAD).next == ("search",)
    assert isinstance(graph.get_state(THREAD).values["retrieval_decision"], Decision)
    assert call(graph_of(judge, checkpointer=saver), None, THREAD)["path"] == ["search", "answer"]
    assert judge.calls == [["unknown?"]], "it is not decided again"
    assert caplog.records == []


STRICT_BY_ENVIRONMENT = """
from tests.test_langgraph import *
graph = graph_of(Judge(), checkpointer=InMemorySaver(), interrupt_after=["gate"])
graph.invoke({"question": "unknown?"}, THREAD)
print(type(graph.get_state(THREAD).values["retrieval_decision"]).__name__)
"""


def test_strict_by_environment_knows_the_types_of_the_state():
    """With LANGGRAPH_STRICT_MSGPACK a state that is annotated with `Decision` needs nothing else."""
    ended = subprocess.run(
        [sys.executable, "-c", STRICT_BY_ENVIRONMENT],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.stdout.strip() == "Decision", ended.stderr
    assert "msgpack" not in ended.stderr


def test_a_router_in_a_graph_puts_nothing_into_checkpoints():
    gate, saver = RetrievalGate(Judge()), InMemorySaver()
    inner = graph_of(gate, checkpointer=saver)
    gate.route(retrieve=inner, direct=inner).invoke({"question": "known?"}, THREAD)
    found = list(saver.list(None))
    assert found
    assert not [key for checkpoint in found for key in checkpoint.metadata if "decided" in key]


def asking(said):
    """A step that asks the user before it goes on."""
    return RunnableLambda(lambda _: f"{said}, {interrupt('May I?')}")


ANSWER_FIRST = AnswerFirst(question_gate=None)
SEARCH = asking("found") | (lambda text: [Document(text)])
CONTENT = RunnableLambda(lambda documents: documents[0].page_content)
ASKING = {
    "a search": ({}, {"retrieve": SEARCH | CONTENT, "look_first": LOOK}, "unknown?"),
    "condensing": ({"condense": asking("known")}, {"retrieve": str}, "And when?"),
    "a draft": ({"llm": asking("Perhaps")}, {"retrieve": str}, "unknown?"),
    # Regression: the interrupt counted as a failure of the LLM, so the other arm ran.
    "an answer": (
        {},
        {"retrieve": str, "direct": asking("answered"), "answer_first": ANSWER_FIRST},
        "known?",
    ),
}


@pytest.mark.parametrize(("gate", "route", "question"), ASKING.values(), ids=list(ASKING))
@each(INVOKES)
def test_what_comes_before_the_decision_may_ask_the_user(call, gate, route, question):
    """Regression: the interrupt counted as a failure, so the user was not asked."""
    router = RetrievalGate(Reader(), **gate).route(**{"direct": str} | route)
    history = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare.")] if "condense" in gate else []
    node = RunnableLambda(lambda state: {"question": state["question"], "chat_history": history})
    node = node | router | (lambda text: {"path": [str(text)]})
    graph = StateGraph(State).add_node("answer", node).add_edge(START, "answer").add_edge("answer", END)
    graph = graph.compile(checkpointer=InMemorySaver())
    assert len(call(graph, {"question": question}, THREAD)["__interrupt__"]) == 1
    (path,) = call(graph, Command(resume="yes"), THREAD)["path"]
    assert path.startswith("answered, yes") == ("answer_first" in route)
