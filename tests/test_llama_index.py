"""LlamaIndex: engines that answer on both arms, in every call style."""

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool

from rgate_integrations import Decision, Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryTransform,
    GatedQueryEngine,
    RetrievalGateEvent,
    RetrievalGateSelector,
)

TEXTS = ["Oulu lies in Finland.", "Bread is baked.", "Jupiter is large."]


class Counting:
    """Retrieves for questions with "unknown" in them; drafts about Oulu and Jupiter."""

    def __init__(self):
        self.calls = []

    def decide_batch(self, questions, *, drafts=None):
        self.calls.append(list(questions))
        if "RAISE" in questions:
            raise RuntimeError("gate down")
        draft = Draft(text="Oulu lies far up north. Jupiter has many moons.")
        return [
            Decision(
                question=q,
                retrieve="unknown" in q or bool(drafts),
                p_known=0.5,
                reason="because",
                draft=draft,
            )
            for q in questions
        ]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


@pytest.fixture
def gate():
    return Counting()


@pytest.fixture
def index():
    return VectorStoreIndex.from_documents([Document(text=t) for t in TEXTS], embed_model=MockEmbedding(8))


def engines(index, gate, streaming):
    llm = MockLLM()
    inner = index.as_query_engine(llm=llm, streaming=streaming)
    gated = GatedQueryEngine.from_defaults(inner, gate, llm=llm, streaming=streaming)
    tools = [
        QueryEngineTool.from_defaults(gated.direct, name="direct", description="d"),
        QueryEngineTool.from_defaults(inner, name="docs", description="r"),
    ]
    selector = RetrievalGateSelector(gate, retrieve="docs")
    return {"gated": gated, "router": RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm)}


@pytest.mark.parametrize("name", ["gated", "router"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_both_arms_answer_in_every_call_style(index, gate, name, streaming):
    engine = engines(index, gate, streaming)[name]
    for question, retrieves in (("unknown thing", True), ("a thing", False)):
        for response in (engine.query(question), await engine.aquery(question)):
            if isinstance(response, StreamingResponse):
                text = "".join(response.response_gen)
            elif isinstance(response, AsyncStreamingResponse):
                text = "".join([t async for t in response.response_gen])
            else:
                text = str(response)
            assert isinstance(response, StreamingResponse | AsyncStreamingResponse) is streaming
            assert question in text
            assert "Empty Response" not in text
            assert bool(response.source_nodes) is retrieves
            if name == "gated":
                assert response.metadata["rgate"]["retrieve"] is retrieves
    assert len(gate.calls) == 4


def test_the_engines_own_llm_is_found(index, gate):
    engine = GatedQueryEngine.from_defaults(index.as_query_engine(llm=MockLLM()), gate)
    assert "a thing" in str(engine.query("a thing"))
    with pytest.raises(ConfigurationError, match="does not show its LLM"):
        GatedQueryEngine.from_defaults(engine, gate)


def test_a_failing_gate_retrieves(index, gate):
    response = engines(index, gate, False)["gated"].query("RAISE")
    assert response.source_nodes
    assert response.metadata["rgate"]["error"]["message"] == "gate down"


def test_tools_are_selected_by_name(index, gate):
    inner = index.as_query_engine(llm=MockLLM())
    tools = [QueryEngineTool.from_defaults(inner, name="other", description="r")]
    router = RouterQueryEngine(RetrievalGateSelector(gate), tools, llm=MockLLM())
    with pytest.raises(ConfigurationError, match=r"no tool named 'direct'; the tools are: 'other'"):
        router.query("x")
    with pytest.raises(ConfigurationError, match="2 retrieve tools"):
        RetrievalGateSelector(gate, retrieve=["a", "b"])


async def test_claims_are_searched_separately_and_the_bundle_is_left_alone(index, gate):
    seen = []

    class Spy(type(index.as_retriever())):
        def _retrieve(self, query_bundle):
            seen.append(query_bundle.query_str)
            return super()._retrieve(query_bundle)

        async def _aretrieve(self, query_bundle):
            return self._retrieve(query_bundle)

    spy = Spy(index, embed_model=MockEmbedding(8), similarity_top_k=2)
    retriever = ClaimFusionRetriever([spy], gate, similarity_top_k=3)
    bundle = QueryBundle("what is unknown?")
    nodes = retriever.retrieve(bundle)
    assert seen == ["what is unknown?", "unknown Oulu lies far up north", "unknown Jupiter has many moons"]
    assert len({n.node.node_id for n in nodes}) == len(nodes) <= 3
    assert bundle.embedding is None
    assert [n.node.node_id for n in await retriever.aretrieve(QueryBundle("what is unknown?"))] == [
        n.node.node_id for n in nodes
    ]


def test_the_transform_adds_claims_to_the_embedding_texts(index, gate):
    with pytest.warns(UserWarning, match="ClaimFusionRetriever searches them separately"):
        transform = ClaimQueryTransform(gate)
    bundle = transform.run("what is unknown?")
    assert bundle.query_str == "what is unknown?"
    assert len(bundle.embedding_strs) == 3
    engine = TransformQueryEngine(index.as_query_engine(llm=MockLLM()), transform)
    assert engine.query("what is unknown?").source_nodes


def test_decisions_are_events(index, gate):
    class Handler(BaseEventHandler):
        found: list = []  # noqa: RUF012  a pydantic field

        def handle(self, event, **kwargs):
            if isinstance(event, RetrievalGateEvent):
                self.found.append(event.decision)

    handler = Handler()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        engines(index, gate, False)["gated"].query("unknown")
    finally:
        dispatcher.event_handlers.remove(handler)
    assert [d.retrieve for d in handler.found] == [True]
