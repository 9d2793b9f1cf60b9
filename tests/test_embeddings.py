"""The package's embedder as LangChain embeddings and as a LlamaIndex embedding model."""

import pickle

import numpy as np
import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.langchain import FaissVectorStore
from rgate_integrations.langchain.vectorstore import RGateEmbeddings
from rgate_integrations.llama_index.embeddings import RGateEmbedding


class TestRGateEmbeddings(EmbeddingsUnitTests):
    embeddings_class = RGateEmbeddings


@pytest.mark.model
@pytest.mark.usefixtures("embedder_model")
class TestRGateEmbeddingsWithTheModel(EmbeddingsIntegrationTests):
    embeddings_class = RGateEmbeddings


@pytest.fixture
def fixed(monkeypatch):
    """The embedder without its model: how often a, b and c are in a text, and which calls were made."""
    calls = []

    def embed(self, texts):
        calls.append((self.name, list(texts)))
        counts = [[text.count(letter) for letter in "abc"] for text in texts]
        return np.array(counts, dtype=np.float32).reshape(-1, 3)

    for name, value in (("embed", embed), ("embed_queries", embed), ("identity", "fixed")):
        monkeypatch.setattr(SentenceEmbedder, name, value)
    return calls


async def test_langchain_calls_embed_a_batch_in_one(fixed):
    embeddings = RGateEmbeddings("some-model")
    assert embeddings.embed_documents(["ab", "c"]) == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert fixed == [("some-model", ["ab", "c"])]
    assert embeddings.embed_query("cc") == await embeddings.aembed_query("cc") == [0.0, 0.0, 2.0]
    assert embeddings.embed_documents([]) == []
    assert pickle.loads(pickle.dumps(embeddings)).embed_query("a") == [1.0, 0.0, 0.0]  # noqa: S301


def test_a_store_and_an_index_share_a_folder(fixed, tmp_path):
    PassageIndex.build([Passage("1", "aa"), Passage("2", "cc")], SentenceEmbedder("m")).save(tmp_path / "i")
    store = FaissVectorStore.load_local(tmp_path / "i", RGateEmbeddings("m"))
    assert [d.id for d in store.similarity_search("c", k=1)] == ["2"]
    store.add_texts(["bb"], ids=["3"])
    store.save_local(tmp_path / "i")
    assert [h.passage.id for h in PassageIndex.load(tmp_path / "i").search(["b"], 1)[0]] == ["3"]


async def test_llama_index_calls_embed_a_batch_in_one(fixed):
    embedding = RGateEmbedding(model_name="some-model", embed_batch_size=2)
    wanted = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert embedding.get_text_embedding_batch(["a", "b", "c"]) == wanted
    assert fixed == [("some-model", ["a", "b"]), ("some-model", ["c"])]
    assert await embedding.aget_text_embedding_batch(["a", "b", "c"]) == wanted
    assert embedding.get_text_embedding("a") == await embedding.aget_text_embedding("a") == wanted[0]
    assert embedding.get_query_embedding("b") == await embedding.aget_query_embedding("b") == wanted[1]
    again = RGateEmbedding.from_dict(embedding.to_dict())
    assert (again.model_name, again.class_name()) == ("some-model", "RGateEmbedding")
    assert pickle.loads(pickle.dumps(embedding)).get_query_embedding("a") == wanted[0]  # noqa: S301
