"""LangChain: drafts that the user's own LLM writes, what it is asked for, and what its errors change."""

from itertools import chain, repeat
from unittest.mock import Mock

import httpx
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations import load_gate
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Chat, Judge, each
from tests.scripted_proxy import ScriptedProxy

EVERYTHING = {"max_tokens": 2, "logprobs": True}


def status_error(status):
    """An error as API clients raise it."""
    return httpx.HTTPStatusError(f"error {status}", request=None, response=httpx.Response(status))


def failing(*errors):
    """An LLM whose first calls raise these errors."""
    return Chat(error=Mock(side_effect=chain(errors, repeat(None))))


def gate_with(llm, judge=None):
    return RetrievalGate(judge or Judge(), llm=llm, tokens=2)


@each(BATCHES)
def test_the_llm_writes_the_drafts(call):
    judge, llm = Judge(), Chat()
    decisions = call(gate_with(llm, judge), ["a?", "unknown?"])
    assert [d.retrieve for d in decisions] == [False, True]
    drafts = [(d.text, d.tokens, d.logprobs, d.source) for d in judge.drafts[0]]
    assert drafts == [("It is", ("It ", "is "), (-0.5, -0.5), "llm")] * 2
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
    (_, *claims) = ClaimQueryRewriter(RetrievalGate(Judge(), llm=llm)).invoke("Who is unknown?")
    assert any("And I" in claim for claim in claims) == finished


@each(SINGLES)
def test_a_runnable_that_is_no_chat_model_writes_drafts_too(call):
    seen, traces = [], RunCollectorCallbackHandler()

    def write(messages, config):
        seen.append(config["tags"])
        return f" about {messages[-1].text} and so on "

    decision = call(gate_with(RunnableLambda(write)), "Oulu", {"tags": ["mine"], "callbacks": [traces]})
    assert decision.draft.text == "about Oulu"
    assert seen == [["mine", "nostream", "rgate_draft"]]
    # Regression: two failed runs came first, as a function takes no options.
    assert [run.error for run in traces.traced_runs[0].child_runs] == [None]


@pytest.mark.parametrize("kept", [[{"max_tokens": 2}], [{"max_tokens": 2}, {}]])
@each(INVOKES)
def test_an_llm_that_refuses_options_is_asked_without_them_from_then_on(call, kept):
    llm = failing(*[ValueError("unknown parameter logprobs")] * len(kept))
    gate = gate_with(llm)
    draft = call(gate, "a?").draft
    assert (draft.logprobs, draft.text) == (None, "It is")
    call(gate, "b?")
    assert llm.seen == [EVERYTHING, *kept, kept[-1]]


@each(BATCHES)
def test_only_refused_questions_of_a_batch_are_asked_again(call):
    errors = {"a long one?": status_error(400), "slow?": TimeoutError("timed out")}
    llm, judge = Chat(error=errors.get), Judge()
    gate = gate_with(llm, judge)
    call(gate, ["a?", "a long one?", "slow?", "b?"])
    assert [draft.text for draft in judge.drafts[0]] == ["It is", "It is"]
    assert sorted(llm.seen, key=len, reverse=True) == [EVERYTHING] * 4 + [{"max_tokens": 2}, {}]
    call(gate, ["c?"])
    assert llm.seen[-1] == EVERYTHING, "a form that worked for others is one that the model takes"


THINKS = AIMessage("", additional_kwargs={"reasoning_content": "Let me see"})
CALLS_A_TOOL = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (TimeoutError("server down"), "TimeoutError"),
        (CALLS_A_TOOL, "NoAnswerError"),
        (THINKS, "NoAnswerError"),
        (None, "NoAnswerError"),
        ({"text": "Shakespeare"}, "NoAnswerError"),
    ],
    ids=["fails", "calls a tool", "thinks", "returns nothing", "returns a dict"],
)
@each(INVOKES)
def test_an_llm_that_writes_nothing_means_no_draft_and_retrieval(call, answer, error):
    judge = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    decision = call(RetrievalGate(judge, llm=RunnableLambda(Mock(side_effect=[answer]))), "who?")
    assert (decision.retrieve, decision.draft, decision.error.type) == (True, None, error)
    # Regression: a reply without an answer cost nothing. What a failed call costs is not known.
    assert decision.cost.model_calls == (error == "NoAnswerError")


def test_drafting_that_breaks_down_retrieves(monkeypatch):
    # Also with ``return_exceptions``.
    monkeypatch.setattr(Chat, "batch", Mock(side_effect=TimeoutError("server down")))
    decision = gate_with(Chat()).invoke("known?")
    assert (decision.retrieve, decision.error.message) == (True, "server down")


class Bounded(Chat):
    """Its length is limited by a field, as of Gemini's and Ollama's classes, and not by an option."""

    num_predict: int | None = None

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        assert kwargs == {}
        return super()._generate(messages, max_tokens=self.num_predict)


@each(INVOKES)
def test_a_limit_that_is_a_field_is_set_in_a_copy(call):
    llm = Bounded()
    assert (call(gate_with(llm), "a?").draft.text, llm.num_predict) == ("It is", None)


# --- an LLM in wrappers --------------------------------------------------------------------------------------


WRAPPERS = {
    "bind": lambda chat: chat.bind(stop=["x"]),
    "bind its own limit": lambda chat: chat.bind(max_tokens=500, logprobs=False),
    "with_config": lambda chat: chat.with_config(tags=["mine"]),
    "with_retry": lambda chat: chat.with_retry(),
    "with_types": lambda chat: chat.with_types(output_type=AIMessage),
    "with_listeners": lambda chat: chat.with_listeners(on_start=lambda run: None),
    "with_fallbacks": lambda chat: chat.with_fallbacks([Chat()]),
    "as a fallback": lambda chat: failing(*[status_error(503)] * 2).with_fallbacks([chat]),
    "configurable_fields": lambda chat: chat.configurable_fields(error=ConfigurableField(id="error")),
    "configurable_alternatives": lambda chat: chat.configurable_alternatives(
        ConfigurableField(id="llm"), default_key="a", b=Chat()
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
@each(BATCHES)
def test_a_wrapped_llm_is_asked_with_limit_and_log_probabilities(call, wrap):
    llm = Chat()
    decisions = call(gate_with(wrap(llm)), ["a?", "b?"])
    assert [(d.draft.text, d.draft.logprobs) for d in decisions] == [("It is", (-0.5, -0.5))] * 2
    assert [{name: seen[name] for name in EVERYTHING} for seen in llm.seen] == [EVERYTHING] * 2
