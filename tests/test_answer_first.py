"""The direct arm answers first: what it has begun is judged, and goes on or is stopped. LangChain."""

import asyncio
import gc
import threading

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.runnables import RunnableGenerator, RunnableLambda, RunnablePassthrough

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.decision_context import KEY
from tests.begun_answers import KNOWN, UNSURE, WHOLE, Knowing, Reader, Runs, TurnReader, Writer
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Search, each
from tests.patience import PATIENCE


def routed(direct, *, judge=None, retrieve=None, **options):
    options = {"tokens": 4, "question_gate": None} | options
    return RetrievalGate(judge or Reader()).route(
        retrieve=retrieve or RunnableLambda(lambda question: f"read about {question}"),
        direct=direct,
        answer_first=AnswerFirst(**options),
    )


def spoken(writer):
    return writer | StrOutputParser()


@each(SINGLES)
def test_a_known_answer_goes_on_and_an_unknown_one_is_stopped(call):
    writer, judge = Writer(), Reader()
    router = routed(spoken(writer), judge=judge)
    assert call(router, "a known one?") == WHOLE
    assert len(writer.calls) == 1
    assert writer.ended == ["whole"]
    ((draft,),) = judge.drafts
    assert (draft.text, draft.finished, draft.source) == ("It is surely the", False, "llm")
    writer.written.clear()
    assert call(router, "an unknown one?") == "read about an unknown one?"
    assert len(writer.calls) == 2
    assert writer.ended == ["whole", "closed"]
    # A synchronous stream ends when the next token comes.
    assert len(writer.written) <= 5
    assert [d.text for (d,) in judge.drafts] == ["It is surely the", "Perhaps it is this"]


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("stream", STREAMS)
def test_released_chunks_are_those_of_the_arm_alone(stream, parsed):
    def texts(chunks):
        return chunks if parsed else [chunk.text for chunk in chunks]

    arm = spoken(Writer()) if parsed else Writer()
    alone = texts(STREAMS[stream](arm, "a known one?"))
    assert texts(STREAMS[stream](routed(arm), "a known one?")) == alone
    assert len(alone) > 8


@each(INVOKES)
def test_an_invoked_chat_model_answers_with_a_message(call):
    answer = call(routed(Writer()), "a known one?")
    assert type(answer) is AIMessage
    assert answer.text == WHOLE


@each(SINGLES)
def test_an_answer_that_ends_early_is_judged_whole(call):
    judge = Reader()
    router = routed(spoken(Writer()), judge=judge, tokens=99)
    assert call(router, "a known one?") == WHOLE
    assert call(router, "an unknown one?") == "read about an unknown one?"
    assert [(d.text, d.finished) for (d,) in judge.drafts] == [(KNOWN, True), (UNSURE, True)]


@each(SINGLES)
def test_an_arm_that_does_not_stream_is_judged_whole(call):
    calls, judge = [], Reader()

    def answer(question):
        calls.append(question)
        return "Perhaps so" if "unknown" in question else "Yes, and no more"

    router = routed(RunnableLambda(answer), judge=judge)
    assert call(router, "a known one?") == "Yes, and no more"
    assert call(router, "an unknown one?") == "read about an unknown one?"
    assert calls == ["a known one?", "an unknown one?"]
    assert [d.text for (d,) in judge.drafts] == ["Yes, and no more", "Perhaps so"]


@each(BATCHES)
def test_a_batch_makes_one_call_of_the_gate(call):
    writer, judge, look = Writer(), Reader(), Reader({"hopeless": 0.05})
    router = routed(spoken(writer), judge=judge, question_gate=look)
    asked = ["known 1", "unknown 2", "hopeless", "known 3"]
    assert call(router, asked) == [WHOLE, "read about unknown 2", "read about hopeless", WHOLE]
    assert look.calls == [asked]
    assert judge.calls == [["known 1", "unknown 2", "known 3"]]
    assert len(writer.calls) == 3
    assert sorted(writer.ended) == ["closed", "whole", "whole"]
    assert call(router, []) == []


@each(BATCHES)
def test_an_input_without_a_question_is_its_own_error(call):
    found = call(routed(spoken(Writer()), question_gate=Reader()), ["known", 5], return_exceptions=True)
    assert found[0] == WHOLE
    assert "cannot be read from int" in str(found[1])


@each(SINGLES)
def test_the_first_look_sends_what_is_clearly_unknown_to_the_retrieve_arm(call):
    writer, judge, look = Writer(), Reader(), Reader({"hopeless": 0.05, "open": 0.3})
    router = routed(spoken(writer), judge=judge, question_gate=look)
    assert call(router, "hopeless") == "read about hopeless"
    assert not writer.calls
    assert call(router, "open") == WHOLE
    assert call(router, "RAISE") == "read about RAISE"
    assert len(writer.calls) == 1


@each(SINGLES)
def test_what_the_first_look_finds_clearly_known_is_not_judged(call):
    writer, judge, look = Writer(), Reader(), Reader({"unknown, or easy?": 0.9})
    assert call(routed(spoken(writer), judge=judge, question_gate=look), "unknown, or easy?") == UNSURE + " "
    assert (judge.calls, writer.ended) == ([], ["whole"])
    narrow = routed(spoken(writer), judge=judge, question_gate=look, retrieve_below=0.1, answer_above=0.95)
    assert call(narrow, "unknown, or easy?") == "read about unknown, or easy?"
    assert judge.calls == [["unknown, or easy?"]]


def test_nothing_of_a_clearly_known_answer_is_held_back():
    writer = Writer()
    router = routed(spoken(writer), question_gate=Reader({"easy?": 0.9}))
    chunks = router.stream("easy?")
    assert next(chunks) == "It "
    assert len(writer.written) <= 2
    assert "It " + "".join(chunks) == WHOLE


@each(INVOKES)
def test_the_threshold_of_a_call_holds_for_both_looks(call):
    router = routed(spoken(Writer()), question_gate=Reader({"hopeless": 0.05, "open": 0.3}))
    never = {"configurable": {"retrieval_threshold": 0.0}}
    strict = {"configurable": {"retrieval_threshold": 0.95}}
    assert call(router, "hopeless", never) == WHOLE
    assert call(router, "open", strict) == "read about open"


@each(SINGLES)
def test_checkpoints_stop_at_the_first_clear_score(call):
    judge = Reader(
        {"Perhaps it": 0.05, "It is": 0.5, "It is surely the": 0.6, "It is surely the one that": 0.7}
    )
    writer = Writer()
    router = routed(spoken(writer), judge=judge, tokens=(2, 4, 6), retrieve_below=0.1, answer_above=0.9)
    assert call(router, "an unknown one?") == "read about an unknown one?"
    assert len(writer.written) <= 3
    assert call(router, "a known one?") == WHOLE
    assert [d.text for (d,) in judge.drafts[1:]] == [
        "It is",
        "It is surely the",
        "It is surely the one that",
    ]


def test_the_default_gates_are_those_for_begun_answers():
    router = RetrievalGate().route(retrieve=str, direct=str, answer_first=True)
    assert router.strategy.answer_first == AnswerFirst()
    assert router.strategy.question_gate.gate.gate.artifact == "default-heads"
    judge = router.strategy.judge.gate.gate
    assert (judge.question.artifact, judge.answer.artifact) == ("default-heads", "default-answer")


@each(SINGLES)
def test_a_gate_of_ones_own_judges_and_no_other_overrules_it(call):
    judge, writer = Reader(), Writer()
    router = RetrievalGate(judge).route(
        retrieve=RunnableLambda(lambda question: "read"), direct=spoken(writer), answer_first=True
    )
    assert call(router, "What is my manager's phone number?") == WHOLE
    assert router.strategy.judge.gate is judge
    assert router.strategy.question_gate is None
    asked = Reader({"hopeless": 0.05})
    explicit = RetrievalGate(judge).route(
        retrieve=str, direct=spoken(writer), answer_first=AnswerFirst(question_gate=asked)
    )
    assert explicit.strategy.question_gate.gate is asked


@pytest.mark.parametrize("options", [{}, {"threshold": 0.4, "on_error": "raise", "timeout": 9.0}])
def test_a_gate_that_reads_the_question_alone_leaves_begun_answers_to_the_one_that_belongs_to_it(options):
    gate = load_gate(**options)
    router = RetrievalGate(gate).route(retrieve=str, direct=str, answer_first=True)
    judge = router.strategy.judge.gate
    assert judge.gate.name == "answer"
    assert judge.gate.question == gate.gate
    threshold = options.get("threshold", load_gate(DEFAULT_GATES["llm"]).threshold)
    assert (judge.threshold, judge.on_error, judge.timeout) == (threshold, gate.on_error, gate.timeout)
    assert router.strategy.question_gate.gate is gate


class QuestionsOnly:
    """A gate of the user's own that takes no drafts."""

    def decide_batch(self, questions):
        return []

    async def adecide_batch(self, questions):
        return []


@pytest.mark.parametrize(
    "gate", ["prompt", "popularity", QuestionsOnly()], ids=["prompt", "popularity", "own"]
)
def test_a_gate_that_cannot_see_an_answer_is_refused_and_the_remedy_holds(gate):
    with pytest.raises(ConfigurationError, match="cannot judge an answer") as caught:
        RetrievalGate(gate).route(retrieve=str, direct=str, answer_first=True)
    assert "question_gate=" in caught.value.hint
    remedy = AnswerFirst(question_gate=gate)
    router = RetrievalGate().route(retrieve=str, direct=str, answer_first=remedy)
    assert router.strategy.judge.gate.gate.name == "answer"


# --- what fails ----------------------------------------------------------------------------------------------


@each(SINGLES)
def test_an_arm_that_fails_before_it_is_judged_retrieves(call):
    assert call(routed(spoken(Writer(fails_at=2))), "a known one?") == "read about a known one?"


@each(SINGLES)
def test_an_arm_that_fails_after_its_release_is_the_callers(call):
    with pytest.raises(OSError, match="connection lost"):
        call(routed(spoken(Writer(fails_at=6))), "a known one?")


@each(SINGLES)
def test_an_arm_that_fails_before_its_first_token_retrieves_however_known_the_question(call):
    look = Reader({"easy?": 0.95})
    writer = Writer(fails_at=0)
    told = Shown()
    assert (
        call(routed(spoken(writer), question_gate=look), "easy?", {"callbacks": [told]}) == "read about easy?"
    )
    assert [(event["retrieve"], event["error"]["type"]) for event in told.events] == [(True, "OSError")]
    with pytest.raises(OSError, match="connection lost"):
        call(routed(spoken(Writer(fails_at=2)), question_gate=look), "easy?")


@each(BATCHES)
def test_an_arm_that_fails_in_a_batch_concerns_its_own_input(call):
    class Some(Writer):
        def _tokens(self, messages, kwargs):
            for number, chunk in enumerate(super()._tokens(messages, kwargs)):
                if number == 6 and "broken" in messages[-1].text:
                    raise OSError("connection lost")
                yield chunk

    found = call(routed(spoken(Some())), ["known", "broken", "unknown"], return_exceptions=True)
    assert found[0] == WHOLE
    assert isinstance(found[1], OSError)
    assert found[2] == "read about unknown"


@each(SINGLES)
def test_a_gate_that_fails_retrieves_or_raises(call):
    writer, judge = Writer(), Reader()
    assert call(routed(spoken(writer), judge=judge), "RAISE") == "read about RAISE"
    assert writer.ended == ["closed"]
    judge.on_error = "raise"
    with pytest.raises(RuntimeError, match="gate down"):
        call(routed(spoken(writer), judge=judge), "RAISE")
    assert writer.ended == ["closed", "closed"]


@each(SINGLES)
def test_an_arm_that_writes_nothing_retrieves(call):
    assert call(routed(RunnableLambda(lambda _: "  ")), "a known one?") == "read about a known one?"


WHOLE_ANSWERS = {name: SINGLES[name] for name in ("invoke", "ainvoke", "batch", "abatch")}
TOOL_CALL = {"name": "add", "args": {"a": 1}, "id": "1", "type": "tool_call"}
TOLD = AIMessage("", tool_calls=[TOOL_CALL])
WITHOUT_TEXT = {
    "tool call": RunnableLambda(lambda _: TOLD),
    "parsed object": RunnableLambda(lambda _: '{"a": [1, 2]}') | JsonOutputParser(),
    "form with the raw message": RunnableLambda(
        lambda _: {"raw": TOLD, "parsed": {"a": 1}, "parsing_error": None}
    ),
}


@pytest.mark.parametrize("arm", WITHOUT_TEXT.values(), ids=list(WITHOUT_TEXT))
@each(WHOLE_ANSWERS)
def test_where_there_is_no_text_to_judge_the_question_decides(call, arm):
    judge, look = Reader(), Reader({"easy form": 0.6, "hard form": 0.37})
    router = routed(arm, judge=judge, question_gate=look)
    assert call(router, "easy form") == arm.invoke("")
    assert call(router, "hard form") == "read about hard form"
    assert judge.calls == []
    lower = {"configurable": {"retrieval_threshold": 0.3}}
    assert call(router, "hard form", lower) == arm.invoke("")
    without = routed(arm, judge=Reader({"easy form": 0.6, "hard form": 0.37}))
    assert call(without, "easy form") == arm.invoke("")
    assert call(without, "hard form") == "read about hard form"


@each(WHOLE_ANSWERS)
def test_the_text_of_a_raw_message_is_judged(call):
    judge = Reader()
    direct = RunnableLambda(lambda question: {"raw": AIMessage(f"Perhaps {question}"), "parsed": {"a": 1}})
    assert call(routed(direct, judge=judge), "a form") == "read about a form"
    assert [d.text for (d,) in judge.drafts] == ["Perhaps a form"]


@each(SINGLES)
def test_the_answer_among_several_outputs_is_judged(call):
    judge = Reader()
    arm = RunnablePassthrough.assign(answer=RunnableLambda(lambda x: x["question"]) | spoken(Writer()))
    router = routed(arm, judge=judge, retrieve=RunnableLambda(lambda x: {"answer": "read"}))
    assert call(router, {"question": "a known one?"}) == {"question": "a known one?", "answer": WHOLE}
    assert call(router, {"question": "an unknown one?"}) == {"answer": "read"}
    assert len(judge.calls) == 2


# --- log-probabilities ---------------------------------------------------------------------------------------


@each(SINGLES)
def test_log_probabilities_are_captured_behind_a_parser(call):
    writer, judge = Knowing(), Reader()
    router = routed(RunnablePassthrough() | writer | StrOutputParser(), judge=judge)
    assert call(router, "a known one?") == WHOLE
    ((draft,),) = judge.drafts
    assert draft.tokens == ("It ", "is ", "surely ", "the ")
    assert draft.logprobs == (0.0, -0.25, -0.5, -0.75)
    assert writer.calls == [{"logprobs": True}]


@each(SINGLES)
def test_a_model_that_refuses_log_probabilities_answers_without(call):
    writer, judge = Knowing(refuses=("logprobs",)), Reader()
    router = routed(writer.bind(stop=None) | StrOutputParser(), judge=judge)
    assert call(router, "a known one?") == WHOLE
    assert call(router, "a known one?") == WHOLE
    assert [sorted(asked) for asked in writer.calls] == [["logprobs"], [], []]
    assert all(draft.logprobs is None for (draft,) in judge.drafts)


class Counting(Writer):
    """A writer whose server says with the first token how many it has read."""

    def _tokens(self, messages, kwargs):
        for number, chunk in enumerate(super()._tokens(messages, kwargs)):
            if number == 0:
                chunk.message.usage_metadata = {"input_tokens": 17, "output_tokens": 1, "total_tokens": 18}
            yield chunk


@pytest.mark.parametrize(("writer", "read"), [(Counting(), 17), (Writer(), 0)], ids=["told", "not told"])
@each(SINGLES)
def test_what_a_stopped_llm_has_read_is_counted_where_it_says_so(call, writer, read):
    costs = []

    def reading(question, config):
        costs.append(config["configurable"][KEY].decision.cost)
        return "read"

    judge = Reader()
    call(routed(spoken(writer), judge=judge, retrieve=RunnableLambda(reading)), "an unknown one?")
    ((draft,),) = judge.drafts
    assert draft.prompt_tokens == read
    assert [(cost.model_calls, cost.tokens_in, cost.tokens_out) for cost in costs] == [(1, read, 4)]


# --- conversations and claims --------------------------------------------------------------------------------

TURNS = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare did.")]


@each(SINGLES)
def test_a_follow_up_that_the_gate_does_not_read_is_never_answered_first(call):
    writer, look, judge = Writer(), Reader(), Reader()
    router = routed(
        spoken(writer), question_gate=look, judge=judge, retrieve=RunnableLambda(lambda _: "read")
    )
    assert call(router, [*TURNS, ("human", "And where was he born?")]) == "read"
    assert call(router, "And where was he born?") == "read"
    assert writer.calls == look.calls == judge.calls == []


@each(SINGLES)
def test_a_follow_up_that_the_gate_reads_is_answered_first(call):
    writer, look, judge = Writer(), TurnReader(), TurnReader()
    router = routed(
        spoken(writer),
        question_gate=look,
        judge=judge,
        retrieve=RunnableLambda(lambda messages: f"read about {messages[-1][1]}"),
    )
    assert call(router, [*TURNS, ("human", "And where was he born?")]) == WHOLE
    assert (
        call(router, [*TURNS, ("human", "And his unknown sister?")]) == "read about And his unknown sister?"
    )
    assert len(writer.calls) == 2
    turns = ("user: Who wrote Hamlet?", "assistant: Shakespeare did.")
    assert look.histories == judge.histories == [turns, turns]


@each(SINGLES)
def test_a_condensed_follow_up_is_condensed_once(call):
    condensed = []

    def condense(messages):
        condensed.append(messages)
        return "Where was Shakespeare born?"

    judge, look = Reader(), Reader()
    router = RetrievalGate(judge, condense=RunnableLambda(condense)).route(
        retrieve=RunnableLambda(str),
        direct=spoken(Writer()),
        answer_first=AnswerFirst(tokens=4, question_gate=look),
    )
    assert call(router, [*TURNS, ("human", "And where was he born?")]) == WHOLE
    assert judge.calls == look.calls == [["Where was Shakespeare born?"]]
    assert len(condensed) == 1


@each(SINGLES)
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    search, writer, judge = Search(), Writer(), Reader()
    gate = RetrievalGate(judge)
    router = gate.route(
        retrieve=gate.guard(search) | RunnableLambda(lambda documents: str(len(documents))),
        direct=spoken(writer),
        answer_first=AnswerFirst(tokens=99, question_gate=None),
    )
    call(router, "an unknown one?")
    assert set(search.queries) == {"an unknown one?", UNSURE.removesuffix(".")}
    assert len(judge.calls) == 1
    assert len(writer.calls) == 1


# --- who hears of it -----------------------------------------------------------------------------------------


class Shown(BaseCallbackHandler):
    """Tokens and events as a user's screen would show them."""

    def __init__(self):
        self.tokens, self.events = [], []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_custom_event(self, name, data, **kwargs):
        self.events.append(data)


@each(SINGLES)
def test_tokens_that_are_dropped_are_shown_to_nobody(call):
    shown = Shown()
    router = routed(spoken(Writer()))
    call(router, "an unknown one?", {"callbacks": [shown]})
    assert shown.tokens == []
    call(router, "a known one?", {"callbacks": [shown]})
    assert "".join(shown.tokens) == WHOLE
    stopped, released = (event["partial_answer"] for event in shown.events)
    assert (stopped["tokens_held"], stopped["tokens_dropped"], stopped["first_token"]) == (4, 4, None)
    assert (released["tokens_held"], released["tokens_dropped"]) == (4, 0)
    assert released["first_token"] >= released["judging"] >= 0


def test_a_graph_streams_the_messages_of_the_answer_that_is_given():
    graph_parts = pytest.importorskip("langgraph.graph")
    router = routed(Writer())

    def answering(state, config):
        return {"answer": str(router.invoke(state["question"], config))}

    graph = graph_parts.StateGraph(dict)
    graph.add_node("answer", answering)
    graph.add_edge(graph_parts.START, "answer")
    compiled = graph.compile()

    def shown(question):
        streamed = compiled.stream({"question": question}, stream_mode="messages")
        return "".join(message.text for message, _ in streamed)

    assert shown("a known one?") == WHOLE
    assert shown("an unknown one?") == ""


@each(SINGLES)
def test_a_stopped_arm_is_a_cancelled_run_in_traces(call):
    runs = Runs()
    call(routed(spoken(Writer())), "an unknown one?", {"callbacks": [runs]})
    (arm,) = [run for run in runs.named("RunnableSequence") if "direct" in (run.tags or [])]
    (model,) = runs.named("Writer")
    assert arm.error is None
    assert arm.outputs["tokens"] == 4
    assert "by the retrieval gate" in arm.outputs["cancelled"]
    assert model.error is None
    assert "by the retrieval gate" in model.outputs["llm_output"]["cancelled"]


async def test_astream_events_show_the_answer_that_is_given():
    router = routed(spoken(Writer()))

    async def shown(question):
        return [event async for event in router.astream_events(question, version="v2")]

    events = await shown("a known one?")
    tokens = [e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == WHOLE
    chunks = [e["data"]["chunk"] for e in events if e["event"] == "on_chain_stream" and not e["parent_ids"]]
    assert "".join(chunks) == WHOLE
    decided = [e for e in events if e["event"] == "on_custom_event"]
    assert [e["data"]["retrieve"] for e in decided] == [False]
    events = await shown("an unknown one?")
    assert not [e for e in events if e["event"] == "on_chat_model_stream"]
    assert events[-1]["data"]["output"] == "read about an unknown one?"


# --- searching meanwhile -------------------------------------------------------------------------------------


@each(SINGLES)
def test_the_search_runs_while_the_answer_is_begun(call):
    search = Search()

    def begun(number):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            assert search.began.wait(PATIENCE)
            return None
        return asyncio.to_thread(search.began.wait, PATIENCE)

    writer = Writer(pace=begun)
    router = routed(
        spoken(writer),
        retrieve=search | RunnableLambda(lambda found: found[0].page_content),
        prefetch=True,
    )
    assert call(router, "an unknown one?") == "about an unknown one?"
    assert search.queries == ["an unknown one?"]
    search.began.clear()
    assert call(router, "a known one?") == WHOLE


@each(SINGLES)
def test_what_the_first_look_settles_is_not_searched_meanwhile(call):
    search = Search()
    router = routed(
        spoken(Writer()),
        retrieve=search | RunnableLambda(lambda found: found[0].page_content),
        question_gate=Reader({"easy?": 0.95, "hopeless?": 0.05}),
        prefetch=True,
    )
    assert call(router, "easy?") == WHOLE
    assert search.queries == []
    assert call(router, "hopeless?") == "about hopeless?"
    assert search.queries == ["hopeless?"]


# --- leaving nothing behind ----------------------------------------------------------------------------------


def test_a_caller_who_leaves_closes_the_stream():
    writer = Writer()
    chunks = routed(spoken(writer)).stream("a known one?")
    assert next(chunks) == "It "
    chunks.close()
    assert writer.ended == ["closed"]


async def nothing_left(ended=lambda: True):
    """Let the loop go on until nothing runs on it and all has ended; generators end one within another."""
    for _ in range(10_000):
        if ended() and asyncio.all_tasks() == {asyncio.current_task()}:
            return True
        await asyncio.sleep(0)
    return False


async def test_an_asynchronous_caller_who_leaves_closes_the_stream():
    writer = Writer()
    chunks = routed(spoken(writer)).astream("a known one?")
    assert await anext(chunks) == "It "
    await chunks.aclose()
    assert await nothing_left(lambda: writer.ended == ["closed"])


@pytest.mark.parametrize("look", [None, Reader({"a known one?": 0.95})], ids=["judged", "clearly known"])
@pytest.mark.parametrize("token", range(1, 9))
async def test_a_caller_who_leaves_the_events_closes_the_stream(token, look):
    """Whatever the state, and at once: nothing waits until garbage is collected."""
    reached = asyncio.Event()

    def pace(number):
        if number == token:
            reached.set()
        return asyncio.sleep(0)

    async def read():
        async for _ in router.astream_events("a known one?", version="v2"):
            pass

    writer = Writer(pace=pace)
    router = routed(spoken(writer), question_gate=look)
    gc.collect()
    gc.disable()
    try:
        reading = asyncio.ensure_future(read())
        await reached.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await nothing_left(lambda: writer.ended)
    finally:
        gc.enable()


async def test_callers_on_one_loop_do_not_wait_for_each_others_llm():
    """Each of 50 answers goes on only when all have begun, and again when all are released."""
    begun, released = asyncio.Barrier(50), asyncio.Barrier(50)

    def pace(number):
        return {1: begun.wait, 6: released.wait}[number]() if number in (1, 6) else None

    router = routed(spoken(Writer(pace=pace)))
    calls = [router.ainvoke(f"known {number}") for number in range(50)]
    assert await asyncio.wait_for(asyncio.gather(*calls), PATIENCE * 2) == [WHOLE] * 50
    assert await nothing_left()


async def test_callers_who_are_cancelled_leave_nothing_behind():
    stuck = asyncio.Event()
    waiting = []

    def pace(number):
        if number != 3:
            return None
        waiting.append(number)
        return stuck.wait()

    writer = Writer(pace=pace)
    router = routed(spoken(writer))
    kinds = ["known", "unknown"]
    tasks = [asyncio.ensure_future(router.ainvoke(f"{kinds[n % 2]} {n}")) for n in range(100)]
    while len(waiting) < 100:
        await asyncio.sleep(0)
    for task in tasks[:20]:
        task.cancel()
    stuck.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found[:20])
    assert [each == WHOLE for each in found[20:]] == [n % 2 == 0 for n in range(20, 100)]
    assert await nothing_left(lambda: len(writer.ended) == 100)
    assert writer.ended.count("whole") == 40


@each(BATCHES)
def test_direct_arms_of_a_batch_run_side_by_side_within_their_limit(call):
    lock, open_now, most = threading.Lock(), [0], [0]
    together = threading.Barrier(4)

    class Counting(Writer):
        def _tokens(self, messages, kwargs):
            with lock:
                open_now[0] += 1
                most[0] = max(most[0], open_now[0])
            try:
                yield from super()._tokens(messages, kwargs)
            finally:
                with lock:
                    open_now[0] -= 1

    writer = Counting()
    router = routed(spoken(writer))
    asked = [f"known {n}" for n in range(8)]
    assert call(router, asked, {"max_concurrency": 3}) == [WHOLE] * 8
    assert most[0] == 3
    if call is BATCHES["batch"]:  # with threads, all of them wait for each other
        writer.pace = lambda number: together.wait(PATIENCE) if number == 1 else None
    assert call(router, asked[:4]) == [WHOLE] * 4


@each(STREAMS)
def test_a_stream_of_bare_functions_works(call):
    def spell(values):
        for value in values:
            yield from f"say {value}"

    async def aspell(values):
        async for value in values:
            for letter in f"say {value}":
                yield letter

    router = routed(RunnableGenerator(spell, aspell))
    assert "".join(call(router, "abc")) == "say abc"
