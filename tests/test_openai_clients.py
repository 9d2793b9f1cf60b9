"""The clients that most applications have, `ChatOpenAI` and `OpenAILike`, on a real server."""

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests.http_servers import Words
from tests.langchain_fakes import INVOKES, SINGLES, each
from tests.llama_index_parts import Rag, ask, every_style

pytestmark = pytest.mark.model
langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
KNOWN, UNKNOWN = ("The fox was well known, and it", "The fox is unknown, but it")  # completed, if need be
ANSWER_FIRST = AnswerFirst(tokens=8, question_gate=None)


def lengths(judge):
    """How many log-probabilities the begun answers had that a gate was shown."""
    return [len(draft.logprobs) for _, drafts, _ in judge.asked for draft in drafts]


@pytest.fixture(scope="module")
def url(served):
    return f"{served.url}/v1"


@each({name: {**SINGLES, **INVOKES}[name] for name in ("invoke", "ainvoke", "batch", "stream", "astream")})
def test_chat_openai_answers_first(url, call):
    chat = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model="smollm2", temperature=0, max_tokens=16
    )
    judge, direct = Words(), chat | StrOutputParser()
    chain = RetrievalGate(judge).route(
        retrieve=RunnableLambda(lambda question: f"read about {question}"),
        direct=direct,
        answer_first=ANSWER_FIRST,
    )
    assert call(chain, KNOWN) == direct.invoke(KNOWN)
    assert call(chain, UNKNOWN) == f"read about {UNKNOWN}"
    assert lengths(judge) == [8, 8]


@pytest.mark.parametrize("chats", [True, False], ids=["chats", "completes"])
@every_style
def test_openai_like_answers_first(url, style, chats):
    llm = openai_like.OpenAILike(
        api_base=url, api_key="none", model="smollm2", temperature=0, max_tokens=16, is_chat_model=chats
    )
    judge = Words()
    engine = GatedQueryEngine.from_defaults(
        Rag(), judge, llm, streaming=style.endswith("stream"), answer_first=ANSWER_FIRST
    )
    assert len(ask(engine, KNOWN, style)[0]) > 16
    assert str(engine.query(UNKNOWN)) == f"read about {UNKNOWN}"
    assert lengths(judge) == [8, 8]
