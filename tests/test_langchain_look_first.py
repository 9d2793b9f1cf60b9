"""LangChain: what is searched ahead, which part of the retrieve arm that is, and what is read of what it finds."""

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableSequence, RunnableSerializable
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.routing import Strategy
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.corpora import CorpusRetriever, format_documents
from rgate_integrations.langchain.router import RetrievalRouter
from tests.begun_answers import KNOWN, LOOK, TEXT, WHOLE, EventRecorder, Reader, Shelf, Writer, answer_to
from tests.langchain_fakes import BATCHES, STREAMS, Judge, each, runs_named

HELD, HELD_UNKNOWN = "who wrote the Zorba quartet", "who wrote the unknown Zorba quartet"


def reading(shelf):
    return shelf | RunnableLambda(lambda found: "".join(document.page_content for document in found))


def router_over(shelf, *, judge=None, answer_first=False, direct=answer_to, **options):
    return RetrievalGate(judge or Judge(), **options).route(
        retrieve=shelf, direct=direct, answer_first=answer_first, look_first=LOOK
    )


def answering(shelf, *, judge=None, writer=None, screen=None):
    """A router that does both."""
    direct = (writer or Writer()) | StrOutputParser()
    first = AnswerFirst(tokens=4, question_gate=screen or Reader({"the Zorba quartet": 0.05}))
    return router_over(reading(shelf), judge=judge or Reader(), answer_first=first, direct=direct)


@each(BATCHES)
@pytest.mark.parametrize("limit", [None, 2])
def test_a_batch_searches_each_question_once_and_calls_each_gate_once_a_part(call, limit):
    shelf, judge, writer, screen = Shelf(), Reader(), Writer(), Reader({"the Zorba quartet": 0.05})
    router = answering(shelf, judge=judge, writer=writer, screen=screen)
    asked = [HELD, HELD_UNKNOWN, "the Zorba quartet", "broken, yet fine", "broken unknown", "the weather"]
    found = call(router, asked, {"max_concurrency": limit}, return_exceptions=True)
    assert found[:4] == [WHOLE, TEXT, TEXT, WHOLE]
    assert isinstance(found[4], TimeoutError)
    assert found[5] == WHOLE
    parts = [asked] if limit is None else [asked[:2], asked[2:4], asked[4:]]
    assert screen.calls == parts
    started = [asked[0], asked[1], asked[3], asked[4]]
    assert [question for questions in judge.calls for question in questions] == started
    assert sorted(shelf.queries) == sorted(asked)
    assert sorted(writer.ended) == ["closed", "closed", "whole", "whole", "whole"]


@each(STREAMS)
def test_listeners_and_the_name_of_an_arm_are_for_its_answer(call):
    """Regression: they saw two runs for each answer, one more for a known question, and a sequence lost its name."""
    ended, collector = [], RunCollectorCallbackHandler()
    arm = Shelf() | RunnableLambda(format_documents) | RunnableLambda(str)
    listening = arm.with_listeners(on_end=lambda run: ended.append(run.outputs)).with_config(run_name="mine")
    for retrieve in (listening, RunnableSequence(*arm.steps, name="mine")):
        router = router_over(retrieve)
        for question in ("the weather", HELD_UNKNOWN):
            call(router, question, {"callbacks": [collector]})
    assert ended == [{"output": f"[1] {TEXT}"}]
    assert len(list(runs_named("mine", collector.traced_runs))) == 2


def test_a_model_that_fails_retrieves(monkeypatch):
    monkeypatch.setattr("rgate_integrations.answering.look_first.search_features", None)
    recorder = EventRecorder()
    assert router_over(reading(Shelf())).invoke("fine", {"callbacks": [recorder]}) == TEXT
    assert recorder.events[0]["warnings"] == ["Judging the passages failed (TypeError), so they are read."]


class Scored(RunnableSerializable):
    """A gate of the user's own, with an attribute that means something else than in ours."""

    threshold: object

    def invoke(self, question, config=None, **options):
        return Decision(question=question, retrieve=True, p_known=0.2)


@pytest.mark.parametrize("threshold", ["high", 0.1])
def test_what_a_gate_of_the_users_own_calls_its_threshold_is_not_compared(threshold):
    """Regression: a TypeError, or an answer without the passages."""
    strategy = Strategy(look_first=LOOK)
    router = RetrievalRouter(
        Scored(threshold=threshold), retrieve=reading(Shelf()), direct=answer_to, strategy=strategy
    )
    assert router.invoke(HELD) == TEXT


class Nested(BaseRetriever):
    """Asks another retriever twice, and returns one document of its own."""

    inner: Shelf = Field(default_factory=Shelf)

    def _get_relevant_documents(self, query, *, run_manager):
        for _ in range(2):
            self.inner.invoke(query, {"callbacks": run_manager.get_child()})
        return [Document(page_content="nothing of use")]


class Choosy(Shelf):
    """Finds the text for questions alone, and for all else five documents of no use."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=text) for text in ([TEXT] if "who" in query else OTHERS)]


def search(question):
    return {"found": [Document(page_content=TEXT), TEXT, None, 3], "question": question}


OTHERS = ["nothing of use"] * 5
SHELVES = {"first": Shelf(texts=OTHERS), "second": Shelf(texts=[TEXT])}

# For an arm, what is answered to a question that its text covers; one that it does not cover is never read for.
FOUND = {
    "a retriever alone": (Shelf(), [Document(page_content=TEXT)]),
    "a retriever at the end": (RunnableLambda(str) | Shelf(), [Document(page_content=TEXT)]),
    "a bound retriever at the end": (
        RunnableLambda(str) | Shelf().with_config(tags=["shelf"]),
        [Document(page_content=TEXT)],
    ),
    "a function that returns other things, too": (
        RunnableLambda(search) | (lambda found: f"read {found['question']}"),
        f"read {HELD}",
    ),
    "not what a retriever asks inside": (reading(Nested()), KNOWN),
    # Regression: of several retrievers only the first one's passages were judged.
    "the best of several corpora": (CorpusRetriever(parts=SHELVES) | (lambda found: "read"), "read"),
    "the best of several retrievers, as text": (
        {name: shelf | format_documents for name, shelf in SHELVES.items()}
        | RunnableLambda(lambda _: "read"),
        "read",
    ),
    # Regression: of those that stay documents only the first retriever's were judged.
    "the best of several retrievers": (SHELVES | RunnableLambda(lambda _: "read"), "read"),
    "the best of several queries": (
        RunnableLambda(lambda asked: ["other", asked]) | Choosy().map() | (lambda _: "read"),
        "read",
    ),
    "the document of a function": (
        RunnableLambda(lambda asked: Document(page_content=TEXT)) | (lambda _: "read"),
        "read",
    ),
    # Regression: the order of the retriever counted, not that of the passages that the LLM reads.
    "what a function puts first": (
        {"documents": Shelf(texts=[*OTHERS, TEXT]) | (lambda found: found[::-1])}
        | RunnableLambda(lambda _: "read"),
        "read",
    ),
}


@pytest.mark.parametrize(("arm", "answer"), FOUND.values(), ids=list(FOUND))
def test_what_is_judged_of_what_an_arm_finds(arm, answer):
    router = router_over(arm)
    assert router.invoke(HELD) == answer
    assert router.invoke("cold weather") == KNOWN


@each(STREAMS)
def test_streams_stay_alive(call):
    router = router_over(reading(Shelf()) | FakeListChatModel(responses=["abc"]) | StrOutputParser())
    assert call(router, HELD) == ["a", "b", "c"]
    assert call(answering(Shelf()), HELD) == call(Writer() | StrOutputParser(), HELD)


# --- other results than documents ---------------------------------------------------------------------------------

ODD = {
    "nothing": None,
    "a dict": {"page_content": "Bread is baked."},
    "dicts": [{"page_content": "Bread is baked."}],
    "texts": ["Bread is baked."],
}


class Returns(BaseRetriever):
    """Returns what it was given, as retrievers of the user's own may."""

    found: object = None

    def _get_relevant_documents(self, query, *, run_manager):
        return self.found


@pytest.mark.parametrize("look_first", [False, LOOK], ids=["", "look first"])
@pytest.mark.parametrize("found", ODD.values(), ids=list(ODD))
@each(BATCHES)
def test_an_arm_gets_what_its_retriever_returned_with_and_without_a_look(call, found, look_first):
    router = RetrievalGate(Judge()).route(
        retrieve=Returns(found=found) | RunnableLambda(lambda given: [given]),
        direct=answer_to,
        look_first=look_first,
    )
    assert call(router, ["a thing", "unknown thing"]) == [KNOWN, [found]]
