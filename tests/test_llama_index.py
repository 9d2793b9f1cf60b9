"""LlamaIndex: what engines, retrievers, the selector and claims do, each called and awaited by the same test."""

import logging
import threading

import pytest
from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, TransformQueryEngine
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool, ToolMetadata

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryTransform,
    GatedQueryEngine,
    GatedRetriever,
    IndexRetriever,
    RetrievalGateEvent,
    RetrievalGateSelector,
)
from tests.llama_index_parts import (
    ScriptedGate,
    ask,
    both_ways,
    every_style,
    vector_index,
)
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import TEXTS, Words


@pytest.fixture
def gate():
    return ScriptedGate()


# --- engines and the selector -------------------------------------------------------------------------------


def engine_of(gate, **options):
    streaming = options.get("streaming", False)
    inner = vector_index().as_query_engine(llm=MockLLM(), streaming=streaming)
    return GatedQueryEngine.from_defaults(inner, gate, llm=MockLLM(), **options)


def router_of(gate, **options):
    engine = engine_of(gate, **options)
    tools = [
        QueryEngineTool.from_defaults(engine.direct, name="direct", description="d"),
        QueryEngineTool.from_defaults(engine.query_engine, name="docs", description="r"),
    ]
    return RouterQueryEngine(RetrievalGateSelector(gate, retrieve="docs"), tools, llm=MockLLM())


@pytest.mark.parametrize("make", [engine_of, router_of])
@every_style
def test_both_arms_answer(gate, make, style):
    streaming = style.endswith("stream")
    engine = make(gate, streaming=streaming)
    for question, retrieves in (("unknown thing", True), ("a thing", False)):
        text, response = ask(engine, question, style)
        assert isinstance(response, StreamingResponse | AsyncStreamingResponse) is streaming
        assert question in text
        assert "Empty Response" not in text
        assert bool(response.source_nodes) is retrieves
        if make is engine_of:
            assert response.metadata["rgate"]["retrieve"] is retrieves
    assert gate.questions == [["unknown thing"], ["a thing"]]


@both_ways
def test_a_failing_gate_retrieves(gate, call):
    response = call(engine_of(gate), "query", "RAISE")
    assert response.source_nodes
    assert response.metadata["rgate"]["error"]["message"] == "gate down"


def test_without_an_llm_that_of_the_settings_answers(gate, monkeypatch):
    inner = vector_index().as_query_engine(llm=MockLLM())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("IS_TESTING", raising=False)
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigurationError, match="no LLM for known questions") as caught:
        GatedQueryEngine.from_defaults(inner, gate)
    assert "llm=llm" in caught.value.hint
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    assert "a thing" in str(GatedQueryEngine.from_defaults(inner, gate).query("a thing"))


def tools_named(*names):
    return [ToolMetadata(name=name, description=name) for name in names]


@both_ways
def test_tools_are_selected_by_name(gate, call):
    selector = RetrievalGateSelector(gate, retrieve="docs")
    tools = tools_named("other", "docs", "direct")
    assert call(selector, "select", tools, "unknown?").ind == 1
    assert call(selector, "select", tools, "known?").ind == 2
    assert call(selector, "select", tools, "known?").reason == "because"


@both_ways
def test_a_name_that_no_tool_has_is_an_error_before_the_gate_is_asked(gate, call):
    for tools in (tools_named("docs", "other"), tools_named("direct", "other")):
        with pytest.raises(ConfigurationError, match=r"no tool named 'd\w+'; the tools are: 'd\w+', 'other'"):
            call(RetrievalGateSelector(gate, retrieve="docs"), "select", tools, "known?")
    assert gate.questions == []


class Last(BaseSelector):
    """Selects the last of the tools it is shown."""

    def _select(self, choices, query):
        self.shown = [choice.name for choice in choices]
        return SelectorResult(selections=[SingleSelection(index=len(choices) - 1, reason="last")])

    async def _aselect(self, choices, query):
        return self._select(choices, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


@both_ways
def test_an_inner_selector_selects_among_several_retrieve_tools(gate, call):
    inner = Last()
    selector = RetrievalGateSelector(gate, retrieve=["b", "a"], inner=inner)
    tools = tools_named("a", "direct", "b")
    assert call(selector, "select", tools, "unknown?").ind == 0
    assert inner.shown == ["b", "a"]
    assert call(selector, "select", tools, "known?").ind == 1
    with pytest.raises(ConfigurationError, match="2 retrieve tools"):
        RetrievalGateSelector(gate, retrieve=["a", "b"])


# --- a search that runs while a begun answer is judged -----------------------------------------------------


class Searching(VectorIndexRetriever):
    """Says when a search has begun; fails for questions with "broken" in them."""

    def __init__(self):
        super().__init__(vector_index(), embed_model=MockEmbedding(8))
        self.began = threading.Event()

    def _retrieve(self, query_bundle):
        self.began.set()
        if "broken" in query_bundle.query_str:
            raise OSError("index gone")
        return super()._retrieve(query_bundle)

    async def _aretrieve(self, query_bundle):
        return self._retrieve(query_bundle)


PREFETCH = AnswerFirst(question_gate=None, prefetch=True)


def prefetching(retriever, gate):
    inner = RetrieverQueryEngine.from_args(retriever, llm=MockLLM())
    return GatedQueryEngine.from_defaults(inner, gate, llm=MockLLM(), answer_first=PREFETCH)


@both_ways
@pytest.mark.parametrize(
    ("question", "sources"),
    [("unknown?", 2), ("known?", 0), ("broken, but known?", 0), ("broken, unknown?", None)],
)
def test_the_search_goes_on_while_an_answer_is_judged(call, question, sources):
    retriever, before_the_decision = Searching(), []
    gate = ScriptedGate(before=lambda: before_the_decision.append(retriever.began.wait(PATIENCE)))
    engine = prefetching(retriever, gate)
    if sources is None:
        with pytest.raises(OSError, match="index gone"):
            call(engine, "query", question)
    else:
        response = call(engine, "query", question)
        assert len(response.source_nodes) == sources
        assert question in str(response)
    assert before_the_decision == [True]


class Heard(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.said = threading.Event()

    def emit(self, record):
        if self.words in record.getMessage():
            self.said.set()


@pytest.fixture
def heard():
    """A search whose error was taken note of: somebody dropped it."""
    log, handler = logging.getLogger("rgate_integrations"), Heard("index gone")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.said
    log.removeHandler(handler)
    log.setLevel(level)


@both_ways
def test_the_search_is_dropped_when_the_gate_raises(call, heard):
    retriever = Searching()

    class Waits(ScriptedProxy):
        def _called(self, name, values):
            retriever.began.wait(PATIENCE)
            super()._called(name, values)

    engine = prefetching(retriever, load_gate("ik", proxy=Waits(), on_error="raise"))
    with pytest.raises(RuntimeError, match="scripted failure"):
        call(engine, "query", "broken RAISE")
    assert heard.wait(PATIENCE)


def test_an_engine_in_one_step_cannot_search_ahead(gate):
    engine = engine_of(gate)
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine(engine, engine.direct, gate, answer_first=PREFETCH)


# --- retrievers --------------------------------------------------------------------------------------------


@both_ways
def test_a_guarded_retriever_finds_a_note_for_what_is_known(gate, call):
    inner = vector_index().as_retriever(similarity_top_k=2)
    guarded = GatedRetriever(inner, gate)
    assert len(call(guarded, "retrieve", "unknown?")) == 2
    (note,) = call(guarded, "retrieve", "known?")
    engine = GatedQueryEngine.from_defaults(
        vector_index().as_query_engine(llm=MockLLM()), gate, llm=MockLLM()
    )
    assert note.node.metadata["rgate"] == engine.query("known?").metadata["rgate"]
    assert note.node.get_content(metadata_mode="llm") == note.node.text
    assert call(GatedRetriever(inner, gate, note=None), "retrieve", "known?") == []


@pytest.fixture(scope="module")
def passages():
    made = [Passage(i, text, title="T" * (i == "rome"), metadata={"n": 1}) for i, text in TEXTS.items()]
    return PassageIndex.build(made, Words())


@both_ways
@pytest.mark.parametrize("kind", [lambda index: index, HybridIndex], ids=["dense", "hybrid"])
def test_an_index_as_a_retriever(passages, call, kind):
    nodes = call(
        IndexRetriever(kind(passages), similarity_top_k=2), "retrieve", QueryBundle("capital of Italy")
    )
    assert [n.node.node_id for n in nodes] == ["rome", "paris"]
    assert 0 < nodes[1].score < nodes[0].score
    assert [n.node.metadata for n in nodes] == [{"n": 1, "title": "T"}, {"n": 1}]
    assert nodes[1].node.text == TEXTS["paris"]


# --- claims ------------------------------------------------------------------------------------------------


class Listed(BaseRetriever):
    """Finds a node of its own and one that all find; keeps the queries."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.queries = []

    def _retrieve(self, query_bundle):
        self.queries.append(query_bundle.query_str)
        query_bundle.embedding = [1.0]  # as LlamaIndex's vector retriever does
        return [NodeWithScore(node=TextNode(id_=i, text=i), score=1.0) for i in (self.name, "all")]


@both_ways
def test_claims_are_searched_separately_and_the_bundle_is_left_alone(gate, call):
    retrievers = [Listed("a"), Listed("b")]
    bundle = QueryBundle("what is unknown?")
    nodes = call(
        ClaimFusionRetriever(retrievers, gate, similarity_top_k=2, filter_claims=True), "retrieve", bundle
    )
    expected = ["what is unknown?", "unknown Oulu lies far up north", "unknown Jupiter has many moons"]
    # Side by side, so in any order.
    assert [sorted(r.queries) for r in retrievers] == [sorted(expected)] * 2
    assert [n.node.node_id for n in nodes] == ["all", "a"]
    assert bundle.embedding is None
    assert gate.questions == [["what is unknown?"], expected[1:]]


@both_ways
def test_what_is_known_is_searched_too(gate, call):
    retriever = Listed("a")
    assert call(ClaimFusionRetriever([retriever], gate, max_queries=1), "retrieve", "known?")
    assert retriever.queries == ["known?"]


def test_the_transform_adds_claims_to_the_embedding_texts(gate):
    with pytest.warns(UserWarning, match="ClaimFusionRetriever searches them separately"):
        transform = ClaimQueryTransform(gate)
    bundle = transform.run("what is unknown?")
    assert bundle.query_str == "what is unknown?"
    assert len(bundle.embedding_strs) == 3
    engine = TransformQueryEngine(vector_index().as_query_engine(llm=MockLLM()), transform)
    assert engine.query("what is unknown?").source_nodes


# --- events ------------------------------------------------------------------------------------------------


@both_ways
def test_decisions_are_events(gate, call):
    class Handler(BaseEventHandler):
        found: list = []  # noqa: RUF012  a pydantic field

        def handle(self, event, **kwargs):
            if isinstance(event, RetrievalGateEvent):
                self.found.append(event.decision)

    handler, dispatcher = Handler(found=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        call(engine_of(gate), "query", "unknown")
    finally:
        dispatcher.event_handlers.remove(handler)
    assert [d.retrieve for d in handler.found] == [True]
