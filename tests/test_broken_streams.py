"""Streams of OpenAI's API that end without a finish reason: half an answer is not judged as a whole one."""

import asyncio

import pytest
from langchain_core.output_parsers import StrOutputParser

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests.begun_answers import KNOWN, Reader
from tests.langchain_fakes import SINGLES, each
from tests.llama_index_parts import Rag, ask, every_style
from tests.tool_server import tool_server

langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
FIRST = AnswerFirst(question_gate=None)  # 32 tokens: longer than the answers


@pytest.fixture
def server():
    with tool_server() as (url, rules):
        yield url, rules


@each(SINGLES)
def test_an_answer_of_chat_openai_that_breaks_off_is_retrieved_for(server, call):
    url, rules = server
    chat = langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="rules", max_retries=0)
    judge = Reader()
    chain = RetrievalGate(judge).route(
        retrieve=lambda question: f"read about {question}",
        direct=chat | StrOutputParser(),
        answer_first=FIRST,
    )
    assert call(chain, "a known one?").strip() == KNOWN
    rules.breaks_off = 5
    assert call(chain, "a known one?") == "read about a known one?"
    assert [draft.finished for (draft,) in judge.drafts] == [True]


@every_style
def test_an_answer_of_openai_like_that_breaks_off_is_retrieved_for(server, style):
    url, rules = server
    llm = openai_like.OpenAILike(
        api_base=url, api_key="none", model="rules", is_chat_model=True, max_retries=0
    )
    judge = Reader()
    engine = GatedQueryEngine.from_defaults(
        Rag(), judge, llm, streaming=style.endswith("stream"), answer_first=FIRST
    )
    assert ask(engine, "a known one?", style)[0].strip() == KNOWN
    rules.breaks_off = 5
    again = asyncio.run(engine.aquery("a known one?")) if style[0] == "a" else engine.query("a known one?")
    assert str(again) == "read about a known one?"
    assert again.metadata["rgate"]["error"]["type"] == "ServerError"
    assert [draft.finished for (draft,) in judge.drafts] == [True]
