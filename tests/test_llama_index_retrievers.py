"""LlamaIndex: what selectors, guarded retrievers, claims and chat engines promise, called and awaited alike."""

import importlib.util
import json
import pkgutil

import pytest
from llama_index.core import postprocessor as core
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RouterQueryEngine, TransformQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata

from rgate_integrations import Decision
from rgate_integrations.engine.follow_ups import REFERS_BACK
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryTransform,
    GatedQueryEngine,
    GatedRetriever,
    IndexRetriever,
    RetrievalGateSelector,
)
from tests.llama_index_parts import (
    ScriptedGate,
    Shelf,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    over,
)
from tests.patience import PATIENCE
from tests.test_hybrid import TEXTS, Words
from tests.test_llama_index_once import Same

KNOWN, UNKNOWN = "a thing", "unknown thing"

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def gate():
    return ScriptedGate()


def gated(gate, streaming=False):
    return GatedQueryEngine.from_defaults(over(Shelf(), streaming=streaming), gate, llm=MockLLM())


class Says(MockLLM):
    """Says the same whatever it is asked; as an object, that the first document is relevant."""

    text: str = ""

    def __init__(self, text=""):
        super().__init__()
        self.text = text

    def complete(self, prompt, formatted=False, **options):
        return CompletionResponse(text=self.text)

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt)

    def chat(self, messages, **options):
        return ChatResponse(message=ChatMessage(role="assistant", content=self.text))

    def structured_predict(self, output_cls, prompt, llm_kwargs=None, **arguments):
        return output_cls(documents=[{"document_number": 1, "relevance": 10}])


# --- selectors and routers ---------------------------------------------------------------------------------


def tools_named(*names):
    return [ToolMetadata(name=name, description=name) for name in names]


@both_ways
@pytest.mark.parametrize("choices", [list, lambda names: tools_named(*names)], ids=["texts", "metadata"])
@pytest.mark.parametrize("query", [str, QueryBundle])
def test_choices_and_questions_of_every_kind(gate, call, choices, query):
    selector = RetrievalGateSelector(gate, retrieve="docs")
    for question, ind in ((UNKNOWN, 1), (KNOWN, 2)):
        found = call(selector, "select", choices(["other", "docs", "direct"]), query(question))
        assert (found.inds, found.reasons) == ([ind], ["because"])


@pytest.mark.parametrize("names", [("docs", "other"), ("direct", "other")])
def test_a_name_that_no_tool_has_is_an_error_before_the_gate_is_asked(gate, names):
    with pytest.raises(ConfigurationError, match=r"no tool named 'd\w+'; the tools are: 'd\w+', 'other'"):
        RetrievalGateSelector(gate, retrieve="docs").select(names, "known?")
    assert gate.questions == []


@both_ways
def test_routers_of_engines_and_of_retrievers(gate, call):
    engine = gated(gate)
    docs = [
        QueryEngineTool.from_defaults(engine.query_engine, name=n, description=n) for n in ("docs", "news")
    ]
    chooses = LLMSingleSelector.from_defaults(llm=Says('[{"choice": 2, "reason": "x"}]'))
    several = RouterQueryEngine(chooses, docs, llm=MockLLM())  # a router within a router
    tools = [
        QueryEngineTool.from_defaults(each, name=name, description="d")
        for name, each in (("direct", engine.direct), ("retrieve", several))
    ]
    router = RouterQueryEngine(RetrievalGateSelector(gate), tools, llm=MockLLM())
    shelves = {"direct": Shelf(), "retrieve": Shelf()}
    tools = [RetrieverTool.from_defaults(each, name=name, description="d") for name, each in shelves.items()]
    retriever = RouterRetriever(RetrievalGateSelector(gate), tools, llm=MockLLM())
    for question, ind in ((UNKNOWN, 1), (KNOWN, 0)):
        assert call(router, "query", question).metadata["selector_result"].inds == [ind]
        assert call(retriever, "retrieve", question)
    assert (shelves["direct"].queries, shelves["retrieve"].queries) == ([KNOWN], [UNKNOWN])


# --- retrievers and claims ---------------------------------------------------------------------------------


@both_ways
def test_a_guarded_retriever_finds_a_note_for_what_is_known(gate, call):
    guarded = GatedRetriever(Shelf(), gate)
    (found,) = call(guarded, "retrieve", UNKNOWN)
    assert "rgate" not in found.node.metadata
    (note,) = call(guarded, "retrieve", KNOWN)
    assert note.node.metadata["rgate"] == gated(gate).query(KNOWN).metadata["rgate"]
    assert note.node.get_content(metadata_mode="llm") == note.node.text
    assert call(GatedRetriever(Shelf(), gate, note=None), "retrieve", KNOWN) == []
    fused = QueryFusionRetriever([guarded], llm=MockLLM(), num_queries=1, use_async=False)
    assert call(fused, "retrieve", KNOWN)[0].node.metadata["rgate"]["retrieve"] is False
    assert "rgate" not in call(TransformRetriever(guarded, Same()), "retrieve", UNKNOWN)[0].node.metadata
    assert "answer it from what you know" in call(RetrieverTool.from_defaults(guarded), "call", KNOWN).content


@both_ways
@pytest.mark.parametrize("query", [str, QueryBundle])
@pytest.mark.parametrize("make", [GatedRetriever, lambda inner, gate: ClaimFusionRetriever([inner], gate)])
def test_retrievers_take_bundles_and_strings_change_neither_and_resolve_objects(gate, call, query, make):
    class Pointing(Shelf):
        def _retrieve(self, query_bundle):
            super()._retrieve(query_bundle)
            return [NodeWithScore(node=IndexNode(text="a", index_id="a"), score=0.5)]

    inner, asked = Pointing(), query(UNKNOWN)
    inner.object_map = {"a": TextNode(id_="b", text="inside")}
    (node,) = call(make(inner, gate), "retrieve", asked)
    assert node.node.text == "inside"
    assert asked == query(UNKNOWN)


@both_ways
@pytest.mark.parametrize("kind", [lambda index: index, HybridIndex], ids=["dense", "hybrid"])
def test_an_index_as_a_retriever(call, kind):
    made = [Passage(i, text, title="T" * (i == "rome"), metadata={"n": 1}) for i, text in TEXTS.items()]
    retriever = IndexRetriever(kind(PassageIndex.build(made, Words())), similarity_top_k=2)
    nodes = call(retriever, "retrieve", QueryBundle("capital of Italy"))
    assert [n.node.node_id for n in nodes] == ["rome", "paris"]
    assert 0 < nodes[1].score < nodes[0].score
    assert [n.node.metadata for n in nodes] == [{"n": 1, "title": "T"}, {"n": 1}]
    assert nodes[1].node.text == TEXTS["paris"]


@both_ways
def test_claims_are_searched_separately_and_fused(gate, call):
    shelves = [Shelf("a", "all"), Shelf("b", "all")]
    fusion = ClaimFusionRetriever(shelves, gate, similarity_top_k=2, filter_claims=True)
    nodes = call(fusion, "retrieve", "what is unknown?")
    expected = ["what is unknown?", "unknown Oulu lies far up north", "unknown Jupiter has many moons"]
    # Side by side, so in any order.
    assert [sorted(shelf.queries) for shelf in shelves] == [sorted(expected)] * 2
    assert [n.node.node_id for n in nodes] == ["all", "a"]
    assert gate.questions == [["what is unknown?"], expected[1:]]
    shelf = Shelf()
    assert call(ClaimFusionRetriever([shelf], gate, max_queries=1), "retrieve", "known?")
    assert shelf.queries == ["known?"]  # whether to search is for the engine to say


def test_the_transform_adds_claims_to_the_embedding_texts(gate):
    with pytest.warns(UserWarning, match="ClaimFusionRetriever searches them separately"):
        transform = ClaimQueryTransform(gate)
    bundle = transform.run("what is unknown?")
    assert bundle.query_str == "what is unknown?"
    assert len(bundle.embedding_strs) == 3
    assert TransformQueryEngine(over(Shelf()), transform).query("what is unknown?").source_nodes


# --- chat engines ------------------------------------------------------------------------------------------


class Condenses(MockLLM):
    """Condenses every follow-up to one question; answers with the end of the prompt."""

    def complete(self, prompt, formatted=False, **options):
        condensed = "standalone question" in prompt.lower()
        return CompletionResponse(text="what is unknown about Ada?" if condensed else prompt[-200:])

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt)


def condense_question(gate, streaming):
    return CondenseQuestionChatEngine.from_defaults(gated(gate, streaming), llm=Condenses())


def context(gate, streaming=False):
    return ContextChatEngine.from_defaults(GatedRetriever(Shelf(), gate), llm=Condenses())


def condense_plus_context(gate, streaming=False):
    return CondensePlusContextChatEngine.from_defaults(GatedRetriever(Shelf(), gate), llm=Condenses())


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
        assert await chat(engine, message, style) not in ("", "Empty Response")
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
    guarded = GatedRetriever(Shelf(), gate, memory=memory)
    engine = ContextChatEngine.from_defaults(guarded, llm=Condenses(), memory=memory)
    await chat(engine, KNOWN, style)
    await chat(engine, "And how old is she?", style)
    assert gate.questions == [[KNOWN], ["And how old is she?"]]
    assert seen == [None, (f"user: {KNOWN}", f"assistant: {engine.chat_history[1].content}")]


# --- postprocessors ----------------------------------------------------------------------------------------

EMBEDS = MockEmbedding(8)
MADE = {
    "SimilarityPostprocessor": {"similarity_cutoff": 20.0},
    "PrevNextNodePostprocessor": {"docstore": SimpleDocumentStore(), "mode": "both"},
    "AutoPrevNextNodePostprocessor": {"docstore": SimpleDocumentStore(), "llm": Says("NONE")},
    "LongContextReorder": {},
    "FixedRecencyPostprocessor": {"date_key": "published"},
    "EmbeddingRecencyPostprocessor": {"date_key": "published", "embed_model": EMBEDS},
    "TimeWeightedPostprocessor": {},
    "SentenceEmbeddingOptimizer": {
        "embed_model": EMBEDS,
        "percentile_cutoff": 0.5,
        "tokenizer_fn": lambda text: text.split(". "),
    },
    "MetadataReplacementPostProcessor": {"target_metadata_key": "window"},
    "PIINodePostprocessor": {"llm": Says("No one. Output Mapping: {}")},
    "LLMRerank": {"llm": Says("Doc: 1, Relevance: 9")},
    "StructuredLLMRerank": {"llm": Says()},
    "RankGPTRerank": {"llm": Says("[1]")},
}
# These need spacy or a model.
NOT_MADE = {"KeywordNodePostprocessor", "NERPIINodePostprocessor", "SentenceTransformerRerank"}


def of_core():
    """The postprocessors of llama-index-core, by name."""
    for module in pkgutil.iter_modules(core.__path__):
        importlib.import_module(f"{core.__name__}.{module.name}")
    waiting, found = [BaseNodePostprocessor], {}
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        found |= {kind.__name__: kind for kind in kinds if kind.__module__.startswith("llama_index.core.")}
    return found


def test_the_note_passes_every_postprocessor_of_core_and_can_be_saved():
    (note,) = GatedRetriever(Shelf(), ScriptedGate()).retrieve(KNOWN)
    kinds = of_core()
    assert set(kinds) <= MADE.keys() | NOT_MADE
    for name in kinds.keys() - NOT_MADE:
        if "Recency" in name and importlib.util.find_spec("pandas") is None:
            continue
        (passed,) = kinds[name](**MADE[name]).postprocess_nodes([note.model_copy()], query_str=KNOWN)
        assert passed.node.metadata["rgate"]["retrieve"] is False, name
    again = json_to_doc(doc_to_json(note.node))
    assert (again.text, again.metadata["rgate"]["reason"]) == (note.node.text, "because")
    json.dumps(note.score, allow_nan=False)


class Drops(BaseNodePostprocessor):
    """Finds nothing good enough, and keeps what it was shown."""

    shown: list = []  # noqa: RUF012  a pydantic field

    def _postprocess_nodes(self, nodes, query_bundle=None):
        self.shown.append((query_bundle.query_str, len(nodes)))
        return []


@every_style
def test_postprocessors_of_the_retriever_never_see_the_note(gate, style):
    drops = Drops(shown=[])
    guarded = GatedRetriever(Shelf(), gate, node_postprocessors=[drops])
    assert drops.callback_manager is guarded.callback_manager
    engine = over(guarded, streaming=style.endswith("stream"))
    assert KNOWN in ask(engine, KNOWN, style)[0]
    assert drops.shown == []
    # That is LlamaIndex's answer when an index has nothing, and it stays so.
    assert "Empty Response" in ask(engine, UNKNOWN, style)[0]
    assert drops.shown == [(UNKNOWN, 1)]
