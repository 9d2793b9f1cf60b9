"""The direct engine answers first: what it has begun is judged, and goes on or is stopped. LlamaIndex."""

import asyncio
from types import SimpleNamespace

import pytest
from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata, LogProb
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, Field

from rgate_integrations import Decision, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import ClaimFusionRetriever, GatedQueryEngine, RetrievalGateEvent
from tests.llama_index_parts import ask, both_ways, every_style
from tests.patience import PATIENCE

KNOWN = "It is surely the one that you think of ."
UNSURE = "Perhaps it is this one , or that other one ."


class Writer(MockLLM):
    """Writes an answer token by token: `UNSURE` for prompts with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: The prompts, in order.
        ended: What became of each stream: "whole" or "closed".
        fails_at: Token before which it fails; None never.
        pace: Called before each token with its number; what it returns is awaited.
        prompt_tokens: What its server says that it has read; None if it does not say.
    """

    prompt_tokens: int | None = None
    calls: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails_at: int | None = None
    pace: object = None

    def __init__(self, *, fails_at=None, pace=None):
        super().__init__()
        self.fails_at = fails_at
        self.pace = pace

    @property
    def metadata(self):
        return LLMMetadata(model_name="writer", is_chat_model=False)

    def complete(self, prompt, formatted=False, **options):
        self.calls.append(prompt)
        return CompletionResponse(text=f"read: {prompt[-40:]}" if "passage" in prompt else prompt)

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt, formatted, **options)

    def _chunks(self, prompt):
        self.calls.append(prompt)
        words = (UNSURE if "unknown" in prompt else KNOWN).split()
        for number, word in enumerate(words):
            if number == self.fails_at:
                raise OSError("connection lost")
            text = " ".join(words[: number + 1])
            delta = word if number == 0 else f" {word}"
            yield CompletionResponse(text=text, delta=delta, **self._told(delta, number))

    def _told(self, delta, number):
        if self.prompt_tokens is None:
            return {}
        return {"raw": {"usage": {"prompt_tokens": self.prompt_tokens}}}

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **options):
        def written():
            try:
                yield from self._chunks(prompt)
            except GeneratorExit:
                self.ended.append("closed")
                raise
            self.ended.append("whole")

        return written()

    @llm_completion_callback()
    async def astream_complete(self, prompt, formatted=False, **options):
        async def written():
            try:
                for number, chunk in enumerate(self._chunks(prompt)):
                    waited = self.pace(number) if self.pace is not None else None
                    if waited is not None:
                        await waited
                    yield chunk
            except (GeneratorExit, asyncio.CancelledError):
                self.ended.append("closed")
                raise
            self.ended.append("whole")

        return written()


class Telling(Writer):
    """A writer that can tell log-probabilities, where at least one likeliest token is asked for.

    Attributes:
        logprobs: Whether it is asked for them.
        top_logprobs: How many of the likeliest tokens it is asked for.
        refuses: Whether its server refuses.
        form: How they are told: as a server's chats or completions do, or in LlamaIndex's own form.
        asked: What it was asked for at each call.
    """

    logprobs: bool | None = None
    top_logprobs: int = 0
    refuses: bool = False
    form: str = "chat"
    asked: list = Field(default_factory=list)

    def _chunks(self, prompt):
        self.asked.append(self.logprobs)
        if self.logprobs and self.refuses:
            raise ValueError("unknown parameter logprobs")
        yield from super()._chunks(prompt)

    def _told(self, delta, number):
        if not self.logprobs or not self.top_logprobs:
            return {}
        value = -0.25 * number
        if self.form == "own":
            return {"logprobs": [[LogProb(token=delta, logprob=value), LogProb(logprob=-9.0)]]}
        if self.form == "chat":
            told = SimpleNamespace(content=[SimpleNamespace(token=delta, logprob=value)])
        else:
            told = SimpleNamespace(tokens=[delta], token_logprobs=[value], top_logprobs=[{delta: value}])
        return {"raw": SimpleNamespace(choices=[SimpleNamespace(logprobs=told)])}


class Reader:
    """A gate that reads begun answers: one with "Perhaps" in it is unknown. Without a draft it says 0.5."""

    on_error = "retrieve"

    def __init__(self, scores=None):
        self.scores = scores or {}
        self.calls, self.drafts = [], []

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        self.calls += questions
        if "RAISE" in questions:
            raise RuntimeError("gate down")
        (draft,) = drafts or [None]
        self.drafts.append(draft)
        known = self.scores.get(questions[0], 0.5)
        if draft is not None:
            known = 0.2 if "Perhaps" in draft.text else 0.9
        limit = 0.5 if threshold is None else threshold
        return [Decision(question=questions[0], retrieve=known < limit, p_known=known, threshold=limit)]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


class Passages(BaseRetriever):
    """Finds one passage."""

    def __init__(self):
        self.searched = []
        super().__init__()

    def _retrieve(self, query_bundle):
        self.searched.append(query_bundle.query_str)
        return [NodeWithScore(node=TextNode(text="a passage"), score=1.0)]


class Rag(CustomQueryEngine):
    """An engine with passages."""

    asked: list = Field(default_factory=list)

    def custom_query(self, query_str):
        self.asked.append(query_str)
        return f"read about {query_str}"


def gated(llm, *, judge=None, streaming=False, engine=None, **options):
    options = {"tokens": 4, "question_gate": None} | options
    return GatedQueryEngine.from_defaults(
        engine or Rag(), judge or Reader(), llm, streaming=streaming, answer_first=AnswerFirst(**options)
    )


class Decisions(BaseEventHandler):
    """The decisions that were told."""

    found: list = Field(default_factory=list)

    def handle(self, event, **kwargs):
        if isinstance(event, RetrievalGateEvent):
            self.found.append(event.decision)


@pytest.fixture
def told():
    handler, dispatcher = Decisions(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler.found
    dispatcher.event_handlers.remove(handler)


STREAMS = {"query": False, "aquery": False, "stream": True, "astream": True}


@every_style
def test_a_known_answer_goes_on_and_an_unknown_one_is_stopped(style):
    llm, judge = Writer(), Reader()
    streaming = STREAMS[style]
    engine = gated(llm, judge=judge, streaming=streaming)
    text, response = ask(engine, "a known one?", style)
    assert text == KNOWN
    kinds = {
        "query": Response,
        "aquery": Response,
        "stream": StreamingResponse,
        "astream": AsyncStreamingResponse,
    }
    assert type(response) is kinds[style]
    assert len(llm.calls) == 1
    assert llm.ended == ["whole"]
    shown = response.metadata["rgate"]
    assert shown["retrieve"] is False
    assert shown["draft"]["text"] == "It is surely the"
    assert shown["partial_answer"]["tokens_held"] == 4
    assert shown["partial_answer"]["first_token"] > 0
    way = "aquery" if style.startswith("a") else "query"
    text, response = ask(engine, "an unknown one?", way)
    assert text == "read about an unknown one?"
    assert llm.ended == ["whole", "closed"]
    assert len(llm.calls) == 2
    shown = response.metadata["rgate"]
    assert (shown["partial_answer"]["tokens_dropped"], shown["cost"]["model_calls"]) == (4, 1)


@pytest.mark.parametrize("style", ["stream", "astream"])
def test_the_streamed_chunks_are_those_of_the_direct_engine(style):
    def chunks(engine):
        if style == "stream":
            return list(engine.query("a known one?").response_gen)

        async def asked():
            response = await engine.aquery("a known one?")
            return [chunk async for chunk in response.response_gen]

        return asyncio.run(asked())

    alone = EmptyIndex().as_query_engine(llm=Writer(), streaming=True)
    assert chunks(gated(Writer(), streaming=True)) == chunks(alone)


@both_ways
def test_the_first_look_spares_the_llm(call):
    llm, judge = Writer(), Reader()
    engine = gated(llm, judge=judge, question_gate=Reader({"hopeless": 0.05, "open": 0.3}))
    assert str(call(engine, "query", "hopeless")) == "read about hopeless"
    assert str(call(engine, "query", "RAISE")) == "read about RAISE"
    assert llm.calls == []
    assert str(call(engine, "query", "open")) == KNOWN
    assert judge.calls == ["open"]


@both_ways
def test_what_is_clearly_known_is_not_judged(call):
    judge, look = Reader(), Reader({"unknown, or easy?": 0.9})
    engine = gated(Writer(), judge=judge, question_gate=look)
    assert str(call(engine, "query", "unknown, or easy?")) == UNSURE
    assert judge.calls == []
    strict = engine.with_threshold(0.95)
    assert str(call(strict, "query", "unknown, or easy?")) == "read about unknown, or easy?"


@both_ways
def test_an_engine_that_does_not_stream_is_judged_whole(call):
    llm, judge = Writer(), Reader()
    direct = EmptyIndex().as_query_engine(llm=llm, streaming=False)
    engine = GatedQueryEngine(Rag(), direct, judge, answer_first=AnswerFirst(question_gate=None))
    response = call(engine, "query", "a known one?")
    assert isinstance(response, Response)
    assert str(response) == judge.drafts[0].text == "a known one?"
    assert judge.drafts[0].finished
    assert len(llm.calls) == 1


@both_ways
def test_of_a_parsed_object_the_question_decides(call):
    class Fact(BaseModel):
        name: str

    class Given(Rag):
        def query(self, str_or_query_bundle):
            return PydanticResponse(Fact(name="Ada"))

        async def aquery(self, str_or_query_bundle):
            return PydanticResponse(Fact(name="Ada"))

    judge, look = Reader(), Reader({"easy form": 0.6, "hard form": 0.37})
    engine = GatedQueryEngine(Rag(), Given(), judge, answer_first=AnswerFirst(question_gate=look))
    assert call(engine, "query", "easy form").response.name == "Ada"
    assert str(call(engine, "query", "hard form")) == "read about hard form"
    assert judge.calls == []
    assert call(engine.with_threshold(0.3), "query", "hard form").response.name == "Ada"
    without = GatedQueryEngine(Rag(), Given(), judge, answer_first=AnswerFirst(question_gate=None))
    assert call(without, "query", "a form").response.name == "Ada"
    assert judge.calls == ["a form"]


@both_ways
def test_an_llm_that_fails_before_it_is_judged_retrieves_and_later_it_is_the_callers_error(call):
    assert str(call(gated(Writer(fails_at=2)), "query", "known")) == "read about known"
    with pytest.raises(OSError, match="connection lost"):
        call(gated(Writer(fails_at=6)), "query", "known")


@both_ways
def test_an_llm_that_fails_before_its_first_token_retrieves_however_known_the_question(call):
    look = Reader({"easy?": 0.95})
    response = call(gated(Writer(fails_at=0), question_gate=look), "query", "easy?")
    assert str(response) == "read about easy?"
    assert response.metadata["rgate"]["error"]["type"] == "OSError"
    with pytest.raises(OSError, match="connection lost"):
        call(gated(Writer(fails_at=2), question_gate=look), "query", "easy?")


@both_ways
def test_a_gate_that_fails_retrieves_or_raises(call):
    llm, judge = Writer(), Reader()
    assert str(call(gated(llm, judge=judge), "query", "RAISE")) == "read about RAISE"
    judge.on_error = "raise"
    with pytest.raises(RuntimeError, match="gate down"):
        call(gated(llm, judge=judge), "query", "RAISE")
    assert llm.ended == ["closed", "closed"]


@pytest.mark.parametrize("form", ["chat", "completion", "own"])
@every_style
def test_log_probabilities_are_captured(style, form):
    llm, judge = Telling(), Reader()
    llm.form = form
    engine = gated(llm, judge=judge, streaming=STREAMS[style])
    assert ask(engine, "a known one?", style)[0] == KNOWN
    (draft,) = judge.drafts
    assert draft.tokens == ("It", " is", " surely", " the")
    assert draft.logprobs == (0.0, -0.25, -0.5, -0.75)
    assert llm.asked == [True]
    assert (llm.logprobs, llm.top_logprobs) == (None, 0)  # the user's own is left as it is


@both_ways
def test_an_llm_that_refuses_log_probabilities_answers_without(call):
    llm, judge = Telling(), Reader()
    llm.refuses = True
    engine = gated(llm, judge=judge)
    assert str(call(engine, "query", "a known one?")) == KNOWN
    assert str(call(engine, "query", "a known one?")) == KNOWN
    assert llm.asked == [True, None, None]
    assert [draft.logprobs for draft in judge.drafts] == [None, None]


@both_ways
def test_what_a_stopped_llm_has_read_is_counted_where_it_says_so(call):
    llm = Writer()
    cost = call(gated(llm), "query", "an unknown one?").metadata["rgate"]["cost"]
    assert (cost["tokens_in"], cost["tokens_out"]) == (0, 4)
    llm.prompt_tokens = 17
    cost = call(gated(llm), "query", "an unknown one?").metadata["rgate"]["cost"]
    assert (cost["model_calls"], cost["tokens_in"], cost["tokens_out"]) == (1, 17, 4)
    assert call(gated(llm), "query", "a known one?").metadata["rgate"]["cost"]["tokens_in"] == 0


@both_ways
def test_one_event_says_what_became_of_what_was_begun(call, told):
    call(gated(Writer()), "query", "an unknown one?")
    call(gated(Writer(), question_gate=Reader({"hopeless": 0.05})), "query", "hopeless")
    begun = [(d.retrieve, d.partial_answer.tokens_held, d.partial_answer.tokens_dropped) for d in told]
    assert begun == [(True, 4, 4), (True, 0, 0)]


@both_ways
def test_the_search_runs_meanwhile(call):
    retriever, llm = Passages(), Writer()
    inner = RetrieverQueryEngine(retriever, get_response_synthesizer(llm=Writer()))
    engine = GatedQueryEngine.from_defaults(
        inner, Reader(), llm, answer_first=AnswerFirst(tokens=4, question_gate=None, prefetch=True)
    )
    assert str(call(engine, "query", "an unknown one?")).startswith("read: ")
    assert retriever.searched == ["an unknown one?"]
    assert str(call(engine, "query", "a known one?")) == KNOWN


@both_ways
def test_what_the_first_look_settles_is_not_searched_meanwhile(call):
    retriever, look = Passages(), Reader({"easy": 0.95, "hopeless": 0.05})
    inner = RetrieverQueryEngine(retriever, get_response_synthesizer(llm=Writer()))
    engine = GatedQueryEngine.from_defaults(
        inner, Reader(), Writer(), answer_first=AnswerFirst(tokens=4, question_gate=look, prefetch=True)
    )
    assert str(call(engine, "query", "easy")) == KNOWN
    assert retriever.searched == []
    assert str(call(engine, "query", "hopeless")).startswith("read: ")
    assert retriever.searched == ["hopeless"]


@every_style
def test_chat_engines_work_around_it(style):
    engine = gated(Writer(), streaming=STREAMS[style])
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=Writer())
    text, _ = ask(chat, "a known one?", style)
    assert text == KNOWN


def test_the_default_gates_are_those_for_begun_answers():
    engine = GatedQueryEngine.from_defaults(Rag(), llm=Writer(), answer_first=True)
    judge = engine.strategy.judge.gate
    assert (judge.question.artifact, judge.answer.artifact) == ("default-heads", "default-answer")
    assert engine.strategy.question_gate.gate.artifact == "default-heads"
    assert engine.strategy.answer_first == AnswerFirst()
    assert GatedQueryEngine.from_defaults(
        Rag(), llm=Writer(), answer_first=True, tokens=16
    ).strategy.answer_first == AnswerFirst(tokens=16)


@both_ways
def test_a_gate_of_ones_own_judges_and_no_other_overrules_it(call):
    judge = Reader()
    engine = GatedQueryEngine.from_defaults(Rag(), judge, Writer(), streaming=False, answer_first=True)
    assert str(call(engine, "query", "What is my manager's phone number?")) == KNOWN
    assert (engine.strategy.judge, engine.strategy.question_gate) == (judge, None)


def test_a_gate_that_reads_the_question_alone_leaves_begun_answers_to_another_or_is_refused():
    gate = load_gate(threshold=0.4)
    engine = GatedQueryEngine.from_defaults(Rag(), gate, Writer(), answer_first=True)
    assert (engine.strategy.judge.gate.name, engine.strategy.judge.threshold) == ("answer", 0.4)
    assert engine.strategy.question_gate.threshold == 0.4
    assert engine.strategy.question_gate.gate.llm_name == "writer"  # the LLM that answers
    with pytest.raises(ConfigurationError, match="cannot judge an answer"):
        GatedQueryEngine.from_defaults(Rag(), "prompt", Writer(), answer_first=True)


@both_ways
def test_a_question_that_refers_back_retrieves(call):
    llm = Writer()
    engine = gated(llm, question_gate=Reader())
    assert str(call(engine, "query", "And how tall is he?")) == "read about And how tall is he?"
    assert str(call(gated(llm), "query", "And how tall is he?")) == "read about And how tall is he?"


@both_ways
def test_the_threshold_of_an_engine_holds_for_what_was_begun(call):
    strict = gated(Writer()).with_threshold(0.95)
    assert str(call(strict, "query", "a known one?")) == "read about a known one?"
    never = gated(Writer(), question_gate=Reader({"hopeless": 0.05})).with_threshold(0.0)
    assert str(call(never, "query", "hopeless")) == KNOWN


@both_ways
def test_two_steps_answer_directly_in_the_callers_kind(call):
    engine = GatedQueryEngine.from_defaults(
        Rag(), "constant:never", Writer(), streaming=False, answer_first=AnswerFirst(question_gate=None)
    )
    nodes = call(engine, "retrieve", QueryBundle("a known one?"))
    response = call(engine, "synthesize", QueryBundle("a known one?"), nodes)
    assert isinstance(response, Response)
    assert str(response) == KNOWN


@both_ways
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    llm, passages = Writer(), Passages()
    claims = ClaimFusionRetriever([passages], llm=llm, gate=Reader())
    inner = RetrieverQueryEngine(claims, get_response_synthesizer(llm=llm))
    engine = gated(llm, engine=inner, tokens=99)
    call(engine, "query", "an unknown one?")
    assert set(passages.searched) == {"an unknown one?", UNSURE.removesuffix(".")}
    assert sum("passage" not in prompt for prompt in llm.calls) == 1


async def nothing_left(ended):
    for _ in range(10_000):
        if ended() and asyncio.all_tasks() == {asyncio.current_task()}:
            return True
        await asyncio.sleep(0)
    return False


async def test_callers_on_one_loop_do_not_wait_for_each_others_llm():
    begun, released = asyncio.Barrier(50), asyncio.Barrier(50)

    def pace(number):
        return {1: begun.wait, 6: released.wait}[number]() if number in (1, 6) else None

    llm = Writer(pace=pace)
    engine = gated(llm)
    calls = [engine.aquery(f"known {number}") for number in range(50)]
    found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE * 2)
    assert [str(response) for response in found] == [KNOWN] * 50
    assert await nothing_left(lambda: llm.ended == ["whole"] * 50)


async def test_callers_who_are_cancelled_leave_nothing_behind():
    stuck, waiting = asyncio.Event(), []

    def pace(number):
        if number != 3:
            return None
        waiting.append(number)
        return stuck.wait()

    llm = Writer(pace=pace)
    engine = gated(llm)
    kinds = ["known", "unknown"]
    tasks = [asyncio.ensure_future(engine.aquery(f"{kinds[n % 2]} {n}")) for n in range(100)]
    while len(waiting) < 100:
        await asyncio.sleep(0)
    for task in tasks[:20]:
        task.cancel()
    stuck.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found[:20])
    assert [str(each) == KNOWN for each in found[20:]] == [n % 2 == 0 for n in range(20, 100)]
    assert await nothing_left(lambda: len(llm.ended) == 100)
    assert llm.ended.count("whole") == 40


async def test_a_caller_who_leaves_a_stream_closes_it():
    llm = Writer()
    response = await gated(llm, streaming=True).aquery("a known one?")
    stream = response.response_gen
    assert await anext(stream) == "It"
    await stream.aclose()
    assert await nothing_left(lambda: llm.ended == ["closed"])
