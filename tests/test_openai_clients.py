"""The clients that most applications have, `ChatOpenAI` and `OpenAILike`, on a real server."""

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from llama_index.core.query_engine import CustomQueryEngine

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine
from tests.langchain_fakes import INVOKES, SINGLES, each
from tests.llama_index_parts import ask, every_style

pytestmark = pytest.mark.model
langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
KNOWN, UNKNOWN = (
    "Once upon a time there was a fox, and it",
    "The fox is unknown, but it",
)  # completed, if need be
ANSWER_FIRST = AnswerFirst(tokens=8, question_gate=None)


class Script:
    """A gate that retrieves for questions with "unknown" in them, and counts the tokens of begun answers."""

    def __init__(self):
        self.tokens = []

    def decide_batch(self, questions, *, drafts):
        decisions = []
        for question, draft in zip(questions, drafts, strict=True):
            assert len(draft.tokens) == len(draft.logprobs)  # each has one
            self.tokens.append(len(draft.tokens))
            unknown = "unknown" in question
            decisions.append(Decision(question=question, retrieve=unknown, p_known=float(not unknown)))
        return decisions

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


@pytest.fixture(scope="module")
def url(served):
    return f"{served.url}/v1"


@each({name: {**SINGLES, **INVOKES}[name] for name in ("invoke", "ainvoke", "batch", "stream", "astream")})
def test_chat_openai_answers_first(url, call):
    chat = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model="smollm2", temperature=0, max_tokens=16
    )
    judge, direct = Script(), chat | StrOutputParser()
    chain = RetrievalGate(judge).route(
        retrieve=RunnableLambda(lambda question: f"read about {question}"),
        direct=direct,
        answer_first=ANSWER_FIRST,
    )
    assert call(chain, KNOWN) == direct.invoke(KNOWN)
    assert call(chain, UNKNOWN) == f"read about {UNKNOWN}"
    assert judge.tokens == [8, 8]


class Rag(CustomQueryEngine):
    """Reads, whatever is asked."""

    def custom_query(self, query_str):
        return f"read about {query_str}"


@pytest.mark.parametrize("chats", [True, False], ids=["chats", "completes"])
@every_style
def test_openai_like_answers_first(url, style, chats):
    llm = openai_like.OpenAILike(
        api_base=url, api_key="none", model="smollm2", temperature=0, max_tokens=16, is_chat_model=chats
    )
    judge = Script()
    engine = GatedQueryEngine.from_defaults(
        Rag(), judge, llm, streaming=style.endswith("stream"), answer_first=ANSWER_FIRST
    )
    assert len(ask(engine, KNOWN, style)[0]) > 16
    assert str(engine.query(UNKNOWN)) == f"read about {UNKNOWN}"
    assert judge.tokens == [8, 8]
