"""The pipeline: one call of each stage for a batch, failures that retrieve, and both arms at once or as a stream."""

from dataclasses import replace

import pytest

from rgate_integrations import Decision, Draft, load_gate
from rgate_integrations.answering.pipeline import Pipeline
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from tests.scripted_proxy import ScriptedProxy


class Gate:
    """Knows questions with "known" in them; those in ``drafts`` have a draft. Remembers what it was asked."""

    threshold = 0.5

    def __init__(self, **drafts):
        self.drafts = drafts
        self.calls = []

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        self.calls.append((list(questions), threshold))
        return [
            Decision(
                question=q,
                retrieve="known" not in q,
                p_known=0.5,
                draft=Draft(text=self.drafts[q]) if q in self.drafts else None,
            )
            for q in questions
        ]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


class Index:
    """Finds for each query a passage of its own and one that all have; nothing for "void"."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        both = Passage("all", "for all")
        return [
            [Hit(Passage(q, f"about {q}"), 0.9, q), Hit(both, 0.1, q)] * ("void" not in q) for q in queries
        ]


class Parrot(ScriptedProxy):
    """Says which prompt it read for which question."""

    name = "parrot"

    def generate(self, prompt, values, *, tokens, adapter=None):
        self.calls.append("generate")
        return [Draft(text=f"{prompt.name}: {v['question']}", model=self.name) for v in values]


class Streamer(Parrot):
    """Writes in two steps."""

    def stream(self, prompt, values, *, tokens):
        yield prompt.name
        yield f"{prompt.name}: {values['question']}"


@pytest.fixture
def pipeline():
    return Pipeline(Gate(), Index(), Parrot(), k=2)


def test_a_batch_is_one_call_of_each_stage(pipeline):
    answered = pipeline.ask_batch(["a?", "known b?", "c?"], threshold=0.7)
    assert pipeline.gate.calls == [(["a?", "known b?", "c?"], 0.7)]
    assert pipeline.index.calls == [(["a?", "c?"], 2)]
    assert pipeline.llm.calls == ["generate"] * 2
    assert [a.answer for a in answered] == [
        "answer-with-passages: a?",
        "answer: known b?",
        "answer-with-passages: c?",
    ]
    assert [[hit.passage.id for hit in a.hits] for a in answered] == [["a?", "all"], [], ["c?", "all"]]
    assert [[query.text for query in a.plan.queries] for a in answered] == [["a?"], [], ["c?"]]
    assert all(list(a.timings) == ["gate", "claims", "search", "answer"] for a in answered)
    assert pipeline.ask_batch([]) == []


def test_one_question_is_a_batch_of_one(pipeline):
    alone = pipeline.ask("a?")
    (batched,) = pipeline.ask_batch(["a?"])
    assert replace(alone, timings={}) == replace(batched, timings={})


def test_claims_are_searched_beside_the_question_unless_they_are_switched_off(pipeline):
    gate = Gate(**{"where is Oulu?": "Oulu has deep snow in winter."})
    with_claims = replace(pipeline, gate=gate).ask("where is Oulu?")
    assert [query.text for query in with_claims.plan.queries] == [
        "where is Oulu?",
        "Oulu has deep snow in winter",
    ]
    assert with_claims.hits[0].passage.id == "all", "what both queries find is first"
    alone = replace(pipeline, gate=gate, claims=False).ask("where is Oulu?")
    assert [query.text for query in alone.plan.queries] == ["where is Oulu?"]
    assert replace(pipeline, claims=False).ask("known a?").plan.queries == ()


def test_a_question_that_cannot_be_read_gets_an_error_and_no_answer(pipeline):
    answered = replace(pipeline, gate=load_gate("constant:always")).ask_batch(["a?", "  ", "\0", "b?"])
    assert [a.answer for a in answered] == ["answer-with-passages: a?", "", "", "answer-with-passages: b?"]
    assert [a.decision.error is None for a in answered] == [True, False, False, True]
    assert pipeline.index.calls == [(["a?", "b?"], 2)]
    arms = replace(pipeline, gate=load_gate("constant:always")).both_arms(["", "a?"])
    assert arms[0].closed_book is None
    assert arms[1].closed_book.text == "answer: a?"


def test_a_failing_gate_retrieves(pipeline):
    class Broken(Gate):
        def decide_batch(self, questions, **options):
            raise RuntimeError("down")

    answered = replace(pipeline, gate=Broken()).ask("known a?")
    assert answered.decision.error.message == "down"
    assert answered.answer == "answer-with-passages: known a?"


def test_a_gate_that_says_so_itself_ends_the_question(pipeline):
    class Strict(Gate):
        def decide_batch(self, questions, **options):
            raise InvalidQuestionError("No.")

    assert replace(pipeline, gate=Strict()).ask("a?").answer == ""


def test_without_an_index_everything_is_answered_closed_book(pipeline):
    closed = replace(pipeline, index=None)
    assert closed.ask("a?").answer == "answer: a?"
    (arms,) = closed.both_arms(["a?"])
    assert arms.closed_book.text == "answer: a?"
    assert arms.with_passages is None
    closed.warm_up()


def test_both_arms_do_not_depend_on_the_decision(pipeline):
    arms = pipeline.both_arms(["known a?", "void?", "b?"])
    assert [a.decision.retrieve for a in arms] == [False, True, True]
    assert [a.closed_book.text for a in arms] == ["answer: known a?", "answer: void?", "answer: b?"]
    assert [a.with_passages.text for a in arms] == [
        "answer-with-passages: known a?",
        "answer: void?",
        "answer-with-passages: b?",
    ]
    assert [len(a.hits) for a in arms] == [2, 0, 2]
    assert pipeline.llm.calls == ["generate"] * 2
    assert len(pipeline.index.calls) == 1


def test_a_stream_shows_the_decision_then_the_passages_then_both_answers(pipeline):
    steps = list(replace(pipeline, llm=Streamer()).stream_arms("known a?"))
    decision, passages, *writing, last = steps
    assert (decision.plan, decision.closed_book, list(decision.timings)) == (None, None, ["gate"])
    assert [hit.passage.id for hit in passages.hits] == ["known a?", "all"]
    assert [s.closed_book.text for s in writing] == ["answer", "answer: known a?", "answer: known a?"]
    assert [s.with_passages and s.with_passages.text for s in writing] == [None, None, "answer-with-passages"]
    (at_once,) = pipeline.both_arms(["known a?"])
    assert (last.closed_book.text, last.with_passages.text) == (
        at_once.closed_book.text,
        at_once.with_passages.text,
    )
    assert list(last.timings) == ["gate", "claims", "search", "answer without", "answer with passages"]


def test_a_stream_of_a_model_that_cannot_stream_and_of_nothing(pipeline):
    steps = list(pipeline.stream_arms("void?"))
    assert steps[-1].with_passages.text == "answer: void?"
    assert pipeline.llm.calls == ["generate"]
    unreadable = replace(pipeline, gate=load_gate("constant:always"))
    assert len(list(unreadable.stream_arms(" "))) == 1
