"""LangChain's standard tests, on the names that this package gives."""

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_rgate import FaissVectorStore, GatedRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

EMBEDDING = DeterministicFakeEmbedding(size=6)
TEXTS = [f"text {number}" for number in range(10)]


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissVectorStore(self.get_embeddings())


class TestGatedRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return GatedRetriever

    @property
    def retriever_constructor_params(self) -> dict:
        store = FaissVectorStore.from_texts(TEXTS, EMBEDDING)
        return {"retriever": store.as_retriever(search_kwargs={"k": 10}), "gate": "constant:always"}

    @property
    def retriever_query_example(self) -> str:
        return "text 5"
