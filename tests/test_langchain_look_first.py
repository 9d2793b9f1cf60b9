"""LangChain: `route(..., look_first=True)` searches once, and reads what it found only where that helps."""

import asyncio

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.artifacts.passage_utility import PassageUtilityModel
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.evidence.search import FEATURES
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.events import EVENT
from tests.langchain_fakes import BATCHES, SINGLES, Judge, each

# P(the passages hold the answer) is near 1 where they have all words of a question, and near 0 where they have none.
COVERED = PassageUtilityModel(
    features=FEATURES,
    weights=tuple(20.0 if name == "cover_best" else 0.0 for name in FEATURES),
    bias=-10.0,
    reading=0.9,
    distraction=0.25,
)
LOOK = LookFirst(model=COVERED)


class Shelf(BaseRetriever):
    """Finds what is on the shelf for every query; fails for "broken", and finds nothing for "empty"."""

    texts: list = Field(default_factory=lambda: ["Zorba wrote the quartet.", "Something else."])
    queries: list = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager):
        self.queries.append(query)
        if "broken" in query:
            raise TimeoutError("index gone")
        if "empty" in query:
            return []
        return [Document(page_content=text) for text in self.texts]


class Told(BaseCallbackHandler):
    """Keeps the events of decisions."""

    run_inline = True

    def __init__(self):
        self.events = []

    def on_custom_event(self, name, data, **facts):
        assert name == EVENT
        self.events.append(data)


def router(shelf, look=LOOK, judge=None, **options):
    context = shelf | (lambda found: " ".join(document.page_content for document in found))
    return RetrievalGate(judge or Judge(), **options).route(
        retrieve={"context": context, "question": RunnablePassthrough()}
        | RunnableLambda(lambda asked: f"{asked['question']} <{asked['context']}>"),
        direct=lambda asked: f"direct {asked}",
        look_first=look,
    )


READ = "<Zorba wrote the quartet. Something else.>"


@each(SINGLES)
def test_passages_that_hold_the_answer_are_read_even_where_the_llm_may_know(call):
    shelf, told = Shelf(), Told()
    question = "who wrote the Zorba quartet"  # P(known) is 0.8: the gate alone would skip
    assert call(router(shelf), question, {"callbacks": [told]}) == f"{question} {READ}"
    (event,) = told.events
    assert (event["outcome"], event["retrieve"], event["p_known"]) == ("retrieve", True, 0.8)
    assert event["p_helps"] == event["threshold"] == pytest.approx(0.9, abs=0.001)
    assert shelf.queries == [question]  # searched once


def document_without(metadata):
    document = Document(page_content="Zorba wrote the quartet.")
    document.metadata = metadata
    return document


ODD = {
    "no metadata": document_without(None),
    "metadata of another kind": document_without("a title"),
    "a text": "Zorba wrote the quartet.",
    "a mapping": {"page_content": "Zorba wrote the quartet.", "metadata": {"title": 3}},
}


@pytest.mark.parametrize("found", ODD.values(), ids=list(ODD))
@each({name: SINGLES[name] for name in ("invoke", "ainvoke")})
def test_documents_that_are_not_quite_documents_are_judged_by_their_text(call, found):
    class Odd(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [found, None, 3]

    routed = RetrievalGate(Judge()).route(
        retrieve=Odd() | RunnableLambda(lambda documents: f"read {len(documents)}"),
        direct=lambda asked: "direct",
        look_first=LOOK,
    )
    assert call(routed, "who wrote the Zorba quartet") == "read 3"
    assert call(routed, "what is the weather") == "direct"


@each(SINGLES)
def test_passages_that_do_not_help_are_not_read(call):
    shelf, told = Shelf(), Told()
    assert call(router(shelf), "unknown weather", {"callbacks": [told]}) == "direct unknown weather"
    (event,) = told.events
    # P(helps) is three quarters of P(known): nothing in the passages, and they distract.
    assert (event["outcome"], event["p_known"]) == ("direct", 0.2)
    assert event["p_helps"] == pytest.approx(0.15, abs=0.001)
    assert shelf.queries == ["unknown weather"]


@each(SINGLES)
@pytest.mark.parametrize(("choice", "wanted"), [("retrieve", READ), ("direct", "direct")])
def test_where_neither_is_likely_the_option_chooses(call, choice, wanted):
    shelf, told = Shelf(), Told()
    look = LookFirst(model=COVERED, abstain_below=0.3, on_abstain=choice)
    assert wanted in call(router(shelf, look), "unknown weather", {"callbacks": [told]})
    (event,) = told.events
    assert (event["outcome"], event["retrieve"]) == ("abstain", choice == "retrieve")
    assert shelf.queries == ["unknown weather"]


@each(BATCHES)
def test_a_batch_decides_once_and_searches_each_question_once(call):
    shelf, judge = Shelf(), Judge()
    asked = ["who wrote Zorba", "unknown weather", "broken unknown", "broken, yet fine", "empty unknown"]
    found = call(router(shelf, judge=judge), asked, return_exceptions=True)
    assert found[:2] == [f"who wrote Zorba {READ}", "direct unknown weather"]
    assert isinstance(found[2], TimeoutError)
    assert found[3:] == ["direct broken, yet fine", "empty unknown <>"]
    assert judge.calls == [asked]
    assert sorted(shelf.queries) == sorted(asked)


@each(SINGLES)
def test_a_search_that_fails_leaves_it_to_the_question_alone(call):
    told = Told()
    assert call(router(Shelf()), "broken, yet fine", {"callbacks": [told]}) == "direct broken, yet fine"
    with pytest.raises(TimeoutError, match="index gone"):
        call(router(Shelf()), "broken unknown", {"callbacks": [told]})
    for event, retrieve in zip(told.events, [False, True], strict=True):
        assert event["retrieve"] is retrieve
        assert event["outcome"] is None
        assert event["warnings"] == ["The search failed (TimeoutError): the gate alone decided."]


@each(SINGLES)
def test_a_search_that_finds_nothing_leaves_it_to_the_question_alone(call):
    told = Told()
    assert call(router(Shelf()), "empty unknown", {"callbacks": [told]}) == "empty unknown <>"
    assert call(router(Shelf()), "empty, yet fine", {"callbacks": [told]}) == "direct empty, yet fine"
    warned = ["The search found nothing to judge: the gate alone decided."]
    assert [event["warnings"] for event in told.events] == [warned, warned]


@each(SINGLES)
def test_a_gate_that_fails_retrieves_and_does_not_search_again(call):
    shelf = Shelf()
    assert READ in call(router(shelf), "RAISE weather")
    assert shelf.queries == ["RAISE weather"]


def test_a_model_that_fails_retrieves(monkeypatch):
    def broken(question, passages):
        raise ZeroDivisionError

    monkeypatch.setattr("rgate_integrations.answering.look_first.search_features", broken)
    told = Told()
    assert READ in router(Shelf()).invoke("fine", {"callbacks": [told]})
    assert told.events[0]["warnings"] == ["Judging what was found failed (ZeroDivisionError): it is read."]


def test_a_threshold_that_is_given_is_enough_whatever_was_found():
    question = "who wrote Zorba"
    config = {"configurable": {"retrieval_threshold": 0.5}}
    assert router(Shelf()).invoke(question, config) == f"direct {question}"
    assert router(Shelf(), threshold=0.5).invoke(question) == f"direct {question}"
    assert READ in router(Shelf()).invoke(question)
    never = {"configurable": {"retrieval_threshold": 0.0}}
    assert router(Shelf()).invoke("unknown Zorba", never) == "direct unknown Zorba"


def test_a_retriever_alone_and_documents_of_functions_are_judged():
    gate = RetrievalGate(Judge())
    shelf = Shelf()
    alone = gate.route(retrieve=shelf, direct=lambda asked: [], look_first=LOOK)
    assert [each.page_content for each in alone.invoke("who wrote Zorba")] == shelf.texts
    assert alone.invoke("unknown weather") == []

    def search(question):
        return {"docs": [Document(page_content="Zorba wrote it.")], "question": question}

    chain = RunnableLambda(search) | (lambda found: f"read {found['question']}")
    functions = gate.route(retrieve=chain, direct=lambda asked: "direct", look_first=LOOK)
    assert functions.invoke("who wrote Zorba") == "read who wrote Zorba"
    assert functions.invoke("unknown weather") == "direct"


class Nested(BaseRetriever):
    """Asks another retriever twice, and returns one document of its own."""

    inner: Shelf

    def _get_relevant_documents(self, query, *, run_manager):
        for _ in range(2):
            self.inner.invoke(query, {"callbacks": run_manager.get_child()})
        return [Document(page_content="nothing of use")]


def test_what_a_retriever_asks_inside_is_not_what_it_found():
    nested = Nested(inner=Shelf())
    assert router(nested).invoke("unknown Zorba") == "direct unknown Zorba"


def test_streams_stay_alive():
    def words(found):
        yield from str(found["context"]).split()

    async def awords(found):
        for word in words(found):
            yield word

    shelf = Shelf(texts=["Zorba wrote it"])
    context = shelf | (lambda found: found[0].page_content)
    chain = {"context": context} | RunnableLambda(words, awords)
    routed = RetrievalGate(Judge()).route(retrieve=chain, direct=words, look_first=LOOK)
    assert list(routed.stream("who wrote Zorba")) == ["Zorba", "wrote", "it"]

    async def chunks():
        return [chunk async for chunk in routed.astream("who wrote Zorba")]

    assert asyncio.run(chunks()) == ["Zorba", "wrote", "it"]


def test_the_default_model_is_shipped():
    told = Told()
    assert router(Shelf(), look=True).invoke("fine", {"callbacks": [told]})
    assert 0 <= told.events[0]["p_helps"] <= 1


def test_decisions_without_a_look_are_as_before():
    told = Told()
    RetrievalGate(Judge()).route(retrieve=str, direct=str).invoke("known", {"callbacks": [told]})
    assert told.events[0]["outcome"] is None
    decision = Decision(question="q", retrieve=True, p_known=0.2)
    assert (decision.p_helps, decision.outcome) == (None, None)


def test_a_retrieve_arm_of_one_step_is_refused():
    with pytest.raises(ConfigurationError, match="several steps"):
        RetrievalGate(Judge()).route(retrieve=str, direct=str, look_first=True)
