"""Gates of several heads: what they make of hidden states, and how they are saved."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rgate_integrations import Draft, Request, load_gate
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.registry import gate_from_config
from rgate_integrations.models.base import HiddenStates
from tests.saved_gates import HEADS, NUMBERS, SEGMENTS, change
from tests.scripted_proxy import ScriptedProxy

UNSURE = (0, 9, 0, -1)


class Told(ScriptedProxy):
    """A proxy whose hidden states are told: by question or segment, or for the question "q"."""

    def __init__(self, states):
        super().__init__(fingerprint="4567")
        self.states = states if isinstance(states, dict) else {"q": states}

    def hidden(self, prompt, values, drafts, layers):
        assert drafts is None
        return [HiddenStates(np.array([self.states[each["question"]]], np.float32), 3) for each in values]


@pytest.fixture
def decide(tmp_path):
    """Decides with heads about a question whose states are told."""

    def decide(states, question="q", history=None, heads=HEADS, **options):
        gate = load_gate(str(save_gate(heads, tmp_path / "g")), proxy=Told(states), **options)
        if isinstance(question, list):
            return gate.decide_batch([Request(each, history) for each in question])
        return gate.decide(question, history=history)

    return decide


@pytest.fixture
def folder(tmp_path):
    return str(save_gate(HEADS, tmp_path / "g"))


def softmax(*logits):
    raised = [math.exp(each) for each in logits]
    return [each / sum(raised) for each in raised]


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


def test_what_needs_nothing_is_skipped_and_what_is_a_fact_is_skipped_if_known(decide):
    decision = decide((1, 2, -1, 0.5))
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
def test_a_decision_names_what_decided(decide, first, retrieve, reason):
    decision = decide(first)
    assert (decision.retrieve, decision.reason) == (retrieve, reason)


def test_a_begun_answer_counts_as_far_as_knowledge_is_needed(folder):
    gate = load_gate(f"answer:{folder},token_probability", proxy=Told((1, 2, -1, 0.5)), weight=0.5)
    decision = gate.decide("q", draft=Draft(text="Bern", tokens=("Bern",), logprobs=(math.log(0.2),)))
    task, fact, _ = softmax(1, 2, -1)
    question = task + fact * sigmoid(0.5)
    weight = 0.5 * fact / (task + fact)
    p = sigmoid((1 - weight) * math.log(question / (1 - question)) + weight * math.log(0.2 / 0.8))
    assert (decision.error, decision.p_known) == (None, pytest.approx(p))
    assert decision.reason == f"Known with probability {p:.2f} (question {question:.2f}, begun answer 0.20)."
    assert decision.signals["task"] == pytest.approx(task)


@pytest.mark.parametrize(
    ("name", "why"),
    [("answer:ik,token_probability", "cannot take question"), ("answer:default", "does not name two gates")],
)
def test_a_begun_answer_is_weighed_by_a_gate_that_knows_kinds(name, why):
    with pytest.raises(ConfigurationError, match=why):
        load_gate(name)


def test_an_abler_llm_knows_more_however_its_ability_is_known(decide):
    able = decide(UNSURE, ability=Ability("GPT-4", 3.0, 0.0, "a test"))
    assert able.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * 3))
    assert "GPT-4" in able.reason
    assert able.llm.startswith("GPT-4")
    names = ("qwen3:4b", "", "openai/gpt-4o")
    weak, plain, strong = (decide(UNSURE, llm_name=name).signals["known"] for name in names)
    assert weak < sigmoid(-1) < strong
    assert plain == pytest.approx(sigmoid(-1))


def test_an_unsure_ability_brings_p_known_near_a_half():
    states = np.array([[(0, 0, 0, 1.5)], [(0, 0, 0, -2.0)]])
    abilities = np.random.default_rng(0).normal(1.0, 2.0, 100_000)
    by_sampling = [np.mean(1 / (1 + np.exp(-(logit + 0.5 * abilities)))) for logit in (1.5, -2.0)]
    assert HEADS.p_fact_known(states, 1.0, 2.0) == pytest.approx(by_sampling, abs=0.01)
    assert HEADS.p_fact_known(states, 1.0, 0.0) == pytest.approx([sigmoid(2.0), sigmoid(-1.5)])


def test_a_name_that_says_nothing_changes_nothing_and_is_told_once(decide, caplog):
    known = [decide(UNSURE, llm_name="my-assistant").signals["known"] for _ in range(2)]
    assert known == pytest.approx([sigmoid(-1)] * 2)
    assert caplog.text.count("Nothing is known of the LLM 'my-assistant'") == 1
    assert "rgate ability" in caplog.text


def test_a_name_that_is_given_goes_before_one_that_is_found(folder):
    found = load_gate(folder).gate.for_llm("gpt-4o", "the chat model")
    assert found.for_llm("phi-4", "the chat model").ability.llm == "phi-4"
    given = found.for_llm("gpt-4o-mini")
    assert (given.llm_name_source, given.ability.llm.startswith("gpt-4o-mini")) == ("", True)
    measured = load_gate(folder, ability=Ability("mine", 1.0, 0.2, "a test")).gate
    for gate in (given, measured):
        assert gate.for_llm("phi-4", "the chat model") is gate
        assert gate_from_config(gate.config()) == gate


@pytest.mark.parametrize(
    ("name", "name_source", "said"),
    [
        ("", "", ""),
        ("phi-4", "the chat model", "phi-4 (named by the chat model; ability"),
        ("phi-4", "", "phi-4 (as given; ability"),
        ("my-assistant", "", "an LLM of which nothing is known but its name, my-assistant"),
    ],
)
def test_a_decision_says_whose_knowledge_was_judged_and_how_it_is_known(folder, name, name_source, said):
    gate = load_gate(folder).gate.for_llm(name, name_source)
    decision = load_gate(gate, proxy=Told(UNSURE)).decide("q")
    assert decision.llm.startswith(said)
    assert bool(decision.llm) == bool(said)


def test_gates_of_gates_tell_their_gates_the_llm_unless_they_were_fitted_to_one(folder):
    answer = load_gate(f"answer:{folder},token_probability", llm_name="phi-4").gate
    assert answer.question.ability.llm == "phi-4"
    assert load_gate("calibrated", inner=folder, llm_name="phi-4").gate.inner.ability is None
    with pytest.raises(ConfigurationError, match="judges no LLM by its name"):
        load_gate("ik", llm_name="phi-4")


def test_white_space_changes_nothing(decide):
    first, second = decide({"who is it": (0, 1, 0, 1)}, ["who is it", " who  is \t it \n"])
    assert (first.p_known, first.reason) == (second.p_known, second.reason)


@pytest.mark.parametrize(
    ("fingerprint", "states", "error"),
    [
        ("", (math.nan, 0, 0, 0), "ScoreError"),
        ("", (0, 0, 0), "ModelLoadError"),
        ("0123", (9, 0, 0, 0), "ModelLoadError"),
    ],
)
def test_states_that_are_no_numbers_or_of_another_model_retrieve(decide, fingerprint, states, error):
    decision = decide(states, heads=replace(HEADS, fingerprint=fingerprint))
    assert (decision.retrieve, decision.error.type) == (True, error)
    assert fingerprint in decision.reason


def test_heads_are_saved_whole(folder):
    loaded = read_gate(folder)
    assert loaded == HEADS
    assert loaded.kind_weight.tolist() == HEADS.kind_weight.tolist()
    assert loaded.segments.weight.tolist() == SEGMENTS.weight.tolist()


@pytest.mark.parametrize(
    ("changes", "says"),
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
def test_a_config_that_makes_no_sense_is_refused(tmp_path, changes, says):
    change(save_gate(HEADS, tmp_path / "g"), **changes)
    with pytest.raises(ModelLoadError, match=says):
        read_gate(tmp_path / "g")


@pytest.mark.parametrize(
    ("part", "name", "shape"),
    [(HEADS, "kind_weight", (2, 1, 4)), (SEGMENTS, "weight", (3, 1, 4)), (SEGMENTS, "layout", (4, 2))],
)
def test_shapes_that_do_not_fit_are_refused(part, name, shape):
    with pytest.raises(ValueError, match=name):
        replace(part, **{name: np.zeros(shape, np.float32)})


# --- segments ----------------------------------------------------------------------------------------------


TASK, NEWS, GIVEN = (9, 0, 0, 0), (0, 0, 9, 0), (0, 0, 0, 9)
LONG = "one two three four five six seven eight nine ten eleven twelve"
PASTED = " ".join([LONG] * 5)


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
def test_what_segments_need(decide, states, question, retrieves):
    assert decide(states, question).retrieve == bool(retrieves)


def test_the_reason_and_the_signals_are_those_of_the_segment_that_decides(decide):
    states = {f"{LONG}. Is it raining": TASK, f"{LONG}.": GIVEN, "Is it raining": NEWS}
    found = decide(states, f"{LONG}.\nIs it raining")
    assert found.reason.startswith("“Is it raining” asks about something that changes with time")
    assert found.signals["given"] == pytest.approx(softmax(*NEWS)[0])


def test_a_message_that_follows_others_is_judged_by_its_segments_alone(decide):
    states = {"And now": NEWS, "Thanks": TASK, "So": (1, 0, 0, 0.5)}
    found = decide(states, ["Thanks", "And now", "So"], ["user: Hi"], threshold=0.6)
    assert [each.retrieve for each in found] == [False, True, True]
    needless, _, unclear = found
    assert (needless.override, unclear.p_known > 0.6) == (None, True)
    assert unclear.override.reason == "Follow-up that may need the earlier turns."
    assert unclear.reason.startswith(f"{unclear.override.reason} “So” ")


@pytest.mark.parametrize(
    ("message", "before", "retrieves"),
    [
        ("Yes", ["user: Hi", "assistant: Sure. Is it raining?"], True),
        ("Yes, since I have to leave soon", ["user: Hi", "assistant: Sure. Is it raining?"], False),
        ("Yes", ["user: Hi", "assistant: Is it raining? It is."], False),
        ("Yes", ["assistant: Hi", "user: Is it raining?"], False),
    ],
)
def test_a_short_reply_is_judged_with_the_question_that_it_answers(decide, message, before, retrieves):
    states = {"Yes": TASK, message: TASK, "Is it raining? Yes": TASK, "Is it raining?": NEWS}
    found = decide(states, message, before)
    assert (found.retrieve, found.question) == (retrieves, message)
    assert ("“Is it raining?”" in found.reason) == retrieves


@pytest.mark.parametrize(("theta", "counts_as"), [(-3.0, -3.0), (0.0, 0.0), (3.0, 0.0)])
def test_of_news_an_able_llm_knows_no_more_than_the_default_one(decide, theta, counts_as):
    heads = replace(HEADS, news_weight=NUMBERS[2:3], news_bias=-2.0)
    options = {"heads": heads, "ability": Ability("x", theta, 0.0, "a test")}
    news, fact = decide((0, 9, 3, -1), **options), decide(UNSURE, **options)
    assert news.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * counts_as))
    assert fact.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * theta))
    assert [("may be news" in each.reason) for each in (news, fact)] == [theta > 0, False]
