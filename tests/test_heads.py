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


@pytest.fixture
def decide(tmp_path):
    """Decides with heads about a question whose states are told."""

    def decide(artifact, proxy, question="q", history=None, **options):
        gate = load_gate(str(save_gate(artifact, tmp_path / "g")), proxy=proxy, **options)
        if isinstance(question, list):
            return gate.decide_batch(question, histories=history)
        return gate.decide(question, history=history)

    return decide


def test_what_needs_nothing_is_skipped_and_what_is_a_fact_is_skipped_if_known(artifact, decide):
    decision = decide(artifact, told((1, 2, -1, 0.5)))
    task, fact, news = softmax(1, 2, -1)
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
def test_a_decision_names_what_decided(artifact, decide, first, retrieve, reason):
    decision = decide(artifact, told(first))
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


def test_an_abler_llm_knows_more_however_its_ability_is_known(artifact, decide):
    proxy, gpt = told((0, 9, 0, -1)), Ability("GPT-4", 3.0, 0.0, "a test")
    able = decide(artifact, proxy, ability=gpt)
    assert able.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * 3))
    assert "GPT-4" in able.reason
    assert able.llm.startswith("GPT-4")
    found = decide(artifact, proxy, ability=gpt, llm_known_by="the direct arm")
    assert found.p_known == able.p_known
    names = ("qwen3:4b", "", "openai/gpt-4o")
    weak, plain, strong = (decide(artifact, proxy, llm_name=name).signals["known"] for name in names)
    assert weak < sigmoid(-1) < strong
    assert plain == pytest.approx(sigmoid(-1))


def test_an_unsure_ability_brings_p_known_near_a_half(artifact):
    states = np.array([[(0, 0, 0, 1.5), (0, 0, 0, 0)], [(0, 0, 0, -2.0), (0, 0, 0, 0)]])
    found = artifact.p_fact_known(states, 1.0, 2.0)
    abilities = np.random.default_rng(0).normal(1.0, 2.0, 100_000)
    by_sampling = [np.mean(1 / (1 + np.exp(-(logit + 0.5 * abilities)))) for logit in (1.5, -2.0)]
    assert found == pytest.approx(by_sampling, abs=0.01)
    assert artifact.p_fact_known(states, 1.0, 0.0) == pytest.approx([sigmoid(2.0), sigmoid(-1.5)])


def test_a_name_that_says_nothing_changes_nothing_and_is_told_once(artifact, decide, caplog):
    for _ in range(2):
        decision = decide(artifact, told((0, 9, 0, -1)), llm_name="my-assistant")
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
    gate = load_gate(str(save_gate(artifact, tmp_path / "g"))).gate.for_llm(name, known_by)
    decision = load_gate(gate, proxy=told((0, 9, 0, -1))).decide("q")
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


def test_white_space_changes_nothing(artifact, decide):
    proxy = Told({"who is it": [(0, 1, 0, 1), (0, 0, 0, 0)]})
    first, second = decide(artifact, proxy, ["who is it", " who  is \t it \n"])
    assert set(proxy.asked) == {"who is it"}
    assert (first.p_known, first.reason) == (second.p_known, second.reason)


@pytest.mark.parametrize(
    ("fingerprint", "proxy", "error"),
    [
        ("", told((math.nan, 0, 0, 0)), "ScoreError"),
        ("", Told({"q": [(0, 0, 0)]}), "ModelLoadError"),
        ("0123", OtherWeights({"q": [(9, 0, 0, 0)] * 2}), "ModelLoadError"),
    ],
)
def test_states_that_are_no_numbers_or_of_another_model_retrieve(artifact, decide, fingerprint, proxy, error):
    decision = decide(dataclasses.replace(artifact, fingerprint=fingerprint), proxy)
    assert (decision.retrieve, decision.error.type) == (True, error)
    assert fingerprint in decision.reason


def test_heads_are_saved_whole(with_segments, tmp_path):
    loaded = read_gate(save_gate(with_segments, tmp_path / "g"))
    assert loaded == with_segments
    assert loaded.kind_weight.tolist() == with_segments.kind_weight.tolist()
    assert loaded.segments.weight.tolist() == with_segments.segments.weight.tolist()


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
PASTED = " ".join([LONG] * 5)


class ToldParts(Told):
    """Tells the states of the whole request by its text, and of a segment likewise."""

    def hidden(self, prompt, values, drafts, layers):
        found = []
        for each in values:
            own = self.states[each["question"]]
            found.append(HiddenStates(np.array([own] * len(layers), np.float32), 3))
        return found


@pytest.mark.parametrize(
    ("states", "question", "retrieves"),
    [
        # Beside much text, what one segment needs the request needs.
        (
            {f"{LONG}. Is it raining": TASK, f"{LONG}.": GIVEN, "Is it raining": NEWS},
            f"{LONG}.\nIs it raining",
            1,
        ),
        # Beside little text only a question is judged by itself.
        ({"Hi Is it": TASK, "Hi": TASK, "Is it": NEWS}, "Hi\nIs it", 0),
        ({"Hi Is it?": TASK, "Hi": TASK, "Is it?": NEWS}, "Hi\nIs it?", 1),
        # No segment makes a request that needs something needless.
        ({f"{LONG}. Now?": NEWS, f"{LONG}.": GIVEN, "Now?": TASK}, f"{LONG}. Now?", 1),
        # Of a long request the segments decide alone.
        ({f"{PASTED}. Now?": NEWS, f"{PASTED}.": GIVEN, "Now?": NEWS}, f"{PASTED}. Now?", 1),
        ({f"{PASTED}. Thanks": NEWS, f"{PASTED}.": GIVEN, "Thanks": TASK}, f"{PASTED}. Thanks", 0),
        # Among too many questions the one that needs it is not found.
        ({"Why? " * 7 + "Why?": TASK, "Why?": TASK}, "Why? " * 8, 0),
        ({"Why? " * 8 + "Why?": TASK, "Why?": TASK}, "Why? " * 9, 1),
    ],
)
def test_what_segments_need(with_segments, decide, states, question, retrieves):
    assert decide(with_segments, ToldParts(states), question).retrieve == bool(retrieves)


def test_the_reason_and_the_signals_are_those_of_the_segment_that_decides(with_segments, decide):
    states = {f"{LONG}. Is it raining": TASK, f"{LONG}.": GIVEN, "Is it raining": NEWS}
    found = decide(with_segments, ToldParts(states), f"{LONG}.\nIs it raining")
    assert found.reason.startswith("“Is it raining” asks about something that changes with time")
    assert found.signals["given"] == pytest.approx(softmax(*NEWS)[0])


def test_a_message_that_follows_others_is_judged_by_its_segments_alone(with_segments, decide):
    proxy = ToldParts({"And now": NEWS, "Thanks": TASK, "So": (1, 0, 0, 0.5)})
    asked, before = ["Thanks", "And now", "So"], [["user: Hi"]] * 3
    found = decide(with_segments, proxy, asked, before, threshold=0.6)
    assert [each.retrieve for each in found] == [False, True, True]
    assert "not clearly needless" in found[2].reason, "whatever the threshold"


@pytest.mark.parametrize(
    ("message", "before", "retrieves"),
    [
        ("Yes", ["user: Hi", "assistant: Sure. Is it raining?"], True),
        ("Yes, since I have to leave soon", ["user: Hi", "assistant: Sure. Is it raining?"], False),
        ("Yes", ["user: Hi", "assistant: Is it raining? It is."], False),
        ("Yes", ["assistant: Hi", "user: Is it raining?"], False),
    ],
)
def test_a_short_reply_is_judged_with_the_question_that_it_answers(
    with_segments, decide, message, before, retrieves
):
    states = {"Yes": TASK, message: TASK, "Is it raining? Yes": TASK, "Is it raining?": NEWS}
    found = decide(with_segments, ToldParts(states), message, before)
    assert (found.retrieve, found.question) == (retrieves, message)
    assert ("“Is it raining?”" in found.reason) == retrieves


@pytest.mark.parametrize(("theta", "counts_as"), [(-3.0, -3.0), (0.0, 0.0), (3.0, 0.0)])
def test_of_news_an_able_llm_knows_no_more_than_the_default_one(artifact, decide, theta, counts_as):
    news_weight = np.zeros_like(artifact.known_weight)
    news_weight[0, 2] = 1.0
    with_news = dataclasses.replace(artifact, news_weight=news_weight, news_bias=-2.0)
    llm = Ability("x", theta, 0.0, "a test")
    news = decide(with_news, told((0, 9, 3, -1)), ability=llm)
    fact = decide(with_news, told((0, 9, 0, -1)), ability=llm)
    assert news.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * counts_as))
    assert fact.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * theta))
    assert [("may be news" in each.reason) for each in (news, fact)] == [theta > 0, False]
