"""Gates of several heads: what they make of hidden states, and how they are saved."""

import dataclasses
import json
import math

import numpy as np
import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.artifacts import HeadsArtifact, Kind, SegmentHeads
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.registry import gate_from_config
from rgate_integrations.models.base import HiddenStates, PooledLayer
from rgate_integrations.models.segments import LAYOUT
from tests.scripted_proxy import ScriptedProxy

KINDS = (
    Kind("task", "always", "needs nothing"),
    Kind("fact", "if_known", "asks about a fact"),
    Kind("news", "never", "asks about something that changes with time"),
)
LAYERS = (PooledLayer(1, "question", "mean"), PooledLayer(2, "all", "last"))


@pytest.fixture
def artifact():
    """Four numbers a layer: the first three are the kinds' logits, the last is the logit of knowing."""
    kind_weight = np.zeros((3, 2, 4), np.float32)
    for kind in range(3):
        kind_weight[kind, 0, kind] = 1.0
    known_weight = np.zeros((2, 4), np.float32)
    known_weight[0, 3] = 1.0
    return HeadsArtifact(
        layers=LAYERS,
        kinds=KINDS,
        kind_weight=kind_weight,
        known_weight=known_weight,
        known_bias=0.0,
        ability_slope=0.5,
        llm="Llama-8B",
        default_ability=(0.0, 0.0),
        base_model="scripted",
        provenance={"data": [], "metrics": {"auc": {"nq": 0.7}, "auc_mean": 0.7, "auc_pooled": 0.7}},
    )


class Told(ScriptedProxy):
    """A proxy whose hidden states are told by question."""

    def __init__(self, states):
        super().__init__()
        self.states = states
        self.asked = []

    def hidden(self, prompt, values, drafts, layers):
        assert drafts is None
        self.asked += [each["question"] for each in values]
        found = [np.asarray(self.states[each["question"]], np.float32) for each in values]
        return [HiddenStates(states, 3) for states in found]


class OtherWeights(Told):
    """Another model of the same shape."""

    fingerprint = "4567"


def told(first, last=(0, 0, 0, 0)):
    return Told({"q": [first, last]})


def softmax(*logits):
    raised = [math.exp(each) for each in logits]
    return [each / sum(raised) for each in raised]


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


def gate_of(artifact, tmp_path, proxy, **options):
    return load_gate(str(save_gate(artifact, tmp_path / "g")), proxy=proxy, **options)


def test_what_needs_nothing_is_skipped_and_what_is_a_fact_is_skipped_if_known(artifact, tmp_path):
    decision = gate_of(artifact, tmp_path, told((1, 2, -1, 0.5))).decide("q")
    task, fact, news = softmax(1, 2, -1)
    assert decision.error is None
    assert decision.p_known == pytest.approx(task + fact * sigmoid(0.5))
    assert decision.signals == pytest.approx(
        {"task": task, "fact": fact, "news": news, "known": sigmoid(0.5)}
    )


@pytest.mark.parametrize(
    ("first", "retrieve", "reason"),
    [
        ((9, 0, 0, -9), False, "The question needs nothing (probability 1.00)."),
        ((0, 9, 0, 3), False, "The question asks about a fact that the LLM knows with probability 0.95."),
        ((0, 9, 0, -3), True, "The question asks about a fact that the LLM knows with probability 0.05."),
        ((0, 0, 9, 9), True, "The question asks about something that changes with time (probability 1.00)."),
    ],
)
def test_a_decision_names_what_decided(artifact, tmp_path, first, retrieve, reason):
    decision = gate_of(artifact, tmp_path, told(first)).decide("q")
    assert (decision.retrieve, decision.reason) == (retrieve, reason)


def test_a_begun_answer_counts_as_far_as_knowledge_is_needed(artifact, tmp_path):
    folder = str(save_gate(artifact, tmp_path / "g"))
    gate = load_gate(f"answer:{folder},token_probability", proxy=told((1, 2, -1, 0.5)), weight=0.5)
    draft = Draft(text="Bern", tokens=("Bern",), logprobs=(math.log(0.2),), source="llm")
    decision = gate.decide_batch(["q"], drafts=[draft])[0]
    task, fact, _ = softmax(1, 2, -1)
    question = task + fact * sigmoid(0.5)
    weight = 0.5 * fact / (task + fact)
    logit = (1 - weight) * math.log(question / (1 - question)) + weight * math.log(0.2 / 0.8)
    assert decision.error is None
    assert decision.p_known == pytest.approx(sigmoid(logit))
    assert decision.reason == (
        f"Known with probability {sigmoid(logit):.2f} (question {question:.2f}, begun answer 0.20)."
    )
    assert decision.signals["task"] == pytest.approx(task)


def test_a_begun_answer_is_weighed_by_a_gate_that_knows_kinds():
    with pytest.raises(ConfigurationError, match="cannot take question"):
        load_gate("answer:ik,token_probability", proxy=ScriptedProxy())
    with pytest.raises(ConfigurationError, match="does not name two gates"):
        load_gate("answer:default", proxy=ScriptedProxy())


def test_an_abler_llm_knows_more(artifact, tmp_path):
    proxy = told((0, 9, 0, -1))
    folder = str(save_gate(artifact, tmp_path / "g"))
    plain = load_gate(folder, proxy=proxy)
    able = load_gate(folder, proxy=proxy, ability=Ability("GPT-4", 3.0, 0.0, "a test")).decide("q")
    assert plain.decide("q").signals["known"] == pytest.approx(sigmoid(-1))
    assert able.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * 3))
    assert "GPT-4" in able.reason
    assert able.llm.startswith("GPT-4")
    strong = load_gate(folder, proxy=proxy, llm_name="openai/gpt-4o").decide("q")
    weak = plain.with_options(llm_name="qwen3:4b").decide("q")
    assert weak.signals["known"] < sigmoid(-1) < strong.signals["known"]


def test_an_unsure_ability_brings_p_known_near_a_half(artifact):
    states = np.array([[(0, 0, 0, 1.5), (0, 0, 0, 0)], [(0, 0, 0, -2.0), (0, 0, 0, 0)]])
    found = artifact.p_fact_known(states, 1.0, 2.0)
    abilities = np.random.default_rng(0).normal(1.0, 2.0, 100_000)
    by_sampling = [np.mean(1 / (1 + np.exp(-(logit + 0.5 * abilities)))) for logit in (1.5, -2.0)]
    assert found == pytest.approx(by_sampling, abs=0.01)
    assert artifact.p_fact_known(states, 1.0, 0.0) == pytest.approx([sigmoid(2.0), sigmoid(-1.5)])


def test_a_name_that_says_nothing_changes_nothing_and_is_told_once(artifact, tmp_path, caplog):
    proxy = told((0, 9, 0, -1))
    folder = str(save_gate(artifact, tmp_path / "g"))
    for _ in range(2):
        decision = load_gate(folder, proxy=proxy, llm_name="my-assistant").decide("q")
    assert decision.signals["known"] == pytest.approx(sigmoid(-1))
    assert caplog.text.count("Nothing is known of the LLM 'my-assistant'") == 1
    assert "rgate ability" in caplog.text


def test_a_name_that_is_given_goes_before_one_that_is_found(artifact, tmp_path):
    folder = str(save_gate(artifact, tmp_path / "g"))
    found = load_gate(folder).gate.for_llm("gpt-4o", "the chat model")
    assert found.for_llm("phi-4", "the chat model").ability.llm == "phi-4"
    given = found.for_llm("gpt-4o-mini")
    assert given.for_llm("phi-4", "the chat model") is given
    assert (given.llm_known_by, given.ability.llm.startswith("gpt-4o-mini")) == ("", True)
    measured = load_gate(folder, ability=Ability("mine", 1.0, 0.2, "a test")).gate
    assert measured.for_llm("phi-4", "the chat model") is measured
    assert gate_from_config(given.config()) == given


@pytest.mark.parametrize(
    ("name", "known_by", "said"),
    [
        ("", "", ""),
        ("phi-4", "the chat model", "phi-4 (named by the chat model; ability"),
        ("phi-4", "", "phi-4 (as given; ability"),
        ("my-assistant", "", "an LLM of which nothing is known but its name, my-assistant"),
    ],
)
def test_a_decision_says_whose_knowledge_was_judged_and_how_it_is_known(
    artifact, tmp_path, name, known_by, said
):
    proxy = told((0, 9, 0, -1))
    gate = load_gate(str(save_gate(artifact, tmp_path / "g"))).gate.for_llm(name, known_by)
    decision = load_gate(gate, proxy=proxy).decide("q")
    assert decision.llm.startswith(said)
    assert bool(decision.llm) == bool(said)


def test_gates_of_gates_tell_their_gates_the_llm_unless_they_were_fitted_to_one(artifact, tmp_path):
    folder = str(save_gate(artifact, tmp_path / "g"))
    assert (
        load_gate(f"answer:{folder},token_probability", llm_name="phi-4").gate.question.ability.llm == "phi-4"
    )
    assert load_gate("calibrated", inner=folder, llm_name="phi-4").gate.inner.ability is None
    with pytest.raises(ConfigurationError, match="judges no LLM by its name"):
        load_gate("ik", llm_name="phi-4")


def test_white_space_and_a_given_draft_change_nothing(artifact, tmp_path):
    proxy = Told({"who is it": [(0, 1, 0, 1), (0, 0, 0, 0)]})
    gate = gate_of(artifact, tmp_path, proxy)
    first, second = gate.decide_batch(["who is it", " who  is \t it \n"], drafts=[None, "It is Bo."])
    assert set(proxy.asked) == {"who is it"}
    assert (first.p_known, first.reason) == (second.p_known, second.reason)
    assert second.draft is None


@pytest.mark.parametrize(
    ("fingerprint", "proxy", "error"),
    [
        ("", told((math.nan, 0, 0, 0)), "ScoreError"),
        ("", Told({"q": [(0, 0, 0)]}), "ModelLoadError"),
        ("0123", OtherWeights({"q": [(9, 0, 0, 0)] * 2}), "ModelLoadError"),
    ],
)
def test_states_that_are_no_numbers_or_of_another_model_retrieve(
    artifact, tmp_path, fingerprint, proxy, error
):
    decision = gate_of(dataclasses.replace(artifact, fingerprint=fingerprint), tmp_path, proxy).decide("q")
    assert (decision.retrieve, decision.error.type) == (True, error)
    assert fingerprint in decision.reason


def test_heads_are_saved_whole(with_segments, tmp_path):
    folder = save_gate(with_segments, tmp_path / "g")
    loaded = read_gate(folder)
    assert loaded == with_segments
    assert loaded.kind_weight.tolist() == with_segments.kind_weight.tolist()
    assert loaded.segments.weight.tolist() == with_segments.segments.weight.tolist()
    assert "Llama-8B" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"kinds": [{"name": "task", "answerable": "sometimes", "about": ""}] * 3},
            "Input should be 'always'",
        ),
        ({"kinds": [{"name": "task", "answerable": "always", "about": ""}]}, "shape"),
        ({"default_ability": [0.0]}, "default_ability"),
        ({"method": "probe"}, "Unexpected keyword|Field required"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(artifact, tmp_path, change, says):
    file = save_gate(artifact, tmp_path / "g") / "gate.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelLoadError, match=says):
        read_gate(tmp_path / "g")


def test_shapes_that_do_not_fit_are_refused(with_segments):
    with pytest.raises(ValueError, match="kind_weight"):
        dataclasses.replace(with_segments, kind_weight=np.zeros((2, 2, 4), np.float32))
    with pytest.raises(ValueError, match="layout"):
        dataclasses.replace(with_segments.segments, layout=np.zeros((4, 2), np.float32))


# --- fitting -----------------------------------------------------------------------------------------------


@pytest.fixture
def with_segments(artifact):
    """Heads of segments whose first three numbers are the kinds' logits, too; the fourth that of given text."""
    kinds = (*KINDS, Kind("given", "always", "is text to work on"))
    weight = np.eye(4, dtype=np.float32)[:, None, :]
    layers = (PooledLayer(1, "question", "last"),)
    segments = SegmentHeads(layers, kinds, weight, np.zeros((4, LAYOUT), np.float32))
    return dataclasses.replace(artifact, segments=segments)


TASK, NEWS, GIVEN = (9, 0, 0, 0), (0, 0, 9, 0), (0, 0, 0, 9)
LONG = "one two three four five six seven eight nine ten eleven twelve"


class ToldParts(Told):
    """Tells the states of the whole request by its text, and of a segment likewise."""

    def hidden(self, prompt, values, drafts, layers):
        found = []
        for each in values:
            own = self.states[each["question"]]
            found.append(HiddenStates(np.array([own] * len(layers), np.float32), 3))
        return found


def test_what_one_segment_beside_much_text_needs_the_request_needs(with_segments, tmp_path):
    asked = f"{LONG}.\nIs it raining"
    states = {f"{LONG}. Is it raining": TASK, f"{LONG}.": GIVEN, "Is it raining": NEWS}
    found = gate_of(with_segments, tmp_path, ToldParts(states)).decide(asked)
    assert found.retrieve
    assert found.reason.startswith("“Is it raining” asks about something that changes with time")
    assert found.signals["given"] == pytest.approx(softmax(*NEWS)[0])


def test_beside_little_text_only_a_question_is_judged_by_itself(with_segments, tmp_path):
    states = {"Hi Is it": TASK, "Hi Is it?": TASK, "Hi": TASK, "Is it": NEWS, "Is it?": NEWS}
    statement, question = gate_of(with_segments, tmp_path, ToldParts(states)).decide_batch(
        ["Hi\nIs it", "Hi\nIs it?"]
    )
    assert (statement.retrieve, question.retrieve) == (False, True)


def test_no_segment_makes_a_request_that_needs_something_needless(with_segments, tmp_path):
    states = {f"{LONG}. Now?": NEWS, f"{LONG}.": GIVEN, "Now?": TASK}
    assert gate_of(with_segments, tmp_path, ToldParts(states)).decide(f"{LONG}. Now?").retrieve


def test_of_a_long_request_the_segments_decide_alone(with_segments, tmp_path):
    pasted = " ".join([LONG] * 5)
    states = {f"{pasted}. {last}": NEWS for last in ("Now?", "Thanks")}
    states |= {
        f"{pasted}.": GIVEN,
        "Now?": NEWS,
        "Thanks": TASK,
        LONG: NEWS,
        f"{LONG}. Thanks": NEWS,
        f"{LONG}.": GIVEN,
    }
    gate = gate_of(with_segments, tmp_path, ToldParts(states))
    decisions = gate.decide_batch([f"{pasted}. Now?", f"{pasted}. Thanks", f"{LONG}. Thanks"])
    assert [each.retrieve for each in decisions] == [True, False, True]


def test_a_message_that_follows_others_is_judged_by_its_segments_alone(with_segments, tmp_path):
    gate = gate_of(
        with_segments, tmp_path, ToldParts({"And now": NEWS, "Thanks": TASK, "So": (1, 0, 0, 0.5)})
    )
    found = gate.decide_batch(["Thanks", "And now", "So"], histories=[["user: Hi"]] * 3)
    assert [each.retrieve for each in found] == [False, True, True]
    assert "not clearly needless" in found[2].reason


def test_of_news_an_able_llm_knows_no_more_than_the_default_one(artifact, tmp_path):
    told_news, told_fact = told((0, 9, 3, -1)), told((0, 9, 0, -1))
    news_weight = np.zeros_like(artifact.known_weight)
    news_weight[0, 2] = 1.0
    with_news = dataclasses.replace(artifact, news_weight=news_weight, news_bias=-2.0)
    known = {
        (name, theta): gate_of(with_news, tmp_path, proxy, ability=Ability("x", theta, 0.0, "a test")).decide(
            "q"
        )
        for name, proxy in (("news", told_news), ("fact", told_fact))
        for theta in (-3.0, 0.0, 3.0)
    }
    shares = {case: decision.signals["known"] for case, decision in known.items()}
    for name in ("news", "fact"):
        assert shares[name, 0.0] == pytest.approx(sigmoid(-1))
        assert shares[name, -3.0] == pytest.approx(sigmoid(-1 - 1.5))
    assert shares["news", 3.0] == pytest.approx(sigmoid(-1))
    assert shares["fact", 3.0] == pytest.approx(sigmoid(-1 + 1.5))
    assert [case for case, decision in known.items() if "may be news" in decision.reason] == [("news", 3.0)]


def test_a_name_that_is_found_counts_as_one_that_is_given(artifact, tmp_path):
    proxy = told((0, 9, 0, -1))
    named = {"ability": Ability("x", 3.0, 0.0, "a test")}
    decisions = [
        gate_of(artifact, tmp_path, proxy, **options).decide("q")
        for options in ({**named, "llm_known_by": "the direct arm"}, named, {})
    ]
    found, given, nobody = (decision.p_known for decision in decisions)
    assert found == given > nobody


def test_a_short_reply_is_judged_with_the_question_that_it_answers(with_segments, tmp_path):
    longer = "Yes, since I have to leave soon"
    states = {text: TASK for text in ("Yes", longer, "Is it raining? Yes")} | {"Is it raining?": NEWS}
    asked = ["user: Hi", "assistant: Sure. Is it raining?"]
    told = ["user: Hi", "assistant: Is it raining? It is."]
    by_user = ["assistant: Hi", "user: Is it raining?"]
    gate = gate_of(with_segments, tmp_path, ToldParts(states))
    found = gate.decide_batch(["Yes", longer, "Yes", "Yes"], histories=[asked, asked, told, by_user])
    assert [each.retrieve for each in found] == [True, False, False, False]
    assert found[0].question == "Yes"
    assert "“Is it raining?”" in found[0].reason


def test_a_request_of_too_many_questions_retrieves(with_segments, tmp_path):
    states = {"Why? " * n + "Why?": TASK for n in (7, 8)} | {"Why?": TASK}
    gate = gate_of(with_segments, tmp_path, ToldParts(states))
    few, many = gate.decide_batch(["Why? " * 8, "Why? " * 9])
    assert (few.retrieve, many.retrieve) == (False, True)
    assert "more than 8 questions" in many.reason


def test_a_lower_threshold_of_a_call_skips_no_message_that_is_not_clearly_needless(with_segments, tmp_path):
    gate = gate_of(with_segments, tmp_path, ToldParts({"So": (1, 0, 0, 0.5)}), threshold=0.9)
    assert gate.decide("So", history=["user: Hi"], threshold=0.6).retrieve
