"""What every router promises, in both frameworks: answer first, look first, and both together."""

import pytest

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.engine.gate_like import answer_first_gates
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.errors import ConfigurationError
from tests.begun_answers import COVERED, KNOWN, LOOK, TEXT, UNSURE, Broken, Reader
from tests.routed import SIDES, LangChain, LlamaIndex

HELD, NOT_HELD = "who wrote the Zorba quartet", "the weather"
HELD_UNKNOWN = "who wrote the unknown Zorba quartet"


@pytest.fixture(params=SIDES, ids=lambda side: side.__name__)
def side(request):
    return request.param


@pytest.fixture(params=[LangChain, LlamaIndex], ids=lambda side: side.__name__)
def framework(request):
    return request.param


# --- answer first --------------------------------------------------------------------------------------------


def test_a_known_answer_goes_on_and_an_unknown_one_is_stopped(side):
    routed = side()
    assert routed.ask("a known one?") == KNOWN
    assert routed.writer.ended == ["whole"]
    told = routed.decision["partial_answer"]
    assert (told["tokens_held"], told["tokens_dropped"]) == (4, 0)
    assert told["first_token"] >= told["judging"] >= 0
    assert TEXT in routed.ask("an unknown one?")
    assert (len(routed.writer.calls), routed.writer.ended) == (2, ["whole", "closed"])
    told = routed.decision["partial_answer"]
    assert (told["tokens_held"], told["tokens_dropped"], told["first_token"]) == (4, 4, None)
    drafts = [(draft.text, draft.finished, draft.source) for (draft,) in routed.judge.drafts]
    assert drafts == [("It is surely the", False, "llm"), ("Perhaps it is this", False, "llm")]


def test_an_answer_that_ends_early_is_judged_whole(side):
    routed = side(tokens=99)
    assert routed.ask("a known one?") == KNOWN
    assert TEXT in routed.ask("an unknown one?")
    assert [(d.text, d.finished) for (d,) in routed.judge.drafts] == [(KNOWN, True), (UNSURE, True)]


def test_a_question_that_is_clearly_unknown_spares_the_llm(side):
    routed = side(scores={"hopeless": 0.05, "open": 0.3})
    assert TEXT in routed.ask("hopeless")
    assert TEXT in routed.ask("RAISE")
    assert routed.writer.calls == []
    assert routed.ask("open") == KNOWN
    assert routed.judge.calls == [["open"]]


def test_an_answer_to_what_is_clearly_known_is_not_judged(side):
    routed = side(scores={"unknown, or easy?": 0.9})
    assert routed.ask("unknown, or easy?") == UNSURE
    assert (routed.judge.calls, routed.decision["partial_answer"]["tokens_held"]) == ([], 0)
    with pytest.raises(OSError, match="connection lost"):  # the arm runs as without a gate
        side(scores={"unknown, or easy?": 0.9}, fails_at=0).ask("unknown, or easy?")
    narrow = side(scores={"unknown, or easy?": 0.9}, answer_above=0.95)
    assert TEXT in narrow.ask("unknown, or easy?")
    assert narrow.judge.calls == [["unknown, or easy?"]]


def test_the_threshold_of_a_call_holds_for_both_gates(framework):
    routed = framework(scores={"hopeless": 0.05, "open": 0.3, "easy": 0.92})
    assert routed.ask("hopeless", threshold=0.0) == KNOWN
    assert TEXT in routed.ask("open", threshold=0.95)
    assert TEXT in routed.ask("easy", threshold=0.95)


def test_an_llm_that_fails_before_it_is_judged_retrieves_and_later_it_is_the_callers_error(side):
    routed = side(fails_at=2)
    assert TEXT in routed.ask("a known one?")
    assert routed.decision["error"]["type"] == "OSError"
    with pytest.raises(OSError, match="connection lost"):
        side(fails_at=6).ask("a known one?")


def test_a_gate_that_fails_retrieves_or_raises(side):
    routed = side()
    assert TEXT in routed.ask("RAISE")
    routed.judge.on_error = "raise"
    with pytest.raises(RuntimeError, match="gate down"):
        routed.ask("RAISE")
    assert routed.writer.ended == ["closed", "closed"]


def test_a_follow_up_that_the_gate_does_not_read_is_never_answered_first(framework):
    routed = framework(scores={})
    assert TEXT in routed.ask("And where was he born?")
    assert routed.writer.calls == routed.screen.calls == routed.judge.calls == []
    assert TEXT in framework().ask("And where was he born?")


def test_what_is_settled_early_is_not_searched_meanwhile(side):
    routed = side(scores={"easy?": 0.95, "hopeless?": 0.05}, prefetch=True)
    assert routed.ask("easy?") == KNOWN
    assert routed.shelf.queries == []
    assert TEXT in routed.ask("hopeless?")
    assert TEXT in routed.ask("an unknown one?")
    assert routed.shelf.queries == ["hopeless?", "an unknown one?"]


def gates_of(framework, gate, **options):
    """Return the judge and the question gate of a router's strategy, without the framework's wrappers."""
    routed = framework.__new__(framework)
    routed.judge = gate
    routed.make(AnswerFirst(**options), False, None)
    strategy = routed.router.strategy if framework is LangChain else routed.engine.strategy
    return [getattr(gate, "origin", gate) for gate in (strategy.judge, strategy.question_gate)]


def test_the_default_gates_are_those_for_begun_answers(framework):
    judge, question_gate = gates_of(framework, None)
    assert (judge.gate.question.artifact, judge.gate.answer.artifact) == ("default", "default-answer")
    assert question_gate.gate.artifact == "default"


def test_a_gate_of_ones_own_judges_and_no_other_overrules_it(framework):
    own, asked = Reader(), Reader()
    assert gates_of(framework, own) == [own, None]
    assert gates_of(framework, own, question_gate=asked) == [own, asked]


@pytest.mark.parametrize("options", [{}, {"threshold": 0.4, "on_error": "raise", "timeout": 9.0}])
def test_a_gate_that_reads_the_question_leaves_begun_answers_to_the_one_that_belongs_to_it(options):
    gate = load_gate(**options)
    judge, question_gate = answer_first_gates(gate)
    assert judge.gate.name == "answer"
    threshold = options.get("threshold", load_gate(DEFAULT_GATES["llm"]).threshold)
    assert (judge.threshold, judge.on_error, judge.timeout) == (threshold, gate.on_error, gate.timeout)
    assert (question_gate.threshold, question_gate.gate.artifact) == (gate.threshold, gate.gate.artifact)


class QuestionsOnly:
    """A gate of the user's own that takes no drafts."""

    def decide_batch(self, questions):
        return []

    adecide_batch = decide_batch


@pytest.mark.parametrize("gate", ["prompt", QuestionsOnly()], ids=["shipped", "own"])
def test_a_gate_that_cannot_see_an_answer_is_refused_and_the_remedy_holds(framework, gate):
    with pytest.raises(ConfigurationError, match="cannot judge an answer") as caught:
        gates_of(framework, gate)
    assert "question_gate=" in caught.value.hint
    assert gates_of(framework, None, question_gate=gate)[0].gate.name == "answer"


# --- look first ----------------------------------------------------------------------------------------------


def test_passages_that_hold_the_answer_are_read_even_where_the_llm_may_know(side):
    routed = side(answers=False, look=LOOK)
    assert TEXT in routed.ask(HELD)  # P(known) is 0.5: the gate alone would skip
    said = routed.decision
    assert (said["outcome"], said["retrieve"], said["p_known"]) == ("retrieve", True, 0.5)
    assert said["p_helps"] == said["threshold"] == pytest.approx(0.9, abs=0.001)
    assert routed.shelf.queries == [HELD]


@pytest.mark.parametrize("choice", ["retrieve", "direct"])
def test_where_neither_is_likely_the_option_chooses(side, choice):
    look = LookFirst(model=COVERED, on_abstain=choice)
    routed = side(look=look, scores={"cold weather": 0.05})
    assert (TEXT in routed.ask("cold weather")) is (choice == "retrieve")
    assert (routed.decision["outcome"], routed.decision["retrieve"]) == ("abstain", choice == "retrieve")
    assert routed.judge.calls == []


def test_a_gate_that_fails_reads_what_was_found(side):
    routed = side(answers=False, look=LOOK)
    assert TEXT in routed.ask("RAISE weather")
    assert routed.decision["error"]["type"] == "RuntimeError"
    assert routed.shelf.queries == ["RAISE weather"]


# --- both ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "question", "text", "outcome", "p_known", "ended"),
    [
        # What was begun is compared with what was found.
        ({}, HELD, KNOWN, "direct", 0.9, ["whole"]),
        ({}, HELD_UNKNOWN, TEXT, "retrieve", 0.2, ["closed"]),
        # Without a gate that screens, every answer is begun.
        (None, "unknownish weather", UNSURE, "direct", 0.2, ["whole"]),
        # Where no passage helps, the question settles it, and so it does where it is clearly unknown.
        ({}, "unknownish weather", UNSURE, "direct", 0.5, None),
        ({"poor weather": 0.12}, "poor weather", KNOWN, "direct", 0.12, None),
        ({"the Zorba quartet": 0.05}, "the Zorba quartet", TEXT, "retrieve", 0.05, None),
        ({}, "Who is he?", TEXT, None, 0.0, None),  # it refers back: what was found is read
    ],
)
def test_what_was_begun_and_what_was_found_are_compared(
    side, scores, question, text, outcome, p_known, ended
):
    routed = side(look=LOOK, scores=scores)
    assert text in routed.ask(question)
    said = routed.decision
    assert (said["outcome"], said["p_known"], said["retrieve"]) == (outcome, p_known, text == TEXT)
    assert routed.shelf.queries == [question]  # it is not searched again
    if ended is None:
        assert (routed.judge.calls, said["partial_answer"]["tokens_held"]) == ([], 0)
        assert len(routed.writer.calls) == (text != TEXT)
    else:
        assert (routed.writer.ended, len(routed.judge.calls)) == (ended, 1)
        assert said["partial_answer"]["tokens_dropped"] == (4 if text == TEXT else 0)


@pytest.mark.parametrize("answers", [False, True], ids=["look first", "both"])
def test_a_search_that_fails_or_finds_nothing_leaves_it_to_the_gate(side, answers):
    routed = side(look=LOOK, answers=answers, scores={"a broken one": 0.05} if answers else None)
    for question, error in (
        ("broken, yet fine", "failed (TimeoutError)"),
        ("empty, yet fine", "found nothing"),
    ):
        assert KNOWN in routed.ask(question)
        assert (routed.decision["outcome"], routed.decision["retrieve"]) == (None, False)
        (warning,) = routed.decision["warnings"]
        assert error in warning
    if answers:
        assert routed.ask("empty unknown") != UNSURE
        for question in ("broken unknown", "a broken one"):
            with pytest.raises(TimeoutError, match="index gone"):
                routed.ask(question)


def test_a_judge_or_an_llm_that_fails_reads_what_was_found(side):
    for routed in (side(look=LOOK, scores={}, judge=Broken()), side(look=LOOK, scores={}, fails_at=2)):
        assert TEXT in routed.ask(HELD)
        assert routed.decision["error"] is not None
        assert routed.shelf.queries == [HELD]
    with pytest.raises(OSError, match="connection lost"):
        routed.ask(NOT_HELD)  # nothing helps, so it is the caller's


@pytest.mark.parametrize("answers", [False, True], ids=["look first", "both"])
def test_a_threshold_that_is_given_is_enough_whatever_was_found(framework, answers):
    routed = framework(look=LOOK, answers=answers, scores={} if answers else None)
    assert TEXT not in routed.ask(HELD_UNKNOWN, threshold=0.1)
    assert (routed.decision["outcome"], routed.decision["threshold"]) == ("direct", 0.1)
    assert TEXT in routed.ask(HELD_UNKNOWN)


def test_the_default_model_is_shipped(framework):
    routed = framework(answers=False, look=True)
    routed.ask("who wrote the Zorba quartet")
    assert 0 <= routed.decision["p_helps"] <= 1
