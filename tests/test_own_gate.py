"""A gate of the user's own, and an evidence of the user's own: one class each, and no edit elsewhere."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rgate_integrations import Gate, load_gate
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates import Score
from rgate_integrations.gates.evidence import Context, DraftSpec, Evidence, EvidenceSpec, Piece
from rgate_integrations.gates.registry import make_gate


@dataclass(frozen=True)
class RareWords(EvidenceSpec[float]):
    """The share of a question's words that the other questions of the batch do not have."""

    reads_model: ClassVar[bool] = False

    def compute(self, context: Context) -> list[Piece[float]]:
        seen = Counter(word for each in context.requests for word in set(each.question.lower().split()))
        asked = [each.question.lower().split() for each in context.requests]
        return [Piece(sum(seen[word] == 1 for word in words) / len(words)) for words in asked]


class Rare(Gate):
    """Questions of rare words are unknown."""

    @property
    def specs(self):
        return (RareWords(),)

    def score(self, evidence: Evidence) -> Score:
        return Score(1 - evidence[RareWords()], f"{evidence[RareWords()]:.0%} of its words are rare.")


def test_an_own_gate_and_evidence_are_used_wherever_a_gate_is_and_need_no_model():
    for gate in (load_gate(Rare(), proxy="/no/such/model"), load_gate("calibrated", inner=Rare())):
        common, rare = gate.decide_batch(["who wrote it", "who wrote it twice over"])
        assert (common.p_known, rare.p_known) == (1.0, pytest.approx(0.6))
        assert "40% of its words" in rare.reason
    assert resolve_gate(Rare()).name == "Rare"


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (lambda evidence: 1 / 0, "ZeroDivisionError"),
        (lambda evidence: None, "ScoreError"),
        (lambda evidence: 0.5, "ScoreError"),
    ],
)
def test_an_own_gate_that_fails_retrieves(monkeypatch, score, error):
    monkeypatch.setattr(Rare, "score", lambda self, evidence: score(evidence))
    decision = load_gate(Rare()).decide("who wrote hamlet?")
    assert (decision.retrieve, decision.error.type) == (True, error)


def test_signals_that_are_no_numbers_cost_no_other_question_its_decision():
    class Signals(Rare):
        def score(self, evidence: Evidence) -> Score:
            signal = "high" if "wrong" in evidence.request.question else 0.5
            return Score(0.9, "", signals={"own": signal})

    bad, good = load_gate(Signals()).decide_batch(["wrong?", "right?"])
    assert (bad.retrieve, bad.error.type) == (True, "ValidationError")
    assert (good.error, good.signals) == (None, {"own": 0.5})


@pytest.mark.parametrize("history", [(), ("user: Who wrote Hamlet?", "assistant: Shakespeare.")])
def test_a_gate_whose_specs_raise_or_are_no_specs_retrieves(history):
    """Regression: `decide` raised an error, whatever ``on_error`` said."""

    class Wrong(Rare):
        needed: Any

        @property
        def specs(self):
            return self.needed or 1 / 0

    wrong = ("draft", ("draft",), DraftSpec(tokens=4), (DraftSpec,))
    errors = dict.fromkeys(wrong, ConfigurationError) | {None: ZeroDivisionError}
    for needed, error in errors.items():
        for gate in (Wrong(needed=needed), make_gate("calibrated", inner=Wrong(needed=needed))):
            decision = load_gate(gate).decide("And when?", history=history)
            assert (decision.retrieve, decision.error.type) == (True, error.__name__)
            with pytest.raises(
                error, match=r"specs must be a tuple.*DraftSpec\(tokens=16\)|division by zero"
            ):
                load_gate(gate, on_error="raise").decide("And when?", history=history)


@pytest.mark.parametrize("name", [["default"], 5, b"default", load_gate("constant:never"), object()])
def test_what_is_no_name_is_refused_without_being_quoted(name):
    """Regression: the error quoted the text of the object, such as an LLM with its key, as a gate's name."""
    with pytest.raises(ConfigurationError, match=rf"not {type(name).__name__}\. Hint: Give an LLM as llm="):
        load_gate(name)
