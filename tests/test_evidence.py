"""Evidence is computed once, shared, and fails one question at a time."""

import math

import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates import decide_together
from tests.scripted_proxy import ScriptedProxy

QUESTIONS = ["who wrote hamlet?", "what is the capital of France?", "how deep is the sea?"]


def test_five_gates_over_one_draft_draft_once(scripted):
    names = ["ik", "slimplm", "token_probability", "self_eval", "perplexity"]
    gates = [load_gate(n, proxy=scripted) for n in names]
    decisions = decide_together(gates, QUESTIONS)
    assert scripted.calls.count("generate") == 1
    assert scripted.calls.count("score") == 3
    alone = [load_gate(n, proxy=ScriptedProxy()).decide_batch(QUESTIONS) for n in names]
    for together, single in zip(decisions, alone, strict=True):
        assert [d.p_known for d in together] == pytest.approx([d.p_known for d in single])
        assert [d.draft for d in together] == [d.draft for d in single]


def test_one_draft_serves_every_length(scripted):
    short, long = decide_together(
        [load_gate("ik", tokens=2, proxy=scripted), load_gate("ik", proxy=scripted)], ["who?"]
    )
    assert scripted.calls.count("generate") == 1
    assert len(short[0].draft.tokens) == 2
    assert short[0].draft.text == "".join(long[0].draft.tokens[:2]).strip()
    assert short[0].draft.finished is False


def test_gates_with_different_proxies_do_not_share():
    with pytest.raises(ConfigurationError, match="same proxy"):
        decide_together(
            [load_gate("ik", proxy=ScriptedProxy()), load_gate("ik", proxy=ScriptedProxy())], QUESTIONS
        )
    assert decide_together([], QUESTIONS) == []


def test_a_given_draft_is_used_as_it_is(scripted):
    given = Draft(text="Paris.", tokens=("Paris", "."), logprobs=(math.log(0.5), -0.01), source="llm")
    (d,) = load_gate("token_probability", proxy=scripted).decide_batch(["capital of France?"], drafts=[given])
    assert scripted.calls == []
    assert d.p_known == pytest.approx(0.5)
    assert d.draft == given
    assert d.cost.model_calls == 0


def test_a_text_without_logprobs_is_read_by_the_proxy_and_says_so(scripted):
    gate = load_gate("token_probability", proxy=scripted)
    (d,) = gate.decide_batch(["capital of France?"], drafts=["Paris it is."])
    assert scripted.calls == ["read"]
    assert d.draft.text == "Paris it is."
    assert d.draft.scored_by == "scripted"
    assert "as read by scripted; its source gave none" in d.reason
    assert d.draft.source == "recorded"


def test_drafts_may_be_given_for_some(scripted):
    found = load_gate("ik", proxy=scripted).decide_batch(QUESTIONS, drafts=[None, "Paris", None])
    assert [d.draft.source for d in found] == ["proxy", "recorded", "proxy"]
    wrong = load_gate("ik", proxy=scripted).decide_batch(QUESTIONS, drafts=["a", {"text": "b"}, "c"])
    assert [d.error is None for d in wrong] == [True, False, True]
    assert "not dict" in wrong[1].reason
    with pytest.raises(ConfigurationError, match="3 questions do not match 1 drafts"):
        load_gate("ik", proxy=scripted).decide_batch(QUESTIONS, drafts=["x"])


class Llm:
    def __init__(self):
        self.asked = []

    def draft(self, questions, tokens):
        self.asked.append((list(questions), tokens))
        return [Draft(text=f"It is {q[:3]}", source="recorded") for q in questions]


def test_the_llm_writes_its_own_first_tokens(scripted):
    llm = Llm()
    found = load_gate("ik", source="llm", tokens=16, proxy=scripted, llm=llm).decide_batch(QUESTIONS)
    assert llm.asked == [(QUESTIONS, 16)]
    assert [d.draft.source for d in found] == ["llm"] * 3
    assert "generate" not in scripted.calls
    without = load_gate("ik", source="llm", proxy=scripted).decide("who?")
    assert without.retrieve
    assert without.error.type == "EvidenceError"
    assert "llm=" in without.error.hint


def test_recorded_drafts_must_be_given(scripted):
    gate = load_gate("ik", source="recorded", proxy=scripted)
    found = gate.decide_batch(QUESTIONS, drafts=["a", None, "c"])
    assert [d.error is None for d in found] == [True, False, True]
    assert found[1].retrieve
    assert "recorded" in found[1].reason


def test_missing_popularity_fails_its_own_question_alone():
    found = load_gate("popularity").decide_batch(QUESTIONS, popularity=[5000, None, 1])
    assert [d.error is None for d in found] == [True, False, True]
    assert [d.retrieve for d in found] == [False, True, True]
    (negative,) = load_gate("popularity").decide_batch(["q"], popularity=[-1])
    assert negative.retrieve
    assert "at least 0" in negative.reason


def test_head_cuts_tokens_or_words():
    draft = Draft(text="a b c", tokens=("a", " b", " c"), logprobs=(-1, -2, -3), entropies=(1, 2, 3))
    assert draft.head(3) is draft
    assert draft.head(2).text == "a b"
    assert draft.head(2).logprobs == (-1, -2)
    assert draft.head(0).text == ""
    assert Draft(text="one two three").head(2).text == "one two"
    with pytest.raises(ValueError, match="3 tokens do not match 1 logprobs"):
        Draft(text="abc", tokens=("a", "b", "c"), logprobs=(-1,))
