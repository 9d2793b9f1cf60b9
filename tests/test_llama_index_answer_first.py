"""LlamaIndex: the direct engine answers first, or a search is looked at first; the contract has what is shared."""

import asyncio

import pytest
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode
from pydantic import BaseModel

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import ClaimFusionRetriever, GatedQueryEngine
from tests.begun_answers import KNOWN, LOOK, TEXT, UNSURE, Reader, Stuck, in_step, nothing_left
from tests.llama_index_parts import (
    Rag,
    ScriptedGate,
    Shelf,
    Writer,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    over,
)
from tests.patience import PATIENCE


def gated(llm, *, judge=None, style="query", engine=None, **options):
    options = AnswerFirst(**({"tokens": 4, "question_gate": None} | options))
    return GatedQueryEngine.from_defaults(
        engine or Rag(), judge or Reader(), llm, streaming=style.endswith("stream"), answer_first=options
    )


@every_style
def test_a_known_answer_is_a_response_of_the_kind_that_was_asked_for(style):
    engine = gated(Writer(), style=style)
    text, response = ask(engine, "a known one?", style)
    assert text == KNOWN
    kinds = {"stream": StreamingResponse, "astream": AsyncStreamingResponse}
    assert type(response) is kinds.get(style, Response)
    assert response.metadata["rgate"]["draft"]["text"] == "It is surely the"
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=Writer())
    assert ask(chat, "a known one?", style)[0] == KNOWN


@both_ways
def test_an_engine_that_does_not_stream_is_judged_whole(call):
    llm, judge = Writer(), Reader()
    direct = EmptyIndex().as_query_engine(llm=llm, streaming=False)
    engine = GatedQueryEngine(Rag(), direct, judge, answer_first=AnswerFirst(question_gate=None))
    response = call(engine, "query", "a known one?")
    assert isinstance(response, Response)
    assert str(response) == judge.drafts[0][0].text == KNOWN
    assert judge.drafts[0][0].finished
    assert len(llm.calls) == 1


@both_ways
def test_of_a_parsed_object_the_question_decides(call):
    class Fact(BaseModel):
        name: str

    class Given(Rag):
        def query(self, str_or_query_bundle):
            return PydanticResponse(Fact(name="Ada"))

        async def aquery(self, str_or_query_bundle):
            return self.query(str_or_query_bundle)

    judge, look = Reader(), Reader({"easy form": 0.6, "hard form": 0.37})
    engine = GatedQueryEngine(Rag(), Given(), judge, answer_first=AnswerFirst(question_gate=look))
    assert call(engine, "query", "easy form").response.name == "Ada"
    assert str(call(engine, "query", "hard form")) == "read about hard form"
    assert judge.calls == []
    assert call(engine.with_threshold(0.3), "query", "hard form").response.name == "Ada"
    without = GatedQueryEngine(Rag(), Given(), judge, answer_first=AnswerFirst(question_gate=None))
    assert call(without, "query", "a form").response.name == "Ada"
    assert judge.calls == [["a form"]]


@pytest.mark.parametrize("form", ["chat", "completion", "own"])
@both_ways
def test_log_probabilities_are_captured(call, form):
    llm, judge = Writer(form=form), Reader()
    assert str(call(gated(llm, judge=judge), "query", "a known one?")) == KNOWN
    ((draft,),) = judge.drafts
    assert draft.tokens == ("It", " is", " surely", " the")
    assert draft.logprobs == (0.0, -0.25, -0.5, -0.75)
    assert llm.calls == [True]
    assert (llm.logprobs, llm.top_logprobs) == (None, 0)  # the user's own is left as it is


@both_ways
def test_an_llm_that_refuses_log_probabilities_answers_without(call):
    llm, judge = Writer(refuses=True), Reader()
    engine = gated(llm, judge=judge)
    for _ in range(2):
        assert str(call(engine, "query", "a known one?")) == KNOWN
    assert llm.calls == [True, None, None]
    assert [draft.logprobs for (draft,) in judge.drafts] == [None, None]


@both_ways
@pytest.mark.parametrize(("usage", "read"), [(None, 0), (17, 17)])
def test_one_event_says_what_was_begun_and_what_it_cost_where_the_llm_says_so(call, usage, read):
    engine = gated(Writer(usage=usage), question_gate=Reader({"hopeless": 0.05}))
    with hearing() as events:
        for question in ("an unknown one?", "a known one?", "hopeless"):
            call(engine, "query", question)
    told = [
        (d.partial_answer.tokens_dropped, d.cost.tokens_in, d.cost.tokens_out) for d in decisions_in(events)
    ]
    assert told == [(4, read, 4), (0, 0, 0), (0, 0, 0)]


@both_ways
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    llm, shelf = Writer(), Shelf()
    engine = gated(llm, engine=over(ClaimFusionRetriever([shelf], llm=llm, gate=Reader())), tokens=99)
    call(engine, "query", "an unknown one?")
    assert set(shelf.queries) == {"an unknown one?", UNSURE.removesuffix(".")}
    assert len(llm.calls) == 1


def test_the_llm_that_answers_is_judged():
    engine = GatedQueryEngine.from_defaults(Rag(), load_gate(), Writer(), answer_first=True, tokens=16)
    assert engine.strategy.question_gate.gate.llm_name == "writer"
    assert engine.strategy.answer_first == AnswerFirst(tokens=16)


# --- callers who share a loop, and callers who leave -----------------------------------------------------------


async def test_callers_on_one_loop_do_not_wait_for_each_others_llm():
    llm = Writer(pace=in_step(50))
    engine = gated(llm)
    calls = [engine.aquery(f"known {number}") for number in range(50)]
    found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE * 2)
    assert [str(response) for response in found] == [KNOWN] * 50
    assert await nothing_left(lambda: llm.ended == ["whole"] * 50)


async def test_callers_who_are_cancelled_leave_nothing_behind():
    stuck = Stuck()
    llm = Writer(pace=stuck)
    engine = gated(llm)
    kinds = ["known", "unknown"]
    found = await stuck.leave([engine.aquery(f"{kinds[n % 2]} {n}") for n in range(100)], leaving=20)
    assert [str(each) == KNOWN for each in found] == [n % 2 == 0 for n in range(20, 100)]
    assert await nothing_left(lambda: len(llm.ended) == 100)
    assert llm.ended.count("whole") == 40


async def test_a_caller_who_leaves_a_stream_closes_it():
    llm = Writer()
    stream = (await gated(llm, style="astream").aquery("a known one?")).response_gen
    assert await anext(stream) == "It"
    await stream.aclose()
    assert await nothing_left(lambda: llm.ended == ["closed"])


# --- look first --------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("found", [TEXT, TextNode(text=TEXT)], ids=type)
def test_what_is_not_quite_a_node_is_judged_by_its_text(call, found):
    class Odd(Rag):
        retriever: object = "there is one"

        def retrieve(self, query_bundle):
            return [found, None, 3]

        def synthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return Response(f"read {len(nodes)}")

        async def asynthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return self.synthesize(query_bundle, nodes)

    engine = GatedQueryEngine.from_defaults(Odd(), ScriptedGate(), llm=MockLLM(), look_first=LOOK)
    assert str(call(engine, "query", "who wrote the Zorba quartet")) == "read 3"
    assert "what is the weather" in str(call(engine, "query", "what is the weather"))


@pytest.mark.parametrize("options", [{"look_first": True}, {"answer_first": AnswerFirst(prefetch=True)}])
def test_an_engine_of_one_step_is_refused(options):
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine.from_defaults(Rag(), llm=MockLLM(), **options)
