"""Bad input: a typed error with a hint, and in a batch only that item fails."""

import pytest

from rgate_integrations import Decision, load_gate
from rgate_integrations.calling import adecide_safely, as_gate, decide_safely
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError

BAD = ["", "   \n\t", "a\0b", None, 7, b"bytes", ["list"]]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_question_is_a_typed_error(scripted, bad):
    gate = load_gate("ik", proxy=scripted)
    with pytest.raises(InvalidQuestionError) as caught:
        gate.decide(bad)
    assert caught.value.hint
    assert scripted.calls == []


async def test_async_calls_raise_the_same(scripted):
    gate = load_gate("ik", proxy=scripted)
    with pytest.raises(InvalidQuestionError):
        await gate.adecide("")
    found = await gate.adecide_batch(["who?", ""])
    assert [d.error is None for d in found] == [True, False]


def test_in_a_batch_only_that_item_fails(scripted):
    found = load_gate("ik", proxy=scripted).decide_batch(["who?", *BAD, "what?"])
    assert [d.error is None for d in found] == [True, *[False] * len(BAD), True]
    assert all(d.retrieve for d in found[1:-1])
    assert {d.error.type for d in found[1:-1]} == {"InvalidQuestionError"}


def test_a_very_long_question_is_cut_with_a_warning(scripted):
    question = "why " * 25_000
    d = load_gate("ik", proxy=scripted).decide(question)
    assert d.error is None
    assert len(d.question) <= 8_192
    assert "cut from 99,999" in d.warnings[0]
    assert load_gate("constant:never").decide(question).warnings


def test_lone_surrogates_do_not_break_json(scripted):
    d = load_gate("ik", proxy=scripted).decide("who is \ud800 here?")
    assert Decision.model_validate_json(d.model_dump_json()) == d


def test_thresholds(scripted):
    gate = load_gate("ik", proxy=scripted)
    each = gate.decide_batch(["a?", "a?", "a?"], threshold=[0.0, None, 1.5])
    assert [d.threshold for d in each] == [0.0, 0.5, 1.5]
    assert [d.retrieve for d in each][::2] == [False, True]
    with pytest.raises(ConfigurationError, match="not nan"):
        gate.decide_batch(["a?"], threshold=float("nan"))
    with pytest.raises(ConfigurationError):
        load_gate("ik", threshold=-1)
    with pytest.raises(ConfigurationError, match="list of questions"):
        gate.decide_batch("one string")


class Own:
    """A user's own gate: two methods without keyword arguments."""

    def decide_batch(self, questions):
        if "RAISE" in questions:
            raise RuntimeError("own failure")
        return [Decision(question=q, retrieve=False, p_known=0.9) for q in questions]

    async def adecide_batch(self, questions):
        return self.decide_batch(questions)


async def test_adapters_accept_the_users_own_gate():
    own = as_gate(Own())
    assert decide_safely(own, ["a"], threshold=[0.3], drafts=[None])[0].p_known == 0.9
    assert (await adecide_safely(own, ["a"]))[0].p_known == 0.9
    failed = decide_safely(own, ["RAISE", "b"])
    assert [d.retrieve for d in failed] == [True, True]
    assert failed[0].error.message == "own failure"
    assert (await adecide_safely(own, ["RAISE"]))[0].retrieve
    with pytest.raises(ConfigurationError, match="decide_batch"):
        as_gate(object())


def test_a_gate_that_returns_too_few_retrieves():
    class Short(Own):
        def decide_batch(self, questions):
            return []

    assert decide_safely(Short(), ["a", "b"])[1].retrieve
