"""Every LlamaIndex composition in every call style: answers, sources, model batches, events, a free event loop."""

import asyncio
import time

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.tools import QueryEngineTool

from rgate_integrations import load_gate
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryEngine,
    ClaimQueryTransform,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateEvent,
    RetrievalGateSelector,
)
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import TEXTS

COMPOSITIONS = (
    "router",
    "gated",
    "retriever engine",
    "context chat",
    "condense chat",
    "transform",
    "claim fusion",
)
DRAFT = "Oulu lies far up north. Jupiter has many moons."


class Slow(ScriptedProxy):
    """Takes its time over each model batch, as a model does: in the gate's thread."""

    wait = 0.0

    def _called(self, name, values):
        time.sleep(self.wait)
        super()._called(name, values)


class Decisions(BaseEventHandler):
    found: list = []  # noqa: RUF012  a pydantic field

    def handle(self, event, **kwargs):
        if isinstance(event, RetrievalGateEvent):
            self.found.append(event.decision)


@pytest.fixture
def events():
    handler, dispatcher = Decisions(found=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler.found
    dispatcher.event_handlers.remove(handler)


@pytest.fixture
def proxy():
    return Slow(fixed=DRAFT)


def questions(proxy):
    """Return a question that the scripted gate does not know, and one that it does."""
    decisions = load_gate("ik", proxy=proxy).decide_batch([f"What is number {i}?" for i in range(50)])
    found = [next(d.question for d in decisions if d.retrieve is retrieve) for retrieve in (True, False)]
    proxy.calls.clear()
    return found


def compose(name, gate, *, streaming, llm, embedding):
    index = VectorStoreIndex.from_documents([Document(text=t) for t in TEXTS.values()], embed_model=embedding)
    inner = index.as_query_engine(llm=llm, streaming=streaming)
    synthesizer = get_response_synthesizer(llm=llm, streaming=streaming)
    gated = GatedQueryEngine.from_defaults(inner, gate, llm=llm, streaming=streaming)
    guarded = GatedRetriever(index.as_retriever(), gate)
    if name == "router":
        tools = [
            QueryEngineTool.from_defaults(gated.direct, name="direct", description="d"),
            QueryEngineTool.from_defaults(inner, name="docs", description="r"),
        ]
        return RouterQueryEngine(RetrievalGateSelector(gate, retrieve="docs"), tools, llm=llm)
    if name == "transform":
        with pytest.warns(UserWarning, match="ClaimFusionRetriever"):
            return ClaimQueryEngine(inner, ClaimQueryTransform(gate))
    return {
        "gated": lambda: gated,
        "retriever engine": lambda: RetrieverQueryEngine(guarded, synthesizer),
        "context chat": lambda: ContextChatEngine.from_defaults(guarded, llm=llm),
        "condense chat": lambda: CondensePlusContextChatEngine.from_defaults(guarded, llm=llm),
        "claim fusion": lambda: RetrieverQueryEngine(
            ClaimFusionRetriever([index.as_retriever()], gate), synthesizer
        ),
    }[name]()


async def ask(engine, question, style):
    """Return the answer and its source nodes."""
    chat = hasattr(engine, "chat")
    if style == "query":
        response = engine.chat(question) if chat else engine.query(question)
        return str(response), response.source_nodes
    if style == "aquery":
        response = await (engine.achat(question) if chat else engine.aquery(question))
        return str(response), response.source_nodes
    if style == "streaming":
        response = engine.stream_chat(question) if chat else engine.query(question)
        return "".join(response.response_gen), response.source_nodes
    response = await (engine.astream_chat(question) if chat else engine.aquery(question))
    tokens = response.async_response_gen() if chat else response.response_gen
    return "".join([token async for token in tokens]), response.source_nodes


async def longest_gap(work):
    """Return the longest time in seconds that the event loop stood still while ``work`` was awaited."""
    task, gap, last = asyncio.ensure_future(work), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.002)
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
    await task
    return gap


# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("style", ["query", "aquery", "streaming", "async streaming"])
async def test_every_composition_in_every_style(proxy, events, name, style):
    gate = load_gate("ik", proxy=proxy)
    unknown, known = questions(proxy)
    parts = {"streaming": "streaming" in style, "llm": MockLLM(), "embedding": MockEmbedding(8)}
    claims = name in ("transform", "claim fusion")
    for question in (unknown, known):
        engine = compose(
            name, gate, **parts
        )  # a chat engine of its own: with a history it asks another question
        proxy.calls.clear()
        events.clear()
        text, sources = await ask(engine, question, style)
        assert text
        assert "Empty Response" not in text
        assert proxy.calls == ["generate", "score"] + ["score"] * claims, (
            "a batch each: draft, judgment, claims"
        )
        assert [(d.question, d.retrieve) for d in events] == [(question, question == unknown)]
        passages = [n for n in sources if "rgate" not in n.node.metadata]
        assert bool(passages) is (claims or question == unknown)
    if style in ("aquery", "async streaming"):
        proxy.wait = 0.1
        for attempt in range(5):  # other programs on the machine make gaps too, but not five times in a row
            engine = compose(name, gate, **parts)
            gap = await longest_gap(ask(engine, f"{unknown} Attempt {attempt}?", style))
            if gap < 0.05:
                break
        assert gap < 0.05


async def test_concurrent_queries_share_model_batches(proxy):
    gate = load_gate("ik", proxy=proxy)
    engine = compose("gated", gate, streaming=False, llm=MockLLM(), embedding=MockEmbedding(8))
    proxy.wait = 0.01
    asked = [f"What is number {i}?" for i in range(64)]
    responses = await asyncio.gather(*(engine.aquery(q) for q in asked))
    assert all(q in str(r) for q, r in zip(asked, responses, strict=True))
    assert len(proxy.calls) < 32


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["router", "retriever engine", "context chat", "claim fusion"])
async def test_compositions_on_real_models(smollm2, minilm, events, monkeypatch, name):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "cookbook"))
    from llama_index_engine import SmallEmbedding, SmallLLM

    gate = load_gate("default", proxy=smollm2)
    engine = compose(name, gate, streaming=False, llm=SmallLLM(), embedding=SmallEmbedding())
    before = smollm2.calls
    text, sources = await ask(engine, "What is the capital of Italy?", "aquery")
    assert text
    assert smollm2.calls > before
    (decision,) = events
    assert decision.error is None
    if decision.retrieve or name == "claim fusion":
        assert "Rome" in sources[0].node.text


@pytest.mark.model
async def test_the_cookbook_workflow_runs_on_real_models(smollm2, minilm, monkeypatch, capsys):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "cookbook"))
    import llama_index_workflow

    await llama_index_workflow.main()
    _, known, _, unknown = capsys.readouterr().out.splitlines()[:4]
    assert "from memory" in known
    assert "with passages" in unknown
