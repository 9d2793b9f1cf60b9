"""The answering LLM: passages where there are some, and nothing generated twice."""

import pytest

from rgate_integrations import Decision, Draft
from rgate_integrations.answer import answer_all
from rgate_integrations.index import Passage
from rgate_integrations.prompts import ANSWER
from tests.scripted_proxy import ScriptedProxy


def decision(draft=None):
    return Decision(question="who?", retrieve=False, p_known=0.9, draft=draft)


def test_a_finished_draft_of_the_same_model_is_the_answer():
    llm = ScriptedProxy()
    own = Draft(text="It was Bach.", tokens=("It was Bach.",), model="scripted", source="proxy")
    assert answer_all(llm, [decision(own)], [[]]) == ["It was Bach."]
    assert llm.calls == ["generate"] * 3  # three empty batches
    other = own.model_copy(update={"model": "another"})
    assert answer_all(llm, [decision(other)], [[]]) != ["It was Bach."]


def test_passages_and_closed_book_are_answered_in_order():
    class Echo(ScriptedProxy):
        def generate(self, prompt, values, *, tokens, adapter=None):
            return [Draft(text=f"{prompt.name}: {v.get('passages', '')}") for v in values]

    answers = answer_all(Echo(), [decision(), decision()], [[Passage(id="1", title="T", text="x")], []])
    assert answers == ["answer-with-passages: [1] T: x", "answer: "]
    assert answer_all(Echo(), [], []) == []


@pytest.mark.model
def test_a_draft_that_was_cut_is_continued(smollm2):
    question = "Name the planets of the solar system in order."
    (whole,) = smollm2.generate(ANSWER, [{"question": question}], tokens=24)
    (cut,) = smollm2.generate(ANSWER, [{"question": question}], tokens=10)
    assert not cut.finished
    (answer,) = answer_all(
        smollm2, [Decision(question=question, retrieve=False, p_known=0.9, draft=cut)], [[]], tokens=24
    )
    assert answer.startswith(cut.text)
    assert answer == whole.text
