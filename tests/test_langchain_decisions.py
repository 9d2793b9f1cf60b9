"""LangChain's decision models: a gate as one, and one as a gate, with the names of 1.8 and of the main branch."""

import subprocess
import sys

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import GatedRetriever, RetrievalGate
from tests.langchain_fakes import INVOKES, SINGLES, Judge, Search, each

pytest.importorskip("langchain_core.decisions", reason="langchain-core >= 1.8")

from langchain_core.decisions import BaseDecisionModel, ChoiceAnswer, ClassifierResponse, NoulAnswer

from rgate_integrations.langchain.decisions import KNOWS, ROUTE, GateDecisionModel


class Says(BaseDecisionModel):
    """Gives the probability that a question ends in, or fails."""

    model: str = "says"

    @property
    def _provider(self):
        return "tests"

    def _classify(self, state, questions):
        assert questions == {"known": KNOWS}
        if "RAISE" in state:
            raise ConnectionError("no server")
        answer = NoulAnswer(type="noul", noul=float(state.split()[-1]))
        if "CHOICE" in state:
            answer = ChoiceAnswer(type="choice", choice="a", probabilities={"a": 1.0}, confidence=1.0)
        return ClassifierResponse(model=self.model, answers={"known": answer})


@each(INVOKES)
def test_a_gate_is_a_decision_model(call):
    model = GateDecisionModel(gate=Judge())
    asked = {"knows": KNOWS, "route": ROUTE}
    known = call(model, {"state": "known?", "questions": asked})
    assert known.nouls["knows"].noul == known.choices["route"].probabilities["direct"] == 0.8
    unknown = call(model, {"state": [HumanMessage("unknown?")], "questions": asked})
    assert (unknown.choices["route"].choice, unknown.choices["route"].confidence) == ("retrieve", 0.8)
    failed = call(model, {"state": "RAISE", "questions": asked})
    assert (failed.choices["route"].choice, failed.nouls["knows"].noul) == ("retrieve", 0.0)
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]
    follow_up = call(model, {"state": turns, "questions": asked})
    assert (follow_up.choices["route"].choice, follow_up.nouls["knows"].noul) == ("retrieve", 0.0)
    bug = KNOWS.model_copy(update={"instructions": "A bug?"})
    with pytest.raises(ConfigurationError, match="'bug' is not one"):
        call(model, {"state": "x?", "questions": {"bug": bug}})


@each(SINGLES)
def test_a_decision_model_is_a_gate(call):
    gate = RetrievalGate(Says())
    known, unknown = call(gate, "known 0.9"), call(gate, "known 0.1")
    assert (known.retrieve, known.p_known, unknown.retrieve, unknown.p_known) == (False, 0.9, True, 0.1)
    assert known.reason == "says says that the LLM knows with probability 0.90."
    assert call(gate, "known 0.9", {"configurable": {"retrieval_threshold": 0.95}}).retrieve
    assert not call(RetrievalGate(Says(), threshold=0.05), "known 0.1").retrieve


def test_what_it_cannot_answer_is_retrieved_for():
    decisions = RetrievalGate(Says()).batch(["RAISE 1", "CHOICE 1", "known 1.0"])
    assert [each.retrieve for each in decisions] == [True, True, False]
    assert [each.error and each.error.type for each in decisions] == [
        "ConnectionError",
        "EvidenceError",
        None,
    ]
    assert "'choice' and no probability" in decisions[1].reason


@each(INVOKES)
def test_it_guards_and_routes(call):
    search = Search()
    for guarded in (RetrievalGate(Says()).guard(search), GatedRetriever(retriever=search, gate=Says())):
        assert call(guarded, "known 0.9") == []
        assert call(guarded, "known 0.1")
    router = RetrievalGate(Says()).route(retrieve=lambda _: "read", direct=lambda _: "knew")
    assert [call(router, "known 0.9"), call(router, "known 0.1")] == ["knew", "read"]


# What langchain-core's main branch calls them; no release has these names yet.
MAIN_BRANCH = """
import asyncio, sys, types
from typing import Any
from langchain_core.runnables import RunnableSerializable
from pydantic import BaseModel

class Predicate(BaseModel):
    instructions: str

class Choice(Predicate):
    choices: dict[str | bool, str | None]

class PredicateAnswer(BaseModel):
    type: str
    probability: float

class ChoiceAnswer(BaseModel):
    type: str
    choice: str
    probabilities: dict[str, float]
    confidence: float

class DecisionResponse(BaseModel):
    model: str
    answers: dict[str, Any]

class BaseDecisionModel(RunnableSerializable[Any, Any]):
    model: str

    def invoke(self, input, config=None, **options):
        return self._decide(input)

    async def ainvoke(self, input, config=None, **options):
        return await self._adecide(input)

module = types.ModuleType("langchain_core.decisions")
for each in (Predicate, Choice, PredicateAnswer, ChoiceAnswer, DecisionResponse, BaseDecisionModel):
    setattr(module, each.__name__, each)
sys.modules["langchain_core.decisions"] = module
import langchain_core
langchain_core.decisions = module

from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.decisions import KNOWS, ROUTE, GateDecisionModel
from tests.langchain_fakes import Judge

model = GateDecisionModel(gate=Judge())
request = {"input": "known?", "questions": {"knows": KNOWS, "route": ROUTE}}
for found in (model.invoke(request), asyncio.run(model.ainvoke(request))):
    assert found.answers["knows"].probability == 0.8, found
    assert found.answers["route"].choice == "direct", found
gate = RetrievalGate(model)
assert [gate.invoke(each).retrieve for each in ("known?", "unknown?")] == [False, True]
"""


def test_the_names_of_the_main_branch():
    done = subprocess.run([sys.executable, "-c", MAIN_BRANCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
