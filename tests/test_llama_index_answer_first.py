"""LlamaIndex: the direct engine answers first, or a search is looked at first; the contract has what is shared."""

from llama_index.core.base.response.schema import (
    PydanticResponse,
)
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from pydantic import RootModel

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.llama_index import ClaimFusionRetriever, GatedQueryEngine
from tests.begun_answers import KNOWN, UNSURE, Reader, nothing_left
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
        answer_first=AnswerFirst(tokens=tokens, question_gate=None),
    )


@every_style
def test_a_known_answer_is_announced_once_and_chat_engines_give_it(style):
    engine = gated(Writer(), style=style)
    with hearing() as events:
        assert ask(engine, "a known one?", style)[0] == KNOWN
    assert [decision.retrieve for decision in decisions_in(events)] == [False]
    chat = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=Writer())
    assert ask(chat, "a known one?", style)[0] == KNOWN


@every_style
def test_events_of_the_direct_engine_have_a_tag(style):
    """Regression: listeners could not tell a stopped answer from that of the wrapped engine."""
    reads = over(Shelf(), streaming=style.endswith("stream"))
    for question, retrieves in (("an unknown one?", True), ("a known one?", False)):
        with hearing() as events:
            ask(gated(Writer(), style=style, engine=reads), question, style)
        named = [(type(event).__name__, "rgate_direct" in event.tags) for event in events]
        assert ("LLMCompletionInProgressEvent", True) in named
        assert ("RetrievalGateEvent", False) in named
        assert (("RetrievalStartEvent", False) in named) is retrieves  # the direct engine's own has the tag


@both_ways
def test_an_engine_that_does_not_stream_is_judged_whole(call):
    judge = Reader()
    engine = GatedQueryEngine(Rag(), Rag(answer=KNOWN), judge, answer_first=JUDGED)
    assert str(call(engine, "query", "a known one?")) == KNOWN
    assert [(draft.text, draft.finished) for (draft,) in judge.drafts] == [(KNOWN, True)]


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
def test_the_claims_that_are_searched_are_what_the_llm_had_written(call):
    llm, shelf = Writer(), Shelf()
    engine = gated(llm, engine=over(ClaimFusionRetriever([shelf], draft_llm=llm, gate=Reader())), tokens=99)
    call(engine, "query", "an unknown one?")
    assert set(shelf.queries) == {"an unknown one?", f"unknown one {UNSURE.removesuffix('.')}"}
    assert len(llm.calls) == 1


async def test_a_caller_who_leaves_a_stream_closes_it():
    llm = Writer()
    stream = (await gated(llm, style="astream").aquery("a known one?")).response_gen
    assert await anext(stream) == "It"
    await stream.aclose()
    assert await nothing_left(lambda: llm.ended == ["closed"])
