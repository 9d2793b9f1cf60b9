"""Evidence is computed once, shared, and fails one question at a time."""

import math
import re
from typing import ClassVar

import numpy as np
import pytest

from rgate_integrations import Draft, Gate, load_gate
from rgate_integrations.engine.evaluation import shorten
from rgate_integrations.errors import EvidenceError, ModelLoadError
from rgate_integrations.gates import Score
from rgate_integrations.gates.evidence import DraftSpec
from rgate_integrations.gates.evidence.base import Context, Inputs, MadeBy, Sources
from rgate_integrations.gates.papers.ik import IKGate
from rgate_integrations.gates.papers.token_probability import PerplexityGate
from rgate_integrations.gates.scoring import ScoreSpec
from tests.scripted_proxy import ScriptedProxy

QUESTIONS = ["who wrote hamlet?", "what is the capital of France?", "how deep is the sea?"]


def test_a_given_draft_is_used_as_it_is(scripted):
    given = Draft(text="Paris.", tokens=("Paris", "."), logprobs=(math.log(0.5), -0.01), source="llm")
    (d,) = load_gate("token_probability", proxy=scripted).decide_batch(["capital of France?"], drafts=[given])
    assert scripted.calls == []
    assert d.p_known == pytest.approx(0.5)
    assert (d.draft, d.cost.model_calls) == (given, 0)


@pytest.mark.parametrize("gate", ["token_probability", "perplexity"])
def test_a_draft_without_logprobs_is_not_judged_by_another_models(scripted, gate):
    (d,) = load_gate(gate, proxy=scripted).decide_batch(["who?"], drafts=["one two three four"])
    assert (d.retrieve, d.error.type, scripted.calls) == (True, "EvidenceError", [])
    assert "logprobs=True" in d.error.hint


def test_who_counts_the_tokens_of_a_given_draft_made_nothing(scripted):
    draft = DraftSpec(tokens=2, source="recorded")
    inputs = [Inputs("who?", Draft(text="one two three four", source="recorded"))]
    (evidence,) = Context(inputs, Sources(lambda: scripted, None, {}), [draft]).evidence([draft])
    assert evidence[draft].text == "one two"
    assert evidence.made_by(draft) == MadeBy()


def test_which_model_made_a_piece_does_not_depend_on_the_batch(scripted):
    draft = DraftSpec()
    given = Draft(text="Paris", tokens=("Paris",), logprobs=(-0.1,))
    context = Context([Inputs("who?", given), Inputs("what?")], Sources(lambda: scripted, None, {}), [draft])
    own, written = context.evidence([draft])
    assert (own.made_by(draft), written.made_by(draft)) == (MadeBy(), MadeBy("scripted", ""))


def test_drafts_may_be_given_for_some_and_must_be_where_nobody_writes_them(scripted):
    found = load_gate("ik", proxy=scripted).decide_batch(QUESTIONS, drafts=[None, "Paris", None])
    assert [d.draft.source for d in found] == ["proxy", "recorded", "proxy"]
    recorded = load_gate("ik", source="recorded", proxy=scripted)
    found = recorded.decide_batch(QUESTIONS, drafts=["a", None, "c"])
    assert [d.error is None for d in found] == [True, False, True]
    assert found[1].retrieve
    assert "recorded" in found[1].reason


class Llm:
    """Writes a draft for each question, or for the first few."""

    def __init__(self, most=None):
        self.asked, self.most = [], most

    def draft(self, questions, tokens):
        self.asked.append((list(questions), tokens))
        return [Draft(text=f"It is {q[:3]}", source="recorded") for q in questions[: self.most]]


def test_the_llm_writes_its_own_first_tokens(scripted):
    llm = Llm()
    gate = load_gate("ik", source="llm", tokens=16, proxy=scripted, llm=llm)
    assert [d.draft.source for d in gate.decide_batch(QUESTIONS)] == ["llm"] * 3
    assert llm.asked == [(QUESTIONS, 16)]
    assert "generate" not in scripted.calls
    found = gate.with_options(llm=Llm(most=0)).decide_batch(QUESTIONS)
    assert all(d.retrieve for d in found)
    assert "wrote 0 drafts for 1 questions" in found[0].reason
    without = load_gate("ik", source="llm", proxy=scripted).decide("who?")
    assert (without.retrieve, without.error.type) == (True, "EvidenceError")
    assert "llm=" in without.error.hint


def test_a_missing_popularity_fails_one_question():
    decisions = load_gate("popularity").decide_batch(QUESTIONS, popularity=[5000, None, 1])
    assert [d.error is None for d in decisions] == [True, False, True]
    assert [d.retrieve for d in decisions] == [False, True, True]
    (negative,) = load_gate("popularity").decide_batch(["q"], popularity=[-1])
    assert negative.retrieve
    assert "at least 0" in negative.reason


def test_on_error_raise_raises_the_first_failure(scripted):
    gate = load_gate("ik", proxy=scripted, on_error="raise")
    with pytest.raises(RuntimeError, match="scripted failure"):
        gate.decide_batch(["who?", "RAISE this"])
    with pytest.raises(EvidenceError, match="popularity"):
        load_gate("popularity", on_error="raise").decide("who?")
    assert gate.decide("who?").error is None


def test_a_model_that_cannot_be_loaded_is_tried_once_not_once_a_question():
    tried = []

    def proxy():
        tried.append(1)
        raise ModelLoadError("no such model")

    context = Context([Inputs(q) for q in QUESTIONS], Sources(proxy, None, {}))
    for _ in range(2):
        found = context.evidence([DraftSpec()])
        assert [str(e) for e in found] == ["no such model"] * 3
    assert tried == [1]


class Both(Gate):
    """Looks at the scores of two gates that read the same draft."""

    gates: ClassVar = (PerplexityGate(tokens=32), IKGate(tokens=32))

    @property
    def specs(self):
        return tuple(ScoreSpec(gate) for gate in self.gates)

    def score(self, evidence):
        return Score(min(evidence[spec].p_known for spec in self.specs), "the lower one")


def test_shared_evidence_is_paid_for_once(scripted):
    draft, judged = (
        load_gate(name, proxy=scripted, tokens=32).decide("who?").cost for name in ("perplexity", "ik")
    )
    assert (draft.model_calls, judged.model_calls) == (1, 2)
    both = load_gate(Both(), proxy=scripted).decide("who?").cost
    assert both.model_calls == judged.model_calls
    assert (both.tokens_in, both.tokens_out) == (judged.tokens_in, judged.tokens_out)


def test_gates_that_read_nothing_load_no_model_for_a_long_question():
    d = load_gate("popularity", proxy="/no/such/folder").decide("why " * 600, popularity=3000)
    assert d.error is None
    assert d.p_known == 0.75


LOG = "\n".join(f"line {i} of the log says that all is well" for i in range(2_000))


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_of_a_long_request_what_asks_is_read_wherever_it_stands(scripted, place):
    half = len(LOG) // 2
    asked = "When is my bill due?"
    text = {
        "first": f"{asked}\n{LOG}",
        "middle": f"{LOG[:half]}\n{asked}\n{LOG[half:]}",
        "last": f"{LOG}\n{asked}",
    }[place]
    inputs = shorten(Inputs(text), Sources(lambda: scripted, None, {}))
    assert asked in inputs.question
    assert inputs.partly
    assert len(inputs.question) < len(text) / 4
    assert shorten(Inputs(asked * 100), Sources(lambda: scripted, None, {})) == Inputs(asked * 100)


class Sure(Gate):
    p: float

    @property
    def specs(self):
        return (DraftSpec(),)

    def score(self, evidence):
        return Score(self.p, "Certainly.")


def test_a_request_that_was_not_read_whole_retrieves_unless_clearly_needless(scripted):
    needless, doubtful = (load_gate(Sure(p=p), proxy=scripted).decide(LOG) for p in (0.95, 0.8))
    assert (needless.retrieve, needless.p_known) == (False, 0.95)
    assert (doubtful.retrieve, doubtful.p_known) == (True, 0.0)
    assert "too long to be read whole" in doubtful.reason
    assert doubtful.question == LOG
    assert re.match(rf"Of {len(LOG):,} characters [0-9,]+ were read\.", doubtful.warnings[0])


def test_arrays_are_sequences_too(scripted):
    found = load_gate("popularity").decide_batch(
        QUESTIONS, popularity=np.array([1000.0, 3000.0, 0.0]), threshold=np.array([0.4, 0.9, 0.1])
    )
    assert [d.p_known for d in found] == [0.5, 0.75, 0.0]
    assert [d.retrieve for d in found] == [False, True, True]
    assert load_gate("constant:never").decide("who?", threshold=np.float32(0.5)).threshold == 0.5


class Counting(ScriptedProxy):
    """Notes how long each text is that it is given to cut or to read."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def truncate(self, text, tokens):
        self.lengths.append(len(text))
        return text[: tokens * 4] if len(text) > tokens * 4 else None

    def score(self, prompt, values, targets, *, adapter=None):
        self.lengths += [len(text) for each in values for text in each.values()]
        return super().score(prompt, values, targets, adapter=adapter)


@pytest.mark.parametrize(
    "draft",
    [
        Draft(text="x" * 320_000),
        Draft(text="x" * 320_000, logprobs=(-0.1,) * 32),
        Draft(text="x" * 12_800, tokens=("x" * 400,) * 32, logprobs=(-0.1,) * 32),
        Draft(text="x" * 320_000, tokens=("x",), logprobs=(-0.1,)),
    ],
    ids=["one word", "with log-probabilities", "long tokens", "tokens that are not its own"],
)
def test_a_draft_is_cut_before_any_of_it_is_encoded(draft):
    """Tokens of 400 characters took 32 s and held up all other callers, and longer ones 14 GB."""
    proxy = Counting()
    gate = load_gate("ik", proxy=proxy)
    decision = gate.decide_batch(["who?"], drafts=[draft])[0]
    assert decision.error is None
    assert max(proxy.lengths) <= 32 * 32
    assert len(decision.draft.text) <= 32 * 32
    assert not decision.draft.finished
