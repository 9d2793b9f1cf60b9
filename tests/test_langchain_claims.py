"""LangChain: from questions to the claim queries that are worth searching."""

import pytest
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Judge, Search, each

DRAFT = "unknown Ada wrote programs. Babbage built engines."


@each(SINGLES)
def test_queries_of_a_question(call):
    rewriter = ClaimQueryRewriter(Judge(draft=DRAFT), filter_claims=True)
    assert call(rewriter, "Who is unknown Ada?") == ["Who is unknown Ada?", "unknown Ada wrote programs"]
    assert call(rewriter, "known?") == []
    assert call(ClaimQueryRewriter(Judge()), {"question": "unknown?"}) == ["unknown?"]


@each(SINGLES)
def test_options(call):
    unfiltered = ClaimQueryRewriter(Judge(draft=DRAFT), always_include_question=False)
    assert call(unfiltered, "Who is unknown Ada?") == [
        "unknown Ada wrote programs",
        "Ada Babbage built engines",
    ]
    plan = call(ClaimQueryRewriter("constant:always", plan=True, max_queries=1), {"question": "who?"})
    assert [q.text for q in plan.queries] == ["who?"]


@each(BATCHES)
def test_a_batch_makes_one_gate_call_for_the_questions_and_one_for_their_claims(call):
    judge = Judge(draft=DRAFT)
    asked = ["Who is unknown Ada?", "known?", "Who was unknown Ada?"]
    found = call(ClaimQueryRewriter(judge, filter_claims=True), asked)
    assert [len(queries) for queries in found] == [2, 0, 2]
    claims = ["unknown Ada wrote programs", "Ada Babbage built engines"]
    assert judge.calls == [asked, claims * 2]


@each({**INVOKES, **BATCHES})
def test_each_item_has_a_run_with_the_gates_as_a_child(call):
    collector = RunCollectorCallbackHandler()
    batched = call in BATCHES.values()
    value = ["unknown?", "known?"] if batched else "unknown?"
    call(ClaimQueryRewriter(Judge()), value, {"callbacks": [collector]})
    assert [run.name for run in collector.traced_runs] == ["ClaimQueryRewriter"] * (2 if batched else 1)
    assert [[child.name for child in run.child_runs] for run in collector.traced_runs] == [
        ["RetrievalGate"]
    ] * len(collector.traced_runs)


@each(BATCHES)
def test_an_item_without_a_question_keeps_its_place(call):
    found = call(ClaimQueryRewriter(Judge()), ["unknown?", {"x": 1}, "known?"], return_exceptions=True)
    assert found[0] == ["unknown?"]
    assert isinstance(found[1], InvalidQuestionError)
    assert found[2] == []
    with pytest.raises(InvalidQuestionError):
        call(ClaimQueryRewriter(Judge()), ["unknown?", {"x": 1}])


@each(BATCHES)
def test_a_rewriter_that_fails(call):
    def broken(questions, drafts):
        raise OSError("model gone")

    rewriter = ClaimQueryRewriter(RetrievalGate(Judge()), rewriter=broken)
    with pytest.raises(OSError, match="model gone"):
        call(rewriter, ["unknown?", "known?"])


@each(SINGLES)
def test_every_query_is_searched(call):
    chain = ClaimQueryRewriter(Judge(draft=DRAFT), filter_claims=True) | Search().map()
    found = call(chain, "Who is unknown Ada?")
    assert [documents[0].page_content for documents in found] == [
        "about Who is unknown Ada?",
        "about unknown Ada wrote programs",
    ]
