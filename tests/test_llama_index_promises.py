"""LlamaIndex: what selectors, retrievers, claims and chat engines promise, called and awaited by the same test."""

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from rgate_integrations import Decision
from rgate_integrations.engine.follow_ups import REFERS_BACK
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryTransform,
    GatedRetriever,
    IndexRetriever,
    RetrievalGateSelector,
)
from tests.llama_index_parts import ScriptedGate, both_ways, decisions_in, every_style, hearing, vector_index
from tests.patience import PATIENCE
from tests.test_hybrid import TEXTS, Words
from tests.test_llama_index import KNOWN, UNKNOWN, gated, plain, tools_named
from tests.test_llama_index_once import Same
from tests.test_llama_index_postprocessors import Says

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def gate():
    return ScriptedGate()


# --- selectors and routers ---------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("choices", [list, lambda names: tools_named(*names)], ids=["texts", "metadata"])
@pytest.mark.parametrize("query", [str, QueryBundle])
def test_choices_and_questions_of_every_kind(gate, call, choices, query):
    selector = RetrievalGateSelector(gate, retrieve="docs")
    for question, ind in ((UNKNOWN, 1), (KNOWN, 2)):
        found = call(selector, "select", choices(["other", "docs", "direct"]), query(question))
        assert (found.inds, found.reasons) == ([ind], ["because"])


@both_ways
@pytest.mark.parametrize("names", [("docs", "other"), ("direct", "other")])
def test_a_name_that_no_tool_has_is_an_error_before_the_gate_is_asked(gate, call, names):
    with pytest.raises(ConfigurationError, match=r"no tool named 'd\w+'; the tools are: 'd\w+', 'other'"):
        call(RetrievalGateSelector(gate, retrieve="docs"), "select", names, "known?")
    assert gate.questions == []


@both_ways
def test_a_router_within_a_router_chooses_among_several(gate, call):
    engine = gated(gate)
    tools = [
        QueryEngineTool.from_defaults(engine.query_engine, name=n, description=n) for n in ("docs", "news")
    ]
    several = RouterQueryEngine(
        LLMSingleSelector.from_defaults(llm=Says('[{"choice": 2, "reason": "x"}]')), tools, llm=MockLLM()
    )
    router = RouterQueryEngine(
        RetrievalGateSelector(gate, retrieve="several"),
        [
            QueryEngineTool.from_defaults(engine.direct, name="direct", description="d"),
            QueryEngineTool.from_defaults(several, name="several", description="s"),
        ],
        llm=MockLLM(),
    )
    assert call(router, "query", UNKNOWN).metadata["selector_result"].inds == [1]
    assert call(router, "query", KNOWN).metadata["selector_result"].inds == [0]


# --- retrievers and claims ---------------------------------------------------------------------------------


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
def test_a_router_of_retrievers(gate, call):
    direct, docs = Listed("direct"), Listed("docs")
    tools = [RetrieverTool.from_defaults(each, name=each.name, description="d") for each in (direct, docs)]
    retriever = RouterRetriever(RetrievalGateSelector(gate, retrieve="docs"), tools, llm=MockLLM())
    call(retriever, "retrieve", UNKNOWN)
    call(retriever, "retrieve", KNOWN)
    assert (docs.queries, direct.queries) == ([UNKNOWN], [KNOWN])


@both_ways
def test_a_guarded_retriever_finds_a_note_for_what_is_known(gate, call):
    inner = vector_index().as_retriever(similarity_top_k=2)
    guarded = GatedRetriever(inner, gate)
    assert len(call(guarded, "retrieve", UNKNOWN)) == 2
    (note,) = call(guarded, "retrieve", KNOWN)
    assert note.node.metadata["rgate"] == gated(gate).query(KNOWN).metadata["rgate"]
    assert note.node.get_content(metadata_mode="llm") == note.node.text
    assert call(GatedRetriever(inner, gate, note=None), "retrieve", KNOWN) == []
    fused = QueryFusionRetriever([guarded], llm=MockLLM(), num_queries=1, use_async=False)
    assert len(call(fused, "retrieve", UNKNOWN)) == 2
    assert call(fused, "retrieve", KNOWN)[0].node.metadata["rgate"]["retrieve"] is False
    assert len(call(TransformRetriever(guarded, Same()), "retrieve", UNKNOWN)) == 2
    assert "answer it from what you know" in call(RetrieverTool.from_defaults(guarded), "call", KNOWN).content


@both_ways
@pytest.mark.parametrize("query", [str, QueryBundle])
@pytest.mark.parametrize("make", [GatedRetriever, lambda inner, gate: ClaimFusionRetriever([inner], gate)])
def test_retrievers_take_bundles_and_strings_change_neither_and_resolve_objects(gate, call, query, make):
    class Pointing(Listed):
        def _retrieve(self, query_bundle):
            super()._retrieve(query_bundle)
            return [NodeWithScore(node=IndexNode(text="a", index_id="a"), score=0.5)]

    inner, asked = Pointing("a"), query(UNKNOWN)
    inner.object_map = {"a": TextNode(id_="b", text="inside")}
    (node,) = call(make(inner, gate), "retrieve", asked)
    assert node.node.text == "inside"
    assert asked == query(UNKNOWN)


@pytest.fixture(scope="module")
def passages():
    made = [Passage(i, text, title="T" * (i == "rome"), metadata={"n": 1}) for i, text in TEXTS.items()]
    return PassageIndex.build(made, Words())


@both_ways
@pytest.mark.parametrize("kind", [lambda index: index, HybridIndex], ids=["dense", "hybrid"])
def test_an_index_as_a_retriever(passages, call, kind):
    retriever = IndexRetriever(kind(passages), similarity_top_k=2)
    nodes = call(retriever, "retrieve", QueryBundle("capital of Italy"))
    assert [n.node.node_id for n in nodes] == ["rome", "paris"]
    assert 0 < nodes[1].score < nodes[0].score
    assert [n.node.metadata for n in nodes] == [{"n": 1, "title": "T"}, {"n": 1}]
    assert nodes[1].node.text == TEXTS["paris"]


@both_ways
def test_claims_are_searched_separately_and_the_bundle_is_left_alone(gate, call):
    retrievers, bundle = [Listed("a"), Listed("b")], QueryBundle("what is unknown?")
    fusion = ClaimFusionRetriever(retrievers, gate, similarity_top_k=2, filter_claims=True)
    nodes = call(fusion, "retrieve", bundle)
    expected = ["what is unknown?", "unknown Oulu lies far up north", "unknown Jupiter has many moons"]
    # Side by side, so in any order.
    assert [sorted(r.queries) for r in retrievers] == [sorted(expected)] * 2
    assert [n.node.node_id for n in nodes] == ["all", "a"]
    assert bundle.embedding is None
    assert gate.questions == [["what is unknown?"], expected[1:]]
    retriever = Listed("a")
    assert call(ClaimFusionRetriever([retriever], gate, max_queries=1), "retrieve", "known?")
    assert retriever.queries == ["known?"]  # whether to search is for the engine to say


def test_the_transform_adds_claims_to_the_embedding_texts(gate):
    with pytest.warns(UserWarning, match="ClaimFusionRetriever searches them separately"):
        transform = ClaimQueryTransform(gate)
    bundle = transform.run("what is unknown?")
    assert bundle.query_str == "what is unknown?"
    assert len(bundle.embedding_strs) == 3
    assert TransformQueryEngine(plain(), transform).query("what is unknown?").source_nodes


# --- chat engines ------------------------------------------------------------------------------------------


class Condenses(MockLLM):
    """Condenses every follow-up to one question; answers with the end of the prompt."""

    def complete(self, prompt, formatted=False, **options):
        condensed = "standalone question" in prompt.lower()
        return CompletionResponse(text="what is unknown about Ada?" if condensed else prompt[-200:])

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt)


def condense_question(gate, streaming):
    return CondenseQuestionChatEngine.from_defaults(gated(gate, plain(streaming=streaming)), llm=Condenses())


def context(gate, streaming=False):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    return ContextChatEngine.from_defaults(guarded, llm=Condenses())


def condense_plus_context(gate, streaming):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    return CondensePlusContextChatEngine.from_defaults(guarded, llm=Condenses())


async def chat(engine, message, style):
    """Say something; returns the text of the answer."""
    if style in ("query", "aquery"):
        return str(engine.chat(message) if style == "query" else await engine.achat(message))
    # Older versions of core write the history before the stream ends.
    if style == "stream":
        response = engine.stream_chat(message)
        writing = getattr(response, "write_response_to_history_thread", None)
        text = "".join(response.response_gen)
        if writing is not None:
            writing.join(PATIENCE)
    else:
        response = await engine.astream_chat(message)
        writing = getattr(response, "awrite_response_to_history_task", None)
        text = "".join([token async for token in response.async_response_gen()])
        if writing is not None:
            await writing
    return text


@pytest.mark.parametrize("make", [condense_question, context, condense_plus_context])
@every_style
async def test_chat_engines_chat_remember_and_forget(gate, make, style):
    engine = make(gate, style.endswith("stream"))
    for message in (KNOWN, UNKNOWN):
        text = await chat(engine, message, style)
        assert text
        assert "Empty Response" not in text
    assert gate.questions == [[KNOWN], [UNKNOWN if make is context else "what is unknown about Ada?"]]
    assert [str(message.role.value) for message in engine.chat_history] == ["user", "assistant"] * 2
    assert engine.chat_history[2].content == UNKNOWN
    engine.reset()
    assert engine.chat_history == []


@pytest.mark.parametrize("style", ["query", "aquery"])
async def test_a_follow_up_that_no_engine_condensed_retrieves_and_says_why(style):
    class KnowsAll(ScriptedGate):
        def _decision(self, question, draft):
            return Decision(question=question, retrieve=False, p_known=0.9)

    engine = context(KnowsAll())
    with hearing() as events:
        await chat(engine, "Who is Ada?", style)
        await chat(engine, "And how old is she?", style)
    assert [(d.retrieve, d.warnings) for d in decisions_in(events)] == [(False, ()), (True, (REFERS_BACK,))]


@pytest.mark.parametrize("make", [ChatMemoryBuffer, Memory])
@pytest.mark.parametrize("style", ["query", "aquery"])
async def test_a_gate_that_reads_the_turns_of_a_chat_engines_memory_decides(style, make):
    class ReadsHistory(ScriptedGate):
        def decide_batch(self, questions, *, histories=None, **options):
            seen.extend(histories or [None])
            return super().decide_batch(questions, **options)

    gate, memory, seen = ReadsHistory(), make.from_defaults(), []
    guarded = GatedRetriever(vector_index().as_retriever(), gate, memory=memory)
    engine = ContextChatEngine.from_defaults(guarded, llm=Condenses(), memory=memory)
    await chat(engine, KNOWN, style)
    await chat(engine, "And how old is she?", style)
    assert gate.questions == [[KNOWN], ["And how old is she?"]]
    assert seen == [None, (f"user: {KNOWN}", f"assistant: {engine.chat_history[1].content}")]
