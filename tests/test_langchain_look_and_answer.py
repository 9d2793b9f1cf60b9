"""LangChain: `route(answer_first=True, look_first=True)` judges a begun answer beside what one search found."""

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import Field

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate
from tests.begun_answers import WHOLE, Reader, Writer
from tests.langchain_fakes import BATCHES, SINGLES, STREAMS, each
from tests.test_langchain_look_first import COVERED, LOOK, Shelf, Told

TEXT = "The unknown Zorba wrote the quartet."
HELD, NOT_HELD = "who wrote the Zorba quartet", "the weather"
HELD_UNKNOWN = "who wrote the unknown Zorba quartet"
READ = f"<{TEXT}>"
LOOKS = {"the Zorba quartet": 0.05, "cold weather": 0.05, "poor weather": 0.12, "a broken one": 0.05}


class Routed:
    """A router over a shelf and a writer, with all that its parts note."""

    def __init__(self, look=LOOK, *, writer=None, judge=None, **options):
        self.shelf, self.told = Shelf(texts=[TEXT]), Told()
        self.writer, self.judge = writer or Writer(), judge or Reader()
        self.first = Reader(LOOKS)
        context = self.shelf | (lambda found: " ".join(document.page_content for document in found))
        self.router = RetrievalGate(self.judge).route(
            retrieve={"context": context, "question": RunnablePassthrough()}
            | RunnableLambda(lambda asked: f"<{asked['context']}>"),
            direct=self.writer | StrOutputParser(),
            answer_first=AnswerFirst(**{"tokens": 4, "question_gate": self.first} | options),
            look_first=look,
        )

    def ask(self, call, question, **config):
        return call(self.router, question, {"callbacks": [self.told], **config})

    @property
    def event(self):
        (event,) = self.told.events
        return event


@each(SINGLES)
def test_a_known_answer_goes_on_though_passages_hold_it(call):
    routed = Routed()
    assert routed.ask(call, HELD) == WHOLE
    assert (routed.event["outcome"], routed.event["p_known"]) == ("direct", 0.9)
    assert routed.writer.ended == ["whole"]
    assert routed.shelf.queries == [HELD]


@each(SINGLES)
def test_an_unsure_answer_is_stopped_for_passages_that_help_and_they_are_not_searched_again(call):
    routed = Routed()
    assert routed.ask(call, HELD_UNKNOWN) == READ
    assert (routed.event["outcome"], routed.event["p_known"]) == ("retrieve", 0.2)
    assert routed.event["p_helps"] == pytest.approx(0.9, abs=0.001)
    assert routed.event["partial_answer"]["tokens_dropped"] == 4
    assert routed.writer.ended == ["closed"]
    assert routed.shelf.queries == [HELD_UNKNOWN]


@each(SINGLES)
def test_where_no_passage_helps_the_answer_goes_on_unjudged(call):
    routed = Routed()
    assert routed.ask(call, NOT_HELD) == WHOLE
    assert (routed.event["outcome"], routed.event["p_known"]) == ("direct", 0.5)
    assert routed.event["partial_answer"]["tokens_held"] == 0
    assert routed.writer.ended == ["whole"]
    assert (len(routed.first.calls), routed.judge.calls) == (1, [])


@each(SINGLES)
def test_what_is_clearly_unknown_is_settled_by_what_was_found(call):
    routed = Routed()
    assert routed.ask(call, "the Zorba quartet") == READ
    assert (routed.event["outcome"], routed.writer.calls) == ("retrieve", [])
    poor = Routed()
    assert poor.ask(call, "poor weather") == WHOLE
    assert (poor.event["outcome"], poor.judge.calls) == ("direct", [])


@each(SINGLES)
@pytest.mark.parametrize(("choice", "wanted"), [("retrieve", READ), ("direct", WHOLE)])
def test_where_neither_is_likely_the_option_chooses(call, choice, wanted):
    routed = Routed(LookFirst(model=COVERED, on_abstain=choice))
    assert routed.ask(call, "cold weather") == wanted
    assert routed.event["outcome"] == "abstain"
    assert routed.judge.calls == []


@each(SINGLES)
def test_without_a_first_look_every_answer_is_begun(call):
    routed = Routed(question_gate=None)
    assert "Perhaps" in routed.ask(call, "unknownish weather")
    assert (routed.event["outcome"], routed.event["p_known"]) == ("direct", 0.2)
    assert routed.judge.calls == [["unknownish weather"]]


@each(BATCHES)
def test_a_batch_calls_each_gate_once_and_searches_each_question_once(call):
    routed = Routed()
    asked = [
        HELD,
        HELD_UNKNOWN,
        "the Zorba quartet",
        "unknownish weather",
        "broken, yet fine",
        "broken unknown",
    ]
    found = call(routed.router, asked, return_exceptions=True)
    assert found[:3] == [WHOLE, READ, READ]
    assert "Perhaps" in found[3]
    assert found[4] == WHOLE
    assert isinstance(found[5], TimeoutError)
    assert routed.first.calls == [asked]
    assert routed.judge.calls == [[asked[0], asked[1], asked[4], asked[5]]]
    assert sorted(routed.shelf.queries) == sorted(asked)
    assert sorted(routed.writer.ended) == ["closed", "closed", "whole", "whole", "whole"]


@each(BATCHES)
def test_a_batch_with_a_limit_goes_in_parts(call):
    routed = Routed()
    asked = [HELD, HELD_UNKNOWN, "the Zorba quartet", NOT_HELD]
    assert call(routed.router, asked, {"max_concurrency": 2}) == [WHOLE, READ, READ, WHOLE]
    assert routed.first.calls == [asked[:2], asked[2:]]
    assert sorted(routed.shelf.queries) == sorted(asked)


@each(SINGLES)
def test_a_search_that_fails_or_finds_nothing_leaves_it_to_the_begun_answer(call):
    for question, error in (
        ("broken, yet fine", "failed (TimeoutError)"),
        ("empty, yet fine", "found nothing"),
    ):
        routed = Routed()
        assert routed.ask(call, question) == WHOLE
        assert routed.event["outcome"] is None
        (warning,) = routed.event["warnings"]
        assert error in warning
    assert Routed().ask(call, "empty unknown") == "<>"
    for question in ("broken unknown", "a broken one"):
        with pytest.raises(TimeoutError, match="index gone"):
            Routed().ask(call, question)


@each(SINGLES)
def test_a_gate_or_a_direct_arm_that_fails_reads_what_was_found(call):
    for routed in (Routed(judge=Broken()), Routed(writer=Writer(fails_at=2))):
        assert routed.ask(call, HELD) == READ
        assert routed.event["error"] is not None
        assert routed.shelf.queries == [HELD]
    with pytest.raises(OSError, match="connection lost"):
        Routed(writer=Writer(fails_at=2)).ask(call, NOT_HELD)  # nothing helps, so it is the caller's


class Broken(Reader):
    """Fails for every draft."""

    def decide_batch(self, questions, **options):
        raise RuntimeError("gate down")


@each(SINGLES)
def test_a_threshold_that_is_given_is_enough_whatever_was_found(call):
    strict, lax = ({"retrieval_threshold": value} for value in (0.95, 0.1))
    assert Routed().ask(call, HELD, configurable=strict) == WHOLE  # passages add nothing to what it knows
    assert "Perhaps" in Routed().ask(call, HELD_UNKNOWN, configurable=lax)
    assert Routed().ask(call, HELD_UNKNOWN) == READ


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("question", [HELD, NOT_HELD])
def test_released_chunks_are_those_of_the_arm_alone(stream, question):
    routed = Routed()
    alone = STREAMS[stream](Writer() | StrOutputParser(), question)
    assert STREAMS[stream](routed.router, question) == alone
    assert len(alone) > 8


def test_a_caller_who_leaves_a_stream_closes_the_answer():
    for question in (HELD, NOT_HELD):
        routed = Routed()
        stream = routed.router.stream(question)
        assert next(stream) == "It "
        stream.close()
        assert routed.writer.ended == ["closed"]


async def test_an_asynchronous_caller_who_is_cancelled_leaves_nothing_behind():
    reached = asyncio.Event()

    async def pace(number):
        if number == 2:
            reached.set()
            await asyncio.Event().wait()

    routed = Routed(writer=Writer(pace=pace))
    task = asyncio.ensure_future(routed.router.ainvoke(HELD))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert routed.writer.ended == ["closed"]


class Slow(Shelf):
    """Finds nothing until it may."""

    began: object = Field(default_factory=asyncio.Event)
    may: object = Field(default_factory=asyncio.Event)

    async def _aget_relevant_documents(self, query, *, run_manager):
        self.began.set()
        await self.may.wait()
        return self._get_relevant_documents(query, run_manager=run_manager)


@pytest.mark.parametrize("answer_first", [False, True])
async def test_a_slow_search_is_waited_for_and_leaves_the_loop_free(answer_first):
    slow = Slow(texts=[TEXT])
    options = AnswerFirst(tokens=4, question_gate=Reader()) if answer_first else False
    router = RetrievalGate(Reader()).route(
        retrieve=slow | (lambda found: found[0].page_content),
        direct=Writer() | StrOutputParser(),
        answer_first=options,
        look_first=LOOK,
    )
    task = asyncio.ensure_future(router.ainvoke(HELD_UNKNOWN))
    await slow.began.wait()
    assert not task.done()
    slow.may.set()
    assert await task == TEXT
    assert slow.queries == [HELD_UNKNOWN]


@each(SINGLES)
def test_a_follow_up_that_the_gate_does_not_read_reads_what_was_found(call):
    routed = Routed()
    conversation = [HumanMessage("Who is Zorba?"), AIMessage("A Greek."), HumanMessage("Is he unknown?")]
    chain = RunnableLambda(lambda messages: "the unknown Zorba") | routed.shelf | (lambda found: "read")
    router = RetrievalGate(routed.judge).route(
        retrieve=chain,
        direct=routed.writer | StrOutputParser(),
        answer_first=AnswerFirst(tokens=4, question_gate=routed.first),
        look_first=LOOK,
    )
    assert call(router, conversation, {"callbacks": [routed.told]}) == "read"
    assert routed.event["outcome"] is None
    assert routed.event["p_known"] == 0.0
    assert routed.writer.calls == []
    assert routed.shelf.queries == ["the unknown Zorba"]


def test_the_defaults_are_those_of_both_ways():
    router = RetrievalGate().route(retrieve=Shelf(), direct=str, answer_first=True, look_first=True)
    assert (router.strategy.answer_first, router.strategy.look_first) == (AnswerFirst(), LookFirst())
    assert router.strategy.question_gate.gate.gate.artifact == "default-heads"
    with pytest.raises(ConfigurationError, match="several steps"):
        RetrievalGate().route(retrieve=str, direct=str, answer_first=True, look_first=True)
