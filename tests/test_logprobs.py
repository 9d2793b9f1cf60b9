"""Log-probabilities of servers, files and frameworks: one reader, which takes nothing for certainty that is not."""

import json
import math

import pytest
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.decision import Draft
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.models.remote import read_completion
from rgate_integrations.runtime.records import check_logprob, read_choice_logprobs, read_logprobs
from rgate_integrations.tuning.arms import read_answer
from tests.begun_answers import Reader
from tests.fake_server import answer
from tests.langchain_fakes import SINGLES, each

CONTENT = [
    {"token": "Par", "logprob": -0.5},
    {"token": "is", "logprob": 1e-9},
    {"token": "", "logprob": -0.1},
]
METADATA = {"logprobs": {"content": CONTENT}}


def test_a_logprob_is_at_most_zero_and_finite():
    assert [check_logprob(value) for value in (-1.5, 0.0, 1e-7, -math.inf)] == [-1.5, 0.0, 0.0, -9999.0]


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.9])
def test_what_would_pass_for_certainty_is_refused(value):
    with pytest.raises(ValueError, match="log-probability"):
        check_logprob(value)
    with pytest.raises(ValueError, match="log-probability"):
        Draft(text="a", logprobs=(value,))
    assert read_logprobs([{"token": "a", "logprob": value}]) == ((), ())
    assert read_completion(json.dumps(answer(tops={"Yes": value, "No": -1.0})).encode())[1] == {}


@pytest.mark.parametrize(
    ("metadata", "read"),
    [
        (METADATA, (("Par", "is"), (-0.5, 0.0))),
        ({"logprobs": CONTENT[:1]}, (("Par",), (-0.5,))),
        (None, ((), ())),
        ({}, ((), ())),
        ({"logprobs": None}, ((), ())),
        ({"logprobs": {"content": [{"tok": "a"}]}}, ((), ())),
        ({"logprobs": ["a"]}, ((), ())),
    ],
)
def test_log_probabilities_in_other_spellings(metadata, read):
    assert read_choice_logprobs(metadata) == read


@each(SINGLES)
def test_tune_and_the_router_read_the_same_log_probabilities(call):
    judge = Reader()
    said = AIMessage("Paris", response_metadata=METADATA)
    router = RetrievalGate(judge).route(
        retrieve=lambda question: "read",
        direct=FakeMessagesListChatModel(responses=[said]),  # streams not
        answer_first=AnswerFirst(tokens=4, question_gate=None),
    )
    call(router, "a known one?")
    ((draft,),) = judge.drafts
    tuned = read_answer(said)
    assert (draft.tokens, draft.logprobs) == (tuned.tokens, tuned.logprobs) == (("Par", "is"), (-0.5, 0.0))
