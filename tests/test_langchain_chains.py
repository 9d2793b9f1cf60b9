"""LangChain: `gated_rag`, the whole chain in one line, with every form of a question."""

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import RetrievalGate, gated_rag
from tests.langchain_fakes import BATCHES, SINGLES, STREAMS, Judge, Search, each

LLM = RunnableLambda(lambda prompt: AIMessage(prompt.to_string()))
SHORT = {
    "prompt": ChatPromptTemplate.from_template("{context}|{question}"),
    "direct_prompt": ChatPromptTemplate.from_template("direct {question}"),
}
WITH_HISTORY = {
    "prompt": ChatPromptTemplate.from_messages(
        [("placeholder", "{chat_history}"), ("human", "rag {question}")]
    ),
    "direct_prompt": ChatPromptTemplate.from_messages(
        [("placeholder", "{chat_history}"), ("human", "direct {question}")]
    ),
}
EARLIER = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare.")]


@pytest.fixture
def judge():
    return Judge()


@each(SINGLES)
def test_the_whole_thing_in_one_line(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge)
    assert call(chain, "unknown?") == (
        "System: Answer the question briefly, using the passages where they help.\n"
        "Human: [1] about unknown?\n\n[2] shared\n\nQuestion: unknown?"
    )
    assert (
        call(chain, "known {braces}?")
        == "System: Answer the question briefly, in one or two sentences.\nHuman: known {braces}?"
    )


@each(SINGLES)
def test_prompts_of_both_arms(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge, **SHORT)
    assert call(chain, "unknown?") == "Human: [1] about unknown?\n\n[2] shared|unknown?"
    assert call(chain, "b") == "Human: direct b"


@pytest.mark.parametrize(
    "value",
    [
        "unknown?",
        {"question": "unknown?"},
        {"input": "unknown?", "chat_history": []},
        {"messages": [("human", "unknown?")]},
        [HumanMessage("unknown?")],
        [SystemMessage("Be kind."), {"role": "user", "content": "unknown?"}],
        HumanMessage("unknown?"),
        ChatPromptTemplate.from_template("{q}").invoke({"q": "unknown?"}),
    ],
)
@each(SINGLES)
def test_every_form_of_a_question(judge, value, call):
    search = Search()
    chain = gated_rag(search, LLM, gate=judge, **SHORT)
    assert call(chain, value) == "Human: [1] about unknown?\n\n[2] shared|unknown?"
    assert search.queries == ["unknown?"]
    assert judge.calls == [["unknown?"]]


@each(SINGLES)
def test_what_holds_no_question(judge, call):
    for value in ({"x": 1}, 3, [AIMessage("a")]):
        with pytest.raises(InvalidQuestionError):
            call(gated_rag(Search(), LLM, gate=judge), value)
    assert judge.calls == []


@each(BATCHES)
def test_a_batch_is_one_call_of_the_gate(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge, **SHORT)
    asked = ["b", {"question": "unknown?"}, [HumanMessage("c")], {"x": 1}]
    found = call(chain, asked, return_exceptions=True)
    assert found[:3] == [
        "Human: direct b",
        "Human: [1] about unknown?\n\n[2] shared|unknown?",
        "Human: direct c",
    ]
    assert isinstance(found[3], InvalidQuestionError)
    assert judge.calls == [["b", "unknown?", "c"]]


@each(SINGLES)
def test_the_key_of_the_question(judge, call):
    chain = gated_rag(Search(), LLM, gate=RetrievalGate(judge, input_key="q"), **SHORT)
    assert call(chain, {"q": "b", "question": "unknown?"}) == "Human: direct b"


@pytest.mark.parametrize(
    "value",
    [
        {"question": "unknown, when?", "chat_history": EARLIER},
        {"messages": [*EARLIER, HumanMessage("unknown, when?")]},
        [*EARLIER, HumanMessage("unknown, when?")],
        {
            "question": "unknown, when?",
            "chat_history": [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare.")],
        },
    ],
)
@each(SINGLES)
def test_the_prompts_see_the_history(judge, value, call):
    chain = gated_rag(Search(), LLM, gate=judge, **WITH_HISTORY)
    assert call(chain, value) == "Human: Who wrote Hamlet?\nAI: Shakespeare.\nHuman: rag unknown, when?"
    plain = call(gated_rag(Search(), LLM, gate=judge), value)
    assert "\nHuman: Who wrote Hamlet?\nAI: Shakespeare.\nHuman: [1]" in plain


@each(SINGLES)
def test_the_history_has_the_key_that_one_likes(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge, history_key="turns", **WITH_HISTORY)
    answer = call(chain, {"question": "unknown, when?", "turns": EARLIER})
    assert answer == "Human: Who wrote Hamlet?\nAI: Shakespeare.\nHuman: rag unknown, when?"


@each({**SINGLES, **BATCHES})
def test_a_follow_up_is_condensed_once_for_gate_search_and_prompts(judge, call):
    condensed, search = [], Search()

    def condense(messages):
        condensed.append([message.text for message in messages])
        return "unknown year of Hamlet?"

    gate = RetrievalGate(judge, condense=condense)
    chain = gated_rag(search, LLM, gate=gate, **SHORT)
    turn = {"question": "And when?", "chat_history": EARLIER}
    answer = "Human: [1] about unknown year of Hamlet?\n\n[2] shared|unknown year of Hamlet?"
    if call in BATCHES.values():
        assert call(chain, [turn, "b"]) == [answer, "Human: direct b"]
    else:
        assert call(chain, turn) == answer
    assert condensed == [["Who wrote Hamlet?", "Shakespeare.", "And when?"]]
    assert search.queries == ["unknown year of Hamlet?"]
    assert judge.questions[0] == "unknown year of Hamlet?"


@pytest.mark.parametrize("condensed", [OSError("down"), 3])
@each(SINGLES)
def test_a_follow_up_that_cannot_be_condensed(judge, condensed, call):
    def condense(messages):
        if isinstance(condensed, Exception):
            raise condensed
        return condensed

    chain = gated_rag(Search(), LLM, gate=RetrievalGate(judge, condense=condense), **WITH_HISTORY)
    answer = call(chain, {"question": "unknown, when?", "chat_history": EARLIER})
    assert answer.endswith("\nHuman: rag unknown, when?")


@each(SINGLES)
def test_sources(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge, return_sources=True, **SHORT)
    found = call(chain, "unknown?")
    assert list(found) == ["sources", "answer"]
    assert [document.page_content for document in found["sources"]] == ["about unknown?", "shared"]
    assert found["answer"] == "Human: [1] about unknown?\n\n[2] shared|unknown?"
    assert call(chain, "b") == {"sources": [], "answer": "Human: direct b"}


@pytest.mark.parametrize("name", STREAMS)
def test_sources_come_before_the_answers_tokens(judge, name):
    llm = FakeListChatModel(responses=["abc"])
    chain = gated_rag(Search(), llm, gate=judge, return_sources=True)
    chunks = [chunk for chunk in STREAMS[name](chain, "unknown?") if chunk != {"answer": ""}]
    assert [document.page_content for document in chunks[0]["sources"]] == ["about unknown?", "shared"]
    assert chunks[1:] == [{"answer": "a"}, {"answer": "b"}, {"answer": "c"}]


@each(SINGLES)
def test_any_retriever_and_a_threshold_for_one_call(judge, call):
    chain = gated_rag(Search().with_config(tags=["t"]), LLM, gate=judge, **SHORT)
    assert call(chain, "b", {"configurable": {"retrieval_threshold": 0.9}}).endswith("shared|b")
    function = gated_rag(lambda query: Search().invoke(query), LLM, gate=judge, **SHORT)
    assert call(function, "unknown?").endswith("shared|unknown?")
    assert "retrieval_threshold" in {spec.id for spec in chain.config_specs}


def test_runs_have_names(judge):
    collector = RunCollectorCallbackHandler()
    gated_rag(Search(), LLM, gate=judge).invoke("unknown?", {"callbacks": [collector]})
    (run,) = collector.traced_runs
    assert run.name == "gated_rag"
    assert [child.name for child in run.child_runs] == ["ReadTurn", "RetrievalRouter"]
