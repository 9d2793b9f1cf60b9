"""LangChain: gate and router make one gate call a batch in every call style, arms stream, failures retrieve."""

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel

from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate, gated_rag
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Chat, Judge, Search, each

TOKENS = "abcdefghijklmnopqrst"
BATCH = ["unknown a", "b", "unknown c", "d"]
ANSWERS = ["R:unknown a", "D:b", "R:unknown c", "D:d"]


@pytest.fixture
def gate():
    return Judge()


@pytest.fixture
def router(gate):
    return RetrievalGate(gate).route(
        retrieve=RunnableLambda(lambda q: f"R:{q}"), direct=RunnableLambda(lambda q: f"D:{q}")
    )


@pytest.fixture
def streaming(gate):
    llm = FakeListChatModel(responses=[TOKENS]) | StrOutputParser()
    return RetrievalGate(gate).route(retrieve=ChatPromptTemplate.from_template("{q}") | llm, direct=llm)


SHOUT = RunnableLambda(str.upper)
COMPOSITIONS = {
    "alone": lambda router: router,
    "with retry": lambda router: router.with_retry(),
    "with config": lambda router: router.with_config(tags=["t"]),
    "with fallbacks": lambda router: router.with_fallbacks([SHOUT]),
}


@each(SINGLES)
def test_every_call_style_gives_the_same_alone_and_nested(router, call):
    outer = RetrievalGate("constant:never").route(retrieve=lambda q: "no", direct=router)
    for chain in (router, outer):
        # The last one breaks the gate, which retrieves then.
        assert [call(chain, question) for question in [*BATCH, "RAISE"]] == [*ANSWERS, "R:RAISE"]
    assert call(RunnableParallel(x=router, y=outer), "b") == {"x": "D:b", "y": "D:b"}


@pytest.mark.parametrize("name", COMPOSITIONS)
@each(BATCHES)
def test_a_batch_is_one_call_of_the_gate(router, gate, call, name):
    chain = RunnableLambda(lambda q: q) | COMPOSITIONS[name](router) | SHOUT
    assert call(chain, BATCH, {"max_concurrency": 2}) == [answer.upper() for answer in ANSWERS]
    assert gate.calls == [BATCH]
    assert call(chain, []) == []
    assert len(gate.calls) == 1
    assert dict(router.batch_as_completed(BATCH)) == dict(enumerate(ANSWERS))


@pytest.mark.parametrize("question", ["unknown x", "b"])
@each(STREAMS)
def test_twenty_tokens_arrive_as_twenty_chunks(streaming, call, question):
    assert call(streaming, question) == list(TOKENS)


@pytest.mark.parametrize("question", ["unknown x", "b"])
async def test_events_show_decision_and_arm(streaming, question):
    events = [e async for e in streaming.astream_events(question, version="v2")]
    (custom,) = [e for e in events if e["event"] == "on_custom_event"]
    (model,) = [e for e in events if e["event"] == "on_chat_model_start"]
    assert (custom["name"], custom["data"]["retrieve"]) == ("retrieval_gate", "unknown" in question)
    assert ("retrieve" in model["tags"], "direct" in model["tags"]) == (
        "unknown" in question,
        question == "b",
    )


ON_ERROR = {
    "the gate": lambda gate: gate,
    "the router": lambda gate: gate.route(retrieve=str, direct=str),
    "answer first": lambda gate: gate.route(retrieve=str, direct=str, answer_first=True),
    "the guard": lambda gate: gate.guard(Search()),
    "the rewriter": ClaimQueryRewriter,
}


@pytest.mark.parametrize("make", ON_ERROR.values(), ids=list(ON_ERROR))
@each(BATCHES)
def test_a_failure_that_is_raised_is_that_of_its_input_alone(gate, call, make):
    """Regression: one empty question failed the whole batch, if the gate raises its failures."""

    class Picky(Judge):
        on_error = "raise"

        def _decision(self, request):
            return None if "odd" in request.question else super()._decision(request)

    runnable = make(RetrievalGate(Picky()))
    found = call(runnable, ["a", "", "an odd one", "unknown b"], return_exceptions=True)
    assert [type(each).__name__ for each in found[1:3]] == ["InvalidQuestionError", "ConfigurationError"]
    assert not any(isinstance(each, Exception) for each in (found[0], found[3]))
    with pytest.raises(ConfigurationError, match="NoneType, not a Decision"):
        call(runnable, ["a", "an odd one", ""])


MESSAGES = [HumanMessage("first"), AIMessage("x"), HumanMessage("unknown"), AIMessage("y")]
INPUTS = [
    "unknown",
    {"question": "unknown"},
    {"input": "unknown"},
    {"messages": MESSAGES},
    MESSAGES,
    ChatPromptTemplate.from_messages([("system", "s"), ("human", "{q}")]).invoke({"q": "unknown"}),
    [("human", "unknown")],
    [{"role": "user", "content": "unknown"}],
    {"role": "user", "content": "unknown"},
    {"question": "unknown", "role": "admin", "content": "a page"},
    HumanMessage("unknown"),
    HumanMessage(["unknown"]),
    # Regression: the question was empty.
    *(
        {"role": "user", "content": [part]}
        for part in ({"type": "input_text", "text": "unknown"}, {"text": "unknown"})
    ),
]


@pytest.mark.parametrize("value", INPUTS)
def test_inputs(gate, value):
    assert RetrievalGate(gate).invoke(value).question == "unknown"
    assert RetrievalGate(gate, input_key="q").invoke({"q": value, "question": "b"}).question == "unknown"


@each(SINGLES)
def test_parts_of_a_message_are_lines_of_its_question(gate, call):
    """Regression: words ran together, also in the LLM's prompt."""
    chat, parts = Chat(), [{"type": kind, "text": kind} for kind in ("text", "input_text")]
    call(gated_rag(Search(), chat, gate=gate), [HumanMessage(parts)])
    assert gate.questions == ["text\ninput_text"]
    assert [message.text.endswith("text\ninput_text") for message in chat.prompts[-1]] == [False, True]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"x": 1}, "no key"),
        (3, r"from int\. Hint: "),
        (None, r"from NoneType\. Hint: "),  # Regression: "'NoneType' object is not iterable"
        ([("nobody", "x")], r"from list: .*'nobody'.* Hint: Pass a string"),  # on one line
        ([], "no human"),
        ([AIMessage("a")], "no human"),
    ],
)
@each(INVOKES)
def test_inputs_without_a_question(gate, call, value, why):
    with pytest.raises(InvalidQuestionError, match=why):
        call(RetrievalGate(gate), value)
    with pytest.raises(InvalidQuestionError, match="no key 'q'"):
        call(RetrievalGate(gate, input_key="q"), {"question": "b"})
    assert gate.calls == []


@each(BATCHES)
def test_a_threshold_for_one_call_does_not_split_the_batch(gate, router, call):
    configs = [{"configurable": {"retrieval_threshold": t}} for t in (0.1, 0.9)]
    assert call(router, ["unknown a", "b"], configs) == ["D:unknown a", "R:b"]
    assert gate.calls == [["unknown a", "b"]]
    strict = RetrievalGate(gate, threshold=0.9)  # a call's threshold overrides the field's
    assert [d.threshold for d in call(strict, ["b", "c"], [{}, configs[0]])] == [0.9, 0.1]
