"""Decisions, drafts and costs are immutable, checked values."""

import errno
import math
import os
from functools import partial

import pytest
from pydantic import ValidationError

from rgate_integrations import Cost, Decision, Draft
from rgate_integrations.decision import Failure
from rgate_integrations.errors import EvidenceError


def decision(**values):
    return Decision(**{"question": "who?", "retrieve": True, "p_known": 0.2, **values})


two_tokens = partial(Draft, text="a b", tokens=("a", " b"))


@pytest.mark.parametrize(
    ("make", "values", "said"),
    [
        # Numbers out of range, which JSON cannot hold either.
        *((decision, {"p_known": value}, "p_known") for value in (math.nan, math.inf, -0.01, 1.01)),
        *((decision, {"threshold": value}, "threshold") for value in (math.nan, math.inf, -0.01)),
        *((decision, {"signals": {"known": value}}, "signals") for value in (math.nan, math.inf)),
        *((Cost, {"milliseconds": value}, "milliseconds") for value in (math.nan, math.inf)),
        (Cost, {"model_calls": -1}, "model_calls"),
        (decision, {"p_knwon": 0.3}, "Extra"),
        # Each token has its own values.
        (two_tokens, {"logprobs": (-1.0,)}, "tokens has 2 entries, but logprobs has 1"),
        (two_tokens, {"logprobs": (0.9, 0.4)}, r"at most 0, not 0\.9: are these probabilities"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, values, said):
    with pytest.raises(ValidationError, match=said):
        make(**values)


def test_half_a_surrogate_pair_which_no_utf8_holds_is_replaced():
    draft = Draft(text="a\ud83e", tokens=("a", "\ud83e"))
    assert (draft.text, draft.tokens) == ("a?", ("a", "?"))


class SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError


class ShyError(Exception):
    @property
    def message(self):
        raise RuntimeError


def with_parts(error, message, hint):
    """Errors of others may have parts of any type."""
    error.message, error.hint = message, hint
    return error


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (EvidenceError("No draft.", hint="Give one."), ("EvidenceError", "No draft.", "Give one.")),
        (ValueError("bad"), ("ValueError", "bad", "")),
        (KeyError(), ("KeyError", "KeyError", "")),  # an exception without words
        (with_parts(ValueError("bad"), {"code": 7}, None), ("ValueError", "bad", "")),
        (SpeechlessError(), ("SpeechlessError", "SpeechlessError", "")),
        (ShyError("bad"), ("ShyError", "bad", "")),
    ],
)
def test_a_failure_tells_the_message_and_the_hint_of_any_error_apart(error, parts):
    failure = Failure.from_error(error)
    assert (failure.type, failure.message, failure.hint) == parts


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("[ONNXRuntimeError] : 6 : std::bad_alloc"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_has_a_hint(error):
    assert "more memory, threads or open files" in Failure.from_error(error).hint


def test_an_arm_that_look_first_chose_stays_at_any_threshold():
    chosen = decision(retrieve=False, p_known=0.3, outcome="direct").with_threshold(0.9)
    assert (chosen.retrieve, chosen.outcome, chosen.threshold) == (False, "direct", 0.9)


def test_infinite_log_probabilities_survive_json():
    draft = Draft(text="a b", logprobs=(-math.inf, 1e-7))  # a server's float is rounded
    assert draft.logprobs == (-9999.0, 0.0)
    assert Draft.model_validate_json(draft.model_dump_json()) == draft


def test_a_head_is_cut_in_every_part_and_says_that_it_was_cut():
    draft = Draft(
        text="It is Paris",
        token_ids=(7, 8, 9),
        tokens=(" It", " is", " Paris"),
        logprobs=(-1.0, -2.0, -3.0),
        model="m",
    )
    assert draft.head(3) is draft
    parts = {"text": "It is", "token_ids": (7, 8), "tokens": (" It", " is"), "logprobs": (-1.0, -2.0)}
    assert draft.head(2) == Draft(**parts, finished=False, model="m")
    assert draft.head(2).head(1) == draft.head(1)
    assert (draft.head(0).text, draft.head(0).logprobs) == ("", ())


def test_a_head_without_tokens_counts_words_and_log_probabilities():
    logprobs = (-1.0, -2.0, -3.0, -4.0)
    draft = Draft(text="one two three", logprobs=logprobs)
    for tokens, text in ((2, "one two"), (3, "one two three")):
        assert draft.head(tokens) == Draft(text=text, logprobs=logprobs[:tokens], finished=False)
    assert draft.head(4) is draft
    assert Draft(text="").head(0).finished is True
