"""LlamaIndex: the direct engine answers first, or a search is looked at first; the contract has what is shared."""

from unittest.mock import Mock

from llama_index.core.base.response.schema import (
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from pydantic import RootModel

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.llama_index import ClaimFusionRetriever, GatedQueryEngine
from tests.begun_answers import KNOWN, UNSURE, Reader, Stuck, nothing_left
from tests.llama_index_parts import (
    Rag,
    Shelf,
    Writer,
    ask,
    both_ways,
    decisions_in,
    every_style,
    hearing,
    over,
)

JUDGED = AnswerFirst(question_gate=None)


def gated(llm, *, judge=None, style="query", engine=None, tokens=4):
    return GatedQueryEngine.from_defaults(
        engine or Rag(),
        judge or Reader(),
        llm,
        streaming=style.endswith("stream"),
        tokens=tokens,
        answer_first=JUDGED,
    )


@every_style
def test_a_known_answer_is_announced_once_and_chat_engines_give_it(style):
    engine = gated(Writer(), style=style)
    with hearing() as events:
        assert ask(engine, "a known one?", style)[0] == KNOWN
    assert [decision.retrieve for decision in decisions_in(events)] == [False]
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=Writer())
    assert ask(chat, "a known one?", style)[0] == KNOWN


@both_ways
def test_an_engine_that_does_not_stream_is_judged_whole(call):
    judge = Reader()
    engine = GatedQueryEngine(Rag(), Rag(answer=KNOWN), judge, answer_first=JUDGED)
    response = call(engine, "query", "a known one?")
    assert isinstance(response, Response)
    assert str(response) == KNOWN
    assert [(draft.text, draft.finished) for (draft,) in judge.drafts] == [(KNOWN, True)]


class Traced(StreamingResponse):
    """A response of the user's own class, with arguments of its own."""

    def __init__(self, chunks):
        super().__init__(chunks, metadata={"trace": 7})


@both_ways
def test_a_stream_of_a_class_of_the_users_own_is_judged(call):
    """Regression: the class was called with other arguments, so the question retrieved."""
    direct = Rag(answer=Traced(iter([KNOWN])))
    engine = GatedQueryEngine(Rag(), direct, Reader(), answer_first=JUDGED, streaming=False)
    response = call(engine, "query", "a known one?")
    assert (str(response), response.metadata["trace"]) == (KNOWN, 7)


@both_ways
def test_of_a_parsed_object_the_question_decides(call):
    parsed, judge = Rag(answer=PydanticResponse(RootModel[str]("Ada"))), Reader()
    screen = AnswerFirst(question_gate=Reader({"easy form": 0.6, "hard form": 0.37}))
    screened = GatedQueryEngine(Rag(), parsed, judge, answer_first=screen)
    assert call(screened, "query", "easy form").response.root == "Ada"
    assert str(call(screened, "query", "hard form")) == "read about hard form"
    assert judge.calls == []
    judged = GatedQueryEngine(Rag(), parsed, judge, answer_first=JUDGED)
    assert call(judged, "query", "a form").response.root == "Ada"
    assert judge.calls == [["a form"]]


@both_ways
def test_log_probabilities_are_captured_and_what_the_llm_says_that_it_has_read(call):
    llm, judge = Writer(), Reader()
    assert str(call(gated(llm, judge=judge), "query", "a known one?")) == KNOWN
    ((draft,),) = judge.drafts
    assert (draft.tokens, draft.prompt_tokens) == (("It", " is", " surely", " the"), 17)
    assert draft.logprobs == (0.0, -0.25, -0.5, -0.75)
    assert llm.calls == [["logprobs"]]
    assert llm.logprobs is None  # the user's own stays unchanged


@both_ways
def test_an_llm_that_refuses_log_probabilities_answers_without(call):
    refusal = Mock(side_effect=[ValueError("unknown parameter logprobs"), None, None])
    llm, judge = Writer(fails=refusal), Reader()
    engine = gated(llm, judge=judge)
    for _ in range(2):
        assert str(call(engine, "query", "a known one?")) == KNOWN
    assert llm.calls == [["logprobs"], [], []]
    assert [draft.logprobs for (draft,) in judge.drafts] == [None, None]


@both_ways
def test_a_prompt_that_is_refused_in_either_form_costs_later_ones_no_log_probabilities(call):
    """Regression: a status 400 about one prompt turned log-probabilities off for good."""
    too_long = ValueError("400: unsupported length of the prompt")
    llm = Writer(fails=Mock(side_effect=[too_long, too_long, None]))
    engine = gated(llm)
    for _ in range(2):
        call(engine, "query", "a known one?")
    assert llm.calls == [["logprobs"], [], ["logprobs"]]


@both_ways
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    llm, shelf = Writer(), Shelf()
    engine = gated(llm, engine=over(ClaimFusionRetriever([shelf], draft_llm=llm, gate=Reader())), tokens=99)
    call(engine, "query", "an unknown one?")
    assert set(shelf.queries) == {"an unknown one?", UNSURE.removesuffix(".")}
    assert len(llm.calls) == 1


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
