"""LangChain: one request is decided once and drafted once, and its decision disturbs nothing else."""

import json

import pytest
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import (
    ClaimQueryRewriter,
    RetrievalGate,
    RetrievalGateMiddleware,
    gate_node,
)
from rgate_integrations.langchain.router import RetrievalRouter
from tests.begun_answers import LOOK, EventRecorder, Knowing, Writer
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Chat, Judge, Search, each, texts


def as_found(state):
    return [f"about {state['retrieval_decision'].question}"]


ARMS = {
    "the guard": lambda gate: gate.guard(Search()) | texts,
    "a step of a chain": lambda gate: RunnablePassthrough() | gate.guard(Search()) | texts,
    "a branch": lambda gate: (
        {"found": gate.guard(Search())} | RunnableLambda(lambda all: texts(all["found"]))
    ),
    "called by a function": lambda gate: (
        RunnableLambda(lambda asked: gate.guard(Search()).invoke(asked)) | texts
    ),
    "with fallbacks": lambda gate: gate.guard(Search()).with_fallbacks([Search()]) | texts,
    "with a name": lambda gate: gate.guard(Search()).with_config(run_name="guard") | texts,
    "a rewriter": lambda gate: ClaimQueryRewriter(gate) | (lambda queries: [f"about {q}" for q in queries]),
    # Regression: each of these emitted the decision a second time.
    "another router": lambda gate: gate.route(retrieve=gate.guard(Search()) | texts, direct=lambda _: []),
    "a node of a graph": lambda gate: gate_node(gate) | as_found,
    "an agent": lambda gate: (
        RunnableLambda(
            lambda asked: RetrievalGateMiddleware(gate, tools=["x"]).before_agent({"messages": [asked]}, None)
        )
        | as_found
    ),
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


def all_texts(searches):
    return [text for documents in searches for text in texts(documents)]


AHEAD = {
    **{name: ARMS[name] for name in ("the guard", "a branch", "with a name", "called by a function")},
    "a guard in a guard": lambda gate: gate.guard(gate.guard(Search())) | texts,
    "a rewriter": lambda gate: ClaimQueryRewriter(gate) | Search().map() | all_texts,
    # Regression: the gate decided about each of the other questions, and for a known one nothing was found.
    "other questions": lambda gate: (
        RunnableLambda(lambda asked: [asked, f"{asked} known"]) | gate.guard(Search()).map() | all_texts
    ),
}
LOOKS = {
    "look first": {"look_first": LOOK},
    "prefetch": {"answer_first": AnswerFirst(tokens=4, question_gate=None, prefetch=True)},
    "both": {"look_first": LOOK, "answer_first": AnswerFirst(tokens=4, question_gate=None)},
}


@pytest.mark.parametrize("options", LOOKS.values(), ids=list(LOOKS))
@pytest.mark.parametrize("llm", [False, True], ids=["gate alone", "with llm"])
@pytest.mark.parametrize("arm", AHEAD.values(), ids=list(AHEAD))
@each(INVOKES)
def test_what_is_searched_ahead_is_searched_without_a_decision_of_its_own(call, arm, llm, options):
    """Regression: the gate decided twice, and found nothing to compare for a known question."""
    judge, chat, recorder = Judge(), Chat(), EventRecorder()
    gate = RetrievalGate(judge, llm=chat if llm else None, tokens=2)
    chain = gate.route(retrieve=arm(gate), direct=Writer() | (lambda answer: [answer.text]), **options)
    for count, question in enumerate(["unknown?", "known?"], start=1):
        found = call(chain, question, {"callbacks": [recorder]})
        assert ("about unknown?" in found) is (question == "unknown?")
        assert (len(judge.calls), len(recorder.events)) == (count, count)
        assert len(chat.seen) == (count if llm and "answer_first" not in options else 0)
        assert (recorder.events[-1]["p_helps"] is not None) is ("look_first" in options)


@each(BATCHES)
def test_what_is_searched_ahead_of_a_batch_is_each_question_alone(call):
    judge, search, recorder = Judge(draft="Ada wrote it. Ada did."), Search(), EventRecorder()
    gate = RetrievalGate(judge)
    chain = gate.route(retrieve=gate.guard(search) | texts, direct=lambda _: ["direct"], look_first=LOOK)
    asked = ["unknown a?", "known?", {"x": 1}, "RAISE"]
    found = call(chain, asked[:3], {"callbacks": [recorder]}, return_exceptions=True)
    assert [found[0][0], found[1][0]] == ["about unknown a?", "about known?"], "a known one may be read, too"
    assert isinstance(found[2], InvalidQuestionError)
    assert (judge.calls, sorted(search.queries)) == ([["unknown a?", "known?"]], ["known?", "unknown a?"])
    assert "about RAISE" in call(chain, asked[3:])[0], "a failure reads what was found"
    assert (len(judge.calls), len(search.queries)) == (2, 3)


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


@pytest.mark.model
@each(SINGLES)
def test_what_the_llm_wrote_is_not_overruled_by_the_question_alone(call):
    """Regression: the default gate of a guard without an LLM decided again."""
    recorder = EventRecorder()
    guard = RetrievalGate().guard(Search())
    chain = RetrievalGate(llm=Knowing(), tokens=2).route(retrieve=guard | texts, direct=lambda _: [])
    asked = "What is the unknown error E-42?"
    assert f"about {asked}" in call(chain, asked, {"callbacks": [recorder]})
    assert [event["gate"] for event in recorder.events] == ["answer"]


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


@pytest.mark.parametrize("answer_first", [False, True], ids=["question", "answer first"])
@each(INVOKES)
def test_a_guard_in_the_retrieve_arm_searches_for_the_question_in_other_words(answer_first, call):
    """Regression: it decided anew about a rewritten question, so that the arm had no passages."""
    search, judge = Search(), Judge()
    gate = RetrievalGate(judge)
    arm = RunnableLambda(lambda question: "in other words") | gate.guard(search)
    router = gate.route(
        retrieve=arm, direct=RunnableLambda(lambda question: "Perhaps."), answer_first=answer_first
    )
    assert "about in other words" in texts(call(router, "unknown?"))
    assert "in other words" not in judge.questions


def test_the_claims_of_the_draft_are_searched_for_with_the_question_in_other_words():
    search, gate = Search(), RetrievalGate(Judge(draft="It is blue. It is deep."))
    arm = RunnableLambda(lambda question: "in other words") | gate.guard(search)
    gate.route(retrieve=arm, direct=RunnableLambda(lambda question: "")).invoke("unknown?")
    assert sorted(search.queries) == ["in other words", "other words is blue", "other words is deep"]
