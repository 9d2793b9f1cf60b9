"""`ChatOpenAI` and `OpenAILike`, which most applications have: on a real server, and on one that breaks off."""

import gc
from functools import partial

import pytest
from langchain_core.output_parsers import StrOutputParser

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests import begun_answers
from tests.http_servers import Words, listening
from tests.langchain_fakes import SINGLES
from tests.llama_index_parts import Rag
from tests.llama_index_parts import ask as ask_engine
from tests.patience import PATIENCE
from tests.scripted_upstream import ScriptedUpstream
from tests.tool_server import tool_server

langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
CLIENT = {"api_key": "none", "model": "smollm2", "temperature": 0, "max_tokens": 16, "max_retries": 0}


def ask_chat_openai(call, url, judge, question, tokens=8):
    """Ask a LangChain router that reads, or answers with the model of a server."""
    chain = RetrievalGate(judge).route(
        retrieve=lambda question: f"read about {question}",
        direct=langchain_openai.ChatOpenAI(base_url=url, **CLIENT) | StrOutputParser(),
        answer_first=AnswerFirst(tokens=tokens, question_gate=None),
    )
    return call(chain, question)


def ask_openai_like(style, url, judge, question, tokens=8, chats=True):
    """Ask a LlamaIndex engine that does the same."""
    engine = GatedQueryEngine.from_defaults(
        Rag(),
        judge,
        openai_like.OpenAILike(api_base=url, is_chat_model=chats, **CLIENT),
        streaming=style.endswith("stream"),
        answer_first=AnswerFirst(tokens=tokens, question_gate=None),
    )
    if "unknown" in question or "cut off" in question:
        style = style.replace("stream", "query")  # the engine that reads has one step, and does not stream
    return ask_engine(engine, question, style)[0]


STYLES = ("query", "aquery", "stream", "astream")
CHATS = {f"ChatOpenAI, {name}": partial(ask_chat_openai, call) for name, call in SINGLES.items()}
CHATS |= {f"OpenAILike, {style}": partial(ask_openai_like, style) for style in STYLES}
COMPLETES = {f"completes, {style}": partial(ask_openai_like, style, chats=False) for style in STYLES}
each_client = pytest.mark.parametrize("ask", CHATS.values(), ids=list(CHATS))
KNOWN = "The fox was well known, and it"  # completed, if need be
UNKNOWN = "The fox is unknown, but it"


@pytest.mark.model
@pytest.mark.parametrize("ask", (CHATS | COMPLETES).values(), ids=list(CHATS | COMPLETES))
def test_the_model_of_a_real_server_answers_first(served, ask):
    judge, url = Words(), f"{served.url}/v1"
    assert len(ask(url, judge, KNOWN)) > 16
    assert ask(url, judge, UNKNOWN) == f"read about {UNKNOWN}"
    drafts = [request.draft for requests in judge.asked for request in requests]
    assert [len(draft.logprobs) for draft in drafts] == [8, 8]


@pytest.fixture
def no_garbage_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@each_client
def test_an_unknown_answer_ends_at_the_server(ask):
    """Regression: LlamaIndex's LLMs leave their streams to the garbage collector, so it was written to its end."""
    upstream = ScriptedUpstream([{"content": "Perhaps. "}] * 10, endless=True)
    with listening(upstream.app) as url:
        assert ask(f"{url}/v1", Words(), UNKNOWN) == f"read about {UNKNOWN}"
        assert upstream.cancelled.wait(PATIENCE)


@each_client
def test_half_an_answer_is_not_judged_as_a_whole_one(ask):
    """The server ends a stream without a finish reason."""
    judge = begun_answers.Reader()
    with tool_server() as (url, rules):
        asked = partial(ask, url, judge, tokens=32)  # more than the answers have
        assert asked("a known one?").strip() == begun_answers.KNOWN
        rules.breaks_off = 5
        assert asked("one that is cut off?") == "read about one that is cut off?"
    assert [draft.finished for (draft,) in judge.drafts] == [True]
