"""One suite for every gate: range, direction, order, thresholds, failures, JSON."""

import json
import math
import pickle
from dataclasses import replace

import pytest

from rgate_integrations import Decision, Draft, Request, list_gates, load_gate
from rgate_integrations.errors import ConfigurationError, UnknownNameError
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.evidence.model_outputs import CompletionSpec, DraftSpec, SamplesSpec
from rgate_integrations.gates.folder import save_gate, tuned_files
from rgate_integrations.gates.registry import gate_class, gate_from_config
from rgate_integrations.models.base import TargetScores
from rgate_integrations.runtime.files import write_folder
from tests.http_servers import serving_gate
from tests.saved_gates import HEADS, PROBE, TUNED
from tests.scripted_proxy import ScriptedProxy
from tests.test_index import Letters

QUESTIONS = [
    "who wrote hamlet?",
    "What is the capital of France?",
    "where was Aarno Maliniemi born?",
    "how many {legs} has a spider",
    "Ünïcödé: 東京 はどこ?",
]
POPULARITY = [900.0, 1200.0, 0.0, 30.0, 5000.0]
VARIANTS = {
    "slimplm-generate": ("slimplm", {"mode": "generate"}),
    "ik-question": ("ik", {"tokens": 0}),
    "boundary-few": ("boundary", {"samples": 3, "seed": 7}),
    "token_probability-mean": ("token_probability", {"statistic": "mean"}),
}
CASES = [*(info.name for info in list_gates()), "constant:never", "constant:random:0.4", *VARIANTS]


class LettersOfQueries(Letters):
    """Stands in for the embedder where no model may be loaded."""

    embed_queries = Letters.embed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What stands for the gates that read files, by name."""
    root = tmp_path_factory.mktemp("gates")
    (root / "labels.jsonl").write_text(
        '{"question": "a b", "known": true}\n{"question": "x", "known": false}\n'
    )
    save_gate(replace(PROBE, tokens=8), root / "probe")
    save_gate(HEADS, root / "heads")
    write_folder(root / "tuned", tuned_files(TUNED, save_gate(PROBE, root / "prior")))
    with serving_gate(load_gate("ik", proxy=ScriptedProxy())) as url:
        yield {
            "remote": url,
            "neighbours": f"neighbours:{root}/labels.jsonl",
            "answer": f"answer:{root}/heads,token_probability",
            **{name: f"{root}/{name}" for name in ("probe", "heads", "tuned")},
        }


@pytest.fixture
def make(folders, monkeypatch):
    """Makes the gate of a case."""
    monkeypatch.setattr("rgate_integrations.index.embedder.SentenceEmbedder", LettersOfQueries)

    def build(case, **behaviour):
        if case == "slimplm-generate":
            behaviour = {"fixed": "Known(True) because it is."} | behaviour
        name, options = VARIANTS.get(case, (case, {}))
        return load_gate(folders.get(name, name), proxy=ScriptedProxy(**behaviour), **options)

    return build


@pytest.fixture
def gate(make, case):
    return make(case)


def decided(gate, questions=QUESTIONS, **fields):
    """Decide for a batch of questions, each of the popularity of its place in `QUESTIONS`."""
    popularity = dict(zip(QUESTIONS, POPULARITY, strict=True))
    return gate.decide_batch([Request(q, popularity=popularity.get(q, 0.0), **fields) for q in questions])


def scores(decisions):
    return [decision.p_known for decision in decisions]


@pytest.mark.parametrize("case", CASES)
class TestEveryGate:
    def test_scores_are_probabilities_that_decide_by_the_threshold_and_cost(self, gate):
        names = {type(spec).__name__ for spec in expand_specs(gate.gate.specs)}
        for d in decided(gate):
            assert d.error is None, d.error
            assert 0 <= d.p_known <= 1
            assert d.retrieve == (d.p_known < d.threshold)
            assert d.reason
            assert (d.cost.model_calls == 0) == (names <= {"ScoreSpec"})
            assert Decision.model_validate_json(d.model_dump_json()) == d
        for threshold, retrieve in ((0.0, False), (1.01, True)):
            assert {d.retrieve for d in decided(gate, threshold=threshold)} == {retrieve}

    def test_neither_batch_nor_order_changes_a_score(self, gate, make, case):
        together = scores(decided(gate))
        assert scores(decided(make(case))) == together
        alone = [decided(gate, [question])[0].p_known for question in QUESTIONS]
        turned = decided(gate, QUESTIONS[::-1])
        assert alone == scores(turned)[::-1] == pytest.approx(together, abs=1e-6)
        assert [d.question for d in turned] == QUESTIONS[::-1]
        assert gate.decide_batch([]) == []

    def test_goes_to_json_and_a_pickle_and_back(self, gate):
        written = gate_from_config(json.loads(json.dumps(gate.gate.config())))
        for again in (gate.with_options(gate=written), pickle.loads(pickle.dumps(gate))):  # noqa: S301
            assert again.gate == gate.gate
            assert scores(decided(again)) == pytest.approx(scores(decided(gate)), abs=1e-6)

    def test_a_failing_model_retrieves_and_spares_the_others(self, make, case):
        failing = QUESTIONS[2]
        gate = make(case, fails_for=failing)
        if not any(spec.reads_model for spec in expand_specs(gate.gate.specs)):
            pytest.skip("asks no model")
        decisions = decided(gate, [QUESTIONS[0], failing, QUESTIONS[1]])
        assert [d.error is None for d in decisions] == [True, False, True]
        assert decisions[1].retrieve
        assert "scripted failure" in decisions[1].reason
        with pytest.raises(RuntimeError, match="scripted failure"):
            decided(gate.with_options(on_error="raise"), [failing])


NO_ANSWERS = {
    "empty": "",
    "white space": " \n\t ",
    "thoughts": "<think>The capital of France is Paris, so",
    "thoughts, closed": "<think>Paris.</think>\n\n",
    "harmony": "<|channel|>analysis<|message|>They ask for Paris",
    "refusal": "I'm sorry, but I can’t help with that.",
    "refusal to know": "I do not know.",
    "tool call": '<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>',
    "tool call as JSON": '{"name": "search", "parameters": {}}',
}


@pytest.mark.parametrize("text", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize("case", CASES)
def test_no_gate_that_looks_at_answers_skips_on_what_is_no_answer(make, case, text, monkeypatch):
    """Whether the draft was given, or the model wrote it."""
    monkeypatch.setattr(
        ScriptedProxy, "_logprob", lambda self, key, values: -1e-9
    )  # whatever it is asked, it is sure
    gate = make(case).with_options(threshold=1e-9)
    refused = Draft(text=text).non_answer == "a refusal"
    if gate.gate.reads_drafts:
        for decision in decided(gate, draft=Draft(text=text, tokens=(text,), logprobs=(-0.001,))):
            assert_retrieves(decision, refused)
    specs = set(map(type, expand_specs(gate.gate.specs)))
    if {DraftSpec, CompletionSpec, SamplesSpec} & specs:
        for decision in decided(make(case, fixed=text).with_options(threshold=1e-9)):
            assert_retrieves(decision, refused and SamplesSpec not in specs)


def assert_retrieves(decision, refused):
    """Regression: an LLM that said that it does not know was reported as a failing gate."""
    assert decision.retrieve
    if refused:
        assert (decision.error, decision.override.retrieve) == (None, True)
        assert "does not know" in decision.reason
    else:
        assert decision.error.type == "NoAnswerError"


READS_SCORES = ["ik", "slimplm", "adapt", "prompt", "self_eval", "calibrated", "ik-question"]


@pytest.mark.parametrize("case", READS_SCORES)
def test_nan_retrieves_with_that_reason(make, case):
    bad, good = make(case, nan_for="whom?").decide_batch(["whom?", "who?"])
    assert (bad.retrieve, bad.error.type, good.error) == (True, "ScoreError", None)
    assert "nan" in bad.reason


@pytest.mark.parametrize("name", ["ik", "slimplm", "prompt", "self_eval"])
def test_higher_confidence_means_skip(name):
    class Sure(ScriptedProxy):
        def score(self, prompt, values, targets, *, adapter=None):
            # "No" is certain only as the answer to "must you search?"
            known = {"Yes", "Known(True)", "True"} if targets[0] != "No" else {"No"}
            logprobs = tuple(-0.1 if target in known else -5.0 for target in targets)
            return [TargetScores(logprobs, 1) for _ in values]

    assert load_gate(name, proxy=Sure()).decide("who?").p_known == pytest.approx(1 / (1 + math.exp(-4.9)))


def test_every_gate_has_a_source_and_says_what_it_costs():
    infos = list_gates()
    assert [info.name for info in infos] == sorted(info.name for info in infos)
    for info in infos:
        assert info.source and info.evidence and info.cost and gate_class(info.name).__doc__  # noqa: PT018


@pytest.mark.parametrize(
    ("name", "options", "error", "why"),
    [
        ("token_probabilty", {}, UnknownNameError, "token_probability"),
        (" ", {}, UnknownNameError, "Known names"),
        # Regression: the hint for "openai:gpt-4o" was "Did you mean popularity?".
        *((llm, {}, UnknownNameError, f"llm_name={llm!r}") for llm in ("openai:gpt-4o", "llama3.1:8b")),
        # Regression: the hint suggested the very name that was given.
        (
            "calibrated",
            {"inner": {"gate": "default"}},
            UnknownNameError,
            "kind of gate .*'default'.* Known names",
        ),
        ("ik", {"tokenz": 3}, ConfigurationError, "parameters are"),
        ("ik:32", {}, ConfigurationError, "takes no argument"),
        ("boundary:accuracy", {}, ConfigurationError, "needs an adapter"),
        ("constant:random:often", {}, ConfigurationError, "rate"),
        *((f"popularity:{cutoff}", {}, ConfigurationError, "are invalid") for cutoff in ("many", 0, "nan")),
        ("constant:sometimes", {}, ConfigurationError, "are invalid"),
        ("boundary:x", {}, ConfigurationError, "are invalid"),
        ("prompt", {"tokens": 8}, ConfigurationError, "are invalid: tokens"),  # its prompt has no draft
    ],
)
def test_what_is_no_gate_is_a_typed_error(name, options, error, why):
    with pytest.raises(error, match=why):
        load_gate(name, **options)
