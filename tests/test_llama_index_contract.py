"""Every LlamaIndex composition in every call style: answers, sources, model batches, events, a free event loop."""

import asyncio
import functools
import threading
from pathlib import Path

import pytest
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool

from rgate_integrations import load_gate
from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryEngine,
    ClaimQueryTransform,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)
from tests.llama_index_parts import (
    CLAIMS,
    ScriptedGate,
    aask,
    ask,
    decisions_in,
    every_style,
    hearing,
    runs_meanwhile,
    vector_index,
)
from tests.scripted_proxy import ScriptedProxy

COMPOSITIONS = (
    "router",
    "gated",
    "retriever engine",
    "context chat",
    "condense chat",
    "transform",
    "claim fusion",
)
WITH_CLAIMS = ("transform", "claim fusion")

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def compose(name, gate, *, streaming=False, llm=None, index=None):
    llm, index = llm or MockLLM(), index or vector_index()
    inner = index.as_query_engine(llm=llm, streaming=streaming)
    if name == "transform":
        return ClaimQueryEngine(inner, claim_transform(gate))
    if name == "context chat":
        return ContextChatEngine.from_defaults(GatedRetriever(index.as_retriever(), gate), llm=llm)
    if name == "condense chat":
        return CondensePlusContextChatEngine.from_defaults(
            GatedRetriever(index.as_retriever(), gate), llm=llm
        )
    synthesizer = get_response_synthesizer(llm=llm, streaming=streaming)
    if name == "retriever engine":
        return RetrieverQueryEngine(GatedRetriever(index.as_retriever(), gate), synthesizer)
    if name == "claim fusion":
        return RetrieverQueryEngine(
            ClaimFusionRetriever([index.as_retriever()], gate, filter_claims=True), synthesizer
        )
    gated = GatedQueryEngine.from_defaults(inner, gate, llm=llm, streaming=streaming)
    if name == "gated":
        return gated
    tools = [
        QueryEngineTool.from_defaults(gated.direct, name="direct", description="d"),
        QueryEngineTool.from_defaults(inner, name="docs", description="r"),
    ]
    return RouterQueryEngine(RetrievalGateSelector(gate, retrieve="docs"), tools, llm=llm)


def claim_transform(gate):
    with pytest.warns(UserWarning, match="ClaimFusionRetriever"):
        return ClaimQueryTransform(gate, filter_claims=True)


@functools.cache
def an_unknown_and_a_known_question():
    """What the scripted gate does not know, and what it does."""
    gate = load_gate("ik", proxy=ScriptedProxy(fixed=CLAIMS.text))
    decisions = gate.decide_batch([f"What is number {i}?" for i in range(50)])
    unknown = next(d.question for d in decisions if d.retrieve)
    known = next(d.question for d in decisions if not d.retrieve)
    return unknown, known


@pytest.mark.parametrize("name", COMPOSITIONS)
@every_style
def test_every_composition_in_every_style(name, style):
    proxy = ScriptedProxy(fixed=CLAIMS.text)
    gate = load_gate("ik", proxy=proxy)
    unknown, known = an_unknown_and_a_known_question()
    for question in (unknown, known):
        # A chat engine of its own for each question: with a history it asks another one.
        engine = compose(name, gate, streaming=style.endswith("stream"))
        proxy.calls.clear()
        with hearing() as events:
            text, response = ask(engine, question, style)
        assert text
        assert "Empty Response" not in text
        batches = ["generate", "score"]
        if name in WITH_CLAIMS:
            batches.append("score")  # all claims in one
        assert proxy.calls == batches
        assert [(d.question, d.retrieve) for d in decisions_in(events)] == [(question, question == unknown)]
        passages = [n for n in response.source_nodes if "rgate" not in n.node.metadata]
        assert bool(passages) is (name in WITH_CLAIMS or question == unknown)


class Watching(ScriptedProxy):
    """Finds out at each model batch, in the gate's thread, whether an event loop runs meanwhile."""

    def __init__(self, loop):
        super().__init__(fixed=CLAIMS.text)
        self.loop = loop
        self.loop_ran = []

    def _called(self, name, values):
        super()._called(name, values)
        self.loop_ran.append(runs_meanwhile(self.loop))


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("style", ["aquery", "astream"])
async def test_the_event_loop_runs_while_the_model_works(name, style):
    proxy = Watching(asyncio.get_running_loop())
    unknown, _ = an_unknown_and_a_known_question()
    engine = compose(name, load_gate("ik", proxy=proxy), streaming=style == "astream")
    await aask(engine, unknown, style)
    assert proxy.loop_ran == [True] * (3 if name in WITH_CLAIMS else 2)


@pytest.mark.parametrize("engine", [TransformQueryEngine, ClaimQueryEngine])
async def test_a_transform_runs_on_the_event_loop_in_llama_indexs_engine_and_beside_it_in_ours(engine):
    # The reason for ClaimQueryEngine: what is called in the loop's own thread stops the loop.
    threads = []
    gate = ScriptedGate(before=lambda: threads.append(threading.current_thread()))
    transform = claim_transform(gate)
    inner = vector_index().as_query_engine(llm=MockLLM())
    assert str(await engine(inner, transform).aquery("what is unknown?"))
    on_the_loop = [thread is threading.current_thread() for thread in threads]
    assert on_the_loop == [engine is TransformQueryEngine] * 2  # the question, and its claims


# --- the same on real models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cookbook():
    """The cookbook's scripts as modules, with short answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "cookbook"))
        import llama_index_engine
        import llama_index_workflow

        patch.setattr(llama_index_engine, "TOKENS", 6)
        yield llama_index_engine, llama_index_workflow


@pytest.mark.model
async def test_the_cookbook_runs_on_real_models(smollm2, minilm, cookbook, monkeypatch, capsys):
    module, workflow = cookbook
    engine = module.build_engine()
    monkeypatch.setattr(module, "build_engine", lambda: engine)
    module.main()
    await workflow.main()
    said = capsys.readouterr().out
    assert said.count("from memory") == said.count("with passages") == 2
    (node,) = engine.query_engine.retrieve(QueryBundle("Where was Aarno Maliniemi born?"))
    assert "Oulu" in node.node.text
