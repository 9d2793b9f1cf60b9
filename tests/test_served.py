"""A proxy behind a server: a real llama.cpp one on loopback, and one that misbehaves on purpose."""

import asyncio
import math
from unittest.mock import AsyncMock

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.gates.papers.verdicts import IK_QUESTION, JUDGMENT, TARGETS
from rgate_integrations.models.remote import RemoteModel
from rgate_integrations.prompts import ANSWER, ANSWER_FEW_SHOT
from tests.fake_server import Fake, answer
from tests.patience import PATIENCE

VALUES = [{"question": "What is the capital of France?"}, {"question": "Who wrote Hamlet?"}]


@pytest.mark.model
def test_a_served_model_agrees_with_the_same_model_here(served, smollm2):
    """The server computes with 4-bit weights and 8-bit activations, so it agrees roughly."""
    proxy = RemoteModel(f"{served.url}/v1", "smollm2", max_concurrency=2, timeout=PATIENCE)
    for draft in proxy.generate(ANSWER, VALUES, tokens=8):
        assert len(draft.logprobs) == len(draft.tokens) <= 8
        assert draft.prompt_tokens > 20
        assert "".join(draft.tokens).strip() == draft.text != ""
    asked = (IK_QUESTION, VALUES, ("Yes", "No"))
    for ours, theirs in zip(smollm2.score(*asked), proxy.score(*asked), strict=True):
        assert ours.prompt_tokens == theirs.prompt_tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=0.4)
    (samples,) = proxy.sample(ANSWER, VALUES[:1], n=2, tokens=6, temperature=1.0, seed=3)
    assert all(sample.text for sample in samples)


@pytest.mark.model
@pytest.mark.parametrize("name", ["ik", "adapt", "prompt", "token_probability", "self_eval"])
def test_gates_decide_with_a_served_model(served, name):
    gate = load_gate(name, proxy=RemoteModel(f"{served.url}/v1", "smollm2", timeout=PATIENCE))
    for decision in gate.decide_batch([v["question"] for v in VALUES]):
        assert decision.error is None
        assert 0 <= decision.p_known <= 1
        assert decision.cost.model_calls


@pytest.mark.parametrize(
    ("tops", "of_no"),
    [
        # What the listed ones leave over; and no more than the least of those that are listed.
        ({"Yes": 0.7, " maybe": 0.2}, 0.1),
        ({"Yes": 0.5, "x": 0.02}, 0.02),
    ],
)
def test_a_target_that_is_not_among_the_likeliest_gets_the_most_it_can_have(fake, tops, of_no):
    said = answer(tops={token: math.log(p) for token, p in tops.items()})
    (score,) = fake(said).score(IK_QUESTION, VALUES[:1], ("Yes", "No"))
    assert score.logprobs == pytest.approx((math.log(tops["Yes"]), math.log(of_no)))


def test_targets_are_told_apart_after_their_common_prefix(fake):
    proxy = fake(answer(tops={"True": -0.2, "False": -1.8}))
    (score,) = proxy.score(JUDGMENT, [{**VALUES[0], "draft": "x"}], TARGETS)
    assert score.logprobs == (-0.2, -1.8)
    path, body, _ = Fake.seen[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"][-1] == {"role": "assistant", "content": "Known("}
    assert body["continue_final_message"] is True
    with pytest.raises(EvidenceError, match="cannot be compared"):
        proxy.score(IK_QUESTION, VALUES[:1], ("Yes", "Yes, sir"))


def test_a_model_that_says_nothing_wrote_an_empty_draft_and_an_adapter_is_a_name(fake):
    """As when it calls a tool."""
    for message in ({}, {"content": None}):
        proxy = fake({"choices": [{"message": message}]})
        (draft,) = proxy.generate(ANSWER, VALUES[:1], tokens=3, adapter="my-lora")
        _, body, _ = Fake.seen[-1]
        assert (draft.text, body["model"], body["max_tokens"]) == ("", "my-lora", 3)


def test_raw_prompts_are_completions_in_either_shape(fake):
    legacy = {"tokens": [" No"], "token_logprobs": [-0.3], "top_logprobs": [{" No": -0.3, " Yes": -1.5}]}
    proxy = fake(
        {
            "choices": [{"text": " No", "logprobs": legacy, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 7},
        }
    )
    (draft,) = proxy.generate(ANSWER_FEW_SHOT, VALUES[:1], tokens=1)
    assert (draft.text, draft.logprobs, draft.finished, draft.prompt_tokens) == ("No", (-0.3,), False, 7)
    path, body, _ = Fake.seen[-1]
    assert (path, body["stop"]) == ("/v1/completions", ["\n"])
    (score,) = proxy.score(ANSWER_FEW_SHOT, VALUES[:1], ("Yes", "No"))
    assert score.logprobs == (-1.5, -0.3)


def test_what_a_server_takes_for_a_token_is_cut(fake):
    whole = answer("x" * 40_000)
    whole["choices"][0]["logprobs"]["content"] = [{"token": "x" * 400, "logprob": -0.1}] * 100
    (draft,) = fake(whole).generate(ANSWER, VALUES[:1], tokens=3)
    assert (draft.tokens, draft.text, draft.finished) == (("x" * 32,) * 3, "x" * 96, False)
    (draft,) = fake(answer("x" * 40_000, logprobs=False)).generate(ANSWER, VALUES[:1], tokens=3)
    assert (draft.text, draft.finished) == ("x" * 96, False)


def test_a_busy_server_is_asked_again_after_ever_longer_pauses_or_when_it_says(fake, monkeypatch):
    sleep = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    proxy = fake((503, "loading"), (503, "loading"), (429, "slow down", ("Retry-After", "2")), answer("fine"))
    assert proxy.generate(ANSWER, VALUES[:1], tokens=3)[0].text == "fine"
    pauses = [call.args[0] for call in sleep.await_args_list]
    assert pauses == [0, pytest.approx(0.375, abs=0.125), pytest.approx(0.75, abs=0.25), 2]
    with pytest.raises(ServerError, match="answered 503"):
        fake((503, "loading"), retries=1).generate(ANSWER, VALUES[:1], tokens=3)


@pytest.mark.parametrize(
    ("said", "asked_with"),
    [
        ("logprobs are not supported for this model", [True, False, False]),
        ("bad request", [True, False, True, False]),
    ],
)
def test_a_server_that_refuses_log_probabilities_answers_without_from_then_on(fake, said, asked_with):
    """A refusal that does not name the log-probabilities has another cause, so the next request sends them again."""
    proxy = fake(lambda body: (400, said) if "logprobs" in body else answer("Paris", logprobs=False))
    for _ in range(2):
        (draft,) = proxy.generate(ANSWER, VALUES[:1], tokens=3)
        assert (draft.text, draft.tokens, draft.logprobs) == ("Paris", (), None)
    assert ["logprobs" in body for _, body, _ in Fake.seen] == asked_with


def test_what_a_server_cannot_do_retrieves_and_says_so(fake):
    decision = load_gate("default", proxy=fake(answer())).decide("who?")
    assert decision.retrieve
    assert "hidden states" in decision.error.message
    assert [fake(answer()).truncate(text, 1) for text in ("abcdefgh", "abc")] == ["abcd", None]


def test_a_question_that_the_server_fails_on_costs_no_other_its_decision_and_is_not_asked_again(fake):
    """Callers share batches: one whose question makes the server answer nonsense must not be felt by the others."""

    def serve(body):
        return (200, "<html>") if "bad" in str(body["messages"]) else answer("Yes", {"Yes": -0.1, "No": -2.4})

    gate = load_gate("ik", proxy=fake(serve, retries=0), tokens=0)
    decisions = gate.decide_batch(["good?", "bad?", "other?"])
    types = [decision.error and decision.error.type for decision in decisions]
    assert (types, decisions[1].retrieve) == ([None, "ServerError", None], True)
    Fake.seen.clear()
    decisions = gate.decide_batch(["bad a?", "bad b?", "bad c?"])
    assert [decision.error.type for decision in decisions] == ["ServerError"] * 3
    assert len(Fake.seen) == 3, "a server that is gone is not asked for each question again"
