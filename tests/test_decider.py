"""A gate as adapters ask it: this package's, or any object of the user's own with the two methods."""

import asyncio
import logging
import math

import pytest

from rgate_integrations import Decision, Override, Request, load_gate
from rgate_integrations.decision import Failure
from rgate_integrations.engine.decider import Failed
from rgate_integrations.engine.follow_ups import REFERS_BACK, UNREAD
from rgate_integrations.engine.loading import answer_first_gates, resolve_gate
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.runtime.flow import arun, run

DRIVERS = {"run": run, "arun": lambda flow: asyncio.run(arun(flow))}
GONE = Failure(type="OSError", message="index gone")
RULED = Override(retrieve=True, reason="A rule.")
EARLIER = ["user: Who wrote Hamlet?", "assistant: Shakespeare."]


def direct(**values):
    """A decision not to retrieve."""
    return Decision(question="a", retrieve=False, p_known=0.9, **values)


@pytest.fixture(params=DRIVERS)
def decide(request):
    """Decides with a user's own gate, from a thread or a task: ``decide(gate, *items)``."""
    return lambda gate, *items: DRIVERS[request.param](resolve_gate(gate).flow(items))


class Own:
    """A user's own gate: two methods, and nothing that says what it can do."""

    def __init__(self):
        self.asked = []

    def decide_batch(self, requests):
        self.asked.append(requests)
        if any("RAISE" in each.question for each in requests):
            raise RuntimeError("own failure")
        return [Decision(question=each.question, retrieve=False, p_known=0.9) for each in requests]

    async def adecide_batch(self, requests):
        return self.decide_batch(requests)


class Judging(Own):
    """Says that it reads drafts and the turns before a question."""

    reads_drafts = reads_history = True


def test_an_own_gate_gets_requests_with_all_that_is_known(decide):
    own = Own()
    request = Request("a b", EARLIER, "It is", {"channel": "web"}, threshold=0.3, popularity=3.0, timeout=5.0)
    first, second = decide(own, request, "c d")
    assert own.asked == [[request, Request("c d")]]
    assert (first.p_known, second.p_known, second.retrieve) == (0.9, 0.9, False)
    with pytest.raises(ConfigurationError, match="decide_batch"):
        resolve_gate(object())


def test_a_threshold_that_it_does_not_apply_is_applied_to_its_p_known(decide):
    settled = {
        "failed": {"retrieve": True, "error": Failure(type="X", message="no")},
        "ruled": {"retrieve": False, "override": Override(retrieve=False, reason="A rule.")},
    }

    class Mixed(Own):
        def decide_batch(self, requests):
            return [
                each.model_copy(update=settled.get(each.question, {}))
                for each in super().decide_batch(requests)
            ]

    asked = [("a", 0.93), ("a", 0.2), ("a", None), ("failed", 0.2), ("failed", 0.93), ("ruled", 0.93)]
    found = decide(Mixed(), *(Request(question, threshold=threshold) for question, threshold in asked))
    assert [(d.retrieve, d.threshold) for d in found] == [
        (True, 0.93),
        (False, 0.2),
        (False, 0.5),
        (True, 0.2),
        (True, 0.93),
        (False, 0.93),
    ]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda requests: 1 / 0, "ZeroDivisionError", "division"),
        (lambda requests: [], "ConfigurationError", "'Odd' returned 0 decisions for 2 questions"),
        (lambda requests: None, "TypeError", "len"),
        (lambda requests: iter(()), "TypeError", "len"),
        (lambda requests: [None] * len(requests), "ConfigurationError", "NoneType, not a Decision"),
        (lambda requests: "ab", "ConfigurationError", "str, not a Decision"),
        (
            lambda requests: [direct(error=GONE)] * 2,
            "ConfigurationError",
            "although it has an error or an override",
        ),
        (
            lambda requests: [direct(override=RULED)] * 2,
            "ConfigurationError",
            "although it has an error or an override",
        ),
    ],
)
def test_whatever_an_own_gate_does_wrong_retrieves_or_is_raised(
    decide, caplog, monkeypatch, answer, error, message
):
    class Odd(Own):
        threshold = 0.7

        def decide_batch(self, requests):
            return answer(requests)

    with caplog.at_level(logging.WARNING, "rgate_integrations"):
        found = decide(Odd(), Request("a b", threshold=0.2), "c d")
    assert [(d.retrieve, d.p_known, d.threshold, d.error.type) for d in found] == [
        (True, 0.0, threshold, error) for threshold in (0.2, 0.7)
    ]
    assert message in found[1].error.message
    assert caplog.text.count("failed for 2 of 2 questions, so it retrieves for them") == 1
    monkeypatch.setattr(Odd, "on_error", "raise", raising=False)
    with pytest.raises(Exception, match=message):
        decide(Odd(), "a b", "c d")


@pytest.mark.parametrize("threshold", ["high", math.nan, -1, True, lambda: 0.3])
def test_whatever_an_own_gate_calls_its_threshold_its_failure_retrieves(decide, threshold):
    own = Own()
    own.threshold = threshold
    (found,) = decide(own, "RAISE")
    assert (found.retrieve, found.threshold, found.error.message) == (True, 0.5, "own failure")
    own.threshold = 0
    assert decide(own, "RAISE")[0].threshold == 0


def test_a_threshold_turns_no_score_that_is_nan(decide):
    class Undecided(Own):
        def decide_batch(self, requests):
            return [direct().model_copy(update={"p_known": math.nan})]

    assert decide(Undecided(), Request("a", threshold=0.2))[0].retrieve


def test_what_failed_before_is_in_its_place_and_the_gate_is_not_asked_about_it(decide):
    own = Own()
    broken, no_text = Failed(OSError("no disk"), "a b"), Failed(InvalidQuestionError("It is empty."))
    found = decide(own, broken, "c d", no_text, 5)
    assert own.asked == [[Request("c d")]]
    assert [(d.question, d.retrieve, d.error and d.error.type) for d in found] == [
        ("a b", True, "OSError"),
        ("c d", False, None),
        ("", True, "InvalidQuestionError"),
        ("", True, "InvalidQuestionError"),
    ]
    assert decide(own, broken)[0].error.message == "no disk"
    assert decide(own) == []
    assert len(own.asked) == 1
    own.on_error = "raise"
    found = run(resolve_gate(own).outcomes([broken, "c d", no_text]))
    assert (found[0], found[1].p_known, found[2]) == (broken.error, 0.9, no_text.error)
    with pytest.raises(OSError, match="no disk"):
        resolve_gate(own).decide_batch([broken, "c d", no_text])


def test_what_an_own_gate_does_not_declare_it_is_not_given_credit_for(decide):
    unread, alone, refers = decide(Own(), Request("a b", EARLIER), "a b", "How tall is he?")
    assert (unread.retrieve, unread.p_known, unread.override.reason) == (True, 0.9, UNREAD)
    assert (alone.retrieve, alone.override, refers.override.reason) == (False, None, REFERS_BACK)
    read, refers = decide(Judging(), Request("How tall is he?", EARLIER), "How tall is he?")
    assert (read.retrieve, read.override, refers.override.reason) == (False, None, REFERS_BACK)


def test_only_an_own_gate_that_says_so_judges_answers(decide):
    with pytest.raises(ConfigurationError, match="reads_drafts = True"):
        answer_first_gates(resolve_gate(Own()))
    assert answer_first_gates(resolve_gate(Judging()))[1] is None
    own = Own()
    judge, question_gate = answer_first_gates(resolve_gate(Judging()), own)
    alike = [question_gate.decides_like(other) for other in (resolve_gate(own), judge, load_gate())]
    assert alike == [True, False, False]
