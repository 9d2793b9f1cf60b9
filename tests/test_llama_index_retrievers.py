"""LlamaIndex: what selectors, guarded retrievers, claims and chat engines promise, called and awaited alike."""

import asyncio
import json
from unittest.mock import AsyncMock, Mock, patch

import pytest
from llama_index.core import (
    VectorStoreIndex,
    get_response_synthesizer,
)
from llama_index.core import postprocessor as core
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory, StaticMemoryBlock
from llama_index.core.memory.memory import InsertMethod
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
)
from llama_index.core.retrievers import QueryFusionRetriever, VectorIndexRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata
from pydantic import Field

from rgate_integrations import AnswerFirst, Request
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
from rgate_integrations.llama_index.retriever import profile_searched
from tests.begun_answers import Librarian, Reader, TurnReader
from tests.llama_index_parts import (
    Rag,
    ScriptedGate,
    Shelf,
    aask,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    over,
    vector_index,
)
from tests.test_hybrid import TEXTS
from tests.test_index import Letters

KNOWN, UNKNOWN = "a thing", "unknown thing"
SOURCE = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="1")}

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


# --- selectors and routers ---------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("kind", [str, lambda name: ToolMetadata(name=name, description=name)])
@pytest.mark.parametrize("query", [str, QueryBundle])
def test_choices_and_questions_of_every_kind(gate, call, kind, query):
    choices = [kind(name) for name in ("other", "other", "docs", "direct")]
    selector = RetrievalGateSelector(gate, retrieve="docs")
    for question, ind in ((UNKNOWN, 2), (KNOWN, 3)):
        found = call(selector, "select", choices, query(question))
        assert (found.inds, found.reasons) == ([ind], ["because"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("docs", "other"), "Unknown tool 'direct'; the tools are: 'docs', 'other'"),
        (("direct", "other"), "Unknown tool 'docs'; the tools are: 'direct', 'other'"),
        # Regression: the second tool never ran, and nothing said so.
        (("direct", "docs", "docs"), "2 tools have the name 'docs'"),
        (("docs", "direct", "direct"), "2 tools have the name 'direct'"),
    ],
)
def test_a_name_that_no_tool_has_or_two_have_is_an_error_before_the_gate_is_asked(gate, names, said):
    with pytest.raises(ConfigurationError, match=said):
        RetrievalGateSelector(gate, retrieve="docs").select(names, "known?")
    assert gate.calls == []


@both_ways
@pytest.mark.parametrize("retrieve", ["docs", ["docs", "more"]], ids=["one tool", "several"])
def test_a_routers_response_has_the_decision_that_selected_its_engines(gate, call, retrieve):
    """Regression: only the response of a selected engine with a gate of its own had it, but not among several."""
    engines = {"direct": over(Shelf()), "docs": GatedQueryEngine(over(Shelf()), Rag(), gate), "more": Rag()}
    tools = [QueryEngineTool.from_defaults(engine, name=n, description="d") for n, engine in engines.items()]
    router = RouterQueryEngine(RetrievalGateSelector(gate, retrieve=retrieve), tools, llm=MockLLM())
    for question in (KNOWN, UNKNOWN):
        (decision,) = gate.decide_batch([Request(question)])
        assert call(router, "query", question).metadata["rgate"] == decision.model_dump(mode="json")


# --- retrievers and claims ---------------------------------------------------------------------------------


@both_ways
def test_a_guarded_retriever_finds_a_note_for_what_is_known(gate, call):
    guarded = GatedRetriever(Shelf(), gate)
    (note,) = call(guarded, "retrieve", KNOWN)
    assert note.node.metadata["rgate"] == gate.decide_batch([Request(KNOWN)])[0].model_dump(mode="json")
    assert note.node.get_content(metadata_mode="llm") == note.node.text
    assert call(GatedRetriever(Shelf(), gate, known_message=None), "retrieve", KNOWN) == []
    fused = QueryFusionRetriever([guarded], llm=MockLLM(), num_queries=1, use_async=False)
    assert call(fused, "retrieve", KNOWN)[0].node.metadata["rgate"]["retrieve"] is False
    both = QueryFusionRetriever([guarded, guarded], llm=MockLLM(), num_queries=1, use_async=False)
    assert len(call(both, "retrieve", KNOWN)) == 1  # Regression: the note was there twice
    assert "answer it from what you know" in call(RetrieverTool.from_defaults(guarded), "call", KNOWN).content


FIRST = AnswerFirst(question_gate=Reader())
IMAGE = "has an image, which the gate cannot read"


@both_ways
@pytest.mark.parametrize("options", [{}, {"answer_first": FIRST}, {"look_first": True}], ids=["", *"al"])
def test_a_query_with_an_image_is_searched_for(gate, call, options):
    """Regression: its text was known, so neither the search nor the LLM saw the image."""
    seen, shelf = [], Shelf()
    shelf.retrieve = lambda bundle: seen.append(bundle.image_path) or []
    shelf.aretrieve = AsyncMock(side_effect=shelf.retrieve)
    bundle = QueryBundle(KNOWN, image_path="a.png")
    assert call(GatedRetriever(shelf, gate), "retrieve", bundle) == []
    engine = GatedQueryEngine.from_defaults(over(shelf), gate, MockLLM(), **options)
    decision = call(engine, "query", bundle).metadata["rgate"]
    assert (decision["retrieve"], decision["question"], seen) == (True, KNOWN, ["a.png"] * 2)
    assert IMAGE in decision["reason"]
    assert gate.calls == []


@both_ways
@pytest.mark.parametrize("query", [str, QueryBundle])
@pytest.mark.parametrize("make", [GatedRetriever, lambda inner, gate: ClaimFusionRetriever([inner], gate)])
def test_retrievers_take_bundles_and_strings_change_neither_and_resolve_objects(gate, call, query, make):
    inner, asked = Shelf("a"), query(UNKNOWN)
    inner.object_map = {"a": TextNode(id_="b", text="inside")}
    (node,) = call(make(inner, gate), "retrieve", asked)
    assert node.node.text == "inside"
    assert asked == query(UNKNOWN)


def earlier(*texts):
    return ChatMemoryBuffer.from_defaults(chat_history=[ChatMessage(text) for text in texts])


@both_ways
@pytest.mark.parametrize(
    "make",
    [
        lambda inner, gate: ClaimFusionRetriever([inner], gate),
        lambda inner, gate: GatedRetriever(inner, gate, memory=earlier("Who is Ada Lovelace?")),
    ],
    ids=["claims", "memory"],
)
def test_the_question_keeps_its_embedding_where_other_texts_are_searched_for_too(gate, call, make):
    """Regression: what HyDE had written for a question, and its vector, were not searched for."""
    asked = QueryBundle(
        "what is an unknown thing?", custom_embedding_strs=["as HyDE writes"], embedding=[0.5]
    )
    with patch.object(Shelf, "_retrieve", return_value=[]) as search:
        call(make(Shelf(), gate), "retrieve", asked)
    bundles = [bundle for (bundle,), _ in search.call_args_list]
    assert asked in bundles
    bundles.remove(asked)
    assert bundles
    assert all((other.embedding, other.custom_embedding_strs) == (None, None) for other in bundles)


@both_ways
@pytest.mark.parametrize("kind", [lambda index: index, HybridIndex], ids=["dense", "hybrid"])
def test_an_index_as_a_retriever(call, kind):
    made = [Passage(i, text, title="T" * (i == "rome"), metadata={"n": 1}) for i, text in TEXTS.items()]
    retriever = IndexRetriever(kind(PassageIndex.build(made, Letters())), similarity_top_k=2)
    nodes = call(retriever, "retrieve", QueryBundle("capital of Italy"))
    assert [n.node.node_id for n in nodes] == ["rome", "paris"]
    assert 0 < nodes[1].score < nodes[0].score
    assert [n.node.metadata for n in nodes] == [{"n": 1, "title": "T"}, {"n": 1}]
    assert nodes[1].node.text == TEXTS["paris"]


def test_a_profile_reads_the_passages_of_an_index_in_memory(monkeypatch):
    monkeypatch.setattr("rgate_integrations.llama_index.retriever.profile_texts", lambda texts, name: texts)
    nodes = [TextNode(text=text, relationships=SOURCE) for text in TEXTS.values()]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    assert sorted(profile_searched(index.as_retriever())["corpus"]) == sorted(TEXTS.values())
    # Regression: of a retriever for some of the nodes, the others were read, too.
    one = VectorIndexRetriever(index, node_ids=[nodes[0].node_id, "deleted since"])
    assert profile_searched(one) == {"corpus": [nodes[0].text]}


@both_ways
def test_claims_are_searched_separately_and_fused(gate, call):
    shelves = [Shelf("a", "all"), Shelf("b", "all")]
    fusion = ClaimFusionRetriever(shelves, gate, similarity_top_k=2, filter_claims=True)
    nodes = call(fusion, "retrieve", "what is unknown?")
    expected = ["what is unknown?", "unknown Oulu lies far up north", "unknown Jupiter has many moons"]
    # Side by side, so in any order.
    assert [sorted(shelf.queries) for shelf in shelves] == [sorted(expected)] * 2
    assert [n.node.node_id for n in nodes] == ["all", "a"]
    assert gate.calls == [["what is unknown?"], expected[1:]]
    shelf = Shelf()
    assert call(ClaimFusionRetriever([shelf], gate, max_queries=1), "retrieve", "known?")
    assert shelf.queries == ["known?"]  # whether to search is for the engine to say


def test_an_empty_question_is_searched_for_as_without_claims(gate):
    """Regression: there was no text to embed, so LlamaIndex raised a bare TypeError."""
    shelf = Shelf()
    assert ClaimQueryTransform(gate).run(" ").embedding_strs == [" "]
    assert ClaimFusionRetriever([shelf], gate).retrieve(" ")
    assert shelf.queries == [" "]


def test_the_transform_adds_claims_to_the_embedding_texts(gate):
    transform = ClaimQueryTransform(gate)
    with pytest.warns(UserWarning, match="ClaimFusionRetriever searches for each of them"):
        bundle = transform.run("what is unknown?")
    assert (bundle.query_str, len(bundle.embedding_strs)) == ("what is unknown?", 3)


COUNT = "must be a whole number of at least 1"
AS_RETRIEVER = r"VectorStoreIndex cannot be used as a retriever.*index\.as_retriever\(\)"
AS_ENGINE = r"VectorStoreIndex cannot be used as a query engine.*index\.as_query_engine\(\).*GatedRetriever"
AS_LLM = r"str cannot be used as an LLM: .* load_gate\(llm_name="  # regression: "no attribute 'metadata'"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda gate: ClaimFusionRetriever([Shelf()], gate, tokens=0), f"tokens {COUNT}"),
        (lambda gate: ClaimFusionRetriever([Shelf()], gate, similarity_top_k=0), f"similarity_top_k {COUNT}"),
        (lambda gate: ClaimFusionRetriever([Shelf()], gate, max_queries=0), f"max_queries {COUNT}"),
        (lambda gate: ClaimQueryTransform(gate, max_queries="6"), f"max_queries {COUNT}"),
        (lambda gate: IndexRetriever("a folder"), "str cannot be used as an index: it has no method search"),
        (
            lambda gate: ClaimFusionRetriever([Shelf()], gate, filter_claims="no"),
            "filter_claims must be True",
        ),
        (lambda gate: ClaimQueryTransform(gate, filter_claims=1), "filter_claims must be True or False"),
        (
            lambda gate: GatedQueryEngine(Rag(), Rag(), gate, streaming="no"),
            "streaming must be True or False",
        ),
        (
            lambda gate: IndexRetriever(PassageIndex(Letters()), similarity_top_k=-1),
            f"similarity_top_k {COUNT}",
        ),
        (lambda gate: GatedRetriever(vector_index(), gate), AS_RETRIEVER),
        (lambda gate: GatedRetriever({"docs": Shelf(), "hr": vector_index()}, gate), AS_RETRIEVER),
        (lambda gate: ClaimFusionRetriever([Shelf(), vector_index()], gate), AS_RETRIEVER),
        (lambda gate: GatedQueryEngine(Rag(), vector_index(), gate), AS_ENGINE),
        (lambda gate: GatedQueryEngine.from_defaults(vector_index(), gate, MockLLM()), AS_ENGINE),
        (lambda gate: GatedQueryEngine.from_defaults(over(Shelf()), gate, "gpt-4o"), AS_LLM),
        (lambda gate: GatedQueryEngine(Rag(), Rag(), gate, llm="gpt-4o"), AS_LLM),
        (lambda gate: ClaimFusionRetriever([Shelf()], gate, draft_llm="gpt-4o"), AS_LLM),
        # Regression: "'tuple' object has no attribute 'callback_manager'", as a postprocessor lists its fields.
        (
            lambda gate: GatedRetriever(Shelf(), gate, node_postprocessors=core.LongContextReorder()),
            r"tuple cannot be used as a node postprocessor.*Pass a list",
        ),
        # Regression: every question failed with "'int' object has no attribute 'get'".
        (
            lambda gate: GatedRetriever(Shelf(), gate, memory=5),
            r"int cannot be used as a memory: .* ChatMemoryBuffer",
        ),
    ],
)
def test_what_has_the_wrong_type_or_is_below_one_is_refused_when_a_part_is_made(gate, make, why):
    with pytest.raises(ConfigurationError, match=why):
        make(gate)


# --- chat engines ------------------------------------------------------------------------------------------


def over_engine(gate, streaming):
    engine = GatedQueryEngine.from_defaults(over(Shelf(), streaming=streaming), gate, llm=MockLLM())
    return CondenseQuestionChatEngine.from_defaults(engine, llm=MockLLM())


def over_retriever(chat_engine):
    return lambda gate, streaming: chat_engine.from_defaults(GatedRetriever(Shelf(), gate), llm=MockLLM())


@pytest.mark.parametrize(
    ("make", "condensed"),
    [
        (over_engine, "rewrite the message to be a standalone question"),
        (over_retriever(CondensePlusContextChatEngine), "rephrase the follow up question"),
        (over_retriever(ContextChatEngine), UNKNOWN),
    ],
    ids=["condense question", "condense plus context", "context"],
)
@every_style
async def test_chat_engines_answer_what_is_known_and_what_is_not(gate, make, condensed, style):
    engine = make(gate, style.endswith("stream"))
    for message in (KNOWN, UNKNOWN):
        text, _ = await aask(engine, message, style)
        assert text not in ("", "Empty Response")
        while len(engine.chat_history) % 2:  # older versions of core note an answer in a thread or task
            await asyncio.sleep(0.01)
    assert gate.questions[0] == KNOWN
    assert condensed in gate.questions[1]  # the LLM repeats what it was asked to condense
    assert len(gate.calls) == 2


@pytest.mark.parametrize("style", ["query", "aquery"])
async def test_a_follow_up_that_no_engine_condensed_retrieves_and_says_why(style):
    engine = over_retriever(ContextChatEngine)(Reader(), False)
    with hearing() as events:
        await aask(engine, "Who is Ada?", style)
        await aask(engine, "And how old is she?", style)
    assert [d.override and d.override.reason for d in decisions_in(events)] == [None, REFERS_BACK]


class TurnLibrarian(TurnReader, Librarian):
    """Reads earlier turns, names the corpora that a question names, and knows nothing."""

    def p_known(self, question, draft):
        return 0.2


class Queries(core.SimilarityPostprocessor):
    """Keeps the questions that it was given."""

    queries: list = Field(default_factory=list)

    def _postprocess_nodes(self, nodes, query_bundle=None):
        self.queries.append(query_bundle.query_str)
        return nodes


@pytest.mark.parametrize("make", [ChatMemoryBuffer, Memory])
@pytest.mark.parametrize("style", ["query", "aquery"])
async def test_a_follow_up_in_a_memory_is_searched_for_with_what_it_follows_on(style, make):
    """Regression: the gate read the memory, but only the last message was searched for."""
    shelves, memory, reranker = {name: Shelf() for name in Librarian.corpora}, make.from_defaults(), Queries()
    gate = TurnLibrarian()
    guarded = GatedRetriever(shelves, gate, memory=memory, node_postprocessors=[reranker])
    engine = ContextChatEngine.from_defaults(guarded, llm=MockLLM(), memory=memory)
    answer, _ = await aask(engine, "Who leads hr these days?", style)
    await aask(engine, "And how old is she, by hr?", style)
    _, response = await aask(engine, "How many people work for hr in Spain?", style)
    first, follow_up, new = (question for (question,) in gate.calls)
    assert gate.histories[:2] == [None, (f"user: {first}", f"assistant: {answer}".strip())]
    assert len(response.source_nodes) == 1
    searched = [first, f"{first}\n{follow_up}", new, f"{follow_up}\n{new}"]
    assert {name: shelf.queries for name, shelf in shelves.items()} == {"docs": [], "hr": searched, "web": []}
    assert reranker.queries == [first, f"{first}\n{follow_up}", new]


@pytest.mark.parametrize("insert", InsertMethod)
@both_ways
def test_what_a_memory_adds_to_the_turns_is_no_turn(call, insert):
    """Regression: it was read as an earlier message of the user, and searched for."""
    facts = StaticMemoryBlock(name="facts", static_content="The user works at Acme.")
    memory = Memory.from_defaults(memory_blocks=[facts], insert_method=insert)
    shelf, gate = Shelf(), TurnReader()
    guarded = GatedRetriever(shelf, gate, memory=memory).with_threshold(1.0)
    call(guarded, "retrieve", "Who is Ada?")
    assert (gate.histories, shelf.queries) == ([None], ["Who is Ada?"])
    memory.put(ChatMessage("Who is Ada?"))
    call(guarded, "retrieve", "Where did Bert live?")
    assert gate.histories[1:] == [("user: Who is Ada?",)]


REPLACES_THE_LIST = [core.SimilarityPostprocessor(similarity_cutoff=0.1)]


@pytest.mark.parametrize("postprocessors", [[], REPLACES_THE_LIST], ids=["plain", "postprocessed"])
@pytest.mark.parametrize("engine", [ContextChatEngine, CondensePlusContextChatEngine, RetrieverQueryEngine])
@every_style
def test_the_note_is_read_and_is_no_source(gate, engine, style, postprocessors):
    guarded = GatedRetriever(Shelf(), gate)
    for question, count in ((KNOWN, 0), (UNKNOWN, 1)):
        options = {"llm": MockLLM(), "node_postprocessors": postprocessors}
        if engine is RetrieverQueryEngine:
            part = engine.from_args(guarded, streaming=style.endswith("stream"), **options)
        else:
            part = engine.from_defaults(guarded, **options)
        text, response = ask(part, question, style)
        assert ("answer it from what you know" in text) is (question == KNOWN)
        assert len(response.source_nodes) == count
        assert [len(source.raw_output) for source in getattr(response, "sources", [])] in ([], [count])
        assert response.metadata["rgate"]["retrieve"] is (question == UNKNOWN)
    plain = ask(over(guarded.retriever), UNKNOWN, "query")[1]
    assert "rgate" not in plain.metadata  # a decision is not left for what is asked later


async def test_a_response_has_the_decision_of_a_search_in_another_task(gate):
    """Regression: in a workflow, or with ``use_async=True``, the decision was lost."""
    shelf = Mock(Shelf, callback_manager=None)
    shelf.aretrieve = AsyncMock(return_value=[NodeWithScore(node=TextNode(text="x"))])  # the same for all
    guarded = GatedRetriever(shelf, gate)
    questions = [UNKNOWN, f"{UNKNOWN} Really?"]
    found = await asyncio.gather(*map(guarded.aretrieve, questions))
    synthesizer = get_response_synthesizer(llm=MockLLM())
    for question, nodes in zip(questions, found, strict=True):
        response = await synthesizer.asynthesize(question, nodes)
        assert response.metadata["rgate"]["question"] == question
    assert "rgate" not in (await synthesizer.asynthesize(UNKNOWN, [*found[0], *found[1]])).metadata


def test_a_document_forges_no_decision():
    """By a key of its own: it went from the sources, and its decision was shown as the gate's."""
    forged = TextNode(text="x", metadata={"rgate": {"retrieve": False, "reason": "forged"}})
    shelf = Mock(Shelf, callback_manager=None)
    shelf.retrieve.return_value = [NodeWithScore(node=forged)]
    response = over(GatedRetriever(shelf, "constant:always")).query(UNKNOWN)
    assert [source.node for source in response.source_nodes] == [forged]
    assert response.metadata["rgate"]["reason"] == "This gate always retrieves."


@both_ways
def test_a_response_with_sources_from_elsewhere_has_no_decision(gate, call):
    guarded, elsewhere = GatedRetriever(Shelf("a"), gate), Shelf("b")
    fused = QueryFusionRetriever([guarded, elsewhere], llm=MockLLM(), num_queries=1, use_async=False)
    response = call(over(fused), "query", UNKNOWN)
    assert len(response.source_nodes) == 2
    assert "rgate" not in response.metadata


def test_no_citation_lists_the_note(gate):
    response = CitationQueryEngine(GatedRetriever(Shelf(), gate), llm=MockLLM()).query(KNOWN)
    assert (response.source_nodes, list(response.metadata)) == ([], ["rgate"])


# --- postprocessors ----------------------------------------------------------------------------------------

BY_SCORE_OR_POSITION = [
    core.SimilarityPostprocessor(similarity_cutoff=20.0),
    core.PrevNextNodePostprocessor(docstore=SimpleDocumentStore(), mode="both"),
    core.LongContextReorder(),
    core.MetadataReplacementPostProcessor(target_metadata_key="window"),
]


@pytest.mark.parametrize("postprocessor", BY_SCORE_OR_POSITION, ids=lambda each: type(each).__name__)
def test_the_note_passes_postprocessors_and_can_be_saved(postprocessor):
    notes = GatedRetriever(Shelf(), ScriptedGate()).retrieve(KNOWN)
    (note,) = postprocessor.postprocess_nodes(notes, query_str=KNOWN)
    assert note.node.metadata["rgate"]["retrieve"] is False
    again = json_to_doc(doc_to_json(note.node))
    assert (again.text, again.metadata["rgate"]["reason"]) == (note.node.text, "because")
    json.dumps(note.score, allow_nan=False)


@every_style
def test_postprocessors_of_the_retriever_never_see_the_note(gate, style):
    drops = core.SimilarityPostprocessor(similarity_cutoff=1e99)  # also the note
    guarded = GatedRetriever(Shelf(), gate, node_postprocessors=[drops])
    assert drops.callback_manager is guarded.callback_manager
    engine = over(guarded, streaming=style.endswith("stream"))
    assert KNOWN in ask(engine, KNOWN, style)[0]
    # That is LlamaIndex's answer when an index has nothing, and it stays so.
    assert "Empty Response" in ask(engine, UNKNOWN, style)[0]
