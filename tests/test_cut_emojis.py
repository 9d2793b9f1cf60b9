"""Half of an emoji, as JavaScript sends it that cuts a text: every place that takes text reads a question mark."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage
from llama_index.core.base.llms.types import ChatMessage as LlamaMessage
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rgate_integrations import Decision, load_gate
from rgate_integrations.answering.claims import Claim
from rgate_integrations.answering.query_plan import Query, QueryPlan
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate
from rgate_integrations.llama_index import GatedQueryEngine, GatedRetriever
from rgate_integrations.llama_index.agents import GatedTool
from rgate_integrations.models.encoding import TextEncoder
from tests.begun_answers import TurnReader
from tests.langchain_fakes import INVOKES, Judge, each
from tests.llama_index_parts import Shelf, both_ways, over

CUT, READ = "Thanks \ud83d", "Thanks ?"
SAID = HumanMessage(CUT)
INPUTS = {
    "a text": CUT,
    "a message's text": SAID.text,
    "a message": SAID,
    "messages": [SAID],
    "a message with a role": [ChatMessage(content=CUT, role="user")],
    "a mapping": {"question": SAID.text},
}
HISTORY = [SAID, AIMessage(CUT), HumanMessage("And when?")]


def as_json(decision):
    """Return the question of a decision that JSON can hold."""
    assert Decision.model_validate_json(decision.model_dump_json()) == decision
    return decision.question


@pytest.mark.parametrize("value", INPUTS.values(), ids=list(INPUTS))
@each(INVOKES)
def test_langchain_decides(call, value):
    judge = Judge()
    assert as_json(call(RetrievalGate(judge), value)) == READ
    assert judge.questions == [READ], "a gate of the user's own may send it to a server"
    assert as_json(call(RetrievalGate("constant:never"), value)) == READ


@each(INVOKES)
def test_turns_before_a_question(call):
    judge = TurnReader()
    assert as_json(call(RetrievalGate(judge), HISTORY)) == "And when?"
    assert judge.histories == [(f"user: {READ}", f"assistant: {READ}")]
    assert call(ClaimQueryRewriter("constant:always"), SAID.text) == [READ]


@both_ways
def test_llama_index_decides(call):
    judge, memory = TurnReader(), ChatMemoryBuffer.from_defaults([LlamaMessage(role="user", content=CUT)])
    engine = GatedQueryEngine.from_defaults(over(Shelf()), judge, MockLLM())
    assert call(engine, "query", CUT).metadata["rgate"]["question"] == READ
    assert call(GatedRetriever(Shelf(), judge), "retrieve", CUT)[0].node.metadata["rgate"]["question"] == READ
    assert as_json(call(GatedTool(lambda input: input, judge), "call", CUT).raw_output) == READ
    call(GatedRetriever(Shelf(), judge, memory=memory), "retrieve", "And when?")
    assert judge.calls == [[READ]] * 3 + [["And when?"]]
    assert judge.histories[-1] == (f"user: {READ}",)


def test_the_core_decides(call, scripted):
    gate = load_gate("ik", proxy=scripted)
    assert as_json(call(gate, SAID.text, history=[SAID.text], draft=SAID.text)) == READ
    plan = QueryPlan(question=CUT, queries=(Query(text=CUT, claim=CUT),))
    assert QueryPlan.model_validate_json(plan.model_dump_json()) == plan
    assert Claim(text=CUT).text == READ


def test_what_a_gate_says_when_it_fails():
    error = {"side_effect": ValueError(CUT)}
    own = SimpleNamespace(decide_batch=Mock(**error), adecide_batch=AsyncMock(**error))
    failing = RetrievalGate(own)
    for decision in (failing.invoke("What is known?"), asyncio.run(failing.ainvoke("What is known?"))):
        as_json(decision)
        assert decision.error.message == READ


def test_tokenizers_read_it():
    words = Tokenizer(WordLevel({"?": 0, "[UNK]": 1}, unk_token="[UNK]"))  # noqa: S106  no password
    assert TextEncoder(words).ids("\ud83d") == [0]


@pytest.mark.model
def test_embedders_read_it(embedder_model):
    """Regression: the default embedder read it in passages, and failed for queries."""
    embedder = SentenceEmbedder()
    for embed in (embedder.embed, embedder.embed_queries):
        cut, read = embed([CUT, READ])
        assert cut.tolist() == pytest.approx(read.tolist(), abs=1e-6)
