"""LlamaIndex: the LLM's own drafts, and what is asked of it after it refused or failed."""

import copy

import pytest
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import BaseModel

from rgate_integrations import load_gate
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)
from rgate_integrations.llama_index.decider import DRAFT_TAG
from tests.llama_index_parts import ScriptedGate, ScriptedLLM, both_ways, hearing, vector_index
from tests.scripted_proxy import ScriptedProxy
from tests.test_llama_index import tools_named

EVERYTHING, NO_LOGPROBS, NOTHING = ["logprobs", "max_tokens"], ["max_tokens"], []


@pytest.fixture
def gate():
    return ScriptedGate()


@both_ways
@pytest.mark.parametrize("chats", [False, True], ids=["completes", "chats"])
def test_everything_that_decides_lets_the_llm_draft(gate, call, chats):
    llm, retriever = ScriptedLLM(chats=chats), vector_index().as_retriever()
    inner = vector_index().as_query_engine(llm=MockLLM())
    call(GatedQueryEngine.from_defaults(inner, gate, llm=llm, tokens=2), "query", "unknown?")
    call(GatedRetriever(retriever, gate, llm=llm, tokens=2), "retrieve", "unknown?")
    call(ClaimFusionRetriever([retriever], gate, llm=llm, tokens=2), "retrieve", "unknown?")
    selector = RetrievalGateSelector(gate, retrieve="docs", llm=llm, tokens=2)
    call(selector, "select", tools_named("direct", "docs"), "unknown?")
    drafts = [d for d in gate.drafts if d.source == "llm"]
    assert [(d.text, d.tokens, d.logprobs, d.model) for d in drafts] == [
        ("It is", ("It ", "is "), (-0.5, -0.5), "scripted")
    ] * 4
    assert llm.asked == [EVERYTHING] * 4


class Status(Exception):
    def __init__(self, status_code):
        super().__init__(f"status {status_code}")
        self.status_code = status_code


def asking(gate, llm, call, times):
    """Ask the same question several times; returns the drafts that the gate was given."""
    guarded = GatedRetriever(vector_index().as_retriever(), gate, llm=llm, tokens=2)
    for _ in range(times):
        assert call(guarded, "retrieve", "unknown?")
    return gate.drafts


@both_ways
@pytest.mark.parametrize(
    "refusal",
    [ValueError("unknown parameter"), TypeError("unexpected keyword argument"), Status(400)],
    ids=repr,
)
def test_an_llm_that_refuses_options_is_asked_without_them_and_that_is_remembered(gate, call, refusal):
    llm = ScriptedLLM(lambda options: refusal if "logprobs" in options else None)
    drafts = asking(gate, llm, call, 2)
    assert [(d.text, d.logprobs) for d in drafts] == [("It is", None)] * 2
    assert llm.asked == [EVERYTHING, NO_LOGPROBS, NO_LOGPROBS]


@both_ways
@pytest.mark.parametrize(
    ("errors", "asked"),
    [
        ([TimeoutError("slow")], []),
        ([ConnectionError("reset")], []),
        ([Status(429)], []),
        ([Status(503)], []),
        ([Status(400), TimeoutError("slow")], [NO_LOGPROBS]),  # no proof that less would work
        ([Status(400)] * 3, [NO_LOGPROBS, NOTHING]),  # the question is refused, and not a form
    ],
    ids=repr,
)
def test_an_error_that_is_no_refusal_costs_one_draft_and_changes_nothing(gate, call, errors, asked):
    failing = iter(errors)
    llm = ScriptedLLM(lambda options: next(failing, None))
    none, draft = asking(gate, llm, call, 2)
    assert none is None
    assert draft.logprobs == (-0.5, -0.5)
    assert llm.asked == [EVERYTHING, *asked, EVERYTHING]


@both_ways
def test_a_gate_that_judges_drafts_retrieves_without_one(call):
    llm = ScriptedLLM(lambda options: TimeoutError("slow"))
    gate = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    selector = RetrievalGateSelector(gate, retrieve="docs", llm=llm)
    chosen = call(selector, "select", tools_named("direct", "docs"), "known?")
    assert chosen.ind == 1
    assert "none was given" in chosen.reason


@both_ways
def test_an_answer_that_is_no_draft_retrieves(gate, call):
    class Odd(ScriptedLLM):
        def complete(self, prompt, formatted=False, **options):
            return None

    selector = RetrievalGateSelector(gate, retrieve="docs", llm=Odd())
    chosen = call(selector, "select", tools_named("direct", "docs"), "known?")
    assert chosen.ind == 1
    assert gate.questions == []


# --- what others see of a draft ----------------------------------------------------------------------------


class Told(ScriptedLLM):
    """Tells LlamaIndex's listeners of its calls, as real LLMs do."""

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **options):
        return super().complete(prompt, formatted, **options)

    @llm_completion_callback()
    async def acomplete(self, prompt, formatted=False, **options):
        return super().complete(prompt, formatted, **options)

    @llm_chat_callback()
    def chat(self, messages, **options):
        return super().chat(messages, **options)

    @llm_chat_callback()
    async def achat(self, messages, **options):
        return super().chat(messages, **options)


def calls_of(events):
    """What was heard of an LLM: the name of each event, and its tags."""
    named = [(event.class_name(), event.tags) for event in events]
    return [(name, tags) for name, tags in named if name.startswith("LLM")]


@both_ways
@pytest.mark.parametrize("chats", [False, True], ids=["completes", "chats"])
def test_listeners_can_tell_a_draft_from_the_answer(gate, call, chats):
    llm = Told(chats=chats)
    inner = vector_index().as_query_engine(llm=MockLLM())
    with hearing() as events, instrument_tags({"tenant": "a"}):
        call(GatedQueryEngine.from_defaults(inner, gate, llm=llm, tokens=2), "query", "a thing")
    kind = "Chat" if chats else "Completion"
    draft = {"tenant": "a", DRAFT_TAG: True}
    assert [(name, tags) for name, tags in calls_of(events) if name.startswith(f"LLM{kind}")] == [
        (f"LLM{kind}StartEvent", draft),
        (f"LLM{kind}EndEvent", draft),
        (f"LLM{kind}StartEvent", {"tenant": "a"}),
        (f"LLM{kind}EndEvent", {"tenant": "a"}),
    ]


@both_ways
def test_a_failing_draft_leaves_no_tag_behind(gate, call):
    llm = Told(lambda options: TimeoutError("slow") if "max_tokens" in options else None)
    inner = vector_index().as_query_engine(llm=MockLLM())
    with hearing() as events:
        call(GatedQueryEngine.from_defaults(inner, gate, llm=llm, tokens=2), "query", "a thing")
    assert [tags for _, tags in calls_of(events)] == [{DRAFT_TAG: True}] + [{}] * 4


class Album(BaseModel):
    """What a structured LLM is to return."""

    title: str


@both_ways
def test_of_a_structured_llm_the_one_inside_drafts(gate, call):
    llm = ScriptedLLM()
    asking(gate, llm.as_structured_llm(Album), call, 1)
    assert [(d.text, d.logprobs) for d in gate.drafts] == [("It is", (-0.5, -0.5))]
    assert llm.asked == [EVERYTHING]


@both_ways
def test_what_drafts_can_be_copied(gate, call):
    guarded = GatedRetriever(vector_index().as_retriever(), gate, llm=ScriptedLLM(), tokens=2)
    copied = copy.deepcopy(guarded)
    assert call(copied, "retrieve", "unknown?")
    assert [d.text for d in copied.decider.gate.drafts] == ["It is"]
    assert gate.drafts == []
