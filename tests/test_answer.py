"""The answering LLM: passages where there are some, and nothing generated twice."""

import pytest

from rgate_integrations import Decision, Draft
from rgate_integrations.answering.requests import AnswerRequest, answer_all, write_answers
from rgate_integrations.index import Passage
from rgate_integrations.prompts import ANSWER, format_passages
from tests.scripted_proxy import ScriptedProxy


class Echo(ScriptedProxy):
    """Writes as many words as it may; remembers how many it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def generate(self, prompt, values, *, tokens, adapter=None):
        self.asked.append((prompt.name, [v["question"] for v in values], tokens))
        words = tuple(f" {prompt.name}" for _ in range(tokens))
        return [Draft(text="".join(words).strip(), tokens=words) for _ in values]


def decision(draft=None, question="who?"):
    return Decision(question=question, retrieve=False, p_known=0.9, draft=draft)


def cut(*words, model="scripted"):
    return Draft(text="".join(words).strip(), tokens=words, model=model, source="proxy", finished=False)


def test_nothing_is_asked_for_nothing():
    llm = Echo()
    assert answer_all(llm, [], []) == []
    assert llm.asked == []


def test_a_finished_draft_of_the_same_model_is_the_answer():
    llm = ScriptedProxy()
    own = Draft(text="It was Bach.", tokens=("It was Bach.",), model="scripted", source="proxy")
    assert answer_all(llm, [decision(own)], [[]]) == ["It was Bach."]
    assert llm.calls == []
    other = own.model_copy(update={"model": "another"})
    assert answer_all(llm, [decision(other)], [[]]) != ["It was Bach."]
    assert answer_all(llm, [decision(cut(" It", " was"))], [[]], tokens=2) == ["It was"]
    assert llm.calls == ["generate"]


def test_each_draft_is_continued_up_to_the_limit_and_no_further():
    llm = Echo()
    drafts = [cut(" a", " b", " c"), cut(" a"), cut(" a", " b", " c")]
    decisions = [decision(draft, f"q{n}?") for n, draft in enumerate(drafts)]
    answers = answer_all(llm, decisions, [[], [], []], tokens=4)
    assert [len(answer.split()) for answer in answers] == [4, 4, 4]
    assert answers[0] == "a b c answer-continued"
    assert llm.asked == [("answer-continued", ["q0?", "q2?"], 1), ("answer-continued", ["q1?"], 3)]


def test_passages_and_closed_book_are_answered_in_order():
    llm = Echo()
    passage = Passage(id="1", title="T", text="x")
    decisions = [decision(question=f"q{n}?") for n in range(3)]
    answers = answer_all(llm, decisions, [[passage], [], [passage]], tokens=1)
    assert answers == ["answer-with-passages", "answer", "answer-with-passages"]
    assert llm.asked == [("answer-with-passages", ["q0?", "q2?"], 1), ("answer", ["q1?"], 1)]


def test_a_continuation_without_tokens_is_joined_by_a_space():
    request = AnswerRequest.continuing("who?", cut("It was"))
    assert request.whole_answer(Draft(text="Bach.")) == "It was Bach."
    assert request.whole_answer(Draft(text="")) == "It was"


def test_passages_are_numbered_and_untitled_ones_have_no_title():
    found = [Passage("a", "It is in France.", title="Paris"), Passage("b", "It rains.")]
    assert format_passages(found) == "[1] Paris: It is in France.\n\n[2] It rains."
    assert format_passages(iter([])) == ""
    request = AnswerRequest.with_passages("where?", found)
    assert request.values["passages"] == format_passages(found)


@pytest.mark.model
def test_a_draft_that_was_cut_is_continued(smollm2):
    question = "Name the planets of the solar system in order."
    (whole,) = write_answers(smollm2, [AnswerRequest.closed_book(question, 12)])
    (begun,) = smollm2.generate(ANSWER, [{"question": question}], tokens=5)
    assert not begun.finished
    (answer,) = answer_all(smollm2, [decision(begun, question)], [[]], tokens=12)
    assert answer.startswith(begun.text)
    assert answer == whole.text
