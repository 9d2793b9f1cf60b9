"""`ChatOpenAI` and `OpenAILike`, which most applications have: on a real server, and on one that breaks off."""

import asyncio
import gc

import pytest
from langchain_core.output_parsers import StrOutputParser

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests import begun_answers
from tests.http_servers import Words, listening
from tests.langchain_fakes import SINGLES, each
from tests.llama_index_parts import Rag, ask, every_style
from tests.patience import PATIENCE
from tests.scripted_upstream import ScriptedUpstream
from tests.tool_server import tool_server

langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
CLIENT = {"api_key": "none", "model": "smollm2", "temperature": 0, "max_tokens": 16, "max_retries": 0}


def routed(url, judge, tokens=8):
    """A LangChain router that reads, or answers with the model of a server; and the latter alone."""
    direct = langchain_openai.ChatOpenAI(base_url=url, **CLIENT) | StrOutputParser()
    chain = RetrievalGate(judge).route(
        retrieve=lambda question: f"read about {question}",
        direct=direct,
        answer_first=AnswerFirst(tokens=tokens, question_gate=None),
    )
    return chain, direct


def engine_of(url, judge, style, tokens=8, chats=True):
    """The same of LlamaIndex, for a style of asking."""
    return GatedQueryEngine.from_defaults(
        Rag(),
        judge,
        openai_like.OpenAILike(api_base=url, is_chat_model=chats, **CLIENT),
        streaming=style.endswith("stream"),
        answer_first=AnswerFirst(tokens=tokens, question_gate=None),
    )


# --- a real server -----------------------------------------------------------------------------------------

KNOWN = "The fox was well known, and it"  # completed, if need be
UNKNOWN = "The fox is unknown, but it"


def lengths(judge):
    """Number of log-probabilities of the partial answers that a gate got."""
    return [len(request.draft.logprobs) for requests in judge.asked for request in requests]


@pytest.mark.model
@each({name: SINGLES[name] for name in ("invoke", "ainvoke", "batch", "stream", "astream")})
def test_chat_openai_answers_first(served, call):
    judge = Words()
    chain, direct = routed(f"{served.url}/v1", judge)
    assert call(chain, KNOWN) == direct.invoke(KNOWN)
    assert call(chain, UNKNOWN) == f"read about {UNKNOWN}"
    assert lengths(judge) == [8, 8]


@pytest.mark.model
@pytest.mark.parametrize("chats", [True, False], ids=["chats", "completes"])
@every_style
def test_openai_like_answers_first(served, style, chats):
    judge = Words()
    engine = engine_of(f"{served.url}/v1", judge, style, chats=chats)
    assert len(ask(engine, KNOWN, style)[0]) > 16
    assert str(engine.query(UNKNOWN)) == f"read about {UNKNOWN}"
    assert lengths(judge) == [8, 8]


# --- one that would answer for ever ------------------------------------------------------------------------


@pytest.fixture
def no_garbage_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@each(SINGLES)
def test_an_unknown_answer_of_chat_openai_ends_at_the_server(call):
    upstream = ScriptedUpstream([{"content": "Perhaps. "}] * 10, endless=True)
    with listening(upstream.app) as url:
        chain, _ = routed(f"{url}/v1", Words())
        assert call(chain, UNKNOWN) == f"read about {UNKNOWN}"
        assert upstream.cancelled.wait(PATIENCE)


@pytest.mark.usefixtures("no_garbage_collection")
@every_style
def test_an_unknown_answer_of_openai_like_ends_at_the_server(style):
    """Regression: LlamaIndex's LLMs leave their streams to the garbage collector, so it was written to its end."""
    upstream = ScriptedUpstream([{"content": "Perhaps. "}] * 10, endless=True)
    with listening(upstream.app) as url:
        engine = engine_of(f"{url}/v1", Words(), style)
        again = asyncio.run(engine.aquery(UNKNOWN)) if style[0] == "a" else engine.query(UNKNOWN)
        assert str(again) == f"read about {UNKNOWN}"
        assert upstream.cancelled.wait(PATIENCE)


# --- one whose streams end without a finish reason: half an answer is not judged as a whole one ------------


@each(SINGLES)
def test_an_answer_of_chat_openai_that_breaks_off_is_retrieved_for(call):
    judge = begun_answers.Reader()
    with tool_server() as (url, rules):
        chain, _ = routed(url, judge, tokens=32)  # more than the answers have
        assert call(chain, "a known one?").strip() == begun_answers.KNOWN
        rules.breaks_off = 5
        assert call(chain, "a known one?") == "read about a known one?"
    assert [draft.finished for (draft,) in judge.drafts] == [True]


@every_style
def test_an_answer_of_openai_like_that_breaks_off_is_retrieved_for(style):
    judge = begun_answers.Reader()
    with tool_server() as (url, rules):
        engine = engine_of(url, judge, style, tokens=32)
        assert ask(engine, "a known one?", style)[0].strip() == begun_answers.KNOWN
        rules.breaks_off = 5
        again = (
            asyncio.run(engine.aquery("a known one?")) if style[0] == "a" else engine.query("a known one?")
        )
    assert str(again) == "read about a known one?"
    assert again.metadata["rgate"]["error"]["type"] == "ServerError"
    assert [draft.finished for (draft,) in judge.drafts] == [True]
