"""LangChain: `gated_rag`, the whole chain in one line, with every form of a question."""

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import ChatMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import RetrievalGate, gated_rag
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from tests.begun_answers import KNOWN, LOOK, Reader, Shelf, Writer
from tests.langchain_fakes import (
    EARLIER,
    INVOKES,
    LLM,
    SINGLES,
    STREAMS,
    Chat,
    Judge,
    ReadsHistory,
    Search,
    each,
    texts,
)

SHORT = {
    "prompt": ChatPromptTemplate.from_template("{context}|{question}"),
    "direct_prompt": ChatPromptTemplate.from_template("direct {question}"),
}
WITH_HISTORY = {
    "prompt": ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "rag {question} {context}")]),
    "direct_prompt": ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "direct {question}")]),
}
READ = "Human: [1] about unknown?\n\n[2] shared|unknown?"


@pytest.fixture
def judge():
    return Judge()


def test_the_prompts_are_those_of_the_command_line(judge):
    chain = gated_rag(Search(), LLM, gate=judge)
    assert chain.invoke({"question": "unknown?", "chat_history": EARLIER}) == (
        "System: Answer the question briefly, using the passages where they help.\n"
        "Human: Who wrote Hamlet?\nAI: Shakespeare.\n"
        "Human: [1] about Who wrote Hamlet?\nunknown?\n\n[2] shared\n\nQuestion: unknown?"
    )
    assert (
        chain.invoke("known {braces}?")
        == "System: Answer the question briefly, in one or two sentences.\nHuman: known {braces}?"
    )


@each(SINGLES)
def test_both_arms_in_every_way_of_calling(judge, call):
    chain = gated_rag(Search(), LLM, gate=judge, return_sources=True, **SHORT)
    found = call(chain, "unknown?")
    assert texts(found["sources"]) == ["about unknown?", "shared"]
    assert found["answer"] == READ
    assert call(chain, "b") == {"sources": [], "answer": "Human: direct b"}


@pytest.mark.parametrize(
    ("option", "text", "lacks", "added"),
    [
        ("prompt", "{context}", "question", " {query}"),
        ("direct_prompt", "Answer: {query} {context}", "question", " {query}"),
        ("prompt", "Answer in one sentence: {question}", "context", " {sources}"),
    ],
)
def test_a_prompt_without_the_question_or_the_passages_is_refused(judge, option, text, lacks, added):
    """Regression: the LLM answered without them."""
    prompt = ChatPromptTemplate.from_template(text)
    with pytest.raises(ConfigurationError, match=rf"^{option}= has no \{{{lacks}\}}.*from_template"):
        gated_rag(Search(), LLM, gate=judge, **{option: prompt})
    keyed = RetrievalGate(judge, input_key="query")
    assert gated_rag(Search(), LLM, gate=keyed, **{option: prompt + added})


def test_a_dicts_other_keys_are_variables_for_the_prompts(judge):
    """Regression: they were dropped, and the prompt lacked its variable."""
    prompt = ChatPromptTemplate.from_template("{context} {question} {lang}")
    chain = gated_rag(Search(), LLM, prompt, gate=judge)
    assert chain.invoke({"question": "unknown?", "lang": "de"}).endswith("unknown? de")


FORMS = [
    {"question": "unknown?"},
    {"input": "unknown?", "chat_history": []},
    {"messages": [("human", "unknown?")]},
    [SystemMessage("Be kind."), {"role": "user", "content": "unknown?"}],
    HumanMessage("unknown?"),
    ChatPromptTemplate.from_template("{q}").invoke({"q": "unknown?"}),
]


def test_every_form_of_a_question_and_one_call_of_the_gate_for_a_batch(judge):
    chain = gated_rag(Search(), LLM, gate=judge, **SHORT)
    found = chain.batch([*FORMS, "b", {"x": 1}, 3], return_exceptions=True)
    assert found[:-2] == [READ] * 6 + ["Human: direct b"]
    assert [type(error) for error in found[-2:]] == [InvalidQuestionError] * 2
    assert judge.calls == [["unknown?"] * 6 + ["b"]]


SYSTEM = SystemMessage("Be kind.")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
PICTURE = HumanMessage([IMAGE])
BOTH = HumanMessage([{"type": "text", "text": "Who is this?"}, IMAGE])
WITH_IMAGES = {
    "in the question": (lambda q: [SYSTEM, *EARLIER, with_image(q)], EARLIER, [IMAGE]),
    "after it": (lambda q: [SYSTEM, *EARLIER, HumanMessage(q), PICTURE], EARLIER, [IMAGE]),
    "before it": (lambda q: {"query": q, "history": [SYSTEM, *EARLIER, PICTURE]}, EARLIER, [IMAGE]),
    "in a graph's state": (lambda q: {"question": q, "messages": [SYSTEM, with_image(q)]}, [], [IMAGE]),
    "in a graph's state, twice": (
        lambda q: {"question": with_image(q), "messages": [SYSTEM, with_image(q)]},
        [],
        [IMAGE],
    ),
    "and another question": (
        lambda q: {"question": q, "messages": [SYSTEM, *EARLIER, with_image("And he?")]},
        [],
        [IMAGE],
    ),
    "in a single message": (
        lambda q: {"question": with_image(q), "history": [SYSTEM, *EARLIER]},
        EARLIER,
        [IMAGE],
    ),
    "before a system message": (lambda q: [with_image(q), SYSTEM], [], [IMAGE]),
    "earlier": (
        lambda q: {"input": q, "chat_history": [SYSTEM, BOTH, EARLIER[1]]},
        [BOTH, EARLIER[1]],
        [],
    ),
}


def with_image(text):
    return HumanMessage([{"type": "text", "text": text}, IMAGE])


@pytest.mark.parametrize(("make", "between", "images"), WITH_IMAGES.values(), ids=list(WITH_IMAGES))
@each(SINGLES)
def test_system_messages_and_images_reach_the_llm(call, make, between, images):
    """Regression: they were dropped."""
    chat = Chat()
    chain = gated_rag(Search(), chat, gate=ReadsHistory())
    for asked, prompt in (("b", ANSWER), ("unknown?", ANSWER_WITH_PASSAGES)):
        call(chain, make(asked))
        (messages,) = chat.prompts[-1:]
        assert messages[:-1] == [SystemMessage(f"{prompt.system}\n\nBe kind."), *between]
        assert messages[-1].text.endswith(asked)
        assert [block for block in messages[-1].content if block == IMAGE] == images


@each(SINGLES)
def test_an_image_alone_is_not_searched_for(call):
    """Regression: the retriever got an empty query, which embedding APIs reject."""
    search, chat = Search(), Chat()
    call(gated_rag(search, chat, gate=Judge()), [PICTURE])
    assert (search.queries, IMAGE in chat.prompts[-1][-1].content) == ([], True)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_condensed_follow_up_keeps_system_messages_and_images(role):
    chat, gate = Chat(), RetrievalGate(Judge(), condense=lambda _: "unknown?")
    system = ChatMessage(role=role, content="Be kind.")
    gated_rag(Search(), chat, gate=gate).invoke([system, *EARLIER, with_image("And he?")])
    first, last = chat.prompts[-1]
    assert (first.text.splitlines()[-1], last.text.splitlines()[-1]) == ("Be kind.", "Question: unknown?")
    assert IMAGE in last.content


FOLLOW_UPS = [
    {"q": "unknown, when?", "question": "no", "chat_history": EARLIER},
    {"q": [*EARLIER, HumanMessage("unknown, when?")]},
    [*EARLIER, HumanMessage("unknown, when?")],
    {"q": "unknown, when?", "history": [("human", "Who wrote Hamlet?"), ("ai", "Shakespeare.")]},
]


@pytest.mark.parametrize("value", FOLLOW_UPS)
@pytest.mark.parametrize("condense", [None, lambda _: 1 / 0, lambda _: 3], ids=["none", "raises", "no text"])
def test_prompts_see_the_history_where_nothing_condenses_it(judge, value, condense):
    gate = RetrievalGate(judge, input_key="q", condense=condense)
    chain = gated_rag(Search(), LLM, gate=gate, **WITH_HISTORY)
    history = "Human: Who wrote Hamlet?\nAI: Shakespeare.\n"
    assert chain.invoke(value).startswith(f"{history}Human: rag unknown, when? [1]")


@pytest.mark.parametrize("name", STREAMS)
def test_sources_come_before_the_answers_tokens(judge, name):
    chain = gated_rag(Search(), FakeListChatModel(responses=["abc"]), gate=judge, return_sources=True)
    chunks = [chunk for chunk in STREAMS[name](chain, "unknown?") if chunk != {"answer": ""}]
    assert texts(chunks[0]["sources"]) == ["about unknown?", "shared"]
    assert chunks[1:] == [{"answer": "a"}, {"answer": "b"}, {"answer": "c"}]


def test_any_retriever_and_a_threshold_for_one_call(judge):
    chain = gated_rag(lambda query: Search().invoke(query), LLM, gate=judge, **SHORT)
    assert chain.invoke("b", {"configurable": {"retrieval_threshold": 0.9}}).endswith("shared|b")
    assert "retrieval_threshold" in {spec.id for spec in chain.config_specs}


@each(SINGLES)
def test_the_llm_may_begin_to_answer_first(call):
    judge, search = Reader({"unknown?": 0.2}), Search()
    options = {"answer_first": AnswerFirst(tokens=4, question_gate=None), "return_sources": True}
    chain = gated_rag(search, Writer(), gate=judge, **options)
    known, unknown = call(chain, "a known one?"), call(chain, "unknown?")
    assert (known["answer"].strip(), known["sources"], len(unknown["sources"])) == (KNOWN, [], 2)
    assert (search.queries, len(judge.calls)) == (["unknown?"], 2)


@pytest.mark.parametrize("search", [Shelf, lambda: RunnableLambda(Shelf().invoke)])
@each(INVOKES)
def test_what_is_found_may_be_looked_at_first(judge, call, search):
    chain = gated_rag(search(), LLM, gate=judge, look_first=LOOK, **SHORT)
    assert "Zorba wrote the quartet." in call(chain, {"question": "who wrote the quartet Zorba?"})
    assert call(chain, "some known thing?") == "Human: direct some known thing?"
