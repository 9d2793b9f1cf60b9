"""How adapters call a gate: this package's, or any object with the two methods."""

import asyncio

import pytest

from rgate_integrations import Decision
from rgate_integrations.decision import Draft, Failure
from rgate_integrations.engine import gate_like
from rgate_integrations.engine.gate_like import resolve_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.flow import Call, arun, run

DRIVERS = {"run": run, "arun": lambda flow: asyncio.run(arun(flow))}


@pytest.fixture(params=DRIVERS)
def decide(request):
    def decide(*arguments, **options):
        return DRIVERS[request.param](gate_like.decide(*arguments, **options))

    return decide


class Own:
    """A user's own gate: two methods without keyword arguments."""

    def decide_batch(self, questions):
        if "RAISE" in questions:
            raise RuntimeError("own failure")
        return [Decision(question=q, retrieve=False, p_known=0.9) for q in questions]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


def test_adapters_accept_the_users_own_gate(decide):
    own = resolve_gate(Own())
    assert decide(own, ["a"], threshold=[0.3], drafts=[None])[0].p_known == 0.9
    failed = decide(own, ["RAISE", "b"])
    assert [(d.retrieve, d.error.message) for d in failed] == [(True, "own failure")] * 2
    with pytest.raises(ConfigurationError, match="decide_batch"):
        resolve_gate(object())


def test_a_threshold_that_the_users_own_gate_does_not_take_is_compared_with_its_p_known(decide):
    failed = Decision(question="c", retrieve=True, p_known=0.95, error=Failure(type="X", message="no"))

    class Mixed(Own):
        def decide_batch(self, questions):
            return [*super().decide_batch(questions[:-1]), failed]

    for thresholds in (0.93, [0.93, 0.93, 0.93]):
        found = decide(Mixed(), ["a", "b", "c"], threshold=thresholds)
        assert [(d.retrieve, d.threshold) for d in found] == [(True, 0.93)] * 3
    found = decide(Mixed(), ["a", "b", "c"], threshold=[None, 0.2, 0.2])
    assert [(d.retrieve, d.threshold) for d in found] == [(False, 0.5), (False, 0.2), (True, 0.2)]
    assert decide(Mixed(), ["a", "c"], threshold=float("nan"))[0].error.type == "ConfigurationError"


def test_a_gate_that_returns_too_few_retrieves_and_one_that_is_told_to_raise_does(decide, monkeypatch):
    monkeypatch.setattr(Own, "on_error", "raise", raising=False)
    with pytest.raises(RuntimeError, match="own failure"):
        decide(Own(), ["RAISE"])
    monkeypatch.undo()
    monkeypatch.setattr(Own, "decide_batch", lambda self, questions: [])
    assert decide(Own(), ["a", "b"])[1].retrieve


class Remembering(Own):
    """Remembers the options that it was given."""

    def decide_batch(self, questions, *, drafts=None, threshold=None):
        self.given = drafts, threshold
        return super().decide_batch(questions)


def test_a_gate_gets_what_it_takes_and_nothing_that_was_not_given(decide):
    gate = Remembering()
    draft = Draft(text="d")
    decide(gate, ["a", "b"], drafts=[draft, None], threshold=[None, None], other=3)
    assert gate.given == ([draft, None], None)


def test_drafting_fails_as_the_gate_does(decide):
    def drafting(error):
        draft = yield Call(lambda: Draft(text="d"), None)
        if error is not None:
            raise error
        return [draft]

    gate = Remembering()
    assert not decide(gate, ["a"], drafting=drafting(None))[0].retrieve
    assert gate.given[0] == [Draft(text="d")]
    (failed,) = decide(gate, ["a"], drafting=drafting(OSError("no disk")))
    assert (failed.retrieve, failed.error.message) == (True, "no disk")
