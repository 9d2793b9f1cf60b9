"""Bad input: a typed error with a hint, and in a batch only that item fails. And how adapters call a gate."""

import asyncio

import pytest

from rgate_integrations import Decision, load_gate
from rgate_integrations.decision import Draft, Failure
from rgate_integrations.engine import gate_like
from rgate_integrations.engine.gate_like import resolve_gate
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.runtime.flow import Call, arun, run

BAD = ["", "   \n\t", "a\0b", None, 7, b"bytes", ["list"]]

DECIDE = {
    "decide": lambda gate, question: gate.decide(question),
    "adecide": lambda gate, question: asyncio.run(gate.adecide(question)),
}
DECIDE_BATCH = {
    "decide_batch": lambda gate, questions, **options: gate.decide_batch(questions, **options),
    "adecide_batch": lambda gate, questions, **options: asyncio.run(gate.adecide_batch(questions, **options)),
}
DRIVERS = {"run": run, "arun": lambda flow: asyncio.run(arun(flow))}


@pytest.fixture(params=DECIDE)
def decide(request):
    return DECIDE[request.param]


@pytest.fixture(params=DECIDE_BATCH)
def decide_batch(request):
    return DECIDE_BATCH[request.param]


@pytest.fixture(params=DRIVERS)
def drive(request):
    return DRIVERS[request.param]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_question_is_a_typed_error(scripted, decide, bad):
    gate = load_gate("ik", proxy=scripted)
    with pytest.raises(InvalidQuestionError) as caught:
        decide(gate, bad)
    assert caught.value.hint
    assert scripted.calls == []


def test_in_a_batch_only_that_item_fails(scripted, decide_batch):
    found = decide_batch(load_gate("ik", proxy=scripted), ["who?", *BAD, "what?"])
    assert [d.error is None for d in found] == [True, *[False] * len(BAD), True]
    assert all(d.retrieve for d in found[1:-1])
    assert {d.error.type for d in found[1:-1]} == {"InvalidQuestionError"}


def test_of_a_very_long_question_a_part_is_read_with_a_warning(scripted, decide):
    question = "why " * 25_000
    d = decide(load_gate("ik", proxy=scripted), question)
    assert d.error is None
    assert d.question == question.strip()
    assert "Of 99,999 characters" in d.warnings[0]
    assert decide(load_gate("constant:never"), question).warnings == ()  # it reads none of it


def test_lone_surrogates_do_not_break_json(scripted, decide):
    d = decide(load_gate("ik", proxy=scripted), "who is \ud800 here?")
    assert Decision.model_validate_json(d.model_dump_json()) == d


def test_thresholds(scripted, decide_batch):
    gate = load_gate("ik", proxy=scripted)
    each = decide_batch(gate, ["a?", "a?", "a?"], threshold=[0.0, None, 1.5])
    assert [d.threshold for d in each] == [0.0, 0.5, 1.5]
    assert [d.retrieve for d in each][::2] == [False, True]
    with pytest.raises(ConfigurationError, match="not nan"):
        decide_batch(gate, ["a?"], threshold=float("nan"))
    with pytest.raises(ConfigurationError):
        load_gate("ik", threshold=-1)
    with pytest.raises(ConfigurationError, match="list of questions"):
        decide_batch(gate, "one string")


class Own:
    """A user's own gate: two methods without keyword arguments."""

    def decide_batch(self, questions):
        if "RAISE" in questions:
            raise RuntimeError("own failure")
        return [Decision(question=q, retrieve=False, p_known=0.9) for q in questions]

    async def adecide_batch(self, questions):
        return self.decide_batch(questions)


def test_adapters_accept_the_users_own_gate(drive):
    own = resolve_gate(Own())
    assert drive(gate_like.decide(own, ["a"], threshold=[0.3], drafts=[None]))[0].p_known == 0.9
    assert drive(gate_like.decide(own, ["a"]))[0].p_known == 0.9
    failed = drive(gate_like.decide(own, ["RAISE", "b"]))
    assert [d.retrieve for d in failed] == [True, True]
    assert failed[0].error.message == "own failure"
    with pytest.raises(ConfigurationError, match="decide_batch"):
        resolve_gate(object())


def test_a_threshold_that_the_users_own_gate_does_not_take_is_compared_with_its_p_known(drive):
    failed = Decision(question="c", retrieve=True, p_known=0.95, error=Failure(type="X", message="no"))

    class Mixed(Own):
        def decide_batch(self, questions):
            return [*super().decide_batch(questions[:-1]), failed]

    for thresholds in (0.93, [0.93, 0.93, 0.93]):
        found = drive(gate_like.decide(Mixed(), ["a", "b", "c"], threshold=thresholds))
        assert [(d.retrieve, d.threshold) for d in found] == [(True, 0.93)] * 3
    found = drive(gate_like.decide(Mixed(), ["a", "b", "c"], threshold=[None, 0.2, 0.2]))
    assert [(d.retrieve, d.threshold) for d in found] == [(False, 0.5), (False, 0.2), (True, 0.2)]
    assert (
        drive(gate_like.decide(Mixed(), ["a", "c"], threshold=float("nan")))[0].error.type
        == "ConfigurationError"
    )


def test_a_gate_that_returns_too_few_retrieves(drive):
    class Short(Own):
        def decide_batch(self, questions):
            return []

    assert drive(gate_like.decide(Short(), ["a", "b"]))[1].retrieve


def test_a_gate_that_is_told_to_raise_does(drive):
    class Strict(Own):
        on_error = "raise"

    with pytest.raises(RuntimeError, match="own failure"):
        drive(gate_like.decide(Strict(), ["RAISE"]))


class Remembering(Own):
    """Remembers the options that it was given."""

    def decide_batch(self, questions, *, drafts=None, threshold=None):
        self.given = drafts, threshold
        return super().decide_batch(questions)

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


def test_a_gate_gets_what_it_takes_and_nothing_that_was_not_given(drive):
    gate = Remembering()
    draft = Draft(text="d")
    drive(gate_like.decide(gate, ["a", "b"], drafts=[draft, None], threshold=[None, None], other=3))
    assert gate.given == ([draft, None], None)


def test_drafting_fails_as_the_gate_does(drive):
    def drafting(error):
        draft = yield Call(lambda: Draft(text="d"), None)
        if error is not None:
            raise error
        return [draft]

    gate = Remembering()
    assert not drive(gate_like.decide(gate, ["a"], drafting=drafting(None)))[0].retrieve
    assert gate.given[0] == [Draft(text="d")]
    (failed,) = drive(gate_like.decide(gate, ["a"], drafting=drafting(OSError("no disk"))))
    assert (failed.retrieve, failed.error.message) == (True, "no disk")
