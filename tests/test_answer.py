"""The answering LLM gets passages if there are any, and one batch per prompt."""

from unittest.mock import Mock, call

from rgate_integrations import Draft
from rgate_integrations.answering.drafting import write_answers
from rgate_integrations.index import Passage
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES


def echo(prompt, values, *, tokens):
    """Answer with the prompt's name."""
    return [Draft(text=f"{prompt.name} {each['question']}") for each in values]


def test_answers_with_passages_and_without_come_in_order_in_a_batch_each():
    llm, found = Mock(), [Passage(id="1", title="T", text="x")]
    llm.generate.side_effect = echo
    answers = write_answers(llm, ["q0?", "q1?", "q2?"], [found, [], found], tokens=9)
    assert [answer.text for answer in answers] == [
        "answer-with-passages q0?",
        "answer q1?",
        "answer-with-passages q2?",
    ]
    read = [{"question": question, "passages": "[1] T: x"} for question in ("q0?", "q2?")]
    assert llm.generate.call_args_list == [
        call(ANSWER_WITH_PASSAGES, read, tokens=9),
        call(ANSWER, [{"question": "q1?"}], tokens=9),
    ]
