"""Nothing is drafted or decided twice in one request, in any composition: calls of LLM and gate are counted."""

import asyncio
import functools
import threading
from types import SimpleNamespace

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import Response
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.llms import LLMMetadata, MockLLM
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryEngine,
    ClaimQueryTransform,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)
from rgate_integrations.llama_index.agents import ANSWER_YOURSELF, GatedTool
from tests.begun_answers import KNOWN, LOOK, TEXT, Reader
from tests.llama_index_parts import (
    CLAIMS,
    Rag,
    ScriptedGate,
    Shelf,
    Writer,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    over,
)
from tests.scripted_proxy import ScriptedProxy

QUESTION = "what is unknown?"
HARD = "which quartet wrote Zorba?"
ELSEWHERE = "is bread baked?"


@pytest.fixture
def llm():
    return Writer()


def drafted(llm):
    """How many drafts an LLM was asked for."""
    return sum("max_tokens" in options for options in llm.calls)


def gated(inner, gate, llm=None, **options):
    return GatedQueryEngine(inner, over(Shelf()), gate, llm=llm, tokens=2, **options)


def fusion(gate, llm=None):
    return ClaimFusionRetriever([Shelf()], gate, draft_llm=llm, filter_claims=True)


def router(gate, inner):
    tools = [
        QueryEngineTool.from_defaults(over(Shelf()), name="direct", description="d"),
        QueryEngineTool.from_defaults(inner, name="docs", description="r"),
    ]
    return RouterQueryEngine(RetrievalGateSelector(gate, retrieve="docs"), tools, llm=MockLLM())


def router_and_guard(gate, llm, **how):
    return router(gate, over(GatedRetriever(Shelf(), gate), **how))


def engine_and_claims(gate, llm, **how):
    return gated(over(fusion(gate, llm), **how), gate, llm)


COMPOSITIONS = {
    "router, guard": router_and_guard,
    "engine, claims": engine_and_claims,
    # No LLM is given for the claims: they are those of whatever draft there is.
    "engine, claims of the gate": lambda g, llm, **how: gated(over(fusion(g), **how), g, llm),
    "engine, transform, claims": lambda g, llm, **how: gated(
        TransformQueryEngine(over(fusion(g, llm), **how), HyDEQueryTransform(MockLLM())), g, llm
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@every_style
def test_one_draft_and_one_decision_a_request(gate, llm, name, style):
    engine = COMPOSITIONS[name](gate, llm, streaming=style.endswith("stream"))
    for times in (1, 2):  # the same question is another request when it is asked again
        with hearing() as events:
            text, response = ask(engine, QUESTION, style)
        assert QUESTION in text
        assert response.source_nodes
        assert drafted(llm) == (0 if name == "router, guard" else times)
        assert gate.questions.count(QUESTION) == times
        assert [decision.question for decision in decisions_in(events)] == [QUESTION]
    claims = [asked for asked in gate.calls if asked != [QUESTION]]
    assert len(claims) == (0 if name == "router, guard" else 2)  # a batch a request


@both_ways
@pytest.mark.parametrize("guards", [False, True], ids=["tool", "guarded tool"])
@pytest.mark.parametrize("make", [GatedRetriever, lambda inner, gate: ClaimFusionRetriever([inner], gate)])
@pytest.mark.parametrize("argument", ["input", "query"])
def test_the_question_of_an_agent_reaches_a_retriever_in_its_own_words(gate, call, make, guards, argument):
    """Regression: LlamaIndex's tool asks for "input is …", which was judged anew, and "input" was in every claim."""
    shelf = Shelf()
    tool = RetrieverTool.from_defaults(make(shelf, gate), name="docs")
    call(GatedTool(tool, gate) if guards else tool, "call", **{argument: QUESTION})
    assert gate.calls == [[QUESTION]]
    assert QUESTION in shelf.queries
    assert not any(argument in query for query in shelf.queries)


@both_ways
@pytest.mark.parametrize("guards", [False, True], ids=["tool", "guarded tool"])
@pytest.mark.parametrize("routes", [False, True], ids=["engine", "router"])
@pytest.mark.parametrize("thing", ["a thing", "unknown"])
@pytest.mark.parametrize("argument", ["query", "search_text"])
def test_the_question_of_an_agent_reaches_an_engine_in_its_own_words(
    gate, call, guards, routes, thing, argument
):
    """Regression: asked for a "query", LlamaIndex's tool asks "{'query': …}", and the braces were judged, too."""
    question, shelf = f'isn\'t it\n"{thing}"?', Shelf()
    engine = GatedQueryEngine.from_defaults(over(GatedRetriever(shelf, gate)), gate, llm=MockLLM())
    engine = router(gate, engine) if routes else engine
    tool = QueryEngineTool.from_defaults(engine, name="docs", description="d")
    output = call(GatedTool(tool, gate) if guards else tool, "call", **{argument: question})
    assert gate.calls == [[question]]
    assert shelf.queries == ([question] if thing == "unknown" else [])
    if not routes:  # a router passes the query to its tools as it is
        assert "{'" not in output.content


@both_ways
def test_a_decision_that_also_read_other_arguments_reaches_an_engine(gate, call):
    shelf = Shelf()
    engine = GatedQueryEngine.from_defaults(over(GatedRetriever(shelf, gate)), gate, llm=MockLLM())

    def search(query: str, customer: str) -> str:
        """Search."""
        return str(engine.query(query))

    async def asearch(query: str, customer: str) -> str:
        return str(await engine.aquery(query))

    # In the oldest LlamaIndex, a function that is called in a thread does not see the decision.
    tool = FunctionTool.from_defaults(search, async_fn=asearch)
    with hearing() as events:
        output = call(GatedTool(tool, gate), "call", query="a thing", customer="unknown GmbH")
    assert output.content != ANSWER_YOURSELF
    assert shelf.queries == ["a thing"]
    assert gate.calls == [["a thing"], ["Tell me more about unknown GmbH in customer."]]
    (decision,) = decisions_in(events)
    assert (decision.question, decision.retrieve) == ("a thing", True)
    assert "argument “customer”" in decision.reason


@both_ways
def test_a_decision_is_gone_with_its_request(gate, llm, call):
    guarded, bundle = GatedRetriever(Shelf(), gate), QueryBundle(QUESTION)
    for engine in (gated(over(guarded), gate, llm), router_and_guard(gate, llm)):
        call(engine, "query", bundle)
        call(engine, "query", bundle)
        call(guarded, "retrieve", QUESTION)
    assert gate.calls == [[QUESTION]] * 6
    assert drafted(llm) == 2


@both_ways
def test_another_question_inside_of_a_request_is_decided_for_itself(gate, llm, call):
    inner = over(GatedRetriever(Shelf(), gate))
    call(gated(TransformQueryEngine(inner, DecomposeQueryTransform(MockLLM())), gate, llm), "query", QUESTION)
    ((first,), (second,)) = gate.calls
    assert first == QUESTION != second
    assert drafted(llm) == 1


@both_ways
def test_another_gate_takes_the_draft_that_is_there(gate, llm, call):
    other = ScriptedGate()
    call(gated(over(fusion(other)), gate, llm), "query", QUESTION)
    assert (gate.questions, other.questions) == (
        [QUESTION],
        ["unknown Perhaps it"],
    )  # the claim of two tokens
    assert drafted(llm) == 1


@both_ways
@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        # The draft, the question, and all claims.
        (lambda gate: fusion(gate()), ["generate", "score", "score"]),
        # At another threshold it is a decision of its own.
        (lambda gate: GatedRetriever(Shelf(), gate(threshold=0.9)), ["generate", "score"] * 2),
        (lambda gate: GatedRetriever(Shelf(), gate()).with_threshold(0.0), ["generate", "score"] * 2),
    ],
    ids=["alike", "another threshold", "changed later"],
)
def test_gates_that_were_made_alike_are_one_gate(call, inside, calls):
    proxy = ScriptedProxy(fixed=CLAIMS)
    gate = functools.partial(load_gate, "ik", proxy=proxy, threshold=1.0)
    call(gated(over(inside(gate)), gate()), "query", "Who wrote Hamlet?")
    assert proxy.calls == calls


class Named(Writer):
    """An LLM whose name the gate finds."""

    @property
    def metadata(self):
        return LLMMetadata(model_name="gpt-4o")


@pytest.mark.model
@both_ways
def test_an_llm_that_is_named_and_one_that_is_found_by_the_same_name_are_one(call):
    """Regression: the gates differed in where the name came from, so the request was decided twice."""
    inner = GatedQueryEngine.from_defaults(over(Shelf()), llm=Named())
    with hearing() as events:
        call(router(load_gate(llm_name="gpt-4o"), inner), "query", "What is error E-42?")
    assert len(decisions_in(events)) == 1
    with hearing() as events:
        call(router(load_gate(llm_name="gpt-4o-mini"), inner), "query", "What is error E-42?")
    assert len(decisions_in(events)) == 2


@pytest.mark.model
@both_ways
def test_what_the_llm_wrote_is_not_overruled_by_the_question_alone(llm, call):
    """Regression: the default gate of a part without drafts decided again."""
    inner = GatedQueryEngine.from_defaults(over(GatedRetriever(Shelf())), llm=llm)
    drafting = GatedQueryEngine.from_defaults(inner, llm=llm, tokens=8)
    answering = GatedQueryEngine.from_defaults(
        inner, llm=llm, answer_first=AnswerFirst(retrieve_below=0.0, answer_above=1.0)
    )
    for engine in (drafting, answering):
        with hearing() as events:
            call(engine, "query", "What is the unknown error E-42?")
        assert [decision.draft is None for decision in decisions_in(events)] == [False]


async def test_requests_side_by_side_keep_their_own_decisions(gate, llm):
    engine = engine_and_claims(gate, llm)
    questions = [f"what is unknown {i}?" for i in range(20)]
    responses = await asyncio.gather(*(engine.aquery(question) for question in questions))
    assert [r.metadata["rgate"]["question"] for r in responses] == questions
    assert len(gate.calls) == 40  # a question and its claims each
    assert drafted(llm) == 20


def routed(engine, gate):
    return router(gate, engine)


def tool(engine, gate):
    call_tool = GatedTool(QueryEngineTool.from_defaults(engine), gate)
    return SimpleNamespace(query=call_tool.call, aquery=call_tool.acall)


def own_arm(inner, gate, llm, **options):
    direct = EmptyIndex().as_query_engine(llm=llm, streaming=True)
    return GatedQueryEngine(inner, direct, gate, **options)


@both_ways
@pytest.mark.parametrize("around", [routed, tool])
@pytest.mark.parametrize("make", [GatedQueryEngine.from_defaults, own_arm], ids=["of an LLM", "own arm"])
@pytest.mark.parametrize(
    ("p_known", "looks", "known"),
    [
        (0.2, False, [0.2]),  # clearly unknown
        (0.4, False, [0.4, 0.9]),  # the LLM begins to answer
        (0.4, True, [0.4, 0.9]),
    ],
)
def test_the_decision_that_chose_an_engine_is_its_screening(llm, call, around, make, p_known, looks, known):
    """Regression: the engine with answer first read the question again."""
    screen, judge = Reader({HARD: p_known}), Reader()
    engine = make(
        over(Shelf()),
        judge,
        llm,
        answer_first=AnswerFirst(question_gate=screen),
        look_first=LOOK if looks else False,
    )
    for times in (1, 2):
        with hearing() as events:
            answer = call(around(engine, screen), "query", HARD)
        assert (KNOWN in str(answer)) is (known[-1] > 0.5)
        assert [decision.p_known for decision in decisions_in(events)] == known
        assert screen.calls == [[HARD]] * times
        assert judge.calls == [[HARD]] * times * (len(known) - 1)


@both_ways
@pytest.mark.parametrize("around", [routed, tool])
def test_the_engine_that_a_decision_chose_looks_first(call, around):
    """Regression: the option had no effect there."""
    gate = Reader({ELSEWHERE: 0.3, TEXT: 0.3})
    engine = GatedQueryEngine(over(Shelf()), Rag(answer="from memory"), gate, look_first=LOOK)
    for question, retrieves in ((ELSEWHERE, False), (TEXT, True)):
        with hearing() as events:
            answer = call(around(engine, gate), "query", question)
        assert (str(answer) == "from memory") is not retrieves
        decided = [(decision.retrieve, decision.outcome) for decision in decisions_in(events)]
        assert decided == [(True, None), (retrieves, "retrieve" if retrieves else "direct")]
    assert gate.calls == [[ELSEWHERE], [TEXT]]


AHEAD = {"look_first": True}


class RagOfTwoParts(Rag):
    """A custom engine as LlamaIndex's docs write it: it inherits methods to search and to answer that raise."""

    retriever: BaseRetriever


@pytest.mark.parametrize(
    ("inner", "options", "said"),
    [
        (Rag(), AHEAD, "Rag has no retriever"),
        (Rag(), {"answer_first": AnswerFirst(prefetch=True)}, "Rag has no retriever"),
        (RagOfTwoParts(retriever=Shelf()), AHEAD, "RagOfTwoParts has no methods retrieve and synthesize"),
        (over(ClaimFusionRetriever([Shelf()])), AHEAD, "ClaimFusionRetriever has its own gate"),
        (over(GatedRetriever(Shelf())), AHEAD, "GatedRetriever has its own gate"),
    ],
)
def test_what_is_one_step_or_decides_itself_cannot_search_ahead(gate, inner, options, said):
    with pytest.raises(ConfigurationError, match=said):
        gated(inner, gate, **options)


# --- the event loop ------------------------------------------------------------------------------------------


def transforming(gate, llm):
    return ClaimQueryEngine(over(Shelf()), ClaimQueryTransform(gate, filter_claims=True))


@pytest.mark.filterwarnings("ignore:LlamaIndex averages claims")
@pytest.mark.parametrize("make", [*COMPOSITIONS.values(), transforming], ids=[*COMPOSITIONS, "transform"])
async def test_the_event_loop_is_free_while_a_gate_decides(llm, make):
    threads = set()
    engine = make(ScriptedGate(before=lambda: threads.add(threading.current_thread())), llm)
    assert str(await engine.aquery(QUESTION))
    assert threads
    assert threading.current_thread() not in threads


# --- the same on real models -------------------------------------------------------------------------------


@pytest.mark.model
async def test_the_cookbook_runs_on_real_models(smollm2, embedder_model, monkeypatch, capsys):
    import llama_index_engine
    import llama_index_workflow

    monkeypatch.setattr(llama_index_engine, "TOKENS", 6)
    engine = llama_index_engine.build_engine()
    monkeypatch.setattr(llama_index_engine, "build_engine", lambda: engine)
    llama_index_engine.main()
    await llama_index_workflow.main()
    said = capsys.readouterr().out
    assert said.count("from memory") == said.count("with passages") == 2
    (node,) = engine.query_engine.retrieve(QueryBundle("Where was Aarno Maliniemi born?"))
    assert "Oulu" in node.node.text


# --- what is found -------------------------------------------------------------------------------------------


class OddEngine(BaseQueryEngine):
    """An engine of the user's own, whose search returns what it was given; its answer says what that was."""

    def __init__(self, found):
        self.found, self.retriever = found, Shelf()
        super().__init__(None)

    def retrieve(self, bundle):
        return self.found

    def synthesize(self, bundle, nodes, **options):
        return Response(f"read {nodes!r}")

    async def asynthesize(self, bundle, nodes, **options):
        return self.synthesize(bundle, nodes)

    def _query(self, bundle):
        return self.synthesize(bundle, self.retrieve(bundle))

    async def _aquery(self, bundle):
        return self._query(bundle)

    def _get_prompt_modules(self):
        return {}


@both_ways
@pytest.mark.parametrize(
    "found", [None, {"text": "Bread."}, [{"text": "Bread."}], ["Bread."], [None]], ids=repr
)
@pytest.mark.parametrize("look_first", [False, LOOK], ids=["", "look first"])
def test_an_engine_reads_what_its_search_returned_with_and_without_a_look(gate, call, found, look_first):
    engine = GatedQueryEngine(OddEngine(found), Rag(answer="from memory"), gate, look_first=look_first)
    assert str(call(engine, "query", "a thing")) == "from memory"
    assert str(call(engine, "query", "unknown thing")) == f"read {found!r}"
