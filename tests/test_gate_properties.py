"""One suite for every gate: range, direction, order, thresholds, failures, JSON."""

import json
import math
import pickle
import random

import pytest

from rgate_integrations import Decision, list_gates, load_gate
from rgate_integrations.errors import ConfigurationError, UnknownNameError
from rgate_integrations.evidence.base import expand_specs
from rgate_integrations.gates.registry import gate_class, gate_from_config
from tests.scripted_proxy import ScriptedProxy

QUESTIONS = [
    "who wrote hamlet?",
    "What is the capital of France?",
    "where was Aarno Maliniemi born?",
    "how many {legs} has a spider",
    "Ünïcödé: 東京 はどこ?",
]
POPULARITY = [900.0, 1200.0, 0.0, 30.0, 5000.0]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    path.write_text(
        '{"question": "who wrote macbeth?", "known": true}\n{"question": "x y z", "known": false}\n'
    )
    return str(path)


@pytest.fixture(scope="module")
def probe_folder(tmp_path_factory):
    import numpy as np

    from rgate_integrations.artifacts.folder import save_gate
    from rgate_integrations.artifacts.probe import ProbeArtifact

    artifact = ProbeArtifact(
        weight=np.ones((2, 4), dtype=np.float32),
        bias=-4.0,
        layers=((1, "draft", "mean"), (2, "draft", "mean")),
        tokens=8,
        source="proxy",
        base_model="scripted",
        llm="a test",
        provenance={"data": [], "metrics": {"auc": {}, "auc_mean": 0.5, "auc_pooled": 0.5}},
    )
    return str(save_gate(artifact, tmp_path_factory.mktemp("probe") / "p"))


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory):
    import numpy as np

    from rgate_integrations.artifacts.folder import save_gate
    from rgate_integrations.artifacts.heads import HeadsArtifact, Kind

    artifact = HeadsArtifact(
        layers=((1, "question", "mean"), (2, "all", "last")),
        kinds=(Kind("task", "always", "needs nothing"), Kind("fact", "if_known", "asks about a fact")),
        kind_weight=np.ones((2, 2, 4), dtype=np.float32),
        known_weight=np.ones((2, 4), dtype=np.float32),
        known_bias=-4.0,
        ability_slope=1.0,
        llm="a test",
        default_ability=(0.0, 1.0),
        base_model="scripted",
        provenance={"data": [], "metrics": {"auc": {}, "auc_mean": 0.5, "auc_pooled": 0.5}},
    )
    return str(save_gate(artifact, tmp_path_factory.mktemp("heads") / "h"))


@pytest.fixture(scope="module")
def tuned_folder(tmp_path_factory):
    import numpy as np

    from rgate_integrations.artifacts.folder import save_gate, tuned_files
    from rgate_integrations.artifacts.probe import ProbeArtifact
    from rgate_integrations.artifacts.tuned import TunedArtifact
    from rgate_integrations.runtime.files import write_folder

    layers = ((1, "question", "mean"), (2, "question", "mean"))
    weight = np.ones((2, 4), dtype=np.float32)
    prior = ProbeArtifact(weight=weight, bias=-4.0, layers=layers, base_model="scripted", llm="a test")
    folder = tmp_path_factory.mktemp("tuned")
    artifact = TunedArtifact(
        slope=0.8,
        bias=-1.0,
        weight=weight / 2,
        head=np.zeros(0, dtype=np.float32),
        layers=layers,
        tokens=0,
        base_model="scripted",
        fingerprint="",
        llm="a test",
        threshold=0.5,
    )
    return str(write_folder(folder / "t", tuned_files(artifact, save_gate(prior, folder / "p"))))


class Neighbourless:
    """Stands in for the embedder where no model may be loaded: letters counted."""

    def __init__(self, name):
        self.name = name

    def embed(self, texts):
        import numpy as np

        counts = np.array([[t.lower().count(c) + 0.01 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    embed_queries = embed


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr("rgate_integrations.index.embedder.SentenceEmbedder", Neighbourless)


VARIANTS = {
    "slimplm-generate": ("slimplm", {"mode": "generate"}),
    "ik-question": ("ik", {"tokens": 0}),
    "boundary-few": ("boundary", {"samples": 3, "normalisation": "samples", "seed": 7}),
    "token_probability-mean": ("token_probability", {"statistic": "mean"}),
}
CASES = [info.name for info in list_gates()] + ["constant:never", "constant:random:0.4", *VARIANTS]
SMALL = {
    "ik": {"tokens": 8},
    "slimplm": {"tokens": 8},
    "adapt": {"tokens": 8},
    "boundary": {"samples": 3, "tokens": 6},
    "token_probability": {"tokens": 8},
}


class Maker:
    """Makes the gate of a case, and holds the questions that it is asked."""

    def __init__(self, build, questions):
        self.build = build
        self.questions = questions

    def __call__(self, case, **options):
        return self.build(case, **options)

    def decide(self, gate, questions=None, **options):
        asked = self.questions if questions is None else questions
        return gate.decide_batch(asked, popularity=POPULARITY[: len(asked)], **options)


@pytest.fixture
def make(labelled, probe_folder, heads_folder, tuned_folder):
    def build(case, proxy=None, **options):
        if case == "slimplm-generate":
            proxy = proxy or ScriptedProxy(fixed="Known(True) because it is.")
        case, given = VARIANTS.get(case, (case, {}))
        options = {**given, **options}
        if case == "neighbours":
            case = f"neighbours:{labelled}"
        if case == "probe":
            case = probe_folder
        if case == "heads":
            case = heads_folder
        if case == "answer":
            case = f"answer:{heads_folder},token_probability"
        if case == "tuned":
            case = tuned_folder
        return load_gate(case, proxy=proxy or ScriptedProxy(), **options)

    return Maker(build, QUESTIONS)


@pytest.fixture(scope="module")
def make_real(smollm2):
    """The same gates on the real model, small enough for a CPU; one proxy, so that weights are loaded once."""

    def build(case, **options):
        return load_gate(case, proxy=smollm2, **SMALL[case], **options)

    return Maker(build, QUESTIONS[2:])


def close(values, gate):
    """Equal but for rounding: padding changes the order in which a real model adds up."""
    return pytest.approx(values, abs=1e-6 if isinstance(gate.get_proxy(), ScriptedProxy) else 1e-3)


@pytest.mark.parametrize("case", CASES)
class TestEveryGate:
    def test_scores_are_probabilities_and_decide_by_the_threshold(self, make, case):
        for d in make.decide(make(case)):
            assert d.error is None, d.error
            assert 0 <= d.p_known <= 1
            assert d.retrieve == (d.p_known < d.threshold)
            assert d.reason
            assert d.gate

    def test_threshold_zero_never_retrieves_and_above_one_always(self, make, case):
        gate = make(case)
        assert [d.retrieve for d in make.decide(gate, threshold=0.0)] == [False] * len(make.questions)
        assert [d.retrieve for d in make.decide(gate, threshold=1.01)] == [True] * len(make.questions)

    def test_is_deterministic(self, make, case):
        assert [d.p_known for d in make.decide(make(case))] == [d.p_known for d in make.decide(make(case))]

    def test_batch_equals_single(self, make, case):
        gate = make(case)
        together = [d.p_known for d in make.decide(gate)]
        alone = [
            gate.decide(q, popularity=p).p_known for q, p in zip(make.questions, POPULARITY, strict=False)
        ]
        assert together == close(alone, gate)

    def test_a_permuted_batch_gives_permuted_results(self, make, case):
        gate, order = make(case), list(range(len(make.questions)))
        random.Random(3).shuffle(order)
        straight = {d.question: d.p_known for d in make.decide(gate)}
        shuffled = gate.decide_batch(
            [make.questions[i] for i in order], popularity=[POPULARITY[i] for i in order]
        )
        assert [d.question for d in shuffled] == [make.questions[i] for i in order]
        assert [d.p_known for d in shuffled] == close([straight[d.question] for d in shuffled], gate)

    def test_empty_batch(self, make, case):
        assert make(case).decide_batch([]) == []

    def test_goes_to_json_and_back(self, make, case):
        gate = make(case)
        again = gate.with_options(gate=gate_from_config(json.loads(json.dumps(gate.gate.config()))))
        assert again.config() == gate.config()
        assert [d.p_known for d in make.decide(again)] == [d.p_known for d in make.decide(gate)]

    def test_is_picklable(self, make, case):
        gate = make(case)
        make.decide(gate)
        again = pickle.loads(pickle.dumps(gate))  # noqa: S301
        assert again.config() == gate.config()
        assert [d.p_known for d in make.decide(again)] == close([d.p_known for d in make.decide(gate)], gate)

    def test_decisions_go_to_json_and_back(self, make, case):
        for d in make.decide(make(case)):
            assert Decision.model_validate_json(d.model_dump_json()) == d

    def test_a_failing_model_retrieves_and_spares_the_others(self, make, case):
        gate = make(case)
        if not any(spec.reads_model for spec in expand_specs(gate.gate.specs)):
            pytest.skip("asks no model")
        bad = make.decide(gate, [make.questions[0], "RAISE this", make.questions[1]])
        assert [d.error is None for d in bad] == [True, False, True]
        assert bad[1].retrieve
        assert "scripted failure" in bad[1].reason
        with pytest.raises(RuntimeError, match="scripted failure"):
            make.decide(gate.with_options(on_error="raise"), ["RAISE this"])

    def test_costs_count_model_calls(self, make, case):
        gate = make(case)
        calls = [d.cost.model_calls for d in make.decide(gate)]
        named = [type(spec).__name__ for spec in expand_specs(gate.gate.specs)]
        free = all(name in ("PopularitySpec", "ScoreSpec") for name in named)
        assert calls == [0] * len(make.questions) if free else all(c >= 1 for c in calls)


READS_SCORES = ["ik", "slimplm", "adapt", "prompt", "self_eval", "calibrated", "ik-question"]
READS_SCORES += ["token_probability", "token_probability-mean", "perplexity"]


@pytest.mark.parametrize("case", READS_SCORES)
def test_nan_retrieves_with_that_reason(make, case):
    found = make(case).decide_batch(["NAN please", "who?"])
    assert found[0].retrieve
    assert found[0].error.type == "ScoreError"
    assert "nan" in found[0].reason
    assert found[1].error is None


def test_an_unreadable_verdict_retrieves(make):
    gate = make("slimplm", proxy=ScriptedProxy(fixed="I think I know."), mode="generate")
    (found,) = gate.decide_batch(["who wrote hamlet?"])
    assert found.retrieve
    assert found.error.type == "ScoreError"
    assert "neither" in found.reason


def test_higher_confidence_means_skip():
    class Sure(ScriptedProxy):
        def score(self, prompt, values, targets, *, adapter=None):
            from rgate_integrations.models.base import TargetScores

            good = {"Yes": "No" not in targets or targets[0] == "Yes", "No": targets[0] == "No"}
            return [
                TargetScores(
                    tuple(-0.1 if good.get(t, t in ("Known(True)", "True")) else -5.0 for t in targets), 1
                )
                for _ in values
            ]

    for name in ("ik", "slimplm", "prompt", "self_eval"):
        assert load_gate(name, proxy=Sure()).decide("who?").p_known == pytest.approx(1 / (1 + math.exp(-4.9)))


def test_there_are_at_least_eighteen_gates_each_with_a_source():
    infos = list_gates()
    assert len(infos) >= 18
    assert all(i.paper and i.evidence and i.cost for i in infos)
    assert [i.name for i in infos] == sorted(i.name for i in infos)
    assert all(gate_class(i.name).__doc__ for i in infos)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="token_probability"):
        load_gate("token_probabilty")
    with pytest.raises(ConfigurationError, match="parameters are"):
        load_gate("ik", tokenz=3)
    with pytest.raises(ConfigurationError, match="takes no argument"):
        load_gate("ik:32")
    with pytest.raises(ConfigurationError, match="accuracy label"):
        load_gate("boundary:accuracy")
    with pytest.raises(ConfigurationError, match="rate"):
        load_gate("constant:random:often")


# What the suite asks of every gate, asked of the real model: here what depends on it most, the rest in the slow run.
REAL_CHECKS = ["test_batch_equals_single"]
SLOW_CHECKS = [
    "test_scores_are_probabilities_and_decide_by_the_threshold",
    "test_is_deterministic",
    "test_costs_count_model_calls",
    "test_a_permuted_batch_gives_permuted_results",
    "test_is_picklable",
    "test_threshold_zero_never_retrieves_and_above_one_always",
    "test_empty_batch",
    "test_goes_to_json_and_back",
    "test_decisions_go_to_json_and_back",
]


@pytest.mark.model
@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize(
    "check", [*REAL_CHECKS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CHECKS)]
)
def test_the_real_proxy_keeps_the_properties(make_real, case, check):
    getattr(TestEveryGate(), check)(make_real, case)


@pytest.mark.model
@pytest.mark.parametrize("case", SMALL)
def test_decisions_of_the_real_proxy_carry_their_cost(make_real, case):
    for d in make_real.decide(make_real(case)):
        assert d.cost.tokens_in > 5
        assert d.cost.milliseconds > 0
        if case != "boundary":  # one sampled answer may be cut off at its first newline
            assert d.cost.tokens_out <= SMALL[case]["tokens"]
