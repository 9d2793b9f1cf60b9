"""LangGraph's checkpoints: a decision comes back as a `Decision`, and without a warning."""

import logging
import subprocess
import sys
from typing import TypedDict

import pytest

from rgate_integrations.decision import Cost, Decision, Draft, Failure, PartialAnswerInfo
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from rgate_integrations.langchain.graph import CHECKPOINT_TYPES
from tests.langchain_fakes import Judge

pytest.importorskip("langgraph")
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from tests.patience import PATIENCE

FULL = Decision(
    question="who wrote hamlet?",
    retrieve=True,
    p_known=0.25,
    threshold=0.75,
    reason="Because.",
    gate="ik",
    partial_answer=PartialAnswerInfo(tokens_held=4, first_token=None),
    draft=Draft(
        text="It is",
        token_ids=(3, 4),
        tokens=("It", " is"),
        logprobs=(-0.5, -9_999.0),
        finished=False,
        source="llm",
        model="m",
        prompt_tokens=7,
    ),
    cost=Cost(model_calls=2, tokens_in=10, tokens_out=3, milliseconds=1.5),
    error=Failure(type="OSError", message="down", hint="Try again."),
    warnings=("one", "two"),
)
FAILED = RetrievalGate(Judge()).invoke("RAISE")
PLAN = ClaimQueryRewriter(Judge(draft="unknown Ada wrote programs."), plan=True).invoke("Who is unknown Ada?")
VALUES = [
    FULL,
    FAILED,
    FULL.draft,
    FULL.cost,
    FULL.partial_answer,
    FULL.error,
    PLAN,
    {"deep": [FULL, {"in": FULL}]},
]


def strict():
    return JsonPlusSerializer(allowed_msgpack_modules=CHECKPOINT_TYPES)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value, caplog):
    serde = strict()
    with caplog.at_level(logging.WARNING):
        again = serde.loads_typed(serde.dumps_typed(value))
    assert again == value
    assert type(again) is type(value)
    assert caplog.records == []


# A graph that decides, waits for a person, and goes on with the decision out of its checkpoint.


class Typed(TypedDict, total=False):
    question: str
    decision: Decision
    answer: str


def decided(state):
    return {"decision": RetrievalGate(Judge()).invoke(state["question"])}


def asked(state):
    reply = interrupt(state["decision"])
    return {"answer": f"{type(state['decision']).__name__} {state['decision'].p_known} {reply}"}


def graph_of(schema, deciding, saver):
    graph = StateGraph(schema)
    graph.add_node("decide", deciding)
    graph.add_node("ask", asked)
    graph.add_edge(START, "decide")
    graph.add_edge("decide", "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def test_a_decision_survives_an_interrupt(caplog):
    graph = graph_of(Typed, decided, InMemorySaver(serde=strict()))
    config = {"configurable": {"thread_id": "1"}}
    with caplog.at_level(logging.WARNING):
        found = graph.invoke({"question": "unknown?"}, config)
        (waiting,) = found["__interrupt__"]
        assert isinstance(waiting.value, Decision)
        assert isinstance(graph.get_state(config).values["decision"], Decision)
        assert graph.invoke(Command(resume="go"), config)["answer"] == "Decision 0.2 go"
    assert caplog.records == []


STRICT_BY_ENVIRONMENT = """
import logging
from tests.test_langchain_checkpoints import *
logging.basicConfig(level=logging.WARNING)
graph = graph_of(Typed, decided, InMemorySaver())
config = {"configurable": {"thread_id": "1"}}
graph.invoke({"question": "unknown?"}, config)
print(graph.invoke(Command(resume="go"), config)["answer"])
"""


def test_strict_by_environment_knows_the_types_of_the_state():
    """With LANGGRAPH_STRICT_MSGPACK a state that is annotated with `Decision` needs nothing else."""
    import os

    environment = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"}
    command = [sys.executable, "-c", STRICT_BY_ENVIRONMENT]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert ended.stdout.strip() == "Decision 0.2 go"
    assert "msgpack" not in ended.stderr
