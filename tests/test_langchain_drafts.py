"""LangChain: drafts that the user's own LLM writes, what it is asked for, and what its errors change."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from tests.langchain_fakes import (
    BATCHES,
    SINGLES,
    Chat,
    Judge,
    Stored,
    each,
    in_threads,
)
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy

EVERYTHING = {"max_tokens": 2, "logprobs": True}


class StatusError(Exception):
    """An error as API clients raise it."""

    def __init__(self, status_code):
        super().__init__(f"error {status_code}")
        self.status_code = status_code


@each(BATCHES)
def test_the_llm_writes_the_drafts(call):
    judge, llm = Judge(), Chat()
    decisions = call(RetrievalGate(judge, llm=llm, tokens=2), ["a?", "unknown?"])
    assert [d.retrieve for d in decisions] == [False, True]
    assert [(d.text, d.tokens, d.logprobs, d.source) for d in judge.drafts] == [
        ("It is", ("It ", "is "), (-0.5, -0.5), "llm")
    ] * 2
    assert llm.seen == [EVERYTHING] * 2
    assert decisions[0].draft.text == "It is"


@pytest.mark.parametrize(
    ("said", "finished"),
    [
        ({"finish_reason": "stop"}, True),
        ({"done_reason": "stop"}, True),
        ({"stop_reason": "max_tokens"}, False),
        ({}, False),
    ],
)
def test_a_draft_is_whole_only_where_the_llm_says_so(said, finished):
    llm = GenericFakeChatModel(messages=iter([AIMessage("It is me. And I", response_metadata=said)]))
    (query, *claims) = ClaimQueryRewriter(RetrievalGate(Judge(), llm=llm)).invoke("Who is unknown?")
    assert query == "Who is unknown?"
    assert any("And I" in claim for claim in claims) == finished


@each(SINGLES)
def test_a_runnable_that_is_no_chat_model_writes_drafts_too(call):
    llm = RunnableLambda(lambda messages: f" about {messages[-1].text} and so on ")
    assert call(RetrievalGate(Judge(), llm=llm, tokens=2), "Oulu").draft.text == "about Oulu"


@each(SINGLES)
def test_a_gate_that_reads_log_probabilities_gets_them(call):
    gate = RetrievalGate(load_gate("perplexity", proxy=ScriptedProxy()), llm=Chat())
    decision = call(gate, "a?")
    assert decision.error is None


@pytest.mark.parametrize(
    ("refuses", "kept"), [(("logprobs",), {"max_tokens": 2}), (("logprobs", "max_tokens"), {})]
)
@each(SINGLES)
def test_an_llm_that_refuses_options_is_asked_without_them_from_then_on(call, refuses, kept):
    llm = Chat(refuses=refuses)
    gate = RetrievalGate(Judge(), llm=llm, tokens=2)
    draft = call(gate, "a?").draft
    assert (draft.logprobs, draft.text) == (None, "It is")
    call(gate, "b?")
    assert llm.seen[-1] == kept
    assert len(llm.seen) == len(refuses) + 2


@pytest.mark.parametrize(
    ("errors", "asked"),
    [
        ([TimeoutError("timed out")], []),
        ([ConnectionError("connection reset")], []),
        ([StatusError(429)], []),
        ([StatusError(500)], []),
        ([RuntimeError("out of memory")], []),
        ([StatusError(400), StatusError(503)], [{"max_tokens": 2}]),  # no proof that less would work
    ],
    ids=str,
)
@each(SINGLES)
def test_an_error_that_is_no_refusal_costs_one_draft_and_changes_nothing(call, errors, asked):
    judge, llm = Judge(), Chat(errors=list(errors))
    gate = RetrievalGate(judge, llm=llm, tokens=2)
    assert call(gate, "a?").draft is None
    assert call(gate, "b?").draft.logprobs == (-0.5, -0.5)
    assert llm.seen == [EVERYTHING, *asked, EVERYTHING]


def of_the_long(error):
    """Raise an error for long questions only."""

    def before(messages):
        if "long" in messages[-1].text:
            raise error

    return before


@each(BATCHES)
def test_only_refused_questions_of_a_batch_are_asked_again(call):
    llm = Chat(before=of_the_long(StatusError(400)))
    judge = Judge()
    gate = RetrievalGate(judge, llm=llm, tokens=2)
    call(gate, ["a?", "a long one?", "b?"])
    assert [d and d.text for d in judge.drafts] == ["It is", None, "It is"]
    seen = sorted(llm.seen, key=len, reverse=True)
    assert seen == [EVERYTHING] * 3 + [{"max_tokens": 2}, {}]
    call(gate, ["c?"])
    assert llm.seen[-1] == EVERYTHING, "a form that worked for others is one that the model takes"


@each(BATCHES)
def test_a_refused_question_beside_one_that_timed_out_is_asked_again(call):
    def before(messages):
        if "slow" in messages[-1].text:
            raise TimeoutError("timed out")

    llm, judge = Chat(before=before, refuses=("logprobs",)), Judge()
    gate = RetrievalGate(judge, llm=llm, tokens=2)
    call(gate, ["slow?", "b?"])
    assert [d and (d.text, d.logprobs) for d in judge.drafts] == [None, ("It is", None)]
    assert len(llm.seen) == 3
    call(gate, ["c?"])
    assert llm.seen[3:] == [{"max_tokens": 2}]


@pytest.mark.parametrize("style", ["threads", "tasks"])
def test_concurrent_first_calls_agree_on_what_the_llm_takes(style):
    together = threading.Barrier(10)

    def before(messages):
        together.wait(PATIENCE)  # all ten are refused before one of them is asked again

    llm = Chat(refuses=("logprobs",), before=before)
    gate = RetrievalGate(Judge(), llm=llm, tokens=2)

    async def in_tasks():
        # The event loop's own pool has too few threads on a small machine.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(10))
        return await asyncio.gather(*(gate.ainvoke(f"{i}?") for i in range(10)))

    if style == "tasks":
        decisions = asyncio.run(in_tasks())
    else:
        decisions = in_threads([lambda i=i: gate.invoke(f"{i}?") for i in range(10)])
    assert [d.error for d in decisions] == [None] * 10
    assert [d.draft.text for d in decisions] == ["It is"] * 10
    assert len(llm.seen) == 20
    llm.before = None
    gate.invoke("x?")
    assert llm.seen[20:] == [{"max_tokens": 2}]


def fails(_):
    raise TimeoutError("server down")


def searches(_):
    return AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])


@pytest.mark.parametrize("writes", [fails, searches])
@each(SINGLES)
def test_an_llm_that_writes_nothing_means_no_draft_and_retrieval(call, writes):
    judge = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    decision = call(RetrievalGate(judge, llm=RunnableLambda(writes)), "who?")
    assert (decision.retrieve, decision.draft, decision.error.type) == (True, None, "EvidenceError")


class Broken(Chat):
    """Fails whatever it is asked, also as a batch with ``return_exceptions``."""

    def batch(self, inputs, config=None, **options):
        raise RuntimeError("no client")

    async def abatch(self, inputs, config=None, **options):
        raise RuntimeError("no client")


@each(SINGLES)
def test_drafting_that_breaks_down_retrieves(call):
    chain = RetrievalGate(Judge(), llm=Broken()).route(retrieve=lambda q: "rag", direct=lambda q: "direct")
    assert call(chain, "known?") == "rag"


# --- an LLM in wrappers --------------------------------------------------------------------------------------


WRAPPERS = {
    "bind": lambda chat: chat.bind(stop=["x"]),
    "bind its own limit": lambda chat: chat.bind(max_tokens=500, logprobs=False),
    "with_config": lambda chat: chat.with_config(tags=["mine"]),
    "with_retry": lambda chat: chat.with_retry(),
    "with_types": lambda chat: chat.with_types(output_type=AIMessage),
    "with_listeners": lambda chat: chat.with_listeners(on_start=lambda run: None),
    "with_fallbacks": lambda chat: chat.with_fallbacks([Chat()]),
    "configurable_fields": lambda chat: chat.configurable_fields(before=ConfigurableField(id="before")),
    "configurable_alternatives": lambda chat: chat.configurable_alternatives(
        ConfigurableField(id="llm"), default_key="a", b=Chat()
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
@each(BATCHES)
def test_a_wrapped_llm_is_asked_with_limit_and_log_probabilities(call, wrap):
    llm = Chat()
    decisions = call(RetrievalGate(Judge(), llm=wrap(llm), tokens=2), ["a?", "b?"])
    assert [(d.draft.text, d.draft.logprobs) for d in decisions] == [("It is", (-0.5, -0.5))] * 2
    assert [{name: seen[name] for name in EVERYTHING} for seen in llm.seen] == [EVERYTHING] * 2


@each(SINGLES)
def test_a_model_configured_at_run_time_is_asked_with_limit_and_log_probabilities(call, monkeypatch):
    chat_models = pytest.importorskip("langchain.chat_models.base")
    llm = Chat()
    monkeypatch.setattr(chat_models, "_init_chat_model_helper", lambda *args, **options: llm)
    configurable = chat_models.init_chat_model(configurable_fields=("model",))
    call(RetrievalGate(Judge(), llm=configurable, tokens=2), "a?")
    assert llm.seen == [EVERYTHING]


@each(SINGLES)
def test_what_the_user_bound_stays_bound(call):
    llm = Chat()
    call(RetrievalGate(Judge(), llm=llm.bind(stop=["x"], user="me"), tokens=2), "a?")
    assert llm.seen == [{**EVERYTHING, "user": "me"}]


@each(SINGLES)
def test_a_transient_error_is_retried_where_the_user_asked_for_it(call):
    llm = Chat(errors=[StatusError(503)])
    retried = llm.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    assert call(RetrievalGate(Judge(), llm=retried, tokens=2), "a?").draft.text == "It is"
    assert llm.seen == [EVERYTHING] * 2


@each(SINGLES)
def test_a_fallback_writes_the_draft_when_the_model_fails(call):
    down, other = Chat(errors=[StatusError(503)]), Chat()
    gate = RetrievalGate(Judge(), llm=down.with_fallbacks([other]), tokens=2)
    assert call(gate, "a?").draft.text == "It is"
    assert (down.seen, other.seen) == ([EVERYTHING], [EVERYTHING])


def test_an_llm_with_a_history_of_its_own_is_refused():
    with pytest.raises(ConfigurationError, match="history"):
        RetrievalGate(Judge(), llm=RunnableWithMessageHistory(Chat(), lambda session_id: Stored()))


# --- what is seen of a draft ---------------------------------------------------------------------------------


async def test_the_draft_is_marked_in_events_and_can_be_left_out():
    llm = Chat()
    chain = RetrievalGate(Judge(), llm=llm, tokens=2).route(retrieve=llm, direct=llm)
    tags = {}
    async for event in chain.astream_events("a?", version="v2"):
        if event["event"] == "on_chat_model_end":
            tags[event["data"]["output"].text] = {"nostream", "rgate_draft"} & set(event["tags"])
    assert tags == {"It is ": {"nostream", "rgate_draft"}, "It is me.": set()}
    events = chain.astream_events("a?", version="v2", exclude_tags=["rgate_draft"])
    chunks = [e["data"]["chunk"].text async for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(chunks) == "It is me."


@each(SINGLES)
def test_the_draft_keeps_the_tags_of_the_call(call):
    seen = []
    llm = RunnableLambda(lambda _, config: seen.append(config["tags"]) or "draft")
    call(RetrievalGate(Judge(), llm=llm), "a?", {"tags": ["mine"]})
    assert seen == [["mine", "nostream", "rgate_draft"]]
