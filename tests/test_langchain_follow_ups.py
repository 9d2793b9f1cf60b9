"""LangChain: in a conversation nothing is skipped that the gate did not understand."""

from operator import itemgetter

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    HumanMessageChunk,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.follow_ups import REFERS_BACK, UNREAD
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate, gated_rag
from rgate_integrations.langchain.questions import CONDENSE_FAILED, parse_question
from tests.begun_answers import LOOK
from tests.langchain_fakes import (
    BATCHES,
    EARLIER,
    INVOKES,
    LLM,
    Chat,
    Judge,
    ReadsHistory,
    Search,
    each,
    texts,
)

TURNS = [*EARLIER, HumanMessage("And when?")]
LINES = ("user: Who wrote Hamlet?", "assistant: Shakespeare.")
PAIRS = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare.")]
ROLES = zip(TURNS, ["user", "assistant", "human"], strict=True)
CHUNKS = [HumanMessageChunk("Who wrote Hamlet?"), AIMessageChunk("Shakespeare.")]
DICTS = [{"role": "user", "content": "Who wrote Hamlet?"}, {"role": "assistant", "content": "Shakespeare."}]
FOLLOW_UPS = {
    "messages": TURNS,
    "messages beside it": {"question": "And when?", "messages": TURNS},
    "earlier messages beside it": {"question": "And when?", "messages": EARLIER},
    "a history": {"input": "And when?", "history": EARLIER},
    "a chat history of pairs": {"input": "And when?", "chat_history": PAIRS},
    "a history of what was streamed": {"input": "And when?", "history": CHUNKS},
    "messages with roles": [ChatMessage(content=turn.text, role=role) for turn, role in ROLES],
    "a history of dicts": {"input": "And when?", "history": DICTS},
    "a transcript": {"input": "And when?", "history": "Human: Who wrote Hamlet?\nAI: Shakespeare."},
    "a history of labelled strings": {
        "input": "And when?",
        "history": ["User: Who wrote Hamlet?", "Bot: Shakespeare."],
    },
    "a history of strings": {"input": "And when?", "history": ["Who wrote Hamlet?", "Shakespeare."]},
    # Regression: the keys of a mapping were read as the user's turns.
    "a state beside messages": {"input": "And when?", "messages": DICTS, "history": {"messages": DICTS}},
    "one message, and a state": {
        "input": {"role": "user", "content": "And when?"},
        "history": {"messages": PAIRS},
    },
    "a transcript in a state": {
        "input": "And when?",
        "history": {"messages": "Human: Who wrote Hamlet?\nAI: Shakespeare."},
    },
    "strings in a state": {
        "input": "And when?",
        "history": {"messages": ["Who wrote Hamlet?", "Shakespeare."]},
    },
    "parts of OpenAI's Responses": [
        {"role": "user", "content": [{"type": "input_text", "text": "Who wrote Hamlet?"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": text} for text in ("Shake", "speare.")],
        },
        {"role": "user", "content": "And when?"},
    ],
    # Regression: without an answer between them, the user's turns were one request.
    "structured output": [
        EARLIER[0],
        AIMessage(
            "", tool_calls=[ToolCall(name="look", args={}, id="1"), ToolCall(name="Answer", args={}, id="2")]
        ),
        ToolMessage("Looked.", tool_call_id="1"),
        ToolMessage("Shakespeare.", tool_call_id="2"),
        HumanMessage("And when?"),
    ],
    "a prompt value": {"input": "And when?", "history": ChatPromptTemplate.from_messages(EARLIER).invoke({})},
}
IMAGE = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
FIRST_QUESTIONS = [
    [SystemMessage("Be brief."), HumanMessage("known?")],
    [HumanMessage("known?"), IMAGE],
    {"question": "When was Hamlet written?", "messages": TURNS},  # it has been rewritten
    *({"question": nothing, "messages": [HumanMessage("known?")]} for nothing in (None, "", " \n")),
    *({"input": "known?", "chat_history": nothing} for nothing in ([], None, "", " \n")),
]


@pytest.mark.parametrize("value", FOLLOW_UPS.values(), ids=list(FOLLOW_UPS))
@each(INVOKES)
def test_a_question_with_turns_before_it_is_a_follow_up(call, value):
    judge, reader = Judge(), ReadsHistory()
    unread = call(RetrievalGate(judge), value)
    assert (unread.question, unread.retrieve, unread.p_known) == ("And when?", True, 0.8)
    assert (unread.override.reason, unread.error) == (UNREAD, None), "it is not a failure"
    read = call(RetrievalGate(reader), value)
    assert (read.retrieve, read.override, reader.histories) == (False, None, [LINES])


@pytest.mark.parametrize(
    "value",
    [
        {"question": "And when?", "history": "Human: Who wrote Hamlet?"},  # as older chains have it
        {"question": "And when?", "history": [("Who wrote Hamlet?", "Shakespeare.", "1600")]},
        [AIMessage("Shall I tell you about Hamlet?"), HumanMessage("Yes!")],
    ],
    ids=["transcript", "triples", "the LLM's own question"],
)
def test_unusual_histories_are_histories(value):
    assert RetrievalGate(Judge()).invoke(value).override.reason == UNREAD


@pytest.mark.parametrize(
    "history",
    [
        [("human", "Hi!"), ("narrator", "Hello!")],
        [("Hi!", "Hello!")],
        # Regression: these were read as the user's turn, which continues in the question.
        {"last": "Hamlet"},
        "They spoke of Hamlet.\nIt is a play.",
    ],
)
def test_an_unknown_history_is_one_turn_of_the_assistant(history):
    reader = ReadsHistory()
    RetrievalGate(reader).invoke({"question": "And when?", "history": history})
    assert reader.histories == [(f"assistant: {history}",)]


@pytest.mark.parametrize("value", FIRST_QUESTIONS)
def test_a_first_question_is_no_follow_up(value):
    decision = RetrievalGate(Judge()).invoke(value)
    assert (decision.retrieve, decision.override) == (False, None)


# --- read by the gate ---------------------------------------------------------------------------------------------


@each(BATCHES)
def test_the_turns_of_a_batch_go_to_the_gate_in_one_call(call):
    judge = ReadsHistory()
    decisions = call(RetrievalGate(judge), ["a?", TURNS, "And when?", "unknown?"])
    assert [d.retrieve for d in decisions] == [False, False, True, True]
    assert decisions[2].override.reason == REFERS_BACK, "it follows on unknown turns"
    assert judge.calls == [["a?", "And when?", "And when?", "unknown?"]]
    assert judge.histories == [None, LINES, None, None]


# --- condensed ---------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_condense_gets_the_conversation_once_for_the_gate_and_the_arm(call):
    seen, judge = [], Judge()

    def condense(messages, config):
        seen.append(([(m.type, m.text) for m in messages], config["tags"]))
        return "<think>Hamlet is meant.</think>\n\nthe unknown?"

    gate = RetrievalGate(judge, condense=RunnableLambda(condense))
    assert call(gate.route(retrieve=ClaimQueryRewriter(gate), direct=gate), TURNS) == ["the unknown?"]
    turns = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare."), ("human", "And when?")]
    assert seen == [(turns, ["nostream", "rgate_condense"])], "its tokens are not part of the answer either"
    assert judge.calls == [["the unknown?"]]


UNCONDENSABLE = [
    (lambda _: 1 / 0, "ZeroDivisionError"),
    (lambda _: 3, "InvalidQuestionError"),
    (lambda _: "<think>Hamlet is", "InvalidQuestionError"),
]


@pytest.mark.parametrize(("condense", "error"), UNCONDENSABLE, ids=["raises", "no question", "nothing"])
@pytest.mark.parametrize("llm", [None, Chat()], ids=["gate alone", "with llm"])
@each(INVOKES)
def test_a_follow_up_that_cannot_be_condensed_is_retrieved_for(call, condense, error, llm):
    judge = Judge()
    gate = RetrievalGate(judge, llm=llm, condense=RunnableLambda(condense))
    decision = call(gate, TURNS)
    assert (decision.question, decision.retrieve) == ("And when?", True)
    assert (decision.error.type, decision.warnings) == (error, (CONDENSE_FAILED,))
    judge.on_error = "raise"
    with pytest.raises((ZeroDivisionError, InvalidQuestionError)):
        call(gate, TURNS)
    assert judge.calls == []


def condense_to_unknown(messages):
    return f"the unknown of {len(messages)}?"


def router_with_key(gate, **options):
    """Return a router whose retrieve arm gives back what it got."""
    given = RunnableLambda(lambda value: value)
    return gate.route(retrieve=given | given, direct=given, condensed_key="alone", **options)


STANDALONE = "the unknown of 3?"
CONDENSED = [
    (TURNS, {"input": TURNS, "alone": STANDALONE}),
    (FOLLOW_UPS["a history"], {**FOLLOW_UPS["a history"], "alone": STANDALONE}),
    ("known?", {"input": "known?", "alone": "known?"}),
    ({"question": "known?", "k": 3}, {"question": "known?", "k": 3, "alone": "known?"}),
]


@pytest.mark.parametrize("answer_first", [False, True], ids=["", "answer first"])
@pytest.mark.parametrize("look_first", [False, LOOK], ids=["", "look first"])
@each(BATCHES)
def test_arms_get_the_condensed_question_under_a_key_that_is_asked_for(call, answer_first, look_first):
    judge, condensed = Judge(), []
    screens = AnswerFirst(question_gate=judge, answer_above=0.8)
    options = {"answer_first": answer_first and screens, "look_first": look_first}

    def condense(messages):
        condensed.append(len(messages))
        return condense_to_unknown(messages)

    gate = RetrievalGate(judge, condense=condense)
    asked = [*(value for value, _ in CONDENSED), {"nothing": 1}]
    *found, error = call(router_with_key(gate, **options), asked, return_exceptions=True)
    assert found == [expected for _, expected in CONDENSED]
    assert isinstance(error, InvalidQuestionError)
    assert condensed == [3, 3], "once a follow-up"
    assert judge.questions[:4] == [STANDALONE, STANDALONE, "known?", "known?"]


@each(INVOKES)
@pytest.mark.parametrize("options", [{}, {"answer_first": True}, {"look_first": True}], ids=str)
def test_what_cannot_be_condensed_reaches_the_arms_as_it_is(call, options):
    """Regression: the gate tried again, which doubled the time of an LLM that does not answer."""
    tried = []
    failing = RetrievalGate(Judge(), condense=lambda messages: tried.append(messages) or 1 / 0)
    assert call(router_with_key(failing, **options), TURNS) == {"input": TURNS, "alone": "And when?"}
    assert len(tried) == 1


@each(INVOKES)
def test_what_reads_the_condensed_question_takes_the_decision(call):
    judge = Judge()
    gate = RetrievalGate(judge, condense=condense_to_unknown)
    search = RunnableLambda(itemgetter("alone")) | ClaimQueryRewriter(gate)
    arms = gate.route(retrieve=search, direct=search, condensed_key="alone")
    assert call(arms, TURNS) == [STANDALONE]
    assert judge.calls == [[STANDALONE]], "it is decided once"


# --- drafted -----------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_summary_by_langchains_middleware_is_no_message_of_the_user():
    text = (
        "The user asked about the travel allowance (32 euros a day) and the end of the contract with Norvia."
    )
    summary = HumanMessage(text, additional_kwargs={"lc_source": "summarization"})
    assert parse_question([summary, HumanMessage("And when?")]).lines == (f"assistant: {text}",)
    assert RetrievalGate().invoke([summary, HumanMessage("and for part-timers?")]).retrieve


def test_the_draft_sees_the_history():
    llm = Chat()
    called = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    asked, answered, follow_up = TURNS
    found = ToolMessage("found", tool_call_id="1")
    turns = [SystemMessage("Be rude."), asked, called, found, answered, follow_up]
    decision = RetrievalGate(Judge(), llm=llm, tokens=2).invoke({"messages": turns})
    assert [m.text for m in llm.prompts[0]][1:] == ["Who wrote Hamlet?", "Shakespeare.", "And when?"]
    assert (decision.override.reason, decision.draft.text) == (UNREAD, "It is"), "it says what to search for"


# --- what is searched for -----------------------------------------------------------------------------------------

NEW = "What is unknown about Ophelia?"
SEARCHED = {
    "a follow-up": ("And when is it unknown?", ["Who wrote Hamlet?\nAnd when is it unknown?"]),
    "a retry": ("Unknown! Try again.", ["Who wrote Hamlet?\nUnknown! Try again."]),
    "a question that may stand alone": (NEW, [NEW, f"Who wrote Hamlet?\n{NEW}"]),
}


@each(INVOKES)
@pytest.mark.parametrize(("question", "searched"), SEARCHED.values(), ids=SEARCHED)
@pytest.mark.parametrize("kind", ["guard", "gated_rag", "look first", "queries"])
def test_a_follow_up_is_searched_for_with_what_it_follows_on(kind, question, searched, call):
    """Regression: the gate read the earlier turns, but only the last message was searched for."""
    search, gate = Search(), RetrievalGate(Judge())
    chains = {
        "guard": gate.guard(search),
        "gated_rag": gated_rag(search, LLM, gate=gate),
        "look first": gated_rag(search, LLM, gate=gate, look_first=True),
        "queries": ClaimQueryRewriter(gate),
    }
    found = call(chains[kind], [*EARLIER, HumanMessage(question)])
    if kind == "queries":
        assert found == searched
    else:
        assert sorted(search.queries) == sorted(searched), "both are searched at the same time"
    if kind == "guard":
        # No more documents than for one text: what both found, and the best of the first.
        assert set(texts(found)) == {"shared", f"about {searched[0]}"}


@each(INVOKES)
@pytest.mark.parametrize(("question", "searched"), SEARCHED.values(), ids=SEARCHED)
def test_a_guard_inside_a_gated_chain_keeps_its_decision_about_a_follow_up(question, searched, call):
    search, judge = Search(), Judge()
    gate = RetrievalGate(judge)
    call(gated_rag(gate.guard(search), LLM, gate=gate), [*EARLIER, HumanMessage(question)])
    assert (sorted(search.queries), judge.questions) == (sorted(searched), [question])
