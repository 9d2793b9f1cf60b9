"""Every Python block of README and docs runs alone, as a reader copies it, on the real default gate."""

import re
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.gates.artifacts import TunedArtifact
from rgate_integrations.gates.folder import tuned_files
from rgate_integrations.gates.tuned import DRAFT_FEATURES
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.runtime.files import write_folder
from tests.three_corpora import TEXTS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
WITH_CODE = {p.relative_to(ROOT).as_posix(): BLOCK.findall(p.read_text(encoding="utf-8")) for p in PAGES}
WITH_CODE = {name: blocks for name, blocks in WITH_CODE.items() if blocks}
BLOCKS = [
    pytest.param(name, block, id=f"{name}-{number}")
    for name, blocks in WITH_CODE.items()
    for number, block in enumerate(blocks, start=1)
]


def test_the_pages_are_found():
    assert len(WITH_CODE) >= 7
    assert len(WITH_CODE["README.md"]) >= 4


def surroundings():
    """What the reader of a page has already: chains, a retriever, an index, models."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableLambda, RunnablePassthrough
    from llama_index.core import Document as Node
    from llama_index.core import VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.llms import MockLLM

    class Nothing(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return []

    class Handbook(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(text) for text in TEXTS["leave"]]

    return {
        "rag_chain": {"context": Nothing(), "question": RunnablePassthrough()}
        | RunnableLambda(lambda found: f"with passages: {found['question']}"),
        "llm_chain": RunnableLambda(lambda q: f"without: {q}"),
        "retriever": Handbook(),
        "chat_model": FakeListChatModel(responses=["Shakespeare wrote it."]),
        "embeddings": DeterministicFakeEmbedding(size=8),
        "index": VectorStoreIndex.from_documents([Node(text="x")], embed_model=MockEmbedding(8)),
        "llm": MockLLM(),
    }


def tune_a_gate(folder):
    """Put a gate there that `rgate tune` might have made, with its second gate; they correct nothing."""
    for name, tokens, features in (("my-gate", 0, 0), ("my-gate/answer-first", 32, len(DRAFT_FEATURES))):
        artifact = TunedArtifact(
            slope=1.0,
            bias=0.0,
            weight=np.zeros((1, 576), np.float32),
            head=np.zeros(features, np.float32),
            layers=(PooledLayer(18, "question", "mean"),),
            tokens=tokens,
            base_model="smollm2-135m-instruct",
            fingerprint="",
            llm="yours",
            threshold=0.5,
            provenance={"data": []},
        )
        write_folder(folder / name, tuned_files(artifact, "default"))


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_block_runs_alone(page, block, smollm2, embedder_model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tune_a_gate(tmp_path)
    names, question = surroundings(), "What is the capital of France?"
    exec(compile(block, page, "exec"), names)  # noqa: S102
    if page == "README.md" and "chain = " in block:
        assert names["chain"].invoke(question).endswith(question)
    if page == "README.md" and "retriever = " in block:
        assert names["retriever"].invoke(question) == []
    if page == "README.md" and "engine = " in block:
        assert question in str(names["engine"].query(question))
    if "print" in block:
        assert capsys.readouterr().out.strip()


def test_the_gate_of_the_contributing_guide_works():
    from tests.scripted_proxy import ScriptedProxy

    (block,) = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    names = {}
    exec(block, names)  # noqa: S102
    gate = load_gate(names["ShortDraftGate"](), proxy=ScriptedProxy())
    decision = gate.decide("who?")
    assert decision.error is None
    assert decision.p_known == 1 - len(decision.draft.tokens) / 33
