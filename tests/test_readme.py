"""Every Python block of the README runs, on the real default gate."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.model
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block(number, smollm2, capsys):
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableLambda
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.llms import MockLLM

    class Nothing(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return []

    names = {
        "rag_chain": RunnableLambda(lambda q: f"with passages: {q}"),
        "llm_chain": RunnableLambda(lambda q: f"without: {q}"),
        "retriever": Nothing(),
        "index": VectorStoreIndex.from_documents([Document(text="x")], embed_model=MockEmbedding(8)),
        "llm": MockLLM(),
    }
    imports = "\n".join(
        line for block in BLOCKS for line in block.splitlines() if line.startswith("from rgate")
    )
    exec(f"{imports}\n{BLOCKS[number]}", names)  # noqa: S102
    question = "What is the capital of France?"
    if "chain = " in BLOCKS[number]:
        assert names["chain"].invoke(question).endswith(question)
    if "retriever = " in BLOCKS[number]:
        assert names["retriever"].invoke(question) == []
    if "engine = " in BLOCKS[number]:
        assert question in str(names["engine"].query(question))
    if "print" in BLOCKS[number]:
        assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_gate_of_the_contributing_guide_works():
    from tests.scripted_proxy import ScriptedProxy

    guide = (README.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names = {}
    exec(block, names)  # noqa: S102
    gate = names["ShortDraftGate"]().with_options(proxy=ScriptedProxy())
    decision = gate.decide("who?")
    assert decision.error is None
    assert decision.p_known == 1 - len(decision.draft.tokens) / 33
