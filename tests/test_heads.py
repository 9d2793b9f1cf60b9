"""Gates of several heads: what they make of hidden states, and how they are saved."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rgate_integrations import Draft, Request, load_gate
from rgate_integrations.engine import decision_engine
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.models.base import HiddenStates
from rgate_integrations.runtime.quotations import PLACE
from rgate_integrations.runtime.segments import LAYOUT
from tests.saved_gates import FACTS, HEADS, KINDS, LAYERS, NUMBERS, SEGMENTS, TOGETHER
from tests.scripted_proxy import ScriptedProxy

UNSURE = (0, 9, 0, -1)


class FixedStates(ScriptedProxy):
    """A proxy with fixed hidden states: by question or segment, or for the question "q"."""

    def __init__(self, states):
        super().__init__(fingerprint="4567")
        self.states = states if isinstance(states, dict) else {"q": states}

    def hidden(self, prompt, values, drafts, layers):
        assert drafts is None
        # What remains of a request without the segments that need passages decides nothing here.
        rest = {each["question"]: (0,) * 4 for each in values if PLACE in each["question"]}
        states = {**rest, **self.states}
        return [HiddenStates(np.array([states[each["question"]]], np.float32), 3) for each in values]


@pytest.fixture
def decide(tmp_path):
    """Decides with heads about a question with fixed states."""

    def decide(states, question="q", history=None, heads=HEADS, **options):
        gate = load_gate(str(save_gate(heads, tmp_path / "g")), proxy=FixedStates(states), **options)
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
    gate = load_gate(f"answer:{folder},token_probability", proxy=FixedStates((1, 2, -1, 0.5)), weight=0.5)
    decision = gate.decide("q", draft=Draft(text="Bern", tokens=("Bern",), logprobs=(math.log(0.2),)))
    task, fact, _ = softmax(1, 2, -1)
    question = task + fact * sigmoid(0.5)
    weight = 0.5 * fact / (task + fact)
    p = sigmoid((1 - weight) * math.log(question / (1 - question)) + weight * math.log(0.2 / 0.8))
    assert (decision.error, decision.p_known) == (None, pytest.approx(p))
    assert (
        decision.reason == f"Known with probability {p:.2f} (question {question:.2f}, partial answer 0.20)."
    )
    assert decision.signals["task"] == pytest.approx(task)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("answer:ik,token_probability", "are invalid: question"),
        ("answer:default", "does not name two gates"),
    ],
)
def test_a_begun_answer_is_weighed_by_a_gate_that_knows_kinds(name, why):
    with pytest.raises(ConfigurationError, match=why):
        load_gate(name)


def test_an_unsure_ability_brings_p_known_near_a_half():
    states = np.array([[(0, 0, 0, 1.5)], [(0, 0, 0, -2.0)]])
    abilities = np.random.default_rng(0).normal(1.0, 2.0, 100_000)
    by_sampling = [np.mean(1 / (1 + np.exp(-(logit + 0.5 * abilities)))) for logit in (1.5, -2.0)]
    assert FACTS.p_fact_known(states, 1.0, 2.0) == pytest.approx(by_sampling, abs=0.01)
    assert FACTS.p_fact_known(states, 1.0, 0.0) == pytest.approx([sigmoid(2.0), sigmoid(-1.5)])


def test_a_name_that_says_nothing_changes_nothing_and_is_told_once(decide, caplog):
    known = [decide(UNSURE, llm_name="my-assistant").signals["known"] for _ in range(2)]
    assert known == pytest.approx([sigmoid(-1)] * 2)
    assert caplog.text.count("Nothing is known about the LLM 'my-assistant'") == 1
    assert "rgate ability" in caplog.text


def test_a_name_that_is_given_goes_before_one_that_is_found(folder):
    found = load_gate(folder).gate.for_llm("gpt-4o", "the chat model")
    assert found.for_llm("phi-4", "the chat model").ability.llm == "phi-4"
    measured = load_gate(folder, ability=Ability("mine", 1.0, 0.2, "a test")).gate
    for gate in (found.for_llm("gpt-4o-mini"), measured):
        assert gate.for_llm("phi-4", "the chat model") is gate


@pytest.mark.parametrize(
    ("name", "name_source", "said"),
    [
        ("", "", ""),
        ("phi-4", "the chat model", "phi-4 (named by the chat model; ability"),
        ("phi-4", "", "phi-4 (as given; ability"),
        ("my-assistant", "", "my-assistant, about which nothing is known"),
    ],
)
def test_a_decision_says_whose_knowledge_was_judged_and_how_it_is_known(folder, name, name_source, said):
    gate = load_gate(folder).gate.for_llm(name, name_source)
    decision = load_gate(gate, proxy=FixedStates(UNSURE)).decide("q")
    assert decision.llm.startswith(said)
    assert bool(decision.llm) == bool(said)


def test_gates_of_gates_tell_their_gates_the_llm_unless_they_were_fitted_to_one(folder):
    answer = load_gate(f"answer:{folder},token_probability", llm_name="phi-4").gate
    assert answer.question.ability.llm == "phi-4"
    assert load_gate("calibrated", inner=folder, llm_name="phi-4").gate.inner.ability is None
    with pytest.raises(ConfigurationError, match="cannot be adjusted to an LLM"):
        load_gate("ik", llm_name="phi-4")


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
    assert loaded.facts.known_weight.tolist() == FACTS.known_weight.tolist()
    assert loaded.together.attention.tolist() == TOGETHER.attention.tolist()


@pytest.mark.parametrize(
    ("part", "name", "shape"),
    [
        (FACTS, "known_weight", (2, 4)),
        (SEGMENTS, "hidden", (7, 15)),
        (SEGMENTS, "output", (2, 8)),
        (SEGMENTS, "output", (3, 7)),
        (TOGETHER, "output", (3, 7)),
        (TOGETHER, "attention", (24, 7)),
        (TOGETHER, "attention_bias", (8,)),
        (TOGETHER, "distances", (3, 3)),
        (TOGETHER, "distances", (2, 4)),
        (TOGETHER, "distances", (0, 3)),
        (TOGETHER, "distances", (2,)),
        (TOGETHER, "joint", (8, 8)),
        (TOGETHER, "joint_bias", (1,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(part, name, shape):
    with pytest.raises(ValueError, match=name):
        replace(part, **{name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (HEADS, "english"),
        (HEADS, "romanised"),
        (HEADS, "self_contained"),
        (HEADS, "self_contained_turns"),
        (HEADS, "about_quotation"),
        (HEADS, "between_pleasantries"),
        (HEADS, "drafts"),
        (FACTS, "news"),
    ],
)
def test_detectors_for_other_layers_are_refused(part, name):
    with pytest.raises(ValueError, match=name):
        replace(part, **{name: Detector(NUMBERS[:2], 0.0)})


# --- segments ----------------------------------------------------------------------------------------------


TASK, NEWS, NEAR = (9, 0, 0, 0), (0, 0, 9, 0), (1, -9, 0, 0)
KNOWN, UNKNOWN = (0, 9, 0, 3), (0, 9, 0, -3)
LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize(
    ("states", "question", "retrieves"),
    [
        # What one segment needs, the request needs, wherever it stands and however short it is.
        ({"Hi Is it": TASK, "Hi": TASK, "Is it": NEWS}, "Hi\nIs it", 1),
        ({"Now? Thanks": TASK, "Now?": NEWS, "Thanks": TASK}, "Now? Thanks", 1),
        ({f"{LONG}. Now?": TASK, f"{LONG}.": TASK, "Now?": NEWS}, f"{LONG}. Now?", 1),
        (
            {
                f"{LONG}. Now?": NEWS,
                f"{LONG}.": TASK,
                "Now?": TASK,
                "… Now?": TASK,
                "…": TASK,
                f"{LONG}?": TASK,
            },
            f"{LONG}. Now?",
            0,
        ),
        # Whether a fact is known is decided by the request as a whole.
        ({"Hi Who": KNOWN, "Hi": TASK, "Who": UNKNOWN}, "Hi\nWho", 0),
        ({"Hi Who": UNKNOWN, "Hi": TASK, "Who": KNOWN}, "Hi\nWho", 1),
        # Among too many questions the one that needs it is not found.
        ({"Why? " * 7 + "How?": TASK, "Why?": TASK, "How?": TASK}, "Why? " * 7 + "How?", 0),
        ({"Why? " * 8 + "How?": TASK, "Why?": TASK, "How?": TASK}, "Why? " * 8 + "How?", 1),
        ({"为什么？ " * 8 + "谁？": TASK, "为什么？": TASK, "谁？": TASK}, "为什么？" * 8 + "谁？", 1),
    ],
)
def test_what_segments_need(decide, states, question, retrieves):
    assert decide(states, question).retrieve == bool(retrieves)


def test_the_reason_and_the_signals_are_those_of_the_segment_that_decides(decide):
    states = {"Thanks! Is it raining": TASK, "Thanks!": TASK, "Is it raining": NEWS}
    found = decide(states, "Thanks!\nIs it raining")
    assert found.reason.startswith("“Is it raining” asks about something that changes with time")
    assert found.signals == pytest.approx(
        dict(zip(("task", "fact", "news"), softmax(*NEWS[:3]), strict=True))
    )


def test_a_message_that_follows_others_retrieves_unless_it_is_clear(decide):
    states = {"Hi": TASK, "And now": NEWS, "Thanks": TASK, "So": (1, 0, 0, 0.5)}
    found = decide(states, ["Thanks", "And now", "So"], ["user: Hi", "assistant: Hello."], threshold=0.6)
    assert [each.retrieve for each in found] == [False, True, True]
    needless, _, unclear = found
    assert (needless.override, unclear.p_known > 0.6) == (None, True)
    assert unclear.override.reason == "Follow-up that may need the earlier turns."
    assert unclear.reason.startswith(f"{unclear.override.reason} The question ")


def test_romanised_text_retrieves_unless_it_is_clear(decide):
    romanised = replace(HEADS, romanised=replace(HEADS.romanised, bias=1.0))
    states = {"Thanks": TASK, "So": (1, 0, 0, 0.5)}
    assert not decide(states, "So", threshold=0.6).retrieve
    needless, unclear = decide(states, ["Thanks", "So"], heads=romanised, threshold=0.6)
    assert (needless.retrieve, unclear.retrieve, unclear.p_known > 0.6) == (False, True, True)
    assert unclear.override.reason == "Romanised text, which the gate understands less well."


def test_an_own_matter_retrieves_whatever_p_known(decide):
    other, own, news = HEADS.own_matters.kinds
    named = replace(
        HEADS, own_matters=replace(HEADS.own_matters, kinds=(other, replace(own, bias=1.0), news))
    )
    decision = decide(TASK, heads=named)
    assert (decision.retrieve, decision.p_known > decision.threshold) == (True, True)
    assert decision.override.reason == "The question names a source."
    assert not decide(TASK).retrieve


@pytest.mark.parametrize("places", [[0], [1], [2], [1, 2]])
def test_an_own_matter_is_found_in_any_segment(places):
    head = HEADS.own_matters
    weights = np.pad(np.eye(1, 4, dtype=np.float32), [(0, 0), (0, LAYOUT)])
    heads = replace(HEADS, own_matters=replace(head, hidden=weights, output=np.float32([[0], [1], [9]])))
    segments = np.zeros((3, 2, 4), np.float32)  # more layers than the head reads
    assert heads.find_own_matter(np.zeros((1, 4)), segments) is None
    segments[:, 1] = 1
    assert heads.find_own_matter(np.zeros((1, 4)), segments) is None
    segments[places, 0] = 1
    own = HEADS.own_matters.kinds[1]
    assert heads.find_own_matter(np.zeros((1, 4)), segments) == (own, places[0])
    assert heads.find_own_matter(np.full((1, 4), 2), segments) == (own, None)
    assert heads.find_own_matter(np.ones((1, 4)), segments[:1]) == (own, None)


def test_one_segment_alone_is_judged_with_a_correction(decide):
    """The last kind of the head for own matters is added to the logit of the same kind of the head for segments."""
    other, own, news = HEADS.own_matters.kinds
    own_matters = replace(HEADS.own_matters, kinds=(other, own, replace(news, bias=19.0)))
    corrected = replace(HEADS, own_matters=own_matters)
    assert decide(TASK, heads=corrected).retrieve
    assert decide(TASK, heads=corrected).override is None
    several = {"Thanks. Bye.": TASK, "Thanks.": TASK, "Bye.": TASK}
    assert not decide(several, "Thanks. Bye.", heads=corrected).retrieve
    with pytest.raises(ValueError, match="the last kind of own_matters is not one of segments"):
        replace(HEADS, own_matters=replace(own_matters, kinds=(news, other, own)))


def test_a_segment_has_the_same_numbers_in_any_batch():
    rng = np.random.default_rng(0)
    shapes = {"hidden": (40, 2 * 6 + LAYOUT), "hidden_bias": (40,), "output": (3, 40)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    head = replace(SEGMENTS, layers=LAYERS, **weights)
    states = rng.normal(size=(50, 2, 6)).astype(np.float32)
    layout = rng.normal(size=(50, LAYOUT)).astype(np.float32)
    together = head.logits(states, layout)
    for some in (slice(0, 1), slice(7, 8), slice(3, 30)):
        assert np.array_equal(head.logits(states[some], layout[some]), together[some])


class LayeredStates(ScriptedProxy):
    """A proxy whose first layer says that a request needs nothing, and its second that it is about news."""

    read = frozenset()

    def hidden(self, prompt, values, drafts, layers):
        self.read |= {layer for layer, _, _ in layers}
        states = np.array([{1: TASK, 2: NEWS}[layer] for layer, _, _ in layers], np.float32)
        return [HiddenStates(states, 3)] * len(values)


def test_further_layers_are_read_only_of_segments_in_context(tmp_path):
    in_context, together = (replace(head, layers=LAYERS[1:]) for head in (SEGMENTS, HEADS.together))
    heads = replace(HEADS, in_context=in_context, together=together)
    proxy = LayeredStates()
    gate = load_gate(str(save_gate(heads, tmp_path / "g")), proxy=proxy, on_error="raise")
    alone = gate.decide("Q?")
    assert (proxy.read, alone.signals["task"]) == ({1}, pytest.approx(softmax(*TASK[:3])[0]))
    again, beside, behind = gate.decide_batch(["Q?", "Q! R?", Request("Q?", ["user: R!"])])
    assert again.signals == alone.signals
    for decision in (beside, behind):
        mean = softmax(*np.mean([TASK[:3], NEWS[:3]], axis=0))
        assert decision.signals["task"] == pytest.approx(mean[0])


OTHER_KINDS = {"kinds": KINDS[:2], "output": SEGMENTS.output[:2]}, {"kinds": KINDS[::-1]}


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        *(("in_context", other, "different kinds") for other in OTHER_KINDS),
        *(("together", other, "different kinds") for other in OTHER_KINDS),
        ("together", {"layers": LAYERS[1:]}, "different layers"),
    ],
)
def test_heads_for_other_kinds_or_layers_in_context_are_refused(name, other, said):
    with pytest.raises(ValueError, match=said):
        replace(HEADS, **{name: replace(getattr(HEADS, name), **other)})


def test_segments_attend_to_each_other_by_the_formula():
    rng = np.random.default_rng(0)
    names = ("attention", "attention_bias", "distances", "joint", "joint_bias")
    random = {name: rng.normal(size=getattr(TOGETHER, name).shape).astype(np.float32) for name in names}
    head = replace(TOGETHER, **random)
    states, layout = rng.normal(size=(5, 1, 4)), np.zeros((5, LAYOUT))
    hidden = np.maximum(np.hstack([states[:, 0], layout]) @ head.hidden.T, 0)
    queries, keys, values = np.split(hidden @ head.attention.T + head.attention_bias, 3, axis=1)
    attended = np.zeros((5, 8))
    for number, part in enumerate((slice(0, 4), slice(4, 8))):
        for row in range(5):
            distances = np.clip(np.arange(5) - row, -1, 1) + 1
            scores = keys[:, part] @ queries[row, part] / math.sqrt(4) + head.distances[number, distances]
            attended[row, part] = softmax(*scores) @ values[:, part]
    joint = np.maximum(np.hstack([hidden, attended]) @ head.joint.T + head.joint_bias, 0)
    np.testing.assert_allclose(head.logits(states, layout), joint @ head.output.T, rtol=1e-4, atol=1e-4)


# --- the reader ----------------------------------------------------------------------------------------------


class Reader(FixedStates):
    """The model of the facts, which fails for one question, or cannot be loaded; it counts what it reads."""

    def __init__(self, fails_for="", states=KNOWN):
        super().__init__(states)
        self.read, self.fails_for = [], fails_for

    def hidden(self, prompt, values, drafts, layers):
        self.read += [each["question"] for each in values]
        self._called("hidden", values)
        if self.fails_for is None:
            raise ModelLoadError("no reader")
        return [HiddenStates(np.array([self.states["q"]], np.float32), 3) for _ in values]


@pytest.fixture
def with_reader(tmp_path, monkeypatch):
    """Decides about requests with a reader of the facts, beside the model of the kinds."""

    def with_reader(reader, states, english_bias=1.0, only=None, **parameters):
        monkeypatch.setattr(decision_engine, "gate_proxy", {"reader": reader}.__getitem__)
        heads = replace(
            HEADS,
            facts=replace(FACTS, base_model="reader"),
            english=replace(HEADS.english, bias=english_bias),
        )
        gate = load_gate(str(save_gate(heads, tmp_path / "g")), proxy=FixedStates(states), **parameters)
        return gate.decide_batch([only] if only else list(states))

    return with_reader


def test_the_reader_looks_closer_only_at_facts_that_may_be_skipped(with_reader):
    reader = Reader()
    asked = {
        "Thanks": TASK,
        "Is it due": NEWS,
        "Who was his barber": UNKNOWN,
        "Who wrote Hamlet": (0, 9, 0, -0.5),
    }
    thanks, private, unknown, fact = with_reader(reader, asked)
    assert reader.read == ["Who wrote Hamlet"]
    assert [each.cost.model_calls for each in (thanks, private, unknown, fact)] == [1, 1, 1, 2]
    assert [each.retrieve for each in (thanks, private, unknown, fact)] == [False, True, True, False]
    assert unknown.signals["known"] == pytest.approx(sigmoid(-3))
    assert fact.signals["known"] == pytest.approx(sigmoid(3))
    assert not {"known"} & {*thanks.signals, *private.signals}


@pytest.mark.parametrize(
    ("threshold", "margin", "read"), [(0.5, 1.0, 0), (0.1, 1.0, 1), (0.5, 4.0, 1), (0, 4.0, 0)]
)
def test_what_may_be_skipped_depends_on_threshold_and_margin(with_reader, threshold, margin, read):
    reader = Reader()
    with_reader(reader, {"Who was his barber": UNKNOWN}, threshold=threshold, margin=margin)
    assert len(reader.read) == read


def test_the_first_look_decides_about_facts_in_other_languages_where_llms_know_less(with_reader):
    reader = Reader()
    known, unknown = with_reader(reader, {"Кто это": KNOWN, "Что это": UNKNOWN}, english_bias=-1.0)
    assert (reader.read, known.retrieve, unknown.retrieve) == ([], False, True)
    assert known.signals["known"] == pytest.approx(sigmoid(3 - 0.4 * FACTS.ability_slope))


@pytest.mark.parametrize(
    ("reader", "error", "spares_others"),
    [
        (Reader(fails_for=None), "ModelLoadError", False),
        (Reader(fails_for="Who wrote Hamlet"), "RuntimeError", True),
        (Reader(states=(0, 0, 0)), "ValueError", False),
        (Reader(states=(math.nan, 0, 0, 0)), "ScoreError", False),
    ],
)
def test_where_the_reader_fails_only_facts_retrieve(with_reader, reader, error, spares_others):
    asked = {"Thanks": TASK, "Who wrote Hamlet": KNOWN, "Who wrote Faust": KNOWN}
    thanks, hamlet, faust = with_reader(reader, asked)
    assert (thanks.retrieve, thanks.error) == (False, None)
    assert (hamlet.retrieve, hamlet.error.type) == (True, error)
    assert (faust.retrieve, faust.error is None) == (not spares_others, spares_others)


def test_a_request_close_to_the_threshold_is_of_the_kind_that_both_models_see(with_reader):
    reader = Reader(states=NEWS)
    decision, far = with_reader(reader, {"What is due": (1, 0, 0, 0), "Thanks": TASK})
    assert (reader.read, decision.retrieve, far.retrieve) == (["What is due"], True, False)
    both = softmax(*((first + closer) / 2 for first, closer in zip((1, 0, 0), NEWS[:3], strict=True)))
    assert decision.signals == pytest.approx(dict(zip(("task", "fact", "news"), both, strict=True)))
    assert decision.reason == "The question asks about something that changes with time (probability 0.97)."


@pytest.mark.parametrize(
    ("asked", "state", "english_bias", "threshold"),
    [
        ("We are two. We are here.", NEAR, 1.0, 0.5),
        ("What is due", NEAR, -1.0, 0.5),
        ("What is due", NEAR, 1.0, 0.0),
        ("What is due", NEAR, 1.0, 1.5),
        ("Who was his barber", (0, 9, 0, -1.5), 1.0, 0.5),  # it too is close to the threshold, in logits
    ],
    ids=[
        "several segments",
        "another language",
        "never retrieves",
        "always retrieves",
        "a fact hardly known",
    ],
)
def test_the_reader_has_no_say_about_other_requests(with_reader, asked, state, english_bias, threshold):
    reader = Reader(states=NEWS)
    states = dict.fromkeys((asked, "We are two.", "We are here."), state)
    with_reader(reader, states, english_bias=english_bias, threshold=threshold, only=asked)
    assert reader.read == []


# --- follow-ups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "before", "retrieves"),
    [
        ("Yes", ["user: Hi", "assistant: Sure. Is it raining?"], True),
        ("Yes, since I have to leave soon", ["user: Hi", "assistant: Sure. Is it raining?"], True),
        ("Yes", ["user: Hi", "assistant: Is it raining? It is."], False),
        ("Yes", ["assistant: Hi", "user: Is it raining?"], True),
        ("Yes", ["assistant: Is it raining?", "assistant: It is."], False),
    ],
)
def test_a_reply_is_judged_with_the_question_that_it_answers(decide, message, before, retrieves):
    states = {"Hi": TASK, message: TASK, f"Is it raining? {message}": TASK, "Is it raining?": NEWS}
    found = decide(states, message, before)
    assert (found.retrieve, found.question) == (retrieves, message)
    assert ("“Is it raining?”" in found.reason) == retrieves


@pytest.mark.parametrize(("theta", "counts_as"), [(-3.0, -3.0), (0.0, 0.0), (3.0, 0.0)])
def test_of_news_an_able_llm_knows_no_more_than_the_default_one(decide, theta, counts_as):
    heads = replace(HEADS, facts=replace(FACTS, news=Detector(NUMBERS[2:3], -2.0)))
    options = {"heads": heads, "ability": Ability("x", theta, 0.0, "a test")}
    news, fact = decide((0, 9, 3, -1), **options), decide(UNSURE, **options)
    assert news.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * counts_as))
    assert fact.signals["known"] == pytest.approx(sigmoid(-1 + 0.5 * theta))
    assert [("may be news" in each.reason) for each in (news, fact)] == [theta > 0, False]


OTHER_THREADS = """
import time
import numpy as np
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.gates.folder import read_gate
heads = read_gate("default")
states, layout = np.ones((1, 4, 384), np.float32), np.ones((1, 11), np.float32)
own, all_threads = time.thread_time(), time.process_time()
for _ in range(300):
    for head in (heads.segments, heads.in_context, heads.together):
        head.logits(states, layout)
own, all_threads = time.thread_time() - own, time.process_time() - all_threads
print(all_threads / own)
"""


@pytest.mark.skipif(not hasattr(np, "vecdot"), reason="needs NumPy 2")
def test_no_other_thread_spins_after_the_heads_have_judged():
    """Regression: BLAS shared the product, and its threads went on spinning: twice the CPU time of a decision."""
    done = subprocess.run([sys.executable, "-c", OTHER_THREADS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3


def test_gates_share_the_shipped_weights():
    """Regression: an application that loads a gate for each request grew by 11 MB a request."""
    first, second = load_gate(), load_gate(llm_name="gpt-4o")
    assert first.gate.trained.segments.hidden is second.gate.trained.segments.hidden
