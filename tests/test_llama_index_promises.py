"""What LlamaIndex promises of routers, selectors, retrievers and engines holds for those of this package, too."""

import asyncio
import copy
import pickle
from typing import ClassVar

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata

from rgate_integrations import Decision, load_gate
from rgate_integrations.engine.follow_ups import REFERS_BACK
from rgate_integrations.engine.gate_like import decide
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateEvent,
    RetrievalGateSelector,
)
from rgate_integrations.runtime.flow import arun, run
from tests.llama_index_parts import ScriptedGate, ask, both_ways, every_style, vector_index
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_llama_index_once import Listed, Same
from tests.test_llama_index_postprocessors import Says

KNOWN, UNKNOWN = "a thing", "unknown thing"
PASSAGES = "Context information"  # in LlamaIndex's prompt for passages, which MockLLM repeats

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def gate():
    return ScriptedGate()


def plain(**options):
    return vector_index().as_query_engine(llm=MockLLM(), **options)


def gated(gate, inner=None, **options):
    return GatedQueryEngine.from_defaults(inner or plain(), gate, llm=MockLLM(), **options)


# --- query engines: kinds of responses, two steps, thresholds ---------------------------------------------------


def retriever_engine(streaming):
    return plain(streaming=streaming)


def transform_engine(streaming):
    return TransformQueryEngine(plain(streaming=streaming), Same())


def citation_engine(streaming):
    return CitationQueryEngine.from_args(vector_index(), llm=MockLLM(), streaming=streaming)


def routed_engine(streaming):
    tools = [QueryEngineTool.from_defaults(plain(streaming=streaming), name="docs", description="d")]
    selector = RetrievalGateSelector("constant:always", direct="docs", retrieve="docs")
    return RouterQueryEngine(selector, tools, llm=MockLLM())


def gated_engine(streaming):
    return gated("constant:always", plain(streaming=streaming))


ENGINES = (retriever_engine, transform_engine, citation_engine, routed_engine, gated_engine)


@pytest.mark.parametrize("make", ENGINES)
@every_style
def test_both_arms_give_the_kind_of_response_that_the_engine_gives(gate, make, style):
    engine = gated(gate, make(style.endswith("stream")))
    kinds = {
        "query": Response,
        "aquery": Response,
        "stream": StreamingResponse,
        "astream": AsyncStreamingResponse,
    }
    for question in (KNOWN, UNKNOWN):
        text, response = ask(engine, question, style)
        assert type(response) is kinds[style]
        assert (PASSAGES in text or "Source" in text) is (question == UNKNOWN)


@both_ways
def test_streaming_can_be_said_too(gate, call):
    streams = gated(gate, streaming=True)
    assert type(call(streams, "query", KNOWN)) in (StreamingResponse, AsyncStreamingResponse)
    assert type(call(gated(gate, plain(streaming=True), streaming=False), "query", KNOWN)) is Response


@both_ways
def test_an_engine_works_in_two_steps(gate, call):
    engine = gated(gate)
    extra = [NodeWithScore(node=TextNode(text="extra"), score=0.5)]
    for question in (KNOWN, UNKNOWN):
        bundle = QueryBundle(question)
        nodes = call(engine, "retrieve", bundle)
        response = call(engine, "synthesize", bundle, nodes, extra)
        assert (PASSAGES in str(response)) is (question == UNKNOWN)
        assert "Empty Response" not in str(response)
        assert response.source_nodes[-1].node.text == "extra"
        assert bundle == QueryBundle(question)
    assert len(nodes) == 2
    assert gate.questions == [[KNOWN], [UNKNOWN]]
    (note,) = call(engine, "retrieve", QueryBundle(KNOWN))
    assert call(engine, "synthesize", QueryBundle(KNOWN), [note]).metadata["rgate"]["reason"] == "because"


@both_ways
def test_an_engine_around_one_in_two_steps_is_one_too(gate, call):
    outer = TransformQueryEngine(gated(gate), Same())
    assert call(outer, "query", KNOWN).metadata["rgate"]["retrieve"] is False
    nodes = outer.retrieve(QueryBundle(KNOWN))
    assert PASSAGES not in str(call(outer, "synthesize", QueryBundle(KNOWN), nodes))


@both_ways
def test_a_threshold_for_a_query(call):
    gate = load_gate("ik", proxy=ScriptedProxy())
    engine = gated(gate)
    for threshold, retrieves in ((1.0, True), (0.0, False)):
        response = call(engine.with_threshold(threshold), "query", "Who wrote Hamlet?")
        assert response.metadata["rgate"]["retrieve"] is retrieves
        assert response.metadata["rgate"]["threshold"] == threshold
        guarded = GatedRetriever(Listed(), gate).with_threshold(threshold)
        assert bool(guarded.retriever.queries) is False
        call(guarded, "retrieve", "Who wrote Hamlet?")
        assert bool(guarded.retriever.queries) is retrieves
        selector = RetrievalGateSelector(gate).with_threshold(threshold)
        chosen = call(selector, "select", ["direct", "retrieve"], "Who wrote Hamlet?")
        assert chosen.ind == int(retrieves)
    response = call(engine.with_threshold(1.0).with_threshold(None), "query", "Who wrote Hamlet?")
    assert response.metadata["rgate"]["threshold"] == gate.threshold == engine.decider.gate.threshold


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), "high"])
def test_what_is_no_threshold_is_an_error_at_once(gate, threshold):
    for part in parts(gate)[:2] + parts(gate)[3:]:
        with pytest.raises(ConfigurationError, match="threshold must be a number"):
            part.with_threshold(threshold)


@both_ways
def test_a_threshold_for_a_gate_that_takes_none(gate, call):
    engine = gated(gate)
    for threshold, retrieves in ((0.6, True), (0.4, False)):  # P(known) is 0.5
        response = call(engine.with_threshold(threshold), "query", KNOWN)
        assert response.metadata["rgate"]["retrieve"] is retrieves
        assert response.metadata["rgate"]["threshold"] == threshold
    response = call(engine.with_threshold(0.0), "query", "RAISE")
    assert response.metadata["rgate"]["error"]["message"] == "gate down"
    assert response.metadata["rgate"]["retrieve"] is True


@both_ways
def test_a_threshold_for_each_question_of_a_gate_that_takes_none(gate, call):
    flow = decide(gate, [KNOWN, KNOWN, UNKNOWN], threshold=[0.6, None, 0.4])
    decisions = run(flow) if call.__name__ == "blocking" else asyncio.run(arun(flow))
    assert [(d.retrieve, d.threshold) for d in decisions] == [(True, 0.6), (False, 0.5), (False, 0.4)]


@both_ways
def test_bundles_and_strings_are_the_same_question(gate, call):
    engine = gated(gate)
    for question in (UNKNOWN, QueryBundle(UNKNOWN)):
        assert call(engine, "query", question).source_nodes
    assert gate.questions == [[UNKNOWN]] * 2


# --- selectors and routers --------------------------------------------------------------------------------------


class Picks(BaseSelector):
    """Selects what it is told to."""

    def __init__(self, *indexes):
        self.indexes = indexes

    def _select(self, choices, query):
        return SelectorResult(
            selections=[SingleSelection(index=i, reason=f"liked {i}") for i in self.indexes]
        )

    async def _aselect(self, choices, query):
        return self._select(choices, query)

    def _get_prompts(self):
        return {}

    def _update_prompts(self, prompts):
        pass


@both_ways
@pytest.mark.parametrize("wrap", [str, lambda name: ToolMetadata(name=name, description="d")])
@pytest.mark.parametrize("query", [str, QueryBundle])
def test_choices_and_questions_of_every_kind(gate, call, wrap, query):
    choices = [wrap(name) for name in ("other", "docs", "direct")]
    selector = RetrievalGateSelector(gate, retrieve="docs")
    found = call(selector, "select", choices, query(UNKNOWN))
    assert isinstance(found, SelectorResult)
    assert (found.inds, found.reasons) == ([1], ["because"])
    assert call(selector, "select", choices, query(KNOWN)).inds == [2]


@both_ways
def test_the_reason_of_an_inner_selector_is_kept(gate, call):
    selector = RetrievalGateSelector(gate, retrieve=["b", "a"], inner=Picks(1))
    found = call(selector, "select", ["a", "direct", "b"], UNKNOWN)
    assert (found.ind, found.reason) == (0, "because liked 1")


@both_ways
def test_core_selectors_select_inside(gate, call):
    one = LLMSingleSelector.from_defaults(llm=Says('[{"choice": 2, "reason": "newer"}]'))
    selector = RetrievalGateSelector(gate, retrieve=["a", "b"], inner=one)
    found = call(selector, "select", ["direct", "a", "b"], UNKNOWN)
    assert (found.ind, found.reason) == (2, "because newer")
    both = LLMMultiSelector.from_defaults(
        llm=Says('[{"choice": 1, "reason": "x"}, {"choice": 2, "reason": "y"}]')
    )
    selector = RetrievalGateSelector(gate, retrieve=["a", "b"], inner=both)
    assert call(selector, "select", ["direct", "a", "b"], UNKNOWN).inds == [1, 2]


@both_ways
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('[{"choice": 0, "reason": "none fits"}]', "selected 0 of 2 tools"),
        ('[{"choice": 3, "reason": "none fits"}]', "selected 3 of 2 tools"),
        ("[]", "selected none of 2 tools"),
        ("I would take the first.", "failed"),
    ],
    ids=["none", "too many", "empty", "no JSON"],
)
def test_where_an_inner_selector_fails_the_first_retrieve_tool_is_taken(gate, call, said, why):
    inner = LLMSingleSelector.from_defaults(llm=Says(said))
    selector = RetrievalGateSelector(gate, retrieve=["b", "a"], inner=inner)
    found = call(selector, "select", ["direct", "a", "b"], UNKNOWN)
    assert found.inds == [2]
    assert why in found.reasons[0]
    gate.on_error = "raise"
    with pytest.raises(Exception, match=r"selected|JSON|json|parse"):
        call(selector, "select", ["direct", "a", "b"], UNKNOWN)


def router(gate, inner=None, streaming=False):
    engine = gated(gate, plain(streaming=streaming))
    names = ("docs", "news")
    tools = [QueryEngineTool.from_defaults(engine.direct, name="direct", description="d")]
    for name in names:
        tools.append(QueryEngineTool.from_defaults(engine.query_engine, name=name, description=name))
    return RouterQueryEngine(
        RetrievalGateSelector(gate, retrieve=names, inner=inner or Picks(0)), tools, llm=MockLLM()
    )


@every_style
def test_a_router_says_what_was_selected(gate, style):
    engine = router(gate, streaming=style.endswith("stream"))
    for question, index in ((KNOWN, 0), (UNKNOWN, 1)):
        text, response = ask(engine, question, style)
        assert response.metadata["selector_result"].ind == index
        assert (PASSAGES in text) is (question == UNKNOWN)


@both_ways
def test_a_router_combines_several_selections(gate, call):
    response = call(router(gate, Picks(0, 1)), "query", UNKNOWN)
    assert response.metadata["selector_result"].inds == [1, 2]
    assert len(response.source_nodes) == 4


@both_ways
def test_a_router_without_a_selection_asks_the_first_retrieve_tool(gate, call):
    response = call(router(gate, Picks()), "query", UNKNOWN)
    assert response.metadata["selector_result"].ind == 1


@both_ways
def test_a_router_of_retrievers(gate, call):
    docs, note = Listed(), Listed()
    tools = [
        RetrieverTool.from_defaults(note, name="direct", description="d"),
        RetrieverTool.from_defaults(docs, name="docs", description="r"),
    ]
    selector = RetrievalGateSelector(gate, retrieve="docs")
    retriever = RouterRetriever(selector, tools, llm=MockLLM())
    call(retriever, "retrieve", UNKNOWN)
    call(retriever, "retrieve", KNOWN)
    assert (docs.queries, note.queries) == ([UNKNOWN], [KNOWN])


# --- retrievers -------------------------------------------------------------------------------------------------


@both_ways
def test_objects_of_nodes_are_resolved(gate, call):
    inner = Listed()
    inner.object_map = {"a": TextNode(id_="b", text="inside")}

    class Pointing(type(inner)):
        def _retrieve(self, query_bundle):
            return [NodeWithScore(node=IndexNode(text="a", index_id="a"), score=0.5)]

    pointing = Pointing()
    pointing.object_map = inner.object_map
    for retriever in (GatedRetriever(pointing, gate), ClaimFusionRetriever([pointing], gate)):
        (node,) = call(retriever, "retrieve", UNKNOWN)
        assert node.node.text == "inside"


@both_ways
@pytest.mark.parametrize("query", [str, QueryBundle])
def test_retrievers_take_bundles_and_strings_and_change_neither(gate, call, query):
    inner = vector_index().as_retriever()
    for retriever in (GatedRetriever(inner, gate), ClaimFusionRetriever([inner], gate)):
        asked = query(UNKNOWN)
        assert call(retriever, "retrieve", asked)
        assert asked == query(UNKNOWN)


@both_ways
def test_retrievers_in_core_retrievers(gate, call):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    fused = QueryFusionRetriever([guarded], llm=MockLLM(), num_queries=1, use_async=False)
    assert len(call(fused, "retrieve", UNKNOWN)) == 2
    (note,) = call(fused, "retrieve", KNOWN)
    assert note.node.metadata["rgate"]["retrieve"] is False
    assert len(call(TransformRetriever(guarded, Same()), "retrieve", UNKNOWN)) == 2
    tool = RetrieverTool.from_defaults(guarded)
    assert "answer it from what you know" in call(tool, "call", KNOWN).content


# --- chat engines -----------------------------------------------------------------------------------------------


class Condenses(MockLLM):
    """Condenses every follow-up to one question; answers with the end of the prompt."""

    def complete(self, prompt, formatted=False, **options):
        if "standalone question" in prompt.lower():
            return self._says("what is unknown about Ada?")
        return self._says(prompt[-200:])

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt)

    def _says(self, text):
        from llama_index.core.base.llms.types import CompletionResponse

        return CompletionResponse(text=text)


def condense_question(gate, streaming):
    return CondenseQuestionChatEngine.from_defaults(gated(gate, plain(streaming=streaming)), llm=Condenses())


def context(gate, streaming):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    return ContextChatEngine.from_defaults(guarded, llm=Condenses())


def condense_plus_context(gate, streaming):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    return CondensePlusContextChatEngine.from_defaults(guarded, llm=Condenses())


CHATS = (condense_question, context, condense_plus_context)


async def chatted(engine, messages, style):
    """Say one message after the other; returns the texts of the answers."""
    texts = []
    for message in messages:
        if style == "query":
            texts.append(str(engine.chat(message)))
        elif style == "aquery":
            texts.append(str(await engine.achat(message)))
        elif style == "stream":
            response = engine.stream_chat(message)
            writing = getattr(response, "write_response_to_history_thread", None)
            texts.append("".join(response.response_gen))
            if writing is not None:  # older versions of core write before the stream ends
                writing.join(PATIENCE)
        else:
            response = await engine.astream_chat(message)
            writing = getattr(response, "awrite_response_to_history_task", None)
            texts.append("".join([token async for token in response.async_response_gen()]))
            if writing is not None:
                await writing
    return texts


@pytest.mark.parametrize("make", CHATS)
@every_style
def test_chat_engines_chat_remember_and_forget(gate, make, style):
    engine = make(gate, style.endswith("stream"))
    texts = asyncio.run(chatted(engine, [KNOWN, UNKNOWN], style))
    assert all(texts)
    assert not any("Empty Response" in text for text in texts)
    second = UNKNOWN if make is context else "what is unknown about Ada?"
    assert gate.questions == [[KNOWN], [second]]
    assert [str(message.role.value) for message in engine.chat_history] == ["user", "assistant"] * 2
    assert engine.chat_history[2].content == UNKNOWN
    engine.reset()
    assert engine.chat_history == []


@pytest.mark.parametrize("style", ["query", "aquery"])
def test_a_follow_up_that_no_engine_condensed_retrieves_and_says_why(style):
    decisions = []

    class KnowsAll(ScriptedGate):
        def _decision(self, question, draft):
            return Decision(question=question, retrieve=False, p_known=0.9)

    class Handler(BaseEventHandler):
        def handle(self, event, **kwargs):
            if isinstance(event, RetrievalGateEvent):
                decisions.append(event.decision)

    handler, dispatcher = Handler(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        asyncio.run(chatted(context(KnowsAll(), False), ["Who is Ada?", "And how old is she?"], style))
    finally:
        dispatcher.event_handlers.remove(handler)
    assert [(d.retrieve, d.warnings) for d in decisions] == [(False, ()), (True, (REFERS_BACK,))]


@pytest.mark.parametrize("make", [ChatMemoryBuffer, Memory])
@pytest.mark.parametrize("style", ["query", "aquery"])
def test_a_gate_that_reads_the_turns_of_a_chat_engines_memory_decides(style, make):
    class ReadsHistory(ScriptedGate):
        histories: ClassVar[list] = []

        def decide_batch(self, questions, *, histories=None, **options):
            self.histories += histories or [None]
            return super().decide_batch(questions, **options)

    gate, memory = ReadsHistory(), make.from_defaults()
    gate.histories.clear()
    guarded = GatedRetriever(vector_index().as_retriever(), gate, memory=memory)
    engine = ContextChatEngine.from_defaults(guarded, llm=Condenses(), memory=memory)
    asyncio.run(chatted(engine, [KNOWN, "And how old is she?"], style))
    assert gate.questions == [[KNOWN], ["And how old is she?"]]
    answer = engine.chat_history[1].content
    assert gate.histories == [None, (f"user: {KNOWN}", f"assistant: {answer}")]


# --- prompts, callbacks, events, copies -------------------------------------------------------------------------


@both_ways
def test_prompts_of_both_arms_can_be_read_and_changed(gate, call):
    engine = gated(gate)
    inner = "query_engine:response_synthesizer:text_qa_template"
    direct = "direct:response_synthesizer:simple_template"
    assert {inner, direct} <= set(engine.get_prompts())
    engine.update_prompts(
        {
            inner: PromptTemplate("Read {context_str}: {query_str}"),
            direct: PromptTemplate("Say {query_str}"),
        }
    )
    assert str(call(engine, "query", KNOWN)) == f"Say {KNOWN}"
    assert str(call(engine, "query", UNKNOWN)).startswith("Read ")
    with pytest.raises(ValueError, match="nowhere"):
        engine.update_prompts({"nowhere:prompt": PromptTemplate("x")})


def test_prompts_of_an_inner_selector_can_be_read_and_changed(gate):
    inner = LLMSingleSelector.from_defaults(llm=MockLLM())
    selector = RetrievalGateSelector(gate, retrieve=["a", "b"], inner=inner)
    assert list(selector.get_prompts()) == ["inner:prompt"]
    engine = RouterQueryEngine(
        selector, [QueryEngineTool.from_defaults(plain(), name="a", description="a")], llm=MockLLM()
    )
    assert "selector:inner:prompt" in engine.get_prompts()
    prompt = PromptTemplate("Select {context_list} {num_choices} {query_str}")
    selector.update_prompts({"inner:prompt": prompt})
    assert inner.get_prompts()["prompt"].get_template() == prompt.get_template()


@both_ways
def test_callbacks_hear_of_every_step(gate, call):
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    retriever = vector_index().as_retriever(similarity_top_k=2)
    retriever.callback_manager = manager
    guarded = GatedRetriever(retriever, gate)
    assert guarded.callback_manager is manager
    call(guarded, "retrieve", UNKNOWN)
    call(guarded, "retrieve", KNOWN)
    assert len(debug.get_event_pairs(CBEventType.RETRIEVE)) == 1  # by what is guarded, where it retrieves
    engine = gated(gate, RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), callback_manager=manager))
    assert engine.callback_manager is manager
    call(engine, "query", UNKNOWN)
    assert len(debug.get_event_pairs(CBEventType.QUERY)) == 1


class Names(BaseEventHandler):
    found: list = []  # noqa: RUF012  a pydantic field

    def handle(self, event, **kwargs):
        self.found.append((event.class_name(), event.span_id))


@both_ways
def test_events_of_a_query_come_in_order_and_in_a_span(gate, call):
    handler, dispatcher = Names(found=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        call(gated(gate), "query", UNKNOWN)
    finally:
        dispatcher.event_handlers.remove(handler)
    names = [name for name, _ in handler.found]
    expected = ["QueryStartEvent", "RetrievalGateEvent", "QueryStartEvent", "RetrievalStartEvent"]
    assert [name for name in names if name in expected] == expected
    assert names[-1] == "QueryEndEvent"
    spans = dict(handler.found)
    assert "GatedQueryEngine" in spans["RetrievalGateEvent"]


@both_ways
def test_only_a_question_that_is_retrieved_for_begins_a_retrieval(gate, call):
    handler, dispatcher = Names(found=[]), get_dispatcher()
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    dispatcher.add_event_handler(handler)
    try:
        call(guarded, "retrieve", KNOWN)
        assert [name for name, _ in handler.found] == ["RetrievalGateEvent"]
        call(guarded, "retrieve", UNKNOWN)
    finally:
        dispatcher.event_handlers.remove(handler)
    names = [name for name, _ in handler.found]
    assert (names.count("RetrievalStartEvent"), names.count("RetrievalEndEvent")) == (1, 1)


def parts(gate):
    inner = vector_index().as_retriever()
    return [
        gated(gate),
        GatedRetriever(inner, gate),
        ClaimFusionRetriever([inner], gate),
        RetrievalGateSelector(gate),
    ]


@pytest.mark.parametrize("number", range(4))
def test_everything_can_be_copied(number):
    part = copy.deepcopy(parts(load_gate("ik", proxy=ScriptedProxy()))[number])
    if isinstance(part, GatedQueryEngine):
        assert "Hamlet" in str(part.query("Who wrote Hamlet?"))
    elif isinstance(part, RetrievalGateSelector):
        assert part.select(["direct", "retrieve"], "Who wrote Hamlet?").ind in (0, 1)
    else:
        assert part.retrieve("Who wrote Hamlet?")


def test_what_core_can_pickle_can_be_pickled():
    selector = RetrievalGateSelector(load_gate("constant:never"), retrieve="docs")
    again = pickle.loads(pickle.dumps(selector))  # noqa: S301
    assert again.select(["direct", "docs"], "Who wrote Hamlet?").ind == 0
    event = RetrievalGateEvent(decision=load_gate("constant:never").decide("Who wrote Hamlet?"))
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301
    assert RetrievalGateEvent.model_validate_json(event.model_dump_json()).decision == event.decision


def test_the_embedding_of_a_bundle_reaches_the_engine(gate):
    seen = []

    class Seeing(type(vector_index().as_retriever())):
        def _retrieve(self, query_bundle):
            seen.append(query_bundle.embedding)
            return super()._retrieve(query_bundle)

    retriever = Seeing(vector_index(), embed_model=MockEmbedding(8))
    engine = gated(gate, RetrieverQueryEngine.from_args(retriever, llm=MockLLM()))
    engine.query(QueryBundle(UNKNOWN, embedding=[0.5] * 8))
    assert seen == [[0.5] * 8]
