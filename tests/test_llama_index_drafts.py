"""LlamaIndex: the LLM's own drafts, and what is asked of it after it refused or failed."""

from email.message import Message
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.instrumentation.dispatcher import instrument_tags
from pydantic import Field

from rgate_integrations.answering.drafting import DRAFT_TAG
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
)
from rgate_integrations.llama_index.answer_first import DIRECT_TAG
from tests.fake_server import Fake
from tests.llama_index_parts import Rag, ScriptedGate, Shelf, Writer, both_ways, decisions_in, hearing

EVERYTHING, NO_LOGPROBS, NOTHING = ["logprobs", "max_tokens"], ["max_tokens"], []
LOGPROBS = (0.0, -0.25)


@both_ways
@pytest.mark.parametrize("chats", [False, True], ids=["completes", "chats"])
def test_everything_that_decides_lets_the_llm_draft(gate, call, chats):
    llm = Writer(chats=chats)
    call(GatedQueryEngine.from_defaults(Rag(), gate, llm=llm, tokens=2), "query", "unknown?")
    call(ClaimFusionRetriever([Shelf()], gate, draft_llm=llm, tokens=2), "retrieve", "unknown?")
    found = [(d.text, d.tokens, d.logprobs, d.model) for (d,) in gate.drafts]
    assert found == [("Perhaps it", ("Perhaps", " it"), LOGPROBS, "writer")] * 2
    assert llm.calls == [EVERYTHING] * 2


BUSY, REFUSED = (HTTPError("http://llm", status, "no", Message(), None) for status in (503, 400))


@both_ways
@pytest.mark.parametrize(
    ("errors", "calls", "logprobs"),
    [
        # What it refuses is remembered.
        ([ValueError("unknown parameter")], [EVERYTHING, NO_LOGPROBS, NO_LOGPROBS], [None, None]),
        ([TypeError("unexpected keyword argument")], [EVERYTHING, NO_LOGPROBS, NO_LOGPROBS], [None, None]),
        ([REFUSED], [EVERYTHING, NO_LOGPROBS, NO_LOGPROBS], [None, None]),
        # Any other error costs one draft, without which the gate is not asked, and changes nothing.
        ([TimeoutError("slow")], [EVERYTHING, EVERYTHING], [LOGPROBS]),
        ([BUSY], [EVERYTHING, EVERYTHING], [LOGPROBS]),
        # It is not certain that less would work,
        ([REFUSED, TimeoutError("slow")], [EVERYTHING, NO_LOGPROBS, EVERYTHING], [LOGPROBS]),
        # and here the question is refused, and not a form.
        ([REFUSED] * 3, [EVERYTHING, NO_LOGPROBS, NOTHING, EVERYTHING], [LOGPROBS]),
    ],
    ids=repr,
)
def test_an_llm_that_refuses_options_is_asked_without_and_an_error_costs_one_draft(
    gate, call, errors, calls, logprobs
):
    llm = Writer(fails=Mock(side_effect=[*errors, None, None]))
    engine = GatedQueryEngine(Rag(), Rag(), gate, llm=llm, tokens=2)
    for _ in range(2):
        call(engine, "query", "unknown?")
    assert [draft.logprobs for (draft,) in gate.drafts] == logprobs
    assert llm.calls == calls


@both_ways
def test_listeners_can_tell_a_draft_from_the_answer(gate, call):
    engine = GatedQueryEngine.from_defaults(Rag(), gate, llm=Writer(), tokens=2)
    with hearing() as events, instrument_tags({"tenant": "a"}):
        call(engine, "query", "a thing")
    heard = [event.tags for event in events if event.class_name().startswith("LLMCompletion")]
    draft, answer = {"tenant": "a", DRAFT_TAG: True}, {"tenant": "a", DIRECT_TAG: True}
    assert heard == [draft, draft, answer, answer], "the start and the end of each"


@both_ways
@pytest.mark.parametrize("says", [" \n", "<think>Let me see"])
def test_an_llm_that_writes_no_answer_gives_no_draft_and_is_retrieved_for(gate, call, says, monkeypatch):
    """Regression: an empty draft was judged, and in LangChain none."""
    monkeypatch.setattr(Writer, "_whole", lambda *arguments: CompletionResponse(text=says))
    engine = GatedQueryEngine.from_defaults(Rag(), gate, llm=Writer(), tokens=2)
    decision = call(engine, "query", "a thing").metadata["rgate"]
    assert (decision["retrieve"], decision["error"]["type"]) == (True, "NoAnswerError")
    assert decision["cost"]["model_calls"] == 1, "regression: it was 0"
    assert gate.drafts == []


# --- LLMs whose calls have no option max_tokens ------------------------------------------------------------


@both_ways
def test_a_draft_of_openais_responses_is_short(gate, call, fake):
    """Regression: after two forms that its client refuses, it was asked for a whole answer."""
    openai = pytest.importorskip("llama_index.llms.openai", reason="comes with the dev extra")
    part = {"type": "output_text", "text": "Oulu, perhaps.", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "output_tokens_details": {}}
    url = fake({"output": [message], "usage": usage}).url
    llm = openai.OpenAIResponses("gpt-4o", api_base=url, api_key="x", max_retries=0)
    call(ClaimFusionRetriever([Shelf()], gate, draft_llm=llm, tokens=2), "retrieve", "unknown?")
    assert [body.get("max_output_tokens") for _, body, _ in Fake.seen] == [16], "OpenAI refuses less"
    assert [draft.text for (draft,) in gate.drafts] == ["Oulu, perhaps."]
    assert llm.max_output_tokens is None, "its answers are as long as before"


class Ollama(Writer):
    """Ignores the options of a call, as LlamaIndex's class of this name does, and notes the options of the server."""

    additional_kwargs: dict = Field(default_factory=dict)
    asked: list = Field(default_factory=list)

    @classmethod
    def class_name(cls):
        return "Ollama_llm"

    def _chunks(self, prompt, options):
        self.asked.append(self.additional_kwargs)
        return super()._chunks(prompt, {"max_tokens": self.additional_kwargs.get("num_predict")})


@both_ways
def test_a_draft_of_ollama_is_short(gate, call):
    """Regression: it wrote a whole answer."""
    llm = Ollama(additional_kwargs={"seed": 1})
    call(ClaimFusionRetriever([Shelf()], gate, draft_llm=llm, tokens=2), "retrieve", "unknown?")
    assert llm.asked == [{"seed": 1, "num_predict": 2}]
    assert [draft.text for (draft,) in gate.drafts] == ["Perhaps it"]
    assert llm.additional_kwargs == {"seed": 1}


class GoogleGenAI(Writer):
    """Reads one option of a call and ignores the others, as LlamaIndex's class of this name does."""

    @classmethod
    def class_name(cls):
        return "GenAI"

    def _chunks(self, prompt, options):
        return super()._chunks(prompt, {"max_tokens": options["generation_config"]["max_output_tokens"]})


@both_ways
def test_a_draft_of_gemini_is_short(gate, call):
    """Regression: it wrote a whole answer."""
    call(ClaimFusionRetriever([Shelf()], gate, draft_llm=GoogleGenAI(), tokens=2), "retrieve", "unknown?")
    assert [draft.text for (draft,) in gate.drafts] == ["Perhaps it"]


# --- what it costs -----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("logprobs", [True, False], ids=["tokens", "words"])
def test_a_decision_counts_the_tokens_of_its_draft_once_a_request(gate, call, logprobs):
    refused = [] if logprobs else [ValueError("unknown parameter")]
    llm = Writer(fails=Mock(side_effect=[*refused, None]))
    inside = GatedQueryEngine(Rag(), Rag(), ScriptedGate(), llm=llm, tokens=2)
    engine = GatedQueryEngine(inside, Rag(), gate, llm=llm, tokens=2)
    with hearing() as events:
        call(engine, "query", "unknown?")
    costs = [(each.cost.model_calls, each.cost.tokens_out) for each in decisions_in(events)]
    assert costs == [(1, 2), (0, 0)], "the inner gate takes the draft that is there"
