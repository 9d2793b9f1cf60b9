"""LangChain: one request is decided once and drafted once, and its decision disturbs nothing else."""

import json

import pytest
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from rgate_integrations.langchain.router import RetrievalRouter
from tests.begun_answers import LOOK, EventRecorder
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Chat, Judge, Search, each, texts

ARMS = {
    "the guard": lambda gate: gate.guard(Search()) | texts,
    "a step of a chain": lambda gate: RunnablePassthrough() | gate.guard(Search()) | texts,
    "a branch": lambda gate: (
        {"found": gate.guard(Search())} | RunnableLambda(lambda all: texts(all["found"]))
    ),
    "called by a function": lambda gate: RunnableLambda(
        lambda asked: texts(gate.guard(Search()).invoke(asked))
    ),
    "with fallbacks": lambda gate: gate.guard(Search()).with_fallbacks([Search()]) | texts,
    "with a name": lambda gate: gate.guard(Search()).with_config(run_name="guard") | texts,
    "a rewriter": lambda gate: ClaimQueryRewriter(gate) | (lambda queries: [f"about {q}" for q in queries]),
}


@pytest.mark.parametrize("llm", [False, True], ids=["gate alone", "with llm"])
@pytest.mark.parametrize("arm", ARMS.values(), ids=list(ARMS))
@each(SINGLES)
def test_what_runs_in_the_retrieve_arm_takes_the_decision_and_the_draft(call, arm, llm):
    judge, chat, recorder = Judge(), Chat(), EventRecorder()
    gate = RetrievalGate(judge, llm=chat if llm else None, tokens=2)
    chain = gate.route(retrieve=arm(gate), direct=lambda _: [])
    assert "about unknown?" in call(chain, "unknown?", {"callbacks": [recorder]})
    assert judge.calls == [["unknown?"]]
    assert (len(chat.seen), len(recorder.events)) == (llm, 1)
    assert call(chain, "RAISE unknown?")[0] == "about RAISE unknown?", "a failure is carried, too"
    assert len(judge.calls) == 2


@each(BATCHES)
def test_each_question_of_a_batch_carries_its_own_decision(call):
    judge, chat = Judge(), Chat()
    gate = RetrievalGate(judge, llm=chat, tokens=2)
    chain = gate.route(retrieve=gate.guard(Search()) | texts, direct=lambda _: ["direct"])
    found = call(chain, ["unknown a?", "known?", "unknown b?"])
    expected = ["about unknown a?", "direct", "about unknown b?"]
    assert all(answer in answers for answer, answers in zip(expected, found, strict=True))
    assert (len(judge.calls), len(chat.seen)) == (1, 3)


@each(INVOKES)
def test_another_gate_question_or_threshold_is_decided(call):
    first, second = Judge(), Judge()
    gate = RetrievalGate(first)
    inner = RetrievalGate(second).route(retrieve=lambda _: "a", direct=lambda _: "b")
    assert call(gate.route(retrieve=inner, direct=inner), "known?") == "b"
    assert (first.calls, second.calls) == ([["known?"]], [["known?"]])
    again = RunnableLambda(lambda question: f"{question} really") | gate
    assert call(gate.route(retrieve=again, direct=again), "known?").question == "known? really"
    stricter = gate.with_config(configurable={"retrieval_threshold": 0.9})
    assert call(gate.route(retrieve=stricter, direct=stricter), "known?").retrieve is True
    assert first.questions[1:] == ["known?", "known? really", "known?", "known?"]


@each(INVOKES)
def test_a_look_at_what_was_found_leaves_the_callers_threshold_as_it_was(call):
    """Regression: the gate was asked twice, since the look had changed the threshold of the decision."""
    judge = Judge()
    gate = RetrievalGate(judge)
    again = Search() | RunnableLambda(lambda _: "unknown?") | gate
    chain = gate.route(retrieve=again, direct=lambda _: None, look_first=LOOK)
    decision = call(chain, "unknown?", {"configurable": {"retrieval_threshold": 0.9}})
    assert (decision.retrieve, decision.outcome) == (True, "retrieve")
    assert judge.calls == [["unknown?"]]


@each(INVOKES)
def test_a_wrapped_gate_carries_its_decisions(call):
    judge = Judge()
    gate = RetrievalGate(judge)
    wrapped = RunnablePassthrough() | gate.with_config(tags=["mine"]).with_retry()
    chain = RetrievalRouter(wrapped.with_config(tags=["too"]), retrieve=gate, direct=gate)
    assert call(chain, "known?").retrieve is False
    assert len(judge.calls) == 1


@each(INVOKES | STREAMS)
def test_the_users_metadata_is_kept_and_ours_is_named(call):
    mine = {"retrieve": "mine", "p_known": "mine", "draft": "mine", "question": "mine"}
    ours = {"rgate_retrieve": False, "rgate_p_known": 0.8, "rgate_draft": "It is"}
    collector = RunCollectorCallbackHandler()
    chain = RetrievalGate(Judge(), llm=Chat(), tokens=2).route(retrieve=str, direct=str)
    call(chain, "known?", {"metadata": mine, "callbacks": [collector]})
    seen = json.loads(json.dumps(collector.traced_runs[0].child_runs[-1].extra["metadata"]))
    assert {key: seen[key] for key in mine | ours} == mine | ours
