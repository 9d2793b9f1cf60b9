"""What users search with becomes a retriever of the gateway, whatever framework it is from."""

from types import SimpleNamespace

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.retrievers import BaseRetriever as LlamaBaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.retriever import as_hit, as_retriever
from tests.scripted_upstream import Shelf

TEXTS = ["Oulu is in Finland.", "Graz is in Austria.", "Bari is in Italy."]
METADATA = {"title": "Cities", "page": 3}


def langchain_store():
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents([Document(text, metadata=METADATA) for text in TEXTS])
    return store


def llama_index():
    documents = [LlamaDocument(text=text, metadata=METADATA) for text in TEXTS]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=4))


def documents(query):
    return [Document(text, metadata=METADATA) for text in TEXTS]


FOUND = {
    "LangChain's store": langchain_store,
    "LangChain's retriever": lambda: langchain_store().as_retriever(search_kwargs={"k": 2}),
    "a runnable": lambda: RunnableLambda(documents),
    "LlamaIndex' index": llama_index,
    "LlamaIndex' retriever": lambda: llama_index().as_retriever(similarity_top_k=2),
    "a function": lambda: documents,
    "mappings": lambda: (
        lambda query: ({"text": text, "title": "Cities", "metadata": METADATA} for text in TEXTS)
    ),
}


@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)
def test_it_finds_passages(make):
    first, second = as_retriever(make()).search(["Where is Oulu?", "Where is Graz?"], 2)
    assert len(first) == len(second) == 2
    assert {hit.passage.text for hit in (*first, *second)} <= set(TEXTS)
    assert len({hit.passage.id for hit in first}) == 2
    assert [(hit.passage.title, hit.passage.metadata["page"], hit.query) for hit in second] == [
        ("Cities", 3, "Where is Graz?")
    ] * 2


class Rich(Shelf):
    """A user's own class, with methods that have the names of the frameworks', but not their signatures."""

    def retrieve(self, query, top_k, /):
        raise AssertionError

    invoke = retrieve


@pytest.mark.parametrize("kind", [Shelf, Rich])
def test_an_object_that_searches_batches_is_one_already_whatever_else_it_can_do(kind):
    """Regression: its method ``retrieve`` or ``invoke`` was called with the query alone."""
    searches = kind()
    assert as_retriever(searches) is searches


class LangChainRetriever(BaseRetriever):
    """A user's retriever, which calls its own method ``search``."""

    def search(self, query):
        return documents(query)

    def _get_relevant_documents(self, query, *, run_manager):
        return self.search(query)


class LlamaRetriever(LlamaBaseRetriever):
    """The same for LlamaIndex."""

    def search(self, query, limit=2):
        return [NodeWithScore(node=TextNode(text=text)) for text in TEXTS[:limit]]

    def _retrieve(self, query_bundle):
        return self.search(query_bundle.query_str)


@pytest.mark.parametrize("make", [LangChainRetriever, LlamaRetriever])
def test_a_frameworks_retriever_may_have_a_method_search_of_its_own(make):
    """Regression: it was taken for the one that takes a list of queries."""
    ((first, second),) = as_retriever(make()).search(["Where is Oulu?"], 2)
    assert [first.passage.text, second.passage.text] == TEXTS[:2]


async def search_later(query):
    return TEXTS


class SearchesLater:
    async def search(self, queries, k):
        return [TEXTS]


# Regression: what is async, and a retriever's class, failed at each search instead, and no request got passages.
NO_RETRIEVERS = [None, "index", 7, str, object(), search_later, SearchesLater(), LangChainRetriever]


@pytest.mark.parametrize("found", NO_RETRIEVERS)
def test_what_cannot_search_is_refused(found):
    with pytest.raises(ConfigurationError, match="cannot search"):
        as_retriever(found)


@pytest.mark.parametrize(
    "empty", [{"text": ""}, Document(page_content=""), SimpleNamespace(text="", id="a", metadata=None), ""]
)
def test_a_passage_without_words_does_not_fail_the_search(empty):
    ((first, second),) = as_retriever(lambda query: [empty, "words"]).search(["query"], 2)
    assert (first.passage.text, second.passage.text) == ("", "words")


@pytest.mark.parametrize(
    ("ids", "identity"),
    [
        ({"id": 0}, "0"),
        ({"node_id": 0}, "0"),
        ({"id": "", "node_id": "n"}, "n"),
        ({"id": None}, "a"),
        ({}, "a"),
    ],
)
def test_zero_is_an_id_and_an_empty_text_is_none(ids, identity):
    """Regression: the first document of a store that counts from 0 got its text as its id."""
    assert as_hit({"text": "a", **ids}, "q").passage.id == identity


@pytest.mark.parametrize("results", ["a text", {"text": "a"}, [7], [{"title": "no text"}], [None]])
def test_what_is_no_passage_is_an_error(results):
    with pytest.raises(TypeError, match=r"The search returned|A result of the search, of type"):
        as_retriever(lambda query: results).search(["q"], 3)
