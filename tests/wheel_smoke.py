"""Smoke tests of the guides, for an environment with the wheel and one extra: ``python -I wheel_smoke.py EXTRA``.

`tests/wheel.sh` runs them. None needs a model but those of ``local``.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

QUESTION = "Who wrote Hamlet?"
KNOWN, UNKNOWN = "constant:never", "constant:always"


def command(*arguments, stdin=""):
    """Run ``rgate``; returns what it prints."""
    rgate = Path(sys.executable).with_name("rgate")
    done = subprocess.run([rgate, *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def core():
    """The commands, and gates without a model. Without an extra, its absence is said by the wheel's name."""
    from rgate_integrations import load_gate
    from rgate_integrations.gates.folder import shipped

    assert load_gate(KNOWN).decide(QUESTION).retrieve is False
    assert {"default", "default-answer"} <= set(shipped())
    assert "skip" in command("decide", "--gate", KNOWN, stdin=f"{QUESTION}\n")
    written = load_gate("ik").decide(QUESTION)
    assert 'pip install "rgate-integrations[local]"' in str(written.error)
    assert not {"torch", "transformers"} & set(sys.modules)
    for adapter, extra in (("langchain", "langchain"), ("llama_index", "llama-index")):
        said = ""
        try:
            import_module(f"rgate_integrations.{adapter}")
        except ImportError as error:
            said = str(error)
        assert f'pip install "rgate-integrations[{extra}]"' in said


def langchain():
    """Guides: LangChain, answer first, look first."""
    from langchain_core.documents import Document
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.retrievers import BaseRetriever

    from rgate_integrations.answering.answer_first import AnswerFirst
    from rgate_integrations.langchain import RetrievalGate, gated_rag

    class Passages(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document("Shakespeare wrote Hamlet.")]

    def reading(question):
        return "from passages"

    model = GenericFakeChatModel(messages=iter(lambda: AIMessage("Shakespeare"), None))
    options = AnswerFirst(question_gate=None)
    for name, answer in ((KNOWN, "Shakespeare"), (UNKNOWN, "from passages")):
        gate = RetrievalGate(name)
        arms = {"retrieve": Passages() | reading, "direct": model}
        assert len(gate.route(**arms).batch([QUESTION] * 2)) == 2
        assert answer in str(gate.route(**arms, answer_first=options).invoke(QUESTION))
        assert answer in str(gate.route(**arms, look_first=True).invoke(QUESTION))
        assert len(gate.guard(Passages()).invoke(QUESTION)) == (name == UNKNOWN)
        assert "Shakespeare" in gated_rag(Passages(), model, gate=gate).invoke(QUESTION)
    assert absent("llama_index", "torch", "langgraph")


def langchain_agents():
    """Guides: agents, LangGraph."""
    from langchain.agents import create_agent
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool

    from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
    from rgate_integrations.langchain.graph import gate_node

    @tool
    def search_docs(query: str) -> str:
        """Search."""
        return "found"

    class Model(GenericFakeChatModel):
        def bind_tools(self, tools, **options):
            return self

    model = Model(messages=iter([AIMessage("Shakespeare")]))
    middleware = RetrievalGateMiddleware(RetrievalGate(KNOWN), tools=["search_docs"])
    agent = create_agent(model, [search_docs], middleware=[middleware])
    found = agent.invoke({"messages": [("human", QUESTION)]})
    assert found["messages"][-1].content == "Shakespeare"

    assert (
        gate_node(RetrievalGate(KNOWN)).invoke({"question": QUESTION})["retrieval_decision"].retrieve is False
    )
    assert absent("llama_index", "torch")


def llama_index():
    """Guide: LlamaIndex."""
    from llama_index.core.indices.empty import EmptyIndex
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RouterQueryEngine
    from llama_index.core.tools import QueryEngineTool

    from rgate_integrations.llama_index import GatedQueryEngine, RetrievalGateSelector

    llm = MockLLM()
    engine = GatedQueryEngine.from_defaults(EmptyIndex().as_query_engine(llm=llm), KNOWN, llm=llm)
    response = engine.query(QUESTION)
    assert QUESTION in str(response)
    assert response.metadata["rgate"]["retrieve"] is False
    tools = [
        QueryEngineTool.from_defaults(engine.direct, name="direct", description="Answers from memory."),
        QueryEngineTool.from_defaults(engine.query_engine, name="docs", description="Searches."),
    ]
    selector = RetrievalGateSelector(KNOWN, direct="direct", retrieve="docs")
    router = RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm)
    assert QUESTION in str(router.query(QUESTION))
    assert absent("langchain_core", "torch", "openai")


def served():
    """Guide: a model on a server."""
    from rgate_integrations import load_gate
    from rgate_integrations.models.served import ServedProxy

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            top = [{"token": "Yes", "logprob": -0.1}, {"token": "No", "logprob": -2.4}]
            content = [{"token": "Yes", "logprob": -0.1, "top_logprobs": top}]
            choice = {
                "message": {"content": "Yes"},
                "finish_reason": "stop",
                "logprobs": {"content": content},
            }
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 7}}).encode()
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = ServedProxy(f"http://127.0.0.1:{server.server_port}/v1", "m")
    decision = load_gate("ik", proxy=proxy, tokens=0).decide(QUESTION)
    assert decision.error is None, decision.error
    assert decision.p_known > 0.8
    server.shutdown()


def faiss():
    """Guide: corpora. An index with an embedder of the user's own."""
    import numpy as np

    from rgate_integrations.index import Passage, PassageIndex

    class Letters:
        name = identity = "letters"

        def embed(self, texts):
            return np.array([[text.count(c) + 0.01 for c in "abcdefgh"] for text in texts], dtype=np.float32)

    passages = [Passage("1", "aaaa bbbb"), Passage("2", "gggg hhhh")]
    with tempfile.TemporaryDirectory() as folder:
        PassageIndex.build(passages, embedder=Letters()).save(f"{folder}/index")
        found = PassageIndex.load(f"{folder}/index", embedder=Letters()).search(["hhh ggg"], 1)
    assert found[0][0].passage.id == "2"


def train():
    """Guides: a gate of your own, thresholds with a guarantee."""
    import numpy as np

    from rgate_integrations.tuning import Budget

    p = np.linspace(0, 1, 400)
    known = p > 0.5
    chosen = Budget(0.4).choose(p, known, known)
    assert chosen.guaranteed
    assert (p < chosen.threshold).mean() <= 0.4
    assert "--num-samples" in command("tune", "--help")


def ray():
    """Guide: many machines."""
    import ray.data

    from rgate_integrations.serving.ray import gate_dataset

    rows = gate_dataset(ray.data.from_items([{"question": QUESTION}]), KNOWN).take_all()
    assert [row["retrieve"] for row in rows] == [False]


def local():
    """Index page: the default gate, with its model."""
    from rgate_integrations import load_gate

    gate = load_gate(on_error="raise")
    common, private = gate.decide_batch(["What is the capital of France?", "What does our contract say?"])
    assert (common.retrieve, private.retrieve) == (False, True)
    assert "skip" in command("decide", stdin="What is the capital of France?\n")


def absent(*modules):
    """Whether none of these modules is installed."""
    return all(importlib.util.find_spec(module) is None for module in modules)


if __name__ == "__main__":
    name = sys.argv[1]
    assert "site-packages" in importlib.util.find_spec("rgate_integrations").origin, "the wheel is tested"
    globals()[name.replace("-", "_")]()
    sys.stdout.write(f"{name}: ok\n")
