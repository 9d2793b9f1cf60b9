"""Nothing is drafted or decided twice in one request: the LLM's and the gate's calls are counted."""

import asyncio

import pytest
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)
from rgate_integrations.llama_index.agents import GatedTool
from tests.llama_index_parts import (
    CLAIMS,
    ScriptedGate,
    ScriptedLLM,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
)
from tests.llama_index_writers import Shelf, over
from tests.scripted_proxy import ScriptedProxy

QUESTION = "what is unknown?"


class Same(BaseQueryTransform):
    """Makes a new bundle with the same question, as LlamaIndex's transforms do."""

    def _run(self, query_bundle, metadata):
        return QueryBundle(query_bundle.query_str, custom_embedding_strs=["x"])

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


class Other(Same):
    """Asks another question."""

    def _run(self, query_bundle, metadata):
        return QueryBundle("another unknown?")


@pytest.fixture
def gate():
    return ScriptedGate()


@pytest.fixture
def llm():
    return ScriptedLLM()


def gated(inner, gate, llm=None, **options):
    return GatedQueryEngine(inner, over(Shelf()), gate, llm=llm, tokens=2, **options)


def drafted(llm):
    """How many drafts an LLM was asked for."""
    return sum("max_tokens" in options for options in llm.asked)


def engine_and_claims(gate, llm, streaming):
    fusion = ClaimFusionRetriever([Shelf()], gate, llm=llm, filter_claims=True)
    return gated(over(fusion, streaming=streaming), gate, llm)


def engine_and_claims_of_the_gate(gate, llm, streaming):
    """The claims are those of whatever draft there is: no LLM is given for them."""
    return gated(
        over(ClaimFusionRetriever([Shelf()], gate, filter_claims=True), streaming=streaming), gate, llm
    )


def engine_transform_and_claims(gate, llm, streaming):
    fusion = ClaimFusionRetriever([Shelf()], gate, llm=llm, filter_claims=True)
    return gated(TransformQueryEngine(over(fusion, streaming=streaming), Same()), gate, llm)


def guard_and_claims(gate, llm, streaming):
    fusion = ClaimFusionRetriever([Shelf()], gate, llm=llm, filter_claims=True)
    return over(GatedRetriever(fusion, gate, llm=llm), streaming=streaming)


def router_and_claims(gate, llm, streaming):
    return router(
        gate,
        llm,
        over(ClaimFusionRetriever([Shelf()], gate, llm=llm, filter_claims=True), streaming=streaming),
    )


def router_and_guard(gate, llm, streaming):
    return router(gate, llm, over(GatedRetriever(Shelf(), gate, llm=llm), streaming=streaming))


def router_and_engine_and_claims(gate, llm, streaming):
    return router(gate, llm, engine_and_claims(gate, llm, streaming))


def router(gate, llm, inner):
    tools = [
        QueryEngineTool.from_defaults(over(Shelf()), name="direct", description="d"),
        QueryEngineTool.from_defaults(inner, name="docs", description="r"),
    ]
    return RouterQueryEngine(RetrievalGateSelector(gate, retrieve="docs", llm=llm), tools, llm=MockLLM())


COMPOSITIONS = (
    engine_and_claims,
    engine_and_claims_of_the_gate,
    engine_transform_and_claims,
    guard_and_claims,
    router_and_claims,
    router_and_guard,
    router_and_engine_and_claims,
)


@pytest.mark.parametrize("make", COMPOSITIONS)
@every_style
def test_one_draft_and_one_decision_a_request(gate, llm, make, style):
    engine = make(gate, llm, style.endswith("stream"))
    for times in (1, 2):  # the same question is another request when it is asked again
        with hearing() as events:
            text, _ = ask(engine, QUESTION, style)
        assert QUESTION in text
        assert drafted(llm) == times
        assert gate.questions.count([QUESTION]) == times
        assert [decision.question for decision in decisions_in(events)] == [QUESTION]
    claims = [asked for asked in gate.questions if asked != [QUESTION]]
    assert len(claims) == (0 if make is router_and_guard else 2)  # a batch a request


@both_ways
def test_the_same_bundle_asked_again_is_another_request(gate, llm, call):
    engine, bundle = router_and_guard(gate, llm, streaming=False), QueryBundle(QUESTION)
    for _ in range(3):
        call(engine, "query", bundle)
    assert gate.questions == [[QUESTION]] * 3
    assert drafted(llm) == 3


@both_ways
def test_a_decision_is_gone_with_its_request(gate, llm, call):
    guarded = GatedRetriever(Shelf(), gate, llm=llm)
    engine = gated(over(guarded), gate, llm)
    call(engine, "query", QUESTION)
    call(guarded, "retrieve", QUESTION)
    router_and_guard(gate, llm, streaming=False).query(QUESTION)
    guarded.retrieve(QUESTION)
    assert gate.questions == [[QUESTION]] * 4


@both_ways
def test_another_question_inside_of_a_request_is_decided_for_itself(gate, llm, call):
    inner = TransformQueryEngine(over(GatedRetriever(Shelf(), gate, llm=llm)), Other())
    call(gated(inner, gate, llm), "query", QUESTION)
    assert gate.questions == [[QUESTION], ["another unknown?"]]
    assert drafted(llm) == 2


@both_ways
def test_another_gate_decides_on_the_draft_that_is_there(gate, llm, call):
    other = ScriptedGate()
    call(gated(over(GatedRetriever(Shelf(), other, llm=llm)), gate, llm), "query", QUESTION)
    assert gate.questions == other.questions == [[QUESTION]]
    assert other.drafts == gate.drafts
    assert drafted(llm) == 1


@both_ways
def test_claims_are_those_of_the_draft_that_is_there_whichever_gate_judged_it(gate, llm, call):
    other = ScriptedGate()
    call(
        gated(over(ClaimFusionRetriever([Shelf()], other, filter_claims=True)), gate, llm), "query", QUESTION
    )
    assert gate.questions == [[QUESTION]]
    assert other.questions == [["unknown is"]]  # the claim of the two tokens
    assert drafted(llm) == 1


@both_ways
def test_another_llm_writes_a_draft_of_its_own(gate, llm, call):
    better = ScriptedLLM()
    fusion = ClaimFusionRetriever([Shelf()], gate, llm=better, filter_claims=True)
    call(gated(over(fusion), gate, llm), "query", QUESTION)
    assert drafted(llm) == drafted(better) == 1
    assert gate.questions[:2] == [[QUESTION], [QUESTION]]


@both_ways
def test_gates_that_were_made_alike_are_one_gate(call):
    proxy = ScriptedProxy(fixed=CLAIMS.text)

    def gate(threshold=1.0):
        return load_gate("ik", proxy=proxy, threshold=threshold)

    call(
        gated(over(ClaimFusionRetriever([Shelf()], gate(), filter_claims=True)), gate()),
        "query",
        "Who wrote Hamlet?",
    )
    assert proxy.calls == ["generate", "score", "score"]  # the draft, the question, and all claims
    proxy.calls.clear()
    call(gated(over(GatedRetriever(Shelf(), gate(0.9))), gate()), "query", "Who wrote Hamlet?")
    assert proxy.calls.count("generate") == 2


@both_ways
def test_another_threshold_inside_is_a_decision_of_its_own(call):
    proxy = ScriptedProxy(fixed=CLAIMS.text)
    gate = load_gate("ik", proxy=proxy)
    listed = Shelf()
    guarded = GatedRetriever(listed, gate).with_threshold(0.0)
    call(gated(over(guarded), gate).with_threshold(1.0), "query", "Who wrote Hamlet?")
    assert listed.queries == []


@both_ways
def test_an_agents_tool_carries_its_decision_too(gate, llm, call):
    tool = QueryEngineTool.from_defaults(
        over(ClaimFusionRetriever([Shelf()], gate, llm=llm, filter_claims=True))
    )
    call(GatedTool(tool, gate, llm=llm), "call", QUESTION)
    assert gate.questions == [[QUESTION], ["unknown is me"]]  # the second is the claim
    assert drafted(llm) == 1


async def test_requests_side_by_side_keep_their_own_decisions(gate, llm):
    engine = engine_and_claims(gate, llm, streaming=False)
    questions = [f"what is unknown {i}?" for i in range(20)]
    responses = await asyncio.gather(*(engine.aquery(question) for question in questions))
    assert [r.metadata["rgate"]["question"] for r in responses] == questions
    assert sorted(asked for (asked,) in gate.questions if asked in questions) == sorted(questions)
    assert drafted(llm) == 20


@pytest.mark.parametrize("retriever", [ClaimFusionRetriever, GatedRetriever])
def test_a_retriever_that_decides_itself_cannot_search_ahead(gate, retriever):
    inner = [Shelf()] if retriever is ClaimFusionRetriever else Shelf()
    with pytest.raises(ConfigurationError, match=f"{retriever.__name__} decides and drafts itself"):
        gated(over(retriever(inner, gate)), gate, look_first=True)
