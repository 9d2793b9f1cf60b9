"""LlamaIndex: the engine's own LLM drafts, speculative search, chat engines that never say "Empty Response"."""

import asyncio
import time

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import CompletionResponse, LogProb
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    IndexRetriever,
    RetrievalGateSelector,
)
from rgate_integrations.llama_index.drafts import LLMDrafter
from tests.test_hybrid import TEXTS, Words


class Judge:
    """Retrieves for questions with "unknown" in them; remembers the drafts it was given."""

    def __init__(self, wait=0.0):
        self.drafts, self.calls, self.wait = [], 0, wait

    def decide_batch(self, questions, *, drafts=None):
        time.sleep(self.wait)
        self.calls += 1
        drafts = drafts or [None] * len(questions)
        self.drafts += drafts
        return [
            Decision(question=q, retrieve="unknown" in q, p_known=0.5, draft=d)
            for q, d in zip(questions, drafts, strict=True)
        ]

    async def adecide_batch(self, questions, **options):
        return await asyncio.to_thread(self.decide_batch, questions, **options)


class Scored(MockLLM):
    """Answers with log-probabilities if it is asked for them; refuses what ``refuses`` names."""

    refuses: tuple[str, ...] = ()
    seen: list = Field(default_factory=list)

    def __init__(self, refuses=()):
        super().__init__()
        self.refuses = refuses

    def complete(self, prompt, formatted=False, **kwargs):
        self.seen.append(kwargs)
        if any(k in self.refuses for k in kwargs):
            raise ValueError("unknown parameter")
        tokens = ["It ", "is ", "me."][: kwargs.get("max_tokens", 9)]
        logprobs = [[LogProb(token=t, logprob=-0.5)] for t in tokens] if kwargs.get("logprobs") else None
        return CompletionResponse(text="".join(tokens), logprobs=logprobs)

    async def acomplete(self, prompt, formatted=False, **kwargs):
        return self.complete(prompt, formatted, **kwargs)


@pytest.fixture
def index():
    documents = [Document(text=t) for t in TEXTS.values()]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))


def test_the_engines_own_llm_writes_the_drafts(index):
    judge, llm = Judge(), Scored()
    inner = index.as_query_engine(llm=MockLLM())
    engine = GatedQueryEngine.from_defaults(inner, judge, llm=llm, tokens=2)
    engine.query("known?")
    asyncio.run(engine.aquery("known?"))
    assert [(d.text, d.tokens, d.logprobs, d.source) for d in judge.drafts] == [
        ("It is", ("It ", "is "), (-0.5, -0.5), "llm")
    ] * 2
    judge = Judge()
    ClaimFusionRetriever([index.as_retriever()], judge, llm=llm, tokens=2).retrieve("unknown?")
    RetrievalGateSelector(judge, retrieve="r", llm=llm, tokens=2).decide("known?")
    assert [d.text for d in judge.drafts[:1] + judge.drafts[-1:]] == ["It is", "It is"]


def test_an_llm_that_refuses_options_is_asked_without():
    llm = Scored(refuses=("logprobs",))
    drafter = LLMDrafter(llm, 2)
    (draft,) = drafter.draft(["a?"])
    assert (draft.text, draft.logprobs) == ("It is", None)
    asyncio.run(drafter.adraft(["b?"]))
    assert [set(kwargs) for kwargs in llm.seen] == [
        {"max_tokens", "logprobs"},
        {"max_tokens"},
        {"max_tokens"},
    ]

    class Down(MockLLM):
        def complete(self, *args, **kwargs):
            raise TimeoutError("server down")

    assert LLMDrafter(Down()).draft(["a?"]) == [None]


def test_no_engine_says_empty_response(index):
    llm = MockLLM()
    for question, passages in (("unknown?", 2), ("known?", 1)):
        guarded = GatedRetriever(index.as_retriever(similarity_top_k=2), Judge())
        synthesizer = get_response_synthesizer(llm=llm)
        engines = [
            RetrieverQueryEngine(guarded, synthesizer).query,
            ContextChatEngine.from_defaults(guarded, llm=llm).chat,
            CondensePlusContextChatEngine.from_defaults(guarded, llm=llm).chat,
        ]
        for ask in engines:
            response = ask(question)
            assert "Empty Response" not in str(response)
            assert len(response.source_nodes) == passages
        response = asyncio.run(RetrieverQueryEngine(guarded, synthesizer).aquery(question))
        assert "Empty Response" not in str(response)
        chat = ContextChatEngine.from_defaults(guarded, llm=llm)
        text = "".join(chat.stream_chat(question).response_gen)
        assert text
        assert "Empty Response" not in text
    (note,) = GatedRetriever(index.as_retriever(), Judge()).retrieve("known?")
    assert note.node.metadata["rgate"]["retrieve"] is False
    assert "rgate" not in note.node.get_content(metadata_mode="llm")
    assert GatedRetriever(index.as_retriever(), Judge(), note=None).retrieve("known?") == []


@pytest.mark.parametrize("style", ["query", "aquery"])
def test_speculative_search(index, style):
    began = []

    class Slow(type(index.as_retriever())):
        def _retrieve(self, query_bundle):
            began.append(time.perf_counter())
            if "broken" in query_bundle.query_str:
                raise OSError("index gone")
            return super()._retrieve(query_bundle)

        async def _aretrieve(self, query_bundle):
            return self._retrieve(query_bundle)

    inner = RetrieverQueryEngine.from_args(Slow(index, embed_model=MockEmbedding(8)), llm=MockLLM())
    judge = Judge(wait=0.2)
    engine = GatedQueryEngine.from_defaults(inner, judge, llm=MockLLM(), speculative=True)

    def run(question):
        began.clear()
        start = time.perf_counter()
        response = engine.query(question) if style == "query" else asyncio.run(engine.aquery(question))
        return response, (began[0] - start if began else None)

    response, first = run("unknown?")
    assert response.source_nodes
    assert first < 0.2
    response, _ = run("known?")
    assert not response.source_nodes
    response, _ = run("broken, but known?")
    assert "broken, but known?" in str(response)
    with pytest.raises(OSError, match="index gone"):
        run("broken and unknown?")
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine(engine, engine.direct, judge, speculative=True)


def test_a_passage_index_as_a_retriever():
    passages = PassageIndex.build([Passage(i, t, metadata={"n": 1}) for i, t in TEXTS.items()], Words())
    nodes = IndexRetriever(passages, similarity_top_k=2).retrieve(QueryBundle("capital of Italy"))
    assert [n.node.node_id for n in nodes] == ["rome", "paris"]
    assert 0 < nodes[1].score < nodes[0].score <= 1
    assert nodes[0].node.metadata == {"n": 1}


@pytest.mark.model
def test_the_cookbook_engine_runs_on_real_models(smollm2, minilm, monkeypatch, capsys):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "cookbook"))
    import llama_index_engine

    llama_index_engine.main()
    _, known_answer, _, unknown_answer = capsys.readouterr().out.splitlines()[:4]
    assert "from memory" in known_answer
    assert "with passages" in unknown_answer
    engine = llama_index_engine.build_engine()
    response = engine.query("Where was Aarno Maliniemi born?")
    assert "Oulu" in response.source_nodes[0].node.text
