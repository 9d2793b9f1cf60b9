"""The flow that every framework follows, without a framework: what is judged, recorded, held back and stopped."""

import asyncio
import itertools

import pytest

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.partial_answer import (
    MOST_BUFFERED,
    BufferedAnswer,
    PartialAnswer,
    TokenStream,
)
from rgate_integrations.answering.routing import RoutedCall, Strategy
from rgate_integrations.decision import Cost
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.flow import arun, run
from tests.begun_answers import KNOWN, UNSURE, Reader

drives = pytest.mark.parametrize("drive", [run, lambda flow: asyncio.run(arun(flow))], ids=["run", "arun"])


async def as_stream_of(values):
    for value in values:
        yield value


class Words(BufferedAnswer):
    """An answer of words; an empty one says nothing."""

    def __init__(self, words):
        super().__init__(PartialAnswer(), TokenStream(lambda: iter(words), lambda: as_stream_of(words)))

    def read(self, chunk):
        self.partial.pieces += [f"{chunk} "] if chunk else []
        return True


class OneCall(RoutedCall):
    """A call for one question."""

    def __init__(self, words, screened=None, **options):
        super().__init__(Strategy(AnswerFirst(**options)), [None])
        self.words, self.asked, self.announced = words, screened, []
        self.reader = Reader()

    def screen(self):
        yield from ()
        return [self.asked]

    def begin(self, place):
        return Words(self.words)

    def judge(self, drafts):
        yield from ()
        return dict(zip(drafts, self.reader.decide_batch(["q"], drafts=list(drafts.values())), strict=True))

    def decide(self):
        raise NotImplementedError

    search = passages = decide

    def announce(self, place, decision):
        yield from ()
        self.announced.append(decision)


@drives
@pytest.mark.parametrize("text", [KNOWN, UNSURE], ids=["known", "unknown"])
def test_the_decision_says_what_was_judged_and_spent(drive, text):
    screened = Decision(
        question="q", retrieve=False, p_known=0.6, cost=Cost(model_calls=2), warnings=("cut",)
    )
    call = OneCall(text.split(), screened, tokens=4)
    (routed,) = drive(call.route())
    decision, dropped = routed.decision, 4 if text == UNSURE else 0
    assert call.announced == [decision]
    assert decision.retrieve == (text == UNSURE)
    assert (routed.answer is None) == decision.retrieve
    assert (decision.draft.text, decision.draft.source) == (" ".join(text.split()[:4]), "llm")
    assert (decision.partial_answer.tokens_held, decision.partial_answer.tokens_dropped) == (4, dropped)
    assert (decision.cost.model_calls, decision.cost.tokens_out) == (2 + decision.retrieve, dropped)
    assert decision.warnings == ("cut",)


@drives
def test_an_answer_of_empty_chunks_is_not_held_without_end(drive):
    call = OneCall(itertools.repeat("", MOST_BUFFERED + 1), tokens=4)
    (routed,) = drive(call.route())
    assert len(call.answers[0].chunks) == MOST_BUFFERED
    assert (routed.decision.retrieve, routed.decision.error.type) == (True, "EvidenceError")
    assert call.reader.calls == []


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigurationError, match="tokens must be at least 1"):
        AnswerFirst(tokens=0)
    with pytest.raises(ConfigurationError, match="retrieve_below"):
        AnswerFirst(retrieve_below=0.9, answer_above=0.1)
