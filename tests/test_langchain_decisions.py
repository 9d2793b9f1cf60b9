"""LangChain's decision models as gates, with the names of 1.8 and of the main branch."""

import subprocess
import sys

import pytest

from rgate_integrations.langchain import GatedRetriever, RetrievalGate
from tests.langchain_fakes import SINGLES, Search, each

pytest.importorskip("langchain_core.decisions", reason="langchain-core >= 1.8")

from langchain_core.decisions import BaseDecisionModel, ChoiceAnswer, ClassifierResponse, NoulAnswer

from rgate_integrations.langchain.decisions import KNOWS


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


@each(SINGLES)
def test_a_decision_model_is_a_gate(call):
    gate = RetrievalGate(Says())
    known, unknown = call(gate, "known 0.9"), call(gate, "known 0.1")
    assert (known.retrieve, known.p_known, unknown.retrieve, unknown.p_known) == (False, 0.9, True, 0.1)
    assert known.reason == "says says that the LLM knows the answer with probability 0.90."
    assert call(gate, "known 0.9", {"configurable": {"retrieval_threshold": 0.95}}).retrieve
    search = Search()
    for guarded in (gate.guard(search), GatedRetriever(retriever=search, gate=Says())):
        assert [len(call(guarded, asked)) for asked in ("known 0.9", "known 0.1")] == [0, 2]


def test_what_it_cannot_answer_is_retrieved_for():
    failed, other, known = RetrievalGate(Says()).batch(["RAISE 1", "CHOICE 1", "known 1.0"])
    assert [each.retrieve for each in (failed, other, known)] == [True, True, False]
    assert (failed.error.type, other.error.type) == ("ConnectionError", "EvidenceError")
    assert "'choice' instead of a probability" in other.reason


def test_one_that_gives_too_few_answers_retrieves():
    """Regression: it was a RuntimeError for the caller."""

    class GivesOne(Says):
        def batch(self, inputs, *args, **kwargs):
            return super().batch(inputs, *args, **kwargs)[:1]

    decisions = RetrievalGate(GivesOne()).batch(["known 0.9", "known 0.9"])
    assert [(each.retrieve, each.error is not None) for each in decisions] == [(True, True)] * 2


# What langchain-core's main branch calls them; no release has these names yet.
MAIN_BRANCH = """
import asyncio, sys, types
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

class Predicate(BaseModel):
    instructions: str

class PredicateAnswer(BaseModel):
    probability: float

class DecisionResponse(BaseModel):
    answers: dict[str, PredicateAnswer]

class BaseDecisionModel(RunnableLambda):
    model: str = "says"

module = types.ModuleType("langchain_core.decisions")
for each in (Predicate, BaseDecisionModel):
    setattr(module, each.__name__, each)
sys.modules["langchain_core.decisions"] = module
import langchain_core
langchain_core.decisions = module

from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.decisions import KNOWS

def answer(request):
    assert request["questions"] == {"known": KNOWS}
    return DecisionResponse(answers={"known": PredicateAnswer(probability=float(request["input"].split()[-1]))})

gate = RetrievalGate(BaseDecisionModel(answer))
for decisions in (gate.batch(["known 0.9", "unknown 0.1"]), asyncio.run(gate.abatch(["known 0.9", "unknown 0.1"]))):
    assert [decision.retrieve for decision in decisions] == [False, True], decisions
"""


def test_the_names_of_the_main_branch():
    done = subprocess.run([sys.executable, "-c", MAIN_BRANCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
