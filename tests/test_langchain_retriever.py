"""LangChain: indexes as retrievers, and the cookbook's chains on real models."""

import pytest

from rgate_integrations import load_gate
from rgate_integrations.index import BM25Index, HybridIndex, Passage, PassageIndex
from rgate_integrations.langchain import IndexRetriever
from tests.langchain_fakes import INVOKES, each
from tests.test_index import Letters

PASSAGES = [Passage("paris", "Paris is the capital of France.", title="Paris"), Passage("b", "Rome is old.")]


INDEXES = {
    "dense": lambda passages: PassageIndex.build(passages, Letters()),
    "bm25": BM25Index,
    "hybrid": lambda passages: HybridIndex(PassageIndex.build(passages, Letters())),
}


@each(INVOKES)
@pytest.mark.parametrize("index_of", INDEXES.values(), ids=list(INDEXES))
def test_every_index_is_a_retriever(call, index_of):
    retriever = IndexRetriever(index=index_of(PASSAGES), k=1)
    (found,) = call(retriever, "the capital of France")
    assert (found.id, found.metadata["title"]) == ("paris", "Paris")
    assert found.metadata["rgate_score"] > 0
    assert len(call(retriever.bind(k=2), "Paris is Rome")) == 2


def test_what_a_passage_says_of_itself_is_kept():
    metadata = {"title": "its own", "rgate_score": "its own", "score": 3}
    index = BM25Index([Passage("a", "Paris is the capital.", title="Paris", metadata=metadata)])
    (found,) = IndexRetriever(index=index, k=1).invoke("Paris")
    assert found.metadata == metadata


@pytest.mark.model
@pytest.mark.slow
def test_the_cookbook_chain_runs_on_real_models(smollm2, embedder_model):
    from langchain_chain import build_chain

    index = PassageIndex.build([Passage(id="1", title="Zorblat", text="The capital of Zorblat is Quimbo.")])
    assert IndexRetriever(index=index).invoke("zorblat", k=1)[0].metadata["title"] == "Zorblat"
    gate = load_gate("ik", proxy=smollm2, tokens=8, threshold=1.01)
    (answer,) = build_chain(gate, index, smollm2).batch(["What is the capital of Zorblat?"])
    assert "Quimbo" in answer


@pytest.mark.model
@pytest.mark.slow
def test_the_cookbook_qdrant_store_runs_on_real_models(smollm2, embedder_model, monkeypatch, capsys):
    from rgate_integrations.models.download import download

    pytest.importorskip("langchain_qdrant")
    download("encyclopedia-leads")
    import qdrant

    store = qdrant.build_store(25)
    monkeypatch.setattr(qdrant, "build_store", lambda: store)
    monkeypatch.setattr(qdrant, "QUESTIONS", qdrant.QUESTIONS[1:3])
    qdrant.main()
    known, decision, unknown, other, found, *_ = capsys.readouterr().out.splitlines()
    assert [known, unknown] == qdrant.QUESTIONS
    assert (decision, other) == ("  skipped retrieval", "  retrieved")
    assert found.startswith("    Along the River During the Qingming Festival: ")
