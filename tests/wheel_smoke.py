"""Smoke tests for an environment with the wheel and one extra: ``python -I wheel_smoke.py EXTRA``.

`tests/wheel.sh` runs them. None needs a model but those of ``local``. What the guides show runs in `test_docs.py`.
"""

import importlib.util
import subprocess
import sys
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
    """A gated chain, whose direct arm begins to answer."""
    from langchain_core.language_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage

    from rgate_integrations.langchain import RetrievalGate

    model = GenericFakeChatModel(messages=iter(lambda: AIMessage("Shakespeare"), None))
    for name, answer in ((KNOWN, "Shakespeare"), (UNKNOWN, "from passages")):
        router = RetrievalGate(name).route(
            retrieve=lambda question: "from passages", direct=model, answer_first=True
        )
        assert answer in str(router.invoke(QUESTION))


def langchain_agents():
    """A node of a graph, and the middleware."""
    from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware
    from rgate_integrations.langchain.graph import gate_node

    gate = RetrievalGate(KNOWN)
    assert gate_node(gate).invoke({"question": QUESTION})["retrieval_decision"].retrieve is False
    RetrievalGateMiddleware(gate, tools=["search_docs"])


def llama_index():
    """A gated query engine."""
    from llama_index.core.indices.empty import EmptyIndex
    from llama_index.core.llms import MockLLM

    from rgate_integrations.llama_index import GatedQueryEngine

    llm = MockLLM()
    engine = GatedQueryEngine.from_defaults(EmptyIndex().as_query_engine(llm=llm), KNOWN, llm=llm)
    response = engine.query(QUESTION)
    assert QUESTION in str(response)
    assert response.metadata["rgate"]["retrieve"] is False


def openai():
    """A server that cannot be reached: its client is there, and the gate retrieves."""
    from rgate_integrations import load_gate
    from rgate_integrations.models.remote import RemoteModel

    # Nothing listens on port 9.
    decision = load_gate("ik", proxy=RemoteModel("http://127.0.0.1:9/v1", "m", retries=0)).decide(QUESTION)
    assert decision.retrieve
    assert decision.error.type == "ServerError"


def faiss():
    """An index with an embedder of the user's own."""
    import numpy as np

    from rgate_integrations.index import Passage, PassageIndex

    class Letters:
        name = identity = "letters"

        def embed(self, texts):
            return np.array([[text.count(c) + 0.01 for c in "abcdefgh"] for text in texts], dtype=np.float32)

    index = PassageIndex.build([Passage("1", "aaaa bbbb"), Passage("2", "gggg hhhh")], embedder=Letters())
    assert index.search(["hhh ggg"], 1)[0][0].passage.id == "2"


def train():
    """A threshold with a guarantee."""
    import numpy as np

    from rgate_integrations.tuning import Budget

    p = np.linspace(0, 1, 400)
    chosen = Budget(0.4).choose(p, p > 0.5, p > 0.5)
    assert chosen.guaranteed
    assert (p < chosen.threshold).mean() <= 0.4


def ray():
    """A data set of questions."""
    import ray.data

    from rgate_integrations.serving.ray import gate_dataset

    rows = gate_dataset(ray.data.from_items([{"question": QUESTION}]), KNOWN).take_all()
    assert [row["retrieve"] for row in rows] == [False]


def local():
    """The default gate, with its model."""
    from rgate_integrations import load_gate

    gate = load_gate(on_error="raise")
    common, private = gate.decide_batch(["What is the capital of France?", "What does our contract say?"])
    assert (common.retrieve, private.retrieve) == (False, True)
    assert "skip" in command("decide", stdin="What is the capital of France?\n")


if __name__ == "__main__":
    name = sys.argv[1]
    assert "site-packages" in importlib.util.find_spec("rgate_integrations").origin, "the wheel is tested"
    globals()[name.replace("-", "_")]()
    sys.stdout.write(f"{name}: ok\n")
