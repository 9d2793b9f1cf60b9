"""LangChain: in a conversation nothing is skipped that the gate did not understand."""

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.follow_ups import REFERS_BACK, UNREAD
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.gate import UNCONDENSED
from rgate_integrations.langchain.runnable import RunBatch
from rgate_integrations.runtime.flow import arun, run
from tests.langchain_fakes import BATCHES, INVOKES, Chat, Judge, Stored, each

EARLIER = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare.")]
HISTORIES = {
    "messages": EARLIER,
    "tuples": [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare.")],
    "dicts": [
        {"role": "user", "content": "Who wrote Hamlet?"},
        {"role": "assistant", "content": "Shakespeare."},
    ],
    "a message history": Stored(EARLIER),
    "a prompt value": ChatPromptTemplate.from_messages(EARLIER).invoke({}),
}


LINES = ("user: Who wrote Hamlet?", "assistant: Shakespeare.")


class ReadsHistory(Judge):
    """A gate that reads the turns before a question."""

    def __init__(self):
        super().__init__()
        self.histories = []

    def decide_batch(self, questions, *, histories=None, **options):
        self.histories += list(histories or [None] * len(questions))
        return super().decide_batch(questions, **options)


@pytest.mark.parametrize("history", HISTORIES.values(), ids=list(HISTORIES))
@pytest.mark.parametrize("key", ["chat_history", "history"])
@each(INVOKES)
def test_a_question_with_a_history_beside_it_is_a_follow_up(call, history, key):
    judge, reader = Judge(), ReadsHistory()
    value = {"input": "And when?", key: history}
    unread = call(RetrievalGate(judge), value)
    assert (unread.question, unread.retrieve, unread.p_known) == ("And when?", True, 0.0)
    assert (unread.warnings, unread.error) == ((UNREAD,), None), "it is no failure"
    assert judge.calls == [], "the gate has nothing to judge"
    read = call(RetrievalGate(reader), value)
    assert (read.retrieve, read.warnings, reader.histories) == (False, (), [LINES])


@pytest.mark.parametrize("history", ["Human: Who wrote Hamlet?", [("Who wrote Hamlet?", "Shakespeare.")]])
def test_transcripts_and_pairs_of_older_chains_are_histories(history):
    value = {"question": "And when?", "history": history}
    assert RetrievalGate(Judge()).invoke(value).warnings == (UNREAD,)


@pytest.mark.parametrize("nothing", [[], None, "", " \n", Stored()])
@each(INVOKES)
def test_a_first_question_is_no_follow_up(call, nothing):
    decision = call(RetrievalGate(Judge()), {"input": "known?", "chat_history": nothing})
    assert (decision.retrieve, decision.warnings) == (False, ())


@each(INVOKES)
def test_an_answer_to_the_llms_own_question_is_a_follow_up(call):
    greeted = [AIMessage("Shall I tell you about Hamlet?"), HumanMessage("Yes!")]
    assert call(RetrievalGate(Judge()), greeted).warnings == (UNREAD,)
    instructed = [SystemMessage("Be brief."), HumanMessage("known?")]
    assert call(RetrievalGate(Judge()), instructed).warnings == ()


@each(INVOKES)
def test_messages_beside_the_question_they_end_in_are_its_history(call):
    messages = [*EARLIER, HumanMessage("And when?")]
    raw = {"question": "And when?", "messages": messages}
    assert call(RetrievalGate(Judge()), raw).warnings == (UNREAD,)
    rewritten = {"question": "When was Hamlet written?", "messages": messages}
    assert call(RetrievalGate(Judge()), rewritten).warnings == ()


# --- read by the gate ---------------------------------------------------------------------------------------------


@each(BATCHES)
def test_the_turns_of_a_batch_go_to_the_gate_in_one_call(call):
    judge = ReadsHistory()
    inputs = ["a?", {"input": "And when?", "chat_history": EARLIER}, "And when?", "unknown?"]
    decisions = call(RetrievalGate(judge), inputs)
    assert [d.retrieve for d in decisions] == [False, False, True, True]
    assert decisions[2].warnings == (REFERS_BACK,), "it follows something, but nobody says what"
    assert judge.calls == [["a?", "And when?", "unknown?"]]
    assert judge.histories == [None, LINES, None]


def test_a_gate_that_takes_any_option_does_not_read_the_turns():
    seen = []

    class Anything(Judge):
        def decide_batch(self, questions, **options):
            seen.append(options)
            return super().decide_batch(questions, **options)

    gate = RetrievalGate(Anything())
    assert gate.invoke({"input": "And when?", "chat_history": EARLIER}).warnings == (UNREAD,)
    assert gate.invoke("known?").retrieve is False
    assert seen == [{}]


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory")
@each(INVOKES)
def test_a_gate_that_reads_the_turns_in_a_chain_with_message_history(call):
    judge, stored = ReadsHistory(), Stored()
    router = RetrievalGate(judge).route(
        retrieve=lambda _: AIMessage("from passages"), direct=lambda _: AIMessage("from memory")
    )
    chain = RunnableWithMessageHistory(router, lambda session_id: stored)
    config = {"configurable": {"session_id": "1"}}
    asked = [HumanMessage("Who wrote Hamlet?"), HumanMessage("And when?"), HumanMessage("unknown, too?")]
    answers = [call(chain, question, config).text for question in asked]
    assert answers == ["from memory", "from memory", "from passages"]
    assert judge.histories[1] == ("user: Who wrote Hamlet?", "assistant: from memory")


# --- condensed ---------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_condense_gets_the_conversation(call):
    seen = []

    def condense(messages, config):
        seen.append(([(m.type, m.text) for m in messages], config["tags"]))
        return "When was Hamlet written?"

    judge = Judge()
    gate = RetrievalGate(judge, condense=RunnableLambda(condense))
    decision = call(gate, {"input": "And when?", "chat_history": EARLIER})
    assert (decision.question, decision.retrieve, decision.warnings) == (
        "When was Hamlet written?",
        False,
        (),
    )
    turns = [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare."), ("human", "And when?")]
    assert seen == [(turns, ["nostream", "rgate_condense"])], "its tokens are no part of the answer either"
    assert judge.questions == ["When was Hamlet written?"]


def broken(messages):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("condense", "error"),
    [
        (broken, "RuntimeError"),
        (lambda _: 3, "InvalidQuestionError"),
        (lambda _: " ", "InvalidQuestionError"),
    ],
    ids=["raises", "returns no question", "returns nothing"],
)
@pytest.mark.parametrize("llm", [None, Chat()], ids=["gate alone", "with llm"])
@each(INVOKES)
def test_a_follow_up_that_cannot_be_condensed_is_retrieved_for(call, condense, error, llm):
    judge = Judge()
    decision = call(
        RetrievalGate(judge, llm=llm, condense=RunnableLambda(condense)), [*EARLIER, ("human", "And when?")]
    )
    assert (decision.question, decision.retrieve) == ("And when?", True)
    assert decision.error.type == error
    assert decision.warnings == (UNCONDENSED,)
    assert judge.calls == []


@each(INVOKES)
def test_a_gate_that_is_told_to_raise_raises_what_condense_raised(call):
    gate = RetrievalGate(Judge(on_error="raise"), condense=RunnableLambda(broken))
    with pytest.raises(RuntimeError, match="no"):
        call(gate, [*EARLIER, HumanMessage("And when?")])


# --- drafted -----------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_the_draft_sees_the_history(call):
    llm = Chat()
    asked_a_tool = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    turns = [
        SystemMessage("Be rude."),
        EARLIER[0],
        asked_a_tool,
        ToolMessage("found", tool_call_id="1"),
        EARLIER[1],
        HumanMessage("And when?"),
    ]
    decision = call(RetrievalGate(Judge(), llm=llm, tokens=2), {"messages": turns})
    assert [(m.type, m.text) for m in llm.prompts[0]][1:] == [
        ("human", "Who wrote Hamlet?"),
        ("ai", "Shakespeare."),
        ("human", "And when?"),
    ]
    assert (decision.retrieve, decision.warnings) == (True, (UNREAD,)), "a begun answer sounds sure"
    assert decision.draft is not None, "it says what to search for"


@each({"run": run, "arun": lambda flow: asyncio.run(arun(flow))})
def test_a_begun_answer_is_judged_instead_of_a_draft(call):
    judge, llm = Judge(), Chat()
    inputs = [{"x": 1}, "known?", [*EARLIER, HumanMessage("And when?")]]
    configs = [{}, {"configurable": {"retrieval_threshold": 0.9}}, {}]
    begun = [Draft(text=text, source="llm") for text in ("nothing", "It is", "In 1601")]
    for gate in (RetrievalGate(judge), RetrievalGate(judge, llm=llm)):
        found = call(gate.flow(RunBatch(inputs, configs, [None] * 3, {"drafts": begun})))
        assert isinstance(found[0], InvalidQuestionError)
        assert [d.draft.text for d in found[1:]] == ["It is", "In 1601"]
        assert [d.retrieve for d in found[1:]] == [True, True]
        assert [d.warnings for d in found[1:]] == [(), (UNREAD,)]
    assert llm.seen == []


class Deaf(Judge):
    """Judges the question and ignores the draft."""

    def decide_batch(self, questions, **options):
        return [Decision(question=q, retrieve=False, p_known=0.8) for q in questions]


@each(INVOKES)
def test_a_gate_that_ignores_the_draft_does_not_skip_a_follow_up(call):
    gate = RetrievalGate(Deaf(), llm=Chat())
    assert call(gate, [*EARLIER, HumanMessage("And when?")]).retrieve is True
    assert call(gate, "When was Hamlet written?").retrieve is False
