"""LlamaIndex: what query engines promise, called and awaited by the same test."""

import copy
import logging
import pickle
import threading
import time

import pytest
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool, ToolMetadata

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateEvent,
    RetrievalGateSelector,
)
from tests.llama_index_parts import (
    ScriptedGate,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    names_of,
    vector_index,
)
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_llama_index_once import Same

KNOWN, UNKNOWN = "a thing", "unknown thing"
PASSAGES = "Context information"  # in LlamaIndex's prompt for passages, which MockLLM repeats


@pytest.fixture
def gate():
    return ScriptedGate()


def plain(**options):
    return vector_index().as_query_engine(llm=MockLLM(), **options)


def gated(gate, inner=None, **options):
    return GatedQueryEngine.from_defaults(inner or plain(), gate, llm=MockLLM(), **options)


def tools_named(*names):
    return [ToolMetadata(name=name, description=name) for name in names]


def routed(streaming):
    tools = [QueryEngineTool.from_defaults(plain(streaming=streaming), name="docs", description="d")]
    selector = RetrievalGateSelector("constant:always", direct="docs", retrieve="docs")
    return RouterQueryEngine(selector, tools, llm=MockLLM())


# --- kinds of responses, two steps, thresholds -------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda streaming: plain(streaming=streaming),
        lambda streaming: TransformQueryEngine(plain(streaming=streaming), Same()),
        lambda streaming: CitationQueryEngine.from_args(vector_index(), llm=MockLLM(), streaming=streaming),
        routed,
        lambda streaming: gated("constant:always", plain(streaming=streaming)),
    ],
    ids=["retriever", "transform", "citation", "router", "gated"],
)
@every_style
def test_both_arms_give_the_kind_of_response_that_the_engine_gives(gate, make, style):
    engine = gated(gate, make(style.endswith("stream")))
    kinds = {"stream": StreamingResponse, "astream": AsyncStreamingResponse}
    for question in (KNOWN, UNKNOWN):
        text, response = ask(engine, question, style)
        assert type(response) is kinds.get(style, Response)
        assert (PASSAGES in text or "Source" in text) is (question == UNKNOWN)
        assert response.metadata["rgate"]["retrieve"] is (question == UNKNOWN)
    assert gate.questions == [[KNOWN], [UNKNOWN]]


@both_ways
def test_streaming_can_be_said_too(gate, call):
    streams = call(gated(gate, streaming=True), "query", KNOWN)
    assert isinstance(streams, StreamingResponse | AsyncStreamingResponse)
    assert type(call(gated(gate, plain(streaming=True), streaming=False), "query", KNOWN)) is Response


@both_ways
def test_a_failing_gate_retrieves(gate, call):
    response = call(gated(gate).with_threshold(0.0), "query", "RAISE")
    assert response.source_nodes
    assert response.metadata["rgate"]["error"]["message"] == "gate down"


def test_without_an_llm_that_of_the_settings_answers(gate, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("IS_TESTING", raising=False)
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigurationError, match=r"no LLM for known questions.*llm=llm"):
        GatedQueryEngine.from_defaults(plain(), gate)
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    assert KNOWN in str(GatedQueryEngine.from_defaults(plain(), gate).query(KNOWN))


@both_ways
def test_a_threshold_for_a_query(call, gate):
    ik = load_gate("ik", proxy=ScriptedProxy())
    for decides, threshold, retrieves in (
        (ik, 1.0, True),
        (ik, 0.0, False),
        (gate, 0.6, True),
        (gate, 0.4, False),
    ):
        response = call(gated(decides).with_threshold(threshold), "query", KNOWN)
        assert response.metadata["rgate"]["retrieve"] is retrieves
        assert response.metadata["rgate"]["threshold"] == threshold
        guarded = GatedRetriever(vector_index().as_retriever(), decides).with_threshold(threshold)
        assert (len(call(guarded, "retrieve", KNOWN)) == 2) is retrieves
        selector = RetrievalGateSelector(decides).with_threshold(threshold)
        assert call(selector, "select", ["direct", "retrieve"], KNOWN).ind == int(retrieves)
    response = call(gated(ik).with_threshold(1.0).with_threshold(None), "query", KNOWN)
    assert response.metadata["rgate"]["threshold"] == ik.threshold


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), "high"])
@pytest.mark.parametrize("kind", [GatedQueryEngine, GatedRetriever, RetrievalGateSelector])
def test_what_is_no_threshold_is_an_error_at_once(gate, kind, threshold):
    part = next(part for part in parts(gate) if isinstance(part, kind))
    with pytest.raises(ConfigurationError, match="threshold must be a number"):
        part.with_threshold(threshold)


@both_ways
def test_a_bundle_and_its_embedding_reach_the_engine(gate, call):
    seen = []

    class Seeing(VectorIndexRetriever):
        def _retrieve(self, query_bundle):
            seen.append(query_bundle.embedding)
            return super()._retrieve(query_bundle)

        async def _aretrieve(self, query_bundle):
            return self._retrieve(query_bundle)

    retriever = Seeing(vector_index(), embed_model=MockEmbedding(8))
    engine = gated(gate, RetrieverQueryEngine.from_args(retriever, llm=MockLLM()))
    call(engine, "query", QueryBundle(UNKNOWN, embedding=[0.5] * 8))
    assert seen == [[0.5] * 8]


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


@both_ways
@pytest.mark.parametrize(
    ("question", "sources"),
    [("unknown?", 2), ("known?", 0), ("broken, but known?", 0), ("broken, unknown?", None)],
)
def test_the_search_goes_on_while_an_answer_is_judged(call, question, sources):
    retriever, before_the_decision = Searching(), []
    gate = ScriptedGate(before=lambda: before_the_decision.append(retriever.began.wait(PATIENCE)))
    engine = gated(gate, RetrieverQueryEngine.from_args(retriever, llm=MockLLM()), answer_first=PREFETCH)
    if sources is None:
        with pytest.raises(OSError, match="index gone"):
            call(engine, "query", question)
    else:
        response = call(engine, "query", question)
        assert len(response.source_nodes) == sources
        assert question in str(response)
    assert before_the_decision == [True]


@both_ways
def test_the_search_is_dropped_when_the_gate_raises(call, caplog):
    retriever = Searching()

    class Waits(ScriptedProxy):
        def _called(self, name, values):
            retriever.began.wait(PATIENCE)
            super()._called(name, values)

    inner = RetrieverQueryEngine.from_args(retriever, llm=MockLLM())
    engine = gated(load_gate("ik", proxy=Waits(), on_error="raise"), inner, answer_first=PREFETCH)
    caplog.set_level(logging.INFO, "rgate_integrations")
    with pytest.raises(RuntimeError, match="scripted failure"):
        call(engine, "query", "broken RAISE")
    end = time.monotonic() + PATIENCE
    while "index gone" not in caplog.text:  # whoever drops a search takes note of its error
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_in_one_step_cannot_search_ahead(gate):
    engine = gated(gate)
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine(engine, engine.direct, gate, answer_first=PREFETCH)


# --- prompts, callbacks, events, copies --------------------------------------------------------------------


@both_ways
def test_prompts_of_both_arms_can_be_read_and_changed(gate, call):
    engine = gated(gate)
    inner = "query_engine:response_synthesizer:text_qa_template"
    direct = "direct:response_synthesizer:simple_template"
    assert {inner, direct} <= set(engine.get_prompts())
    read, say = PromptTemplate("Read {context_str}: {query_str}"), PromptTemplate("Say {query_str}")
    engine.query_engine.update_prompts({inner.removeprefix("query_engine:"): read})
    engine.direct.update_prompts({direct.removeprefix("direct:"): say})
    assert str(call(engine, "query", KNOWN)) == f"Say {KNOWN}"
    assert str(call(engine, "query", UNKNOWN)).startswith("Read ")


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


@both_ways
def test_events_of_a_query_come_in_order_and_in_a_span(gate, call):
    with hearing() as events:
        call(gated(gate), "query", UNKNOWN)
    expected = ["QueryStartEvent", "RetrievalGateEvent", "QueryStartEvent", "RetrievalStartEvent"]
    assert [name for name in names_of(events) if name in expected] == expected
    assert names_of(events)[-1] == "QueryEndEvent"
    (decided,) = [event for event in events if isinstance(event, RetrievalGateEvent)]
    assert "GatedQueryEngine" in decided.span_id
    assert decided.decision.retrieve


@both_ways
def test_only_a_question_that_is_retrieved_for_begins_a_retrieval(gate, call):
    guarded = GatedRetriever(vector_index().as_retriever(), gate)
    with hearing() as events:
        call(guarded, "retrieve", KNOWN)
    assert names_of(events) == ["RetrievalGateEvent"]
    with hearing() as events:
        call(guarded, "retrieve", UNKNOWN)
    assert (names_of(events).count("RetrievalStartEvent"), len(decisions_in(events))) == (1, 1)


def parts(gate):
    inner = vector_index().as_retriever()
    return [
        gated(gate),
        GatedRetriever(inner, gate),
        ClaimFusionRetriever([inner], gate),
        RetrievalGateSelector(gate, retrieve="docs"),
    ]


def test_everything_can_be_copied_and_what_core_can_pickle_can_be_pickled():
    engine, *retrievers, selector = copy.deepcopy(parts(load_gate("ik", proxy=ScriptedProxy())))
    assert "Hamlet" in str(engine.query("Who wrote Hamlet?"))
    assert all(retriever.retrieve("Who wrote Hamlet?") for retriever in retrievers)
    assert selector.select(["direct", "docs"], "Who wrote Hamlet?").ind in (0, 1)
    never = load_gate("constant:never")
    again = pickle.loads(pickle.dumps(RetrievalGateSelector(never, retrieve="docs")))  # noqa: S301
    assert again.select(["direct", "docs"], "Who wrote Hamlet?").ind == 0
    event = RetrievalGateEvent(decision=never.decide("Who wrote Hamlet?"))
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301
    assert RetrievalGateEvent.model_validate_json(event.model_dump_json()).decision == event.decision
