"""LangChain's own standard suites for vector stores and retrievers, and what they leave out."""

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.langchain import FaissVectorStore, IndexRetriever, RetrievalGate
from rgate_integrations.langchain.embeddings import EmbeddingsAdapter
from rgate_integrations.langchain.vectorstore import METRICS


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture(params=list(METRICS))
    def vectorstore(self, request):
        return FaissVectorStore(embedding=self.get_embeddings(), distance_strategy=request.param)


class TestLoadedFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture(params=list(METRICS))
    def vectorstore(self, request, tmp_path):
        made = FaissVectorStore(embedding=self.get_embeddings(), distance_strategy=request.param)
        made.add_texts(["deleted again"], ids=["1"])
        made.delete(["1"])
        made.save_local(tmp_path / "store")
        return FaissVectorStore.load_local(tmp_path / "store", self.get_embeddings())


TEXTS = [f"text {i}" for i in range(9)]


class RetrieverSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor_params(self):
        return {}

    @property
    def retriever_query_example(self):
        return "text 1"


def filled_store(strategy="COSINE"):
    store = FaissVectorStore(DeterministicFakeEmbedding(size=8), distance_strategy=strategy)
    store.add_texts(TEXTS)
    return store


class TestGatedRetriever(RetrieverSuite):
    @property
    def retriever_constructor(self):
        def made(k=3):
            gate = RetrievalGate("constant:always")
            return gate.guard(filled_store().as_retriever(search_kwargs={"k": 5}), k=k)

        return made


@pytest.mark.parametrize("search_type", ["similarity", "mmr", "similarity_score_threshold"])
@pytest.mark.parametrize("strategy", list(METRICS))
class TestStoreAsRetriever(RetrieverSuite):
    @pytest.fixture(autouse=True)
    def kind(self, search_type, strategy):
        self.search_type, self.strategy = search_type, strategy

    @property
    def retriever_constructor(self):
        def made(k=3):
            options = (
                {"k": k}
                if self.search_type != "similarity_score_threshold"
                else {"k": k, "score_threshold": 0.0}
            )
            return filled_store(self.strategy).as_retriever(
                search_type=self.search_type, search_kwargs=options
            )

        return made


@pytest.mark.parametrize("kind", ["dense", "l2", "words", "hybrid"])
class TestIndexRetriever(RetrieverSuite):
    @pytest.fixture(autouse=True)
    def made_index(self, kind):
        embedder = EmbeddingsAdapter(DeterministicFakeEmbedding(size=8))
        index = PassageIndex(embedder, metric="l2" if kind == "l2" else "cosine")
        index.add([Passage(id=text, text=text) for text in TEXTS])
        self.index = {"dense": index, "l2": index, "words": BM25Index(index), "hybrid": HybridIndex(index)}[
            kind
        ]

    @property
    def retriever_constructor(self):
        return lambda k=3: IndexRetriever(index=self.index, k=k)
