"""The direct arm answers first, in LangChain: chunks, batches, forms, log-probabilities, traces and callers."""

import asyncio
import gc
from contextvars import ContextVar
from itertools import cycle
from operator import itemgetter
from unittest.mock import MagicMock, Mock

import langsmith
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.runnables import (
    ConfigurableField,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers.context import register_configure_hook, run_collector_var
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.runtime.flow import variable_set
from tests.begun_answers import (
    UNSURE,
    WHOLE,
    EventRecorder,
    Knowing,
    Reader,
    TurnReader,
    Writer,
    nothing_left,
)
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Chat, Search, each, gathered, runs_named

WAYS = {name: SINGLES[name] for name in ("invoke", "ainvoke", "abatch", "astream")}


def routed(direct, *, judge=None, retrieve=None, condense=None, llm=None, **options):
    return RetrievalGate(judge or Reader(), condense=condense, llm=llm).route(
        retrieve=retrieve or RunnableLambda(lambda question: f"read about {question}"),
        direct=direct,
        answer_first=AnswerFirst(**{"tokens": 4, "question_gate": None} | options),
    )


def spoken(writer):
    return writer | StrOutputParser()


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("stream", STREAMS)
def test_released_chunks_are_those_of_the_arm_alone(stream, parsed):
    arm = spoken(Writer()) if parsed else Writer()
    alone, released = [
        [getattr(chunk, "text", chunk) for chunk in STREAMS[stream](chain, "a known one?")]
        for chain in (arm, routed(arm))
    ]
    assert released == alone
    assert len(alone) > 8


@each(BATCHES)
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_makes_one_call_of_each_gate_and_errors_stay_with_their_input(call, prefetch):
    judge, look = Reader(), Reader({"hopeless": 0.05})
    search, writer = Search(), Writer(fails_at=6, fails_for="late")
    retrieve = search | (lambda found: found[0].page_content)
    router = routed(spoken(writer), judge=judge, retrieve=retrieve, question_gate=look, prefetch=prefetch)
    asked = ["known 1", "unknown 2", "hopeless", "late", "broken unknown", 5]
    found = call(router, asked, return_exceptions=True)
    assert found[:3] == [WHOLE, "about unknown 2", "about hopeless"]
    assert [str(error)[:16] for error in found[3:]] == ["connection lost", "index gone", "Cannot read a qu"]
    assert look.calls == [asked[:5]]
    assert judge.calls == [["known 1", "unknown 2", "late", "broken unknown"]]
    assert len(writer.calls) == 4
    assert sorted(search.queries) == ["broken unknown", "hopeless", "unknown 2"], "no more is searched for"
    assert call(router, []) == []


@each(BATCHES)
@pytest.mark.parametrize("limit", [1, 2])
def test_no_part_of_a_batch_is_searched_ahead(call, limit):
    """Regression: a part of one, because of the limit or as the rest, was searched for as a call of its own."""
    search = Search()
    retrieve = search | (lambda found: found[0].page_content)
    router = routed(spoken(Writer()), retrieve=retrieve, prefetch=True)
    found = call(router, ["known 1", "unknown 2", "known 3"], {"max_concurrency": limit})
    assert found == [WHOLE, "about unknown 2", WHOLE]
    assert search.queries == ["unknown 2"]


@each(INVOKES)
def test_an_arm_that_does_not_stream_is_judged_whole(call):
    judge = Reader()
    answers = {
        "known": AIMessage("Yes"),
        "unknown": AIMessage("Perhaps"),
        "nothing": AIMessage("  "),
        "form": {"raw": AIMessage("Perhaps so"), "parsed": {"a": 1}},
    }
    router = routed(RunnableLambda(answers.get), judge=judge)
    assert call(router, "known") == AIMessage("Yes")
    for unknown in ("unknown", "nothing", "form"):
        assert call(router, unknown) == f"read about {unknown}"
    assert [d.text for (d,) in judge.drafts] == ["Yes", "Perhaps", "Perhaps so"]


TOOL_CALL = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}])
WITHOUT_TEXT = {
    "tool call": RunnableLambda(lambda _: TOOL_CALL),
    "parsed object": RunnableLambda(lambda _: '{"a": [1, 2]}') | JsonOutputParser(),
    "form with the raw message": RunnableLambda(
        lambda _: {"raw": TOOL_CALL, "parsed": {"a": 1}, "parsing_error": None}
    ),
}


@pytest.mark.parametrize("arm", WITHOUT_TEXT.values(), ids=list(WITHOUT_TEXT))
@each(INVOKES)
def test_where_there_is_no_text_to_judge_the_question_decides(call, arm):
    scores = {"easy form": 0.6, "hard form": 0.37}
    judge = Reader()
    lower = {"configurable": {"retrieval_threshold": 0.3}}
    for gates in ({"judge": judge, "question_gate": Reader(scores)}, {"judge": Reader(scores)}):
        router = routed(arm, **gates)
        assert call(router, "easy form") == call(router, "hard form", lower) == arm.invoke("")
        assert call(router, "hard form") == "read about hard form"
    assert judge.calls == []


def keyed(**steps):
    return RunnablePassthrough.assign(**steps)


def saying(text):
    return GenericFakeChatModel(messages=cycle([text]))


@each(INVOKES)
def test_an_answer_under_a_key_is_judged_only_if_the_key_is_known(call):
    """Regression: text under another key retrieved, or counted as thoughts."""
    judge, asked = Reader(), {"question": "an unknown one?", "text": "a note"}
    answer = itemgetter("question") | spoken(Writer())
    assert call(routed(keyed(response=answer), judge=judge), asked) == f"read about {asked}"
    assert judge.drafts[0][0].text.startswith("Perhaps"), "what is passed on is not the answer"
    for text in ("Perhaps so", "w " * 50):
        router = routed(keyed(summary=itemgetter("text") | spoken(saying(text))))
        assert call(router, asked) == {**asked, "summary": text}


JSON, LIST = itemgetter("text") | JsonOutputParser(), itemgetter("text") | CommaSeparatedListOutputParser()
PARSED = {
    "an object": (keyed(answer=JSON), '{"a": [1, 2, 3]}', {"a": [1, 2, 3]}),
    "a list": (LIST | (lambda items: {"answer": items}), "b, b, c", ["b", "b", "c"]),
    "a list that grows": (JSON, '["Paris is nice", "Berlin"]', ["Paris is nice", "Berlin"]),
    "a list in parts": (LIST, "b, b, c", ["b", "b", "c"]),
    "a message": (keyed(answer=itemgetter("text") | saying("b c")), "a", "b c"),
}


@pytest.mark.parametrize(("arm", "text", "answer"), PARSED.values(), ids=list(PARSED))
@each(INVOKES)
def test_an_answer_that_is_put_together_is_what_the_arm_alone_returns(call, arm, text, answer):
    result = call(routed(arm, judge=Reader({"known": 0.9})), {"question": "known", "text": text})
    result = result if isinstance(result, list) else result["answer"]
    assert getattr(result, "text", result) == answer
    assert not isinstance(result, AIMessageChunk)


# --- conversations and claims --------------------------------------------------------------------------------

TURNS = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare did."), ("human", "And where was he born?")]


@each(INVOKES)
def test_a_follow_up_that_the_gate_reads_is_answered_first(call):
    look, judge = TurnReader(), TurnReader()
    retrieve = RunnableLambda(lambda messages: f"read about {messages[-1][1]}")
    router = routed(spoken(Writer()), question_gate=look, judge=judge, retrieve=retrieve)
    assert call(router, TURNS) == WHOLE
    unknown = [*TURNS[:2], ("human", "And his unknown sister?")]
    assert call(router, unknown) == "read about And his unknown sister?"
    turns = ("user: Who wrote Hamlet?", "assistant: Shakespeare did.")
    assert look.histories == judge.histories == [turns, turns]


@each(INVOKES)
def test_a_condensed_follow_up_is_condensed_once_and_no_draft_is_written_beside_the_answer(call):
    judge, look, condense, llm = Reader(), Reader(), Mock(return_value="Where was Shakespeare born?"), Chat()
    router = routed(
        spoken(Writer()), judge=judge, question_gate=look, condense=RunnableLambda(condense), llm=llm
    )
    assert call(router, TURNS) == WHOLE
    assert judge.calls == look.calls == [["Where was Shakespeare born?"]]
    assert (condense.call_count, llm.seen) == (1, [])


@each(INVOKES)
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    search, gate = Search(), RetrievalGate(Reader())
    options = AnswerFirst(tokens=99, question_gate=None)
    retrieve = gate.guard(search) | RunnableLambda(lambda documents: str(len(documents)))
    call(gate.route(retrieve=retrieve, direct=spoken(Writer()), answer_first=options), "an unknown one?")
    assert set(search.queries) == {"an unknown one?", f"unknown one {UNSURE.removesuffix('.')}"}
    assert len(gate.gate.gate.calls) == 1


def test_a_gate_in_a_calls_config_is_refused_because_it_would_not_judge_the_answer():
    """Regression: it was ignored."""
    router = routed(spoken(Writer())).configurable_fields(gate=ConfigurableField(id="gate"))
    assert router.invoke("a known one?") == WHOLE
    with pytest.raises(ConfigurationError, match="one chain per gate"):
        router.invoke("a known one?", {"configurable": {"gate": RetrievalGate(Reader())}})


# --- who hears of it -----------------------------------------------------------------------------------------


BINDINGS = {
    "with_config": lambda writer: spoken(writer).with_config(run_name="bound"),
    "with_retry": lambda writer: spoken(writer).with_retry(),
    "bind": lambda writer: writer.bind(stop=None),
    "log-probabilities": lambda writer: writer,  # the gate binds them to the model
}


@pytest.mark.parametrize("bind", BINDINGS.values(), ids=list(BINDINGS))
@each(WAYS)
def test_listeners_around_the_router_get_no_dropped_token_of_a_bound_arm(call, bind):
    """Regression: a binding took the listeners of the surrounding run, and so showed a stopped answer."""
    shown, collector = EventRecorder(), RunCollectorCallbackHandler()
    chain = RunnablePassthrough() | routed(bind(Knowing()))
    call(chain, "an unknown one?", {"callbacks": [shown, collector]})
    assert shown.tokens == []
    (model,) = runs_named("Knowing", collector.traced_runs)
    assert model.end_time is not None
    call(chain, "a known one?", {"callbacks": [shown]})
    assert "".join(shown.tokens) == WHOLE
    assert [event["retrieve"] for event in shown.events] == [True, False]


class Budget(EventRecorder):
    """Forbids calls of the LLM, once it is used up."""

    raise_error = True

    def __init__(self, used_up):
        super().__init__()
        self.used_up = used_up

    def on_chat_model_start(self, *args, **kwargs):
        if self.used_up:
            raise PermissionError("budget used up")


@each(WAYS)
def test_a_handler_that_may_raise_stops_the_llm_before_it_is_asked(call):
    """Regression: it was called after the answer, when the LLM had long been asked."""
    writer = Writer()
    router = routed(spoken(writer), retrieve=spoken(writer))
    with pytest.raises(PermissionError, match="budget used up"):
        call(router, "a known one?", {"callbacks": [Budget(used_up=True)]})
    assert writer.calls == []
    budget = Budget(used_up=False)
    assert call(router, "a known one?", {"callbacks": [budget]}) == WHOLE
    assert "".join(budget.tokens) == WHOLE


@each(INVOKES)
def test_handlers_inside_of_the_arm_get_a_stopped_answer(call):
    """As the guide says, since the arm does not pass them on."""
    shown = EventRecorder()
    call(routed(spoken(Writer(callbacks=[shown]))), "an unknown one?")
    assert "".join(shown.tokens) == "Perhaps it is this "


class OpenRuns(EventRecorder):
    """A user's own tracing: the runs that have not ended, and the errors of the others."""

    def __init__(self):
        super().__init__()
        self.open, self.errors = set(), []

    def on_chain_start(self, *args, run_id, **kwargs):
        self.open.add(run_id)

    on_chat_model_start = on_chain_start

    def on_chain_end(self, *args, run_id, **kwargs):
        self.open.remove(run_id)

    on_llm_end = on_chain_end

    def on_chain_error(self, error, *, run_id, **kwargs):
        self.open.remove(run_id)
        self.errors.append(type(error).__name__)

    on_llm_error = on_chain_error


@each(WAYS)
def test_listeners_see_the_runs_of_a_released_answer_fail(call):
    """Regression: if the LLM failed after its answer was released, these runs never ended."""
    shown = OpenRuns()
    with pytest.raises(OSError, match="connection lost"):
        call(routed(spoken(Writer(fails_at=6))), "a known one?", {"callbacks": [shown]})
    assert shown.open == set()
    assert set(shown.errors) == {"OSError"}
    assert "".join(shown.tokens) == "It is surely the one that "


@each(WAYS)
def test_listeners_see_nothing_of_a_request_with_refused_log_probabilities(call):
    """Regression: they got its error, and ``astream_events`` got the start of runs without an end."""
    shown, refused = OpenRuns(), TypeError("create() got an unexpected keyword argument 'logprobs'")
    writer = Knowing(fails=Mock(side_effect=[refused, None]))
    assert call(routed(spoken(writer)), "a known one?", {"callbacks": [shown]}) == WHOLE
    assert [kwargs.get("logprobs") for kwargs in writer.calls] == [True, None]
    assert (shown.open, shown.errors, "".join(shown.tokens)) == (set(), [], WHOLE)


HOOKED = ContextVar("hooked", default=None)
register_configure_hook(HOOKED, inheritable=True)


@each(INVOKES)
def test_a_handler_for_all_calls_counts_each_token_once(call):
    """Regression: such a handler, for example of `get_usage_metadata_callback`, got every event twice."""
    with variable_set(HOOKED, EventRecorder()):
        call(routed(spoken(Writer())), "a known one?")
        assert "".join(HOOKED.get().tokens) == WHOLE


@pytest.mark.parametrize("hook", [HOOKED, run_collector_var], ids=["inherited", "collect_runs"])
@each(INVOKES)
def test_a_tracer_for_all_calls_sees_each_run_once_and_a_stopped_answer_as_cancelled(call, hook):
    """Regression: it saw errors, and one that is inherited saw each run twice."""
    search, collector = Search(), RunCollectorCallbackHandler()
    retrieve = {"found": search} | RunnableLambda(str)
    with variable_set(hook, collector):
        call(routed(spoken(Writer()), retrieve=retrieve, prefetch=True), "an unknown one?")
    (run,) = collector.traced_runs
    names = ["RunnableSequence", "Writer", "StrOutputParser", "RunnableParallel<found>", "Search"]
    seen = {name: list(runs_named(name, [run])) for name in names}
    assert {name: len(runs) for name, runs in seen.items()} == dict.fromkeys(names, 1)
    assert all(run.error is None and run.end_time is not None for (run,) in seen.values())
    outputs = seen["RunnableSequence"][0].outputs
    assert (outputs["tokens"], "by the retrieval gate" in outputs["cancelled"]) == (4, True)


@each(WAYS)
def test_langsmith_sees_a_stopped_answer_as_cancelled(call):
    """Its tracer is copied on the way, for each run."""
    client = MagicMock(spec=langsmith.Client, tracing_queue=None)
    config = {"callbacks": [LangChainTracer(client=client)], "configurable": {"thread_id": "1"}}
    assert call(routed(spoken(Writer())), "an unknown one?", config) == "read about an unknown one?"
    ended = [sent.kwargs for sent in client.update_run.call_args_list]
    assert len(ended) == 6
    assert [run["error"] for run in ended] == [None] * 6
    assert sum("cancelled" in str(run["outputs"]) for run in ended) == 3


@pytest.mark.parametrize(("question", "expected"), [("a known one?", WHOLE), ("an unknown one?", "")])
async def test_streams_of_messages_and_events_show_the_answer_that_is_given(question, expected):
    graph_parts = pytest.importorskip("langgraph.graph")
    router = routed(spoken(Writer()))
    node = RunnableLambda(itemgetter("question")) | router | (lambda answer: {"answer": answer})
    graph = (
        graph_parts.StateGraph(dict).add_node("answer", node).add_edge(graph_parts.START, "answer").compile()
    )
    streamed = graph.astream({"question": question}, stream_mode="messages")
    assert "".join([message.text async for message, _ in streamed]) == expected

    events = [event async for event in router.astream_events(question, version="v2")]
    tokens = [e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == expected
    chunks = [e["data"]["chunk"] for e in events if e["event"] == "on_chain_stream" and not e["parent_ids"]]
    assert "".join(chunks) == (expected or f"read about {question}")
    assert [e["data"]["retrieve"] for e in events if e["event"] == "on_custom_event"] == [not expected]


# --- leaving nothing behind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [False, True], ids=["alone", "with listeners"])
async def test_callers_who_leave_a_stream_close_it_and_listeners_see_its_runs_end(listens):
    """Regression: the runs stayed open."""
    writer, shown, awaiting = Writer(), OpenRuns(), OpenRuns()
    router = routed(spoken(writer))
    chunks = router.stream("a known one?", {"callbacks": [shown] * listens})
    awaited = router.astream("a known one?", {"callbacks": [awaiting] * listens})
    assert next(chunks) == await anext(awaited) == "It "
    chunks.close()
    assert writer.ended == ["closed"]
    await awaited.aclose()
    assert shown.open == awaiting.open == set()
    assert await nothing_left(lambda: writer.ended == ["closed", "closed"])


@pytest.mark.parametrize("look", [None, Reader({"a known one?": 0.95})], ids=["judged", "clearly known"])
@pytest.mark.parametrize("token", range(1, 9))
async def test_a_caller_who_leaves_the_events_closes_the_stream(token, look):
    """Whatever the state, and at once: nothing waits until garbage is collected."""
    reached = asyncio.Event()

    async def pace(number):
        if number == token:
            reached.set()

    writer = Writer(pace=pace)
    router = routed(spoken(writer), question_gate=look)
    gc.disable()
    try:
        reading = asyncio.ensure_future(gathered(router.astream_events("a known one?", version="v2")))
        await reached.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await nothing_left(lambda: writer.ended)
    finally:
        gc.enable()


@pytest.mark.parametrize("config", [{"max_concurrency": 3}, {}])
@each(BATCHES)
def test_answers_of_a_batch_are_begun_side_by_side_within_its_limit_or_32(call, config):
    """Regression: without a limit, a batch sent all of its questions to the LLM at once."""
    writer, open_now = Writer(), []
    writer.pace = lambda number: open_now.append(len(writer.calls) - len(writer.ended))
    asked = [f"known {n}" for n in range(50)]
    assert call(routed(spoken(writer)), asked, config) == [WHOLE] * 50
    assert max(open_now) <= config.get("max_concurrency", 32)
