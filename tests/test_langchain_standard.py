"""LangChain's own standard suites for vector stores and retrievers, and what they leave out."""

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rgate_integrations.index import BM25Index, HybridIndex, Passage, PassageIndex
from rgate_integrations.langchain import FaissVectorStore, IndexRetriever, RetrievalGate
from rgate_integrations.langchain.vectorstore import EmbeddingsAdapter


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture(params=["new", "loaded"])
    def vectorstore(self, request, tmp_path):
        made = FaissVectorStore(embedding=self.get_embeddings())
        if request.param == "new":
            return made
        made.add_texts(["deleted again"], ids=["1"])
        made.delete(["1"])
        made.save_local(tmp_path / "store")
        return FaissVectorStore.load_local(tmp_path / "store", self.get_embeddings())


TEXTS = [f"text {i}" for i in range(9)]


class RetrieverSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor_params(self):
        return {}

    retriever_query_example = "text 1"

    @pytest.fixture(autouse=True)
    def store(self):
        self.filled = FaissVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=8))


class TestGatedRetriever(RetrieverSuite):
    @property
    def retriever_constructor(self):
        gate = RetrievalGate("constant:always")
        return lambda k=3: gate.guard(self.filled.as_retriever(search_kwargs={"k": 5}), k=k)


@pytest.mark.parametrize("search_type", ["similarity", "mmr", "similarity_score_threshold"])
class TestStoreAsRetriever(RetrieverSuite):
    @pytest.fixture(autouse=True)
    def kind(self, search_type):
        self.fixed = {"search_type": search_type}
        self.options = {"score_threshold": 0.0} if search_type == "similarity_score_threshold" else {}

    @property
    def retriever_constructor(self):
        return lambda k=3: self.filled.as_retriever(search_kwargs={"k": k, **self.options}, **self.fixed)


@pytest.mark.parametrize("kind", [lambda index: index, BM25Index, HybridIndex])
class TestIndexRetriever(RetrieverSuite):
    @pytest.fixture(autouse=True)
    def made_index(self, kind):
        embedder = EmbeddingsAdapter(DeterministicFakeEmbedding(size=8))
        self.index = kind(PassageIndex.build([Passage(id=text, text=text) for text in TEXTS], embedder))

    @property
    def retriever_constructor(self):
        return lambda k=3: IndexRetriever(index=self.index, k=k)
