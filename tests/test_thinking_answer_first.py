"""Answer first with an LLM that thinks: the question decides, nothing waits for thoughts, and nothing is withheld."""

import gc
import itertools
from typing import ClassVar

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests.begun_answers import LOOK, TEXT, EventRecorder
from tests.begun_answers import Shelf as Retriever
from tests.http_servers import Words, listening, serving_gateway
from tests.langchain_fakes import SINGLES, each
from tests.llama_index_parts import Rag, ask, every_style
from tests.patience import PATIENCE
from tests.scripted_upstream import ANSWER, ScriptedUpstream, Shelf

openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")

WORDS = [f"{word} " for word in ["Let", "me", "see", "what", "I", "know", "of", "that", "."]] * 6
DELTAS = {
    "reasoning_content": [{"reasoning_content": word} for word in WORDS],
    "reasoning": [{"reasoning": word} for word in WORDS],
    "thinking": [{"thinking": word} for word in WORDS],
    "blocks": [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Let"}]}]}],
    "tags": [{"content": "<think>"}, {"content": "\n"}, *({"content": word} for word in WORDS)],
    "harmony": [{"content": word} for word in ("<|channel|>", "analysis", "<|message|>", *WORDS)],
}
END = {
    "tags": [{"content": "</think>\n\n"}],
    "harmony": [{"content": "<|end|><|start|>assistant<|channel|>final<|message|>"}],
}
KNOWN, UNKNOWN = "An open one, known?", "An open one, not?"
CLIENT = {"api_key": "none", "model": "m", "max_retries": 0}


class ByQuestion(Words):
    """Is unsure about questions; it must not see a partial answer that consists of thoughts."""

    fields: ClassVar = {"reason": "So."}

    def p_known(self, request):
        assert request.draft is None, f"thoughts were judged: {request.draft}"
        return 0.6 if "known" in request.question else 0.4


def upstreams(dialect):
    """A server that thinks and answers, and one that never comes to an answer."""
    start = [{"role": "assistant", "content": ""}]
    whole = [*start, *DELTAS[dialect], *END.get(dialect, []), *ANSWER]
    return ScriptedUpstream(whole), ScriptedUpstream([*start, *DELTAS[dialect]], endless=True)


def options(**more):
    return {"answer_first": AnswerFirst(tokens=4, question_gate=ByQuestion(), **more)}


# --- over the network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DELTAS)
def test_the_gateway_lets_thoughts_through_or_stops_them_at_once(dialect):
    answers, thinks = upstreams(dialect)
    body = {"model": "m", "stream": True}
    for upstream, question, decision in ((answers, KNOWN, "direct"), (thinks, UNKNOWN, "retrieve")):
        messages = {"messages": [{"role": "user", "content": question}]}
        with (
            listening(upstream.app) as behind,
            serving_gateway(ByQuestion(), f"{behind}/v1", Shelf(), answer_first=AnswerFirst(tokens=4)) as url,
            httpx.stream(
                "POST", f"{url}/v1/chat/completions", json={**body, **messages}, timeout=60
            ) as response,
        ):
            assert response.headers["x-rgate-decision"] == decision
            assert "thinks before it answers" in response.headers["x-rgate-reason"]
            if decision == "direct":
                alone = httpx.post(f"{behind}/v1/chat/completions", json={**body, **messages})
                assert response.read() == alone.content
                assert len(upstream.requests) == 2, "it was asked once"
                continue
            # The request with passages thinks, too: its bytes arrive unchanged.
            assert b"chat.completion.chunk" in next(response.iter_raw())
            assert upstream.cancelled.wait(PATIENCE)
            assert "Shakespeare" in upstream.requests[-1]["messages"][-1]["content"]


def test_the_gateway_looks_at_each_request_anew():
    """Regression: after one answer with thoughts, no other answer started, whatever its model."""

    class Open(ByQuestion):
        def p_known(self, request):
            return 0.6

    upstream, gate = upstreams("reasoning_content")[0], Open()
    with (
        listening(upstream.app) as behind,
        serving_gateway(gate, f"{behind}/v1", Shelf(), answer_first=AnswerFirst(tokens=4)) as url,
    ):
        for deltas in (upstream.deltas, ANSWER):
            upstream.deltas = deltas
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": KNOWN}]}
            httpx.post(f"{url}/v1/chat/completions", json=body)
    assert [request.draft.text for (request,) in gate.asked if request.draft] == ["The answer is 42."]


def langchain_router(url, **more):
    direct = openai.ChatOpenAI(base_url=f"{url}/v1", **CLIENT) | StrOutputParser()
    return RetrievalGate(ByQuestion()).route(retrieve=Retriever() | str, direct=direct, **options(**more))


@pytest.mark.parametrize("dialect", ["reasoning_content", "tags"])
@each({name: SINGLES[name] for name in ("invoke", "astream")})
def test_chat_openai(call, dialect):
    """It hides what is beside the text: an LLM that writes none counts as one that thinks."""
    for upstream, question in zip(upstreams(dialect), (KNOWN, UNKNOWN), strict=True):
        recorder = EventRecorder()
        with listening(upstream.app) as url:
            answer = call(langchain_router(url), question, {"callbacks": [recorder]})
        assert (answer.endswith("The answer is 42."), TEXT in answer) == (
            question == KNOWN,
            question == UNKNOWN,
        )
        assert len(upstream.requests) == 1
        if question == UNKNOWN:
            assert upstream.cancelled.wait(PATIENCE)
        assert "So. The LLM thinks before it answers" in recorder.events[-1]["reason"]


@pytest.mark.parametrize("dialect", ["reasoning_content", "tags"])
@every_style
def test_openai_like(style, dialect):
    for upstream, question in zip(upstreams(dialect), (KNOWN, UNKNOWN), strict=True):
        with listening(upstream.app) as url:
            engine = GatedQueryEngine.from_defaults(
                Rag(),
                ByQuestion(),
                openai_like.OpenAILike(api_base=f"{url}/v1", is_chat_model=True, **CLIENT),
                streaming=style.endswith("stream"),
                **options(),
            )
            if question == KNOWN:
                text, response = ask(engine, question, style)
            else:  # an engine of one step does not stream
                text, response = ask(engine, question, style.replace("stream", "query"))
                gc.collect()  # LlamaIndex's blocking stream holds itself, and the connection
        assert text.endswith("The answer is 42." if question == KNOWN else f"read about {question}")
        assert len(upstream.requests) == 1
        decision = response.metadata["rgate"]
        assert "thinks before it answers" in decision["reason"]


# --- as LangChain's chat models give thoughts --------------------------------------------------------------------


def blocks(kind, **fields):
    return [AIMessageChunk([{"type": kind, "index": 0, **fields}]) for _ in WORDS]


CHUNKS = {
    "Anthropic": blocks("thinking", thinking="Let "),
    "Anthropic, redacted": blocks("redacted_thinking", data="EmwK"),
    "Gemini": blocks("thinking", thinking="Let "),
    "OpenAI's Responses": blocks("reasoning", summary=[], id="rs"),
    "Ollama, DeepSeek": [AIMessageChunk("", additional_kwargs={"reasoning_content": word}) for word in WORDS],
    "LangChain's blocks": blocks("reasoning", reasoning="Let "),
}


class Thinker(BaseChatModel):
    """Streams chunks of thoughts, and then its answer in as many chunks as words; or never comes to that."""

    thoughts: list
    calls: list = Field(default_factory=list)
    written: list = Field(default_factory=list)

    @property
    def _llm_type(self):
        return "thinker"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.calls.append(messages[-1].text)
        message = sum(self.thoughts[1:], self.thoughts[0]) + AIMessageChunk("The answer is 42.")
        return ChatResult(generations=[ChatGenerationChunk(message=message)])

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        self.calls.append(messages[-1].text)
        known = "known" in messages[-1].text
        words = [AIMessageChunk(delta["content"]) for delta in ANSWER]
        thoughts = [*self.thoughts, *words] if known else itertools.cycle(self.thoughts)
        for chunk in thoughts:
            self.written.append(chunk)
            yield ChatGenerationChunk(message=chunk)


@pytest.mark.parametrize("parser", [True, False], ids=["text", "messages"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@each({name: SINGLES[name] for name in ("invoke", "astream")})
def test_thoughts_of_a_chat_model_are_known_by_the_first_and_then_no_answer_is_begun(call, chunks, parser):
    llm = Thinker(thoughts=chunks)
    router = RetrievalGate(ByQuestion()).route(
        retrieve=Retriever() | str, direct=llm | StrOutputParser() if parser else llm, **options()
    )
    assert TEXT in call(router, UNKNOWN)
    assert len(llm.written) <= 2, "it is stopped at its first thought"
    assert TEXT in call(router, UNKNOWN)
    assert len(llm.calls) == 1, "it is known by now"
    answer = call(router, KNOWN)
    assert getattr(answer, "text", answer).strip() == "The answer is 42."
    assert len(llm.calls) == 2


def test_without_a_gate_for_the_question_there_is_no_evidence():
    llm = Thinker(thoughts=CHUNKS["Ollama, DeepSeek"])
    recorder = EventRecorder()
    router = RetrievalGate(ByQuestion()).route(
        retrieve=Retriever() | str, direct=llm, answer_first=AnswerFirst(question_gate=None)
    )
    assert TEXT in router.invoke(KNOWN, {"callbacks": [recorder]})
    assert recorder.events[-1]["error"]["type"] == "NoAnswerError"


def test_what_a_search_finds_decides_beside_the_question():
    llm = Thinker(thoughts=CHUNKS["Ollama, DeepSeek"])
    held = "known: who wrote the Zorba quartet"
    router = RetrievalGate(ByQuestion()).route(
        retrieve=Retriever() | str, direct=llm | StrOutputParser(), look_first=LOOK, **options()
    )
    for question, retrieved in ((held, True), (KNOWN, False)) * 2:
        assert (TEXT in router.invoke(question)) == retrieved


def test_empty_thoughts_are_none():
    """As of a template whose thinking is off: the answer behind them is judged."""
    judge, llm = Words(), Thinker(thoughts=[AIMessageChunk("<think>"), AIMessageChunk("\n\n</think>\n\n")])
    router = RetrievalGate(judge).route(
        retrieve=Retriever() | str, direct=llm, answer_first=AnswerFirst(tokens=6, question_gate=None)
    )
    assert router.invoke(KNOWN).text.endswith("The answer is 42.")
    assert [request.draft.text for (request,) in judge.asked] == ["The answer is 42."]
