"""What every router promises, in both frameworks: answer first, look first, and both together."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from langchain_core.runnables import RunnableGenerator

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.partial_answer import MAX_SILENT_CHUNKS
from rgate_integrations.decision import Cost, Override
from rgate_integrations.engine.loading import DEFAULT_GATES, OWN, answer_first_gates, resolve_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate
from tests.begun_answers import (
    COVERED,
    KNOWN,
    LOOK,
    TEXT,
    UNSURE,
    Broken,
    Librarian,
    Reader,
    Shelf,
    Stuck,
    nothing_left,
)
from tests.patience import PATIENCE
from tests.routed import SIDES, LangChain, LlamaIndex, reading

HELD, NOT_HELD = "who wrote the Zorba quartet", "the weather"
HELD_UNKNOWN = "who wrote the unknown Zorba quartet"
ABSTAINS = LookFirst(model=COVERED, on_abstain="direct")


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
    info = routed.decision["partial_answer"]
    assert (info["tokens_held"], info["tokens_dropped"]) == (4, 0)
    assert info["first_token"] >= info["judging"] >= 0
    assert TEXT in routed.ask("an unknown one?")
    assert (len(routed.writer.calls), routed.writer.ended) == (2, ["whole", "closed"])
    info = routed.decision["partial_answer"]
    assert (info["tokens_held"], info["tokens_dropped"], info["first_token"]) == (4, 4, None)
    drafts = [(draft.text, draft.finished, draft.source) for (draft,) in routed.judge.drafts]
    assert drafts == [("It is surely the", False, "llm"), ("Perhaps it is this", False, "llm")]


def test_an_answer_that_ends_early_is_judged_whole(side):
    routed = side(tokens=99)
    assert routed.ask("a known one?") == KNOWN
    assert TEXT in routed.ask("an unknown one?")
    assert [(d.text, d.finished) for (d,) in routed.judge.drafts] == [(KNOWN, True), (UNSURE, True)]


@pytest.mark.parametrize(
    ("question", "text", "judged", "searched"),
    [
        ("hopeless", TEXT, False, True),
        ("RAISE", TEXT, False, True),
        ("open", KNOWN, True, None),  # it may be searched for, or not yet
        ("open, unknown", TEXT, True, True),
        ("unknown, or easy", UNSURE, False, False),
        ("unknown, or narrow", TEXT, True, True),
        ("broken", KNOWN, True, None),
    ],
)
def test_a_clear_question_is_settled_early_and_the_others_are_searched_for_meanwhile(
    side, question, text, judged, searched
):
    scores = {"hopeless": 0.05, "open": 0.3, "unknown, or easy": 0.96, "unknown, or narrow": 0.94}
    routed = side(scores=scores, answer_above=0.95, prefetch=True)
    assert text in routed.ask(question)
    assert routed.judge.calls == [[question]] * judged
    assert routed.decision["partial_answer"]["tokens_held"] == 4 * judged
    assert len(routed.writer.calls) == (judged or text != TEXT)
    if searched is not None:
        assert routed.shelf.queries == [question] * searched


BROKEN = {"look": LOOK, "scores": {"a broken one": 0.05}}


@pytest.mark.parametrize(
    ("options", "question", "said"),
    [
        ({"scores": {"easy": 0.96}, "fails_at": 0}, "easy", "connection lost"),  # it runs as without a gate
        ({"fails_at": 6}, "a known one?", "connection lost"),
        ({"look": LOOK, "scores": {}, "fails_at": 2}, NOT_HELD, "connection lost"),  # nothing else helps
        # Where the gate says retrieve.
        ({"prefetch": True}, "broken and unknown", "index gone"),
        (BROKEN, "broken unknown", "index gone"),
        (BROKEN, "a broken one", "index gone"),
    ],
)
def test_errors_of_the_arms_are_the_callers(side, options, question, said):
    with pytest.raises(OSError, match=said):
        side(**options).ask(question)


def test_the_threshold_of_a_call_holds_for_both_gates(framework):
    routed = framework(scores={"hopeless": 0.05, "open": 0.3, "easy": 0.92})
    assert routed.ask("hopeless", threshold=0.0) == KNOWN
    assert TEXT in routed.ask("open", threshold=0.95)
    assert TEXT in routed.ask("easy", threshold=0.95)


def test_an_answer_of_empty_chunks_is_not_held_without_end():
    def silent(questions):
        yield from chunks

    chunks, judge = iter([""] * 2 * MAX_SILENT_CHUNKS), Reader()
    router = RetrievalGate(judge).route(
        retrieve=str,
        direct=RunnableGenerator(silent),
        answer_first=AnswerFirst(question_gate=None),
    )
    assert router.invoke("what?") == "what?"
    assert len(list(chunks)) == MAX_SILENT_CHUNKS, "no more is asked for"
    assert judge.calls == []


def test_a_decision_has_the_costs_and_warnings_of_both_gates():
    class Costly(Reader):
        def _decision(self, *given):
            costs = {"cost": Cost(model_calls=1), "warnings": ("cut",)}
            return super()._decision(*given).model_copy(update=costs)

    routed = LlamaIndex(judge=Costly(), question_gate=Costly())
    for question, calls, dropped in (("a known one?", 2, 0), ("an unknown one?", 3, 4)):
        routed.ask(question)
        cost = routed.decision["cost"]
        assert (cost["model_calls"], cost["tokens_out"]) == (calls, dropped)
        assert list(routed.decision["warnings"]) == ["cut"]


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
    assert routed.writer.calls == routed.judge.calls == []
    assert TEXT in framework().ask("And where was he born?")


def test_log_probabilities_are_captured_and_what_the_llm_says_that_it_has_read(side):
    routed = side()
    assert routed.ask("a known one?") == KNOWN
    ((draft,),) = routed.judge.drafts
    assert [token.strip() for token in draft.tokens] == ["It", "is", "surely", "the"]
    assert (draft.logprobs, draft.prompt_tokens) == ((0.0, -0.25, -0.5, -0.75), 17)
    assert [sorted(options) for options in routed.writer.calls] == [["logprobs"]]
    assert routed.writer.logprobs is None, "the user's own stays unchanged"


@pytest.mark.parametrize(
    ("error", "times", "known", "calls", "without"),
    [
        (ValueError("unknown parameter logprobs"), 1, [True, True], [["logprobs"], [], []], [True, True]),
        # Regression: a status 400 about one prompt turned log-probabilities off for good.
        (
            ValueError("400: unsupported length of the prompt"),
            2,
            [False, True],
            [["logprobs"], [], ["logprobs"]],
            [False],
        ),
    ],
    ids=["log-probabilities", "a prompt in either form"],
)
def test_what_an_llm_refuses_is_asked_for_no_more_but_a_refused_prompt_changes_nothing(
    side, error, times, known, calls, without
):
    routed = side(writer={"fails": Mock(side_effect=[*[error] * times, None, None])})
    assert [routed.ask("a known one?") == KNOWN for _ in range(2)] == known
    assert [sorted(options) for options in routed.writer.calls] == calls
    assert [draft.logprobs is None for (draft,) in routed.judge.drafts] == without


async def test_callers_write_side_by_side_and_those_who_are_cancelled_leave_nothing_behind(framework):
    stuck, kinds = Stuck(), ["known", "unknown"]
    routed = framework(writer={"pace": stuck})
    found = await stuck.leave([routed.aask(f"{kinds[n % 2]} {n}") for n in range(100)], leaving=20)
    assert [each == KNOWN for each in found] == [n % 2 == 0 for n in range(20, 100)]
    assert await nothing_left(lambda: len(routed.writer.ended) == 100)
    assert routed.writer.ended.count("whole") == 40


def test_no_other_gate_screens_questions_for_one_of_the_users_own(framework):
    routed = framework(question_gate=OWN)
    assert routed.ask("a known one?") == KNOWN
    assert [draft.text for (draft,) in routed.judge.drafts] == ["It is surely the"]


@pytest.mark.parametrize("options", [{}, {"threshold": 0.4, "on_error": "raise", "timeout": 9.0}])
def test_a_gate_that_reads_the_question_leaves_begun_answers_to_the_one_that_belongs_to_it(options):
    gate = load_gate(**options)
    judge, question_gate = answer_first_gates(gate)
    assert (judge.gate.question.artifact, judge.gate.answer.artifact) == ("default", "default-answer")
    threshold = options.get("threshold", load_gate(DEFAULT_GATES["llm"]).threshold)
    assert (judge.threshold, judge.on_error, judge.timeout) == (threshold, gate.on_error, gate.timeout)
    assert (question_gate.threshold, question_gate.gate.artifact) == (gate.threshold, gate.gate.artifact)


# A gate of the user's own that takes no drafts.
QUESTIONS_ONLY = SimpleNamespace(decide_batch=lambda questions: [], adecide_batch=lambda questions: [])


@pytest.mark.parametrize(
    "gate", ["prompt", load_gate("prompt").gate, QUESTIONS_ONLY], ids=["a name", "a Gate", "own"]
)
def test_a_gate_that_cannot_see_an_answer_is_refused_and_the_remedy_holds(framework, gate):
    with pytest.raises(ConfigurationError, match=r"cannot judge a partial answer.* Hint: .*question_gate="):
        framework(judge=gate, question_gate=OWN)
    assert answer_first_gates(resolve_gate(), gate)[0].name == "answer"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("answer_first", {"tokens": 8}),
        ("answer_first", LookFirst()),
        ("answer_first", None),
        ("look_first", "yes"),
        ("look_first", AnswerFirst),
    ],
)
def test_options_that_are_none_are_refused_and_not_taken_as_true(argument, value):
    said = f"{argument}= must be True, False or .*, not {type(value).__name__}.*{argument}=True"
    with pytest.raises(ConfigurationError, match=said):
        RetrievalGate(Reader()).route(retrieve=reading(Shelf()), direct=str, **{argument: value})


# --- look first, and both --------------------------------------------------------------------------------------

LIKELY, ALONE = {"scores": {}}, {"answers": False}
COLD = {"scores": {"cold weather": 0.05}}


@pytest.mark.parametrize(
    ("options", "question", "text", "outcome", "p_known", "ended", "judged"),
    [
        # The partial answer is compared with the passages.
        (LIKELY, HELD, KNOWN, "direct", 0.9, ["whole"], 1),
        (LIKELY, HELD_UNKNOWN, TEXT, "retrieve", 0.2, ["closed"], 1),
        # Without a gate that screens, every answer starts.
        ({}, "unknownish weather", UNSURE, "direct", 0.2, ["whole"], 1),
        # If no passage helps, or the question is clearly unknown, the question settles it.
        (LIKELY, "unknownish weather", UNSURE, "direct", 0.5, ["whole"], 0),
        ({"scores": {"poor weather": 0.12}}, "poor weather", KNOWN, "direct", 0.12, ["whole"], 0),
        ({"scores": {"the Zorba quartet": 0.05}}, "the Zorba quartet", TEXT, "retrieve", 0.05, [], 0),
        (LIKELY, "Who is he?", TEXT, None, 0.5, [], 0),  # it refers back: what was found is read
        # Where neither is likely, the option chooses.
        (COLD, "cold weather", TEXT, "abstain", 0.05, [], 0),
        (COLD | {"look": ABSTAINS}, "cold weather", KNOWN, "abstain", 0.05, ["whole"], 0),
        # Without answer first the gate alone would skip, and one that fails reads what was found.
        (ALONE, HELD, TEXT, "retrieve", 0.5, [], 1),
        (ALONE, "RAISE weather", TEXT, None, 0.0, [], 1),
    ],
)
def test_what_the_llm_knows_and_what_was_found_are_compared(
    side, options, question, text, outcome, p_known, ended, judged
):
    routed = side(**({"look": LOOK} | options))
    assert text in routed.ask(question)
    said = routed.decision
    assert (said["outcome"], said["p_known"], said["retrieve"]) == (outcome, p_known, text == TEXT)
    assert (routed.writer.ended, len(routed.judge.calls)) == (ended, judged)
    assert routed.shelf.queries == [question]  # it is not searched again


@pytest.mark.parametrize("answers", [False, True], ids=["look first", "both"])
@pytest.mark.parametrize(
    ("question", "error"),
    [("broken, yet fine", "failed (TimeoutError)"), ("empty, yet fine", "found nothing")],
)
def test_a_search_that_fails_or_finds_nothing_leaves_it_to_the_gate(side, answers, question, error):
    # Passages could help more than what the LLM knows.
    look = LookFirst(model=COVERED.model_copy(update={"reading": 1.0}))
    routed = side(look=look, answers=answers)
    assert KNOWN in routed.ask(question)
    assert (routed.decision["outcome"], routed.decision["retrieve"]) == (None, False)
    (warning,) = routed.decision["warnings"]
    assert error in warning


class Ruled(Reader):
    """A rule of its own decides about questions with "by rule" in them."""

    def _decision(self, request, draft=None):
        retrieve = "unknown" in request.question
        rule = Override(retrieve=retrieve, reason="A rule.")
        decision = super()._decision(request, draft)
        return decision.with_retrieve(retrieve, override=rule) if "by rule" in request.question else decision


RULES = {
    "look first": {"judge": Ruled, "answers": False},
    "both, screened": {"question_gate": Ruled()},
    "both": {"judge": Ruled},
}


@pytest.mark.parametrize("options", RULES.values(), ids=list(RULES))
def test_what_no_passage_can_change_does_not_wait_for_them(framework, monkeypatch, options):
    """Regression: a question that a rule decides waited for a search whose result was ignored."""
    searched = threading.Event()

    def search(*arguments, **options):
        searched.wait(PATIENCE)
        searched.set()
        return []

    routed = framework(look=LOOK, **options)
    name = "_retrieve" if framework is LlamaIndex else "_get_relevant_documents"
    monkeypatch.setattr(type(routed.shelf), name, search)
    assert routed.ask(f"{NOT_HELD}, by rule") == KNOWN
    assert not searched.is_set()
    searched.set()
    assert (routed.decision["override"]["retrieve"], routed.decision["p_helps"]) == (False, None)


@pytest.mark.parametrize("look", [None, LOOK], ids=["answer first", "both"])
def test_no_answer_is_begun_at_a_threshold_that_always_retrieves(framework, look):
    """Regression: the LLM began an answer, which was dropped; or useless passages sent the question to the LLM."""
    routed = framework(look=look, scores={NOT_HELD: 0.99})
    assert TEXT in routed.ask(NOT_HELD, threshold=1.1)
    assert routed.writer.calls == []


@pytest.mark.parametrize("options", RULES.values(), ids=list(RULES))
def test_what_a_rule_sends_to_the_retrieve_arm_is_searched_once(side, options):
    routed = side(look=LOOK, **options)
    assert TEXT in routed.ask("unknown, by rule")
    assert routed.shelf.queries == ["unknown, by rule"]
    with pytest.raises(OSError, match="index gone"):
        routed.ask("broken unknown, by rule")
    assert routed.decision["override"]["retrieve"]


@pytest.mark.parametrize("options", RULES.values(), ids=list(RULES))
def test_in_a_batch_the_others_are_compared(options):
    routed = LangChain(look=LOOK, **options)
    asked = [f"{NOT_HELD}, by rule", HELD_UNKNOWN, "unknown, by rule", f"{HELD}, by rule"]
    found = [answer.strip() for answer in routed.router.batch(asked)]
    assert found == [KNOWN, f"<{TEXT}>", f"<{TEXT}>", KNOWN]
    assert sorted(routed.shelf.queries) == sorted(asked)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fails_at": 2}, "OSError"),
        ({"fails_at": 2, "look": LOOK, "scores": {}}, "OSError"),
        ({"judge": Broken, "look": LOOK, "scores": {}}, "RuntimeError"),
    ],
)
def test_an_llm_that_fails_before_it_is_judged_or_a_judge_that_fails_retrieves_once(side, options, error):
    routed = side(**options)
    assert TEXT in routed.ask(HELD)
    assert routed.decision["error"]["type"] == error
    assert routed.shelf.queries == [HELD]


@pytest.mark.parametrize("answers", [False, True], ids=["look first", "both"])
def test_a_threshold_that_is_given_is_enough_whatever_was_found(framework, answers):
    routed = framework(look=LOOK, answers=answers, scores={} if answers else None)
    assert TEXT not in routed.ask(HELD_UNKNOWN, threshold=0.1)
    assert (routed.decision["outcome"], routed.decision["threshold"]) == ("direct", 0.1)
    assert TEXT in routed.ask(HELD_UNKNOWN)


# --- several corpora -----------------------------------------------------------------------------------------------

WAYS = {
    "question alone": {"answers": False},
    "look first": {"answers": False, "look": LOOK},
    "answer first": {},
    "prefetch": {"prefetch": True, "scores": {}},
    "both": {"look": LOOK},
    "both, screened": {"look": LOOK, "scores": {}},
}
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))


@pytest.mark.parametrize(("asked", "named"), [("docs", "docs"), ("hr, then docs", "hr"), ("others", "web")])
@every_way
def test_the_corpus_that_the_decision_names_is_searched_once_and_no_other(side, options, asked, named):
    question = f"who wrote the unknown Zorba quartet, by {asked}"
    judge = Librarian({question: 0.2})
    routed = side(judge=judge, names=Librarian.corpora, **options)
    assert f"{TEXT} {named}" in routed.ask(question)
    searched = [name for name in Librarian.corpora if name in asked] or [named]
    if isinstance(routed, LangChain):  # one chain answers
        searched = [named]
    assert routed.queries == {name: [question] * (name in searched) for name in Librarian.corpora}
    assert (routed.decision["corpus"], routed.decision["corpora"][0]) == (named, named)


@every_way
def test_what_the_llm_knows_names_no_corpus(side, options):
    question = "the weather, by docs"
    routed = side(judge=Librarian({question: 0.95}), names=Librarian.corpora, **options)
    assert KNOWN in routed.ask(question)
    assert (routed.decision["retrieve"], routed.decision["corpus"]) == (False, None)
    assert routed.queries["hr"] == routed.queries["web"] == []


@every_way
def test_where_the_gate_fails_the_first_chain_or_every_retriever_searches(side, options):
    routed = side(judge=Librarian, names=Librarian.corpora, **options)
    assert f"{TEXT} docs" in routed.ask("RAISE unknown, by hr")
    asked = [name for name, queries in routed.queries.items() if queries]
    assert asked == (["docs"] if isinstance(routed, LangChain) else list(Librarian.corpora))
    assert routed.decision["error"]["message"] == "gate down"


class BrokenLibrarian(Librarian):
    """Knows where to search, but fails for every draft."""

    def p_known(self, question, draft):
        return 1 / 0 if draft else 0.5


def test_a_judge_that_fails_searches_where_the_question_gate_says(side):
    """Regression: the first chain or every retriever searched, although the first decision had named a corpus."""
    question = "who wrote the Zorba quartet, by hr"
    routed = side(judge=BrokenLibrarian(), question_gate=BrokenLibrarian(), names=Librarian.corpora)
    assert f"{TEXT} hr" in routed.ask(question)
    assert routed.queries == {"docs": [], "hr": [question], "web": []}
    assert (routed.decision["corpus"], routed.decision["error"]["type"]) == ("hr", "ZeroDivisionError")
