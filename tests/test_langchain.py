"""LangChain: one gate call a batch in every call style, arms that stream, failures that retrieve."""

import asyncio

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableParallel
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain import GatedRetriever, IndexRetriever, RetrievalGate

TOKENS = "abcdefghijklmnopqrst"


class Counting:
    """Retrieves for questions with "unknown" in them; counts its calls."""

    def __init__(self):
        self.calls = []

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        self.calls.append(list(questions))
        if any("RAISE" in q for q in questions):
            raise RuntimeError("gate down")
        p = [0.2 if "unknown" in q else 0.8 for q in questions]
        limits = [t if t is not None else 0.5 for t in threshold or [None] * len(questions)]
        return [
            Decision(question=q, retrieve=x < t, p_known=x, threshold=t)
            for q, x, t in zip(questions, p, limits, strict=True)
        ]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


class Remembering(BaseRetriever):
    """Finds two documents a query and remembers the queries."""

    queries: list[str] = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager):
        self.queries.append(query)
        return [Document(page_content=f"about {query}"), Document(page_content="shared", id="shared")]


@pytest.fixture
def gate():
    return Counting()


@pytest.fixture
def router(gate):
    llm = FakeListChatModel(responses=[TOKENS]) | StrOutputParser()
    prompt = ChatPromptTemplate.from_template("{q}")
    return RetrievalGate(gate).route(retrieve=RunnableLambda(lambda q: {"q": q}) | prompt | llm, direct=llm)


@pytest.fixture
def plain(gate):
    return RetrievalGate(gate).route(
        retrieve=RunnableLambda(lambda q: f"R:{q}"), direct=RunnableLambda(lambda q: f"D:{q}")
    )


BATCH = ["unknown a", "b", "unknown c", "d"]
ANSWERS = ["R:unknown a", "D:b", "R:unknown c", "D:d"]


def compositions(plain):
    shout = RunnableLambda(str.upper)
    return {
        "alone": (plain, ANSWERS),
        "in a sequence": (RunnableLambda(lambda q: q) | plain | shout, [a.upper() for a in ANSWERS]),
        "with retry": (plain.with_retry(), ANSWERS),
        "with config": (plain.with_config(tags=["t"]), ANSWERS),
        "with fallbacks": (plain.with_fallbacks([shout]), ANSWERS),
    }


@pytest.mark.parametrize("name", ["alone", "in a sequence", "with retry", "with config", "with fallbacks"])
async def test_every_call_style_gives_the_same(plain, gate, name):
    chain, expected = compositions(plain)[name]
    assert [chain.invoke(q) for q in BATCH] == expected
    assert [await chain.ainvoke(q) for q in BATCH] == expected
    assert ["".join(chain.stream(q)) for q in BATCH] == expected
    assert ["".join([c async for c in chain.astream(q)]) for q in BATCH] == expected
    gate.calls.clear()
    assert chain.batch(BATCH) == expected
    assert gate.calls == [BATCH]
    gate.calls.clear()
    assert await chain.abatch(BATCH, {"max_concurrency": 2}) == expected
    assert gate.calls == [BATCH]
    assert dict(chain.batch_as_completed(BATCH)) == dict(enumerate(expected))


async def test_routers_nest(plain, gate):
    outer = RetrievalGate("constant:never").route(retrieve=RunnableLambda(lambda q: "no"), direct=plain)
    assert outer.batch(BATCH) == ANSWERS
    both = RunnableParallel(x=plain, y=outer)
    assert both.invoke("b") == {"x": "D:b", "y": "D:b"}
    assert (await both.abatch(["unknown a"]))[0] == {"x": "R:unknown a", "y": "R:unknown a"}


@pytest.mark.parametrize("question", ["unknown x", "b"])
async def test_twenty_tokens_arrive_as_twenty_chunks(router, question):
    assert list(router.stream(question)) == list(TOKENS)
    assert [c async for c in router.astream(question)] == list(TOKENS)
    events = [e async for e in router.astream_events(question, version="v2")]
    assert (
        sum(e["event"] == "on_chat_model_stream" and bool(e["data"]["chunk"].content) for e in events) == 20
    )
    (custom,) = [e for e in events if e["event"] == "on_custom_event"]
    assert custom["name"] == "retrieval_gate"
    assert custom["data"]["retrieve"] is question.startswith("unknown")
    assert "RetrievalGate" in {e["name"] for e in events}
    tag = "retrieve" if question.startswith("unknown") else "direct"
    assert any(tag in e["tags"] for e in events if e["event"] == "on_chat_model_start")


def test_exceptions_stay_with_their_item(gate):
    def fail(question):
        if "c" in question:
            raise ValueError("arm down")
        return question

    chain = RetrievalGate(gate).route(retrieve=RunnableLambda(fail), direct=RunnableLambda(fail))
    found = chain.batch(["a", "c", "unknown b"], return_exceptions=True)
    assert [type(f).__name__ for f in found] == ["str", "ValueError", "str"]
    with pytest.raises(ValueError, match="arm down"):
        chain.batch(["a", "c"])
    with pytest.raises(ValueError, match="arm down"):
        chain.invoke("c")


async def test_a_failing_gate_retrieves(plain):
    assert plain.invoke("RAISE") == "R:RAISE"
    assert plain.batch(["RAISE", "b"]) == ["R:RAISE", "R:b"]
    assert await plain.ainvoke("RAISE") == "R:RAISE"
    assert plain.batch([]) == []


def test_inputs(gate):
    runnable = RetrievalGate(gate)
    messages = [HumanMessage("first"), AIMessage("x"), HumanMessage("unknown last"), AIMessage("y")]
    prompt = ChatPromptTemplate.from_messages([("system", "s"), ("human", "{q}")]).invoke(
        {"q": "unknown in a prompt"}
    )
    for value in (
        {"question": "unknown q"},
        {"input": "unknown i"},
        {"messages": messages},
        messages,
        prompt,
    ):
        assert runnable.invoke(value).retrieve, value
    assert runnable.invoke([("human", "unknown pair")]).retrieve
    assert runnable.invoke([{"role": "user", "content": "unknown dict"}]).retrieve
    assert RetrievalGate(gate, input_key="q").invoke({"q": "unknown", "question": "b"}).retrieve
    for bad, why in (({"x": 1}, "no key"), (3, "from int"), ([], "no human"), ([AIMessage("a")], "no human")):
        with pytest.raises(InvalidQuestionError, match=why):
            runnable.invoke(bad)
    found = runnable.batch(["b", {"x": 1}, "unknown"], return_exceptions=True)
    assert [getattr(f, "retrieve", None) for f in found] == [False, None, True]
    assert isinstance(found[1], InvalidQuestionError)


def test_a_threshold_for_one_call_does_not_split_the_batch(gate, plain):
    configs = [{"configurable": {"retrieval_threshold": t}} for t in (0.1, 0.9)]
    assert plain.batch(["unknown a", "b"], configs) == ["D:unknown a", "R:b"]
    assert gate.calls == [["unknown a", "b"]]
    assert plain.invoke("b", {"configurable": {"retrieval_threshold": 0.9}}) == "R:b"
    assert "retrieval_threshold" in [s.id for s in plain.config_specs]


def test_the_graph_shows_gate_and_arms(router):
    drawn = router.get_graph().draw_mermaid()
    for name in ("RetrievalGate", "retrieve", "direct", "FakeListChatModel"):
        assert name in drawn


def test_the_guarded_retriever(gate):
    inner = Remembering()
    guarded = RetrievalGate(gate).guard(inner)
    assert guarded.invoke("b") == []
    assert inner.queries == []
    found = guarded.invoke("unknown Oulu and Turku?")
    assert "unknown Oulu and Turku?" in inner.queries
    assert found[0].metadata["rgate"]["query"]
    assert len([d for d in found if d.page_content == "shared"]) == 1
    assert len(guarded.invoke("unknown Oulu and Turku?", k=1)) == 1
    assert len(GatedRetriever(retriever=inner, gate=gate, k=1).invoke("unknown")) == 1


async def test_the_guarded_retriever_awaits(gate):
    guarded = RetrievalGate(gate).guard(Remembering())
    assert await guarded.ainvoke("b") == []
    assert (await guarded.ainvoke("unknown"))[0].metadata["rgate"] == {
        "query": "unknown",
        "claim": None,
        "rank": 1,
    }


async def test_a_thousand_concurrent_calls_share_batches():
    from rgate_integrations import load_gate
    from tests.scripted_proxy import ScriptedProxy

    proxy = ScriptedProxy()
    chain = RetrievalGate(load_gate("prompt", proxy=proxy)).route(
        retrieve=RunnableLambda(lambda q: q), direct=RunnableLambda(lambda q: q)
    )
    questions = [f"q{i}?" for i in range(1_000)]
    assert await asyncio.gather(*(chain.ainvoke(q) for q in questions)) == questions
    assert len(proxy.calls) < 500


@pytest.mark.model
def test_the_cookbook_chain_runs_on_real_models(smollm2, minilm, monkeypatch):
    import pathlib

    from rgate_integrations import load_gate
    from rgate_integrations.index import Passage, PassageIndex
    from rgate_integrations.pipeline import Pipeline

    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "cookbook"))
    from langchain_chain import build_chain

    index = PassageIndex.build([Passage(id="1", title="Zorblat", text="The capital of Zorblat is Quimbo.")])
    assert IndexRetriever(index=index).invoke("zorblat", k=1)[0].metadata["title"] == "Zorblat"
    pipeline = Pipeline(load_gate("ik", proxy=smollm2, tokens=8, threshold=1.01), index, smollm2, k=1)
    (answer,) = build_chain(pipeline).batch(["What is the capital of Zorblat?"])
    assert "Quimbo" in answer


@pytest.mark.model
def test_the_cookbook_qdrant_store_runs_on_real_models(smollm2, minilm, monkeypatch, capsys):
    import pathlib

    from rgate_integrations.proxy.download import download

    pytest.importorskip("langchain_qdrant")
    download("encyclopedia-leads")
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "cookbook"))
    import qdrant

    store = qdrant.build_store(25)
    monkeypatch.setattr(qdrant, "build_store", lambda: store)
    monkeypatch.setattr(qdrant, "QUESTIONS", qdrant.QUESTIONS[1:3])
    qdrant.main()
    known, decision, unknown, other, found, *_ = capsys.readouterr().out.splitlines()
    assert [known, unknown] == qdrant.QUESTIONS
    assert (decision, other) == ("  skipped retrieval", "  retrieved")
    assert found.startswith("    Along the River During the Qingming Festival: ")
