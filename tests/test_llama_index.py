"""LlamaIndex: what query engines promise, called and awaited by the same test."""

import copy
import pickle

import pytest
from llama_index.core import Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool

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
from tests.begun_answers import LOOK
from tests.llama_index_parts import (
    Rag,
    Shelf,
    ask,
    both_ways,
    every_style,
    hearing,
    over,
    vector_index,
)
from tests.scripted_proxy import ScriptedProxy

KNOWN, UNKNOWN = "a thing", "unknown thing"
PASSAGES = "Context information"  # in LlamaIndex's prompt for passages, which MockLLM repeats


def plain(**options):
    return vector_index().as_query_engine(llm=MockLLM(), **options)


def gated(gate, inner=None, **options):
    return GatedQueryEngine.from_defaults(inner or plain(), gate, llm=MockLLM(), **options)


def guarded(gate):
    return GatedRetriever(vector_index().as_retriever(), gate)


def routed(streaming):
    tools = [QueryEngineTool.from_defaults(plain(streaming=streaming), name="docs", description="d")]
    selector = RetrievalGateSelector("constant:always", direct="docs", retrieve="docs")
    return RouterQueryEngine(selector, tools, llm=MockLLM())


@pytest.mark.parametrize(
    "make",
    [
        lambda streaming: plain(streaming=streaming),
        lambda streaming: TransformQueryEngine(plain(streaming=streaming), HyDEQueryTransform(MockLLM())),
        lambda streaming: CitationQueryEngine.from_args(vector_index(), llm=MockLLM(), streaming=streaming),
        routed,
        lambda streaming: gated("constant:always", plain(streaming=streaming)),
    ],
    ids=["retriever", "transform", "citation", "router", "gated"],
)
@pytest.mark.parametrize("first", [False, AnswerFirst(question_gate=None)], ids=["", "answer first"])
@every_style
def test_both_arms_give_the_kind_of_response_that_the_engine_gives(gate, make, first, style):
    engine = gated(gate, make(style.endswith("stream")), answer_first=first)
    kinds = {"stream": StreamingResponse, "astream": AsyncStreamingResponse}
    for question in (KNOWN, UNKNOWN):
        text, response = ask(engine, question, style)
        assert type(response) is kinds.get(style, Response)
        assert (PASSAGES in text or "Source" in text) is (question == UNKNOWN)
        assert response.metadata["rgate"]["retrieve"] is (question == UNKNOWN)
    assert gate.calls == [[KNOWN], [UNKNOWN]]


@both_ways
def test_streaming_can_be_said_too(gate, call):
    streams = call(gated(gate, streaming=True), "query", KNOWN)
    assert isinstance(streams, StreamingResponse | AsyncStreamingResponse)
    assert type(call(gated(gate, plain(streaming=True), streaming=False), "query", KNOWN)) is Response


@every_style
def test_an_engine_that_streams_in_threads_alone_can_be_awaited(gate, style):
    # Awaited, it gives what it gives when it is called.
    in_threads = Rag(answer=StreamingResponse(iter(["It ", "is ", "me."])))
    engine = GatedQueryEngine(Rag(), in_threads, gate, streaming=style.endswith("stream"))
    assert ask(engine, KNOWN, style)[0] == "It is me."


def test_without_an_llm_that_of_the_settings_answers(gate, monkeypatch):
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    assert KNOWN in str(GatedQueryEngine.from_defaults(plain(), gate).query(KNOWN))


def parts(gate):
    """An engine, a guarded retriever and a selector."""
    return gated(gate), guarded(gate), RetrievalGateSelector(gate)


@both_ways
@pytest.mark.parametrize(("threshold", "retrieves"), [(0.0, False), (1.0, True)])
def test_each_part_decides_at_a_threshold_of_its_own(gate, call, threshold, retrieves):
    engine, retriever, selector = (part.with_threshold(threshold) for part in parts(gate))
    decision = call(engine, "query", KNOWN).metadata["rgate"]
    assert (decision["retrieve"], decision["threshold"]) == (retrieves, threshold)
    assert ("rgate" not in call(retriever, "retrieve", KNOWN)[0].node.metadata) is retrieves
    assert call(selector, "select", ["direct", "retrieve"], KNOWN).ind == int(retrieves)
    assert call(engine.with_threshold(None), "query", KNOWN).metadata["rgate"]["threshold"] == 0.5
    with pytest.raises(ConfigurationError, match="threshold must be a finite number"):
        engine.with_threshold(-1.0)


SELECTOR = r"^RetrievalGateSelector\(\) .*"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        # A misspelt option is named with the class that was called.
        (
            lambda: gated("ik", look_frist=True),
            TypeError,
            r"^GatedQueryEngine\(\) .* 'look_frist'\. .*_first'\?$",
        ),
        (
            lambda: GatedRetriever(Shelf(), k_message=""),
            TypeError,
            r"^GatedRetriever\(\) .* 'k_message'\. .*n_mess",
        ),
        (lambda: RetrievalGateSelector(direkt="a"), TypeError, rf"{SELECTOR} 'direkt'\. .* 'direct'"),
        (lambda: RetrievalGateSelector(nevr="a"), TypeError, rf"{SELECTOR} 'nevr'\. .* 'never'\?$"),
        # Regression: bare TypeErrors, and a retriever that finds nothing.
        (lambda: RetrievalGateSelector(direct=0, retrieve=1), ConfigurationError, "must be names of tools"),
        (lambda: ClaimFusionRetriever(Shelf()), ConfigurationError, "a list"),
        (lambda: ClaimFusionRetriever([]), ConfigurationError, "a list"),
    ],
)
def test_options_that_are_misspelt_or_cannot_work_are_refused_at_once(make, error, said):
    with pytest.raises(error, match=said):
        make()


@both_ways
def test_a_bundle_and_its_embedding_reach_the_engine(gate, call):
    shelf = Shelf()
    call(gated(gate, over(shelf)), "query", QueryBundle(UNKNOWN, embedding=[0.5] * 8))
    assert shelf.embeddings == [[0.5] * 8]


# --- prompts, callbacks, events, copies --------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"look_first": LOOK}], ids=["", "look first"])
@every_style
def test_callbacks_hear_of_one_query_whatever_the_arm(gate, options, style):
    heard = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = get_response_synthesizer(MockLLM(), streaming=style.endswith("stream"))
    inner = RetrieverQueryEngine(Shelf(), synthesizer, callback_manager=CallbackManager([heard]))
    direct = over(Shelf(), streaming=style.endswith("stream"))
    engine = gated(gate, inner, direct=direct, **options)
    assert engine.callback_manager is inner.callback_manager
    ask(engine, KNOWN, style)
    assert heard.get_event_pairs(CBEventType.QUERY) == []  # the direct engine has other callbacks
    _, response = ask(engine, UNKNOWN, style)
    ((start, end),) = heard.get_event_pairs(CBEventType.QUERY)
    assert (start.payload, end.payload) == ({"query_str": UNKNOWN}, {"response": response})


@both_ways
def test_the_engines_own_callbacks_hear_of_a_known_question(gate, call):
    """Regression: only those of the settings did."""
    heard = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = get_response_synthesizer(MockLLM())
    inner = RetrieverQueryEngine(Shelf(), synthesizer, callback_manager=CallbackManager([heard]))
    response = call(gated(gate, inner), "query", KNOWN)
    ((start, end),) = heard.get_event_pairs(CBEventType.QUERY)
    assert (start.payload["query_str"], end.payload["response"].response) == (KNOWN, response.response)


@both_ways
@pytest.mark.parametrize(
    ("part", "name", "question", "expected"),
    [
        (gated, "query", KNOWN, ["QueryStart", "RetrievalGate", "QueryStart"]),
        (gated, "query", UNKNOWN, ["QueryStart", "RetrievalGate", "QueryStart", "RetrievalStart"]),
        (guarded, "retrieve", KNOWN, ["RetrievalGate"]),
        (guarded, "retrieve", UNKNOWN, ["RetrievalGate", "RetrievalStart"]),
    ],
)
def test_events_come_in_order_and_in_a_span(gate, call, part, name, question, expected):
    decides = part(gate)
    with hearing() as events:
        call(decides, name, question)
    names = [event.class_name().removesuffix("Event") for event in events]
    assert [name for name in names if name in expected] == expected
    (decided,) = [event for event in events if isinstance(event, RetrievalGateEvent)]
    assert type(decides).__name__ in decided.span_id
    assert decided.decision.retrieve is (question == UNKNOWN)


def test_everything_can_be_copied_and_what_core_can_pickle_can_be_pickled():
    gate, never = load_gate("ik", proxy=ScriptedProxy()), load_gate("constant:never")
    engine, retriever, selector, fusion = copy.deepcopy((*parts(gate), ClaimFusionRetriever([Shelf()], gate)))
    assert "Hamlet" in str(engine.query("Who wrote Hamlet?"))
    assert retriever.retrieve("Who wrote Hamlet?")
    assert fusion.retrieve("Who wrote Hamlet?")
    event = RetrievalGateEvent(decision=never.decide("Who wrote Hamlet?"))
    pickled, event_again = pickle.loads(pickle.dumps((RetrievalGateSelector(never), event)))  # noqa: S301
    for each in (selector.with_threshold(0.0), pickled):
        assert each.select(["direct", "retrieve"], "Who wrote Hamlet?").ind == 0
    assert event_again == event == RetrievalGateEvent.model_validate_json(event.model_dump_json())
