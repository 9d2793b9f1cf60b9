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

    def ask(state):
        answers = call(model, {"state": state, "questions": {"knows": KNOWS, "route": ROUTE}})
        return answers.nouls["knows"].noul, answers.choices["route"].choice

    assert ask("known?") == (0.8, "direct")
    assert ask([HumanMessage("unknown?")]) == (0.2, "retrieve")
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]
    assert ask("RAISE") == ask(turns) == (0.0, "retrieve")
    bug = KNOWS.model_copy(update={"instructions": "A bug?"})
    with pytest.raises(ConfigurationError, match="cannot answer the question 'bug'"):
        call(model, {"state": "x?", "questions": {"bug": bug}})


@each(SINGLES)
def test_a_decision_model_is_a_gate(call):
    gate = RetrievalGate(Says())
    known, unknown = call(gate, "known 0.9"), call(gate, "known 0.1")
    assert (known.retrieve, known.p_known, unknown.retrieve, unknown.p_known) == (False, 0.9, True, 0.1)
    assert known.reason == "says says that the LLM knows with probability 0.90."
    assert call(gate, "known 0.9", {"configurable": {"retrieval_threshold": 0.95}}).retrieve
    search = Search()
    for guarded in (gate.guard(search), GatedRetriever(retriever=search, gate=Says())):
        assert [len(call(guarded, asked)) for asked in ("known 0.9", "known 0.1")] == [0, 2]


def test_what_it_cannot_answer_is_retrieved_for():
    failed, other, known = RetrievalGate(Says()).batch(["RAISE 1", "CHOICE 1", "known 1.0"])
    assert [each.retrieve for each in (failed, other, known)] == [True, True, False]
    assert (failed.error.type, other.error.type) == ("ConnectionError", "EvidenceError")
    assert "'choice' instead of a probability" in other.reason


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
