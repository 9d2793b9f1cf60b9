"""LangChain's own standard suites for vector stores and retrievers, and what they leave out."""

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, IndexMismatchError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.langchain import FaissVectorStore, GatedRetriever, IndexRetriever, RetrievalGate
from rgate_integrations.langchain.distances import DistanceStrategy
from rgate_integrations.langchain.embeddings import EmbeddingsAdapter


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture(params=list(DistanceStrategy))
    def vectorstore(self, request):
        return FaissVectorStore(embedding=self.get_embeddings(), distance_strategy=request.param)


class TestLoadedFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture(params=list(DistanceStrategy))
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
@pytest.mark.parametrize("strategy", list(DistanceStrategy))
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


class Letters(Embeddings):
    """The share of a, b and c in a text; counts its calls."""

    def __init__(self):
        self.calls = 0

    def embed_documents(self, texts):
        self.calls += 1
        return [[t.count("a") + 1e-3, t.count("b"), t.count("c")] for t in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


@pytest.fixture
def store():
    made = FaissVectorStore(embedding=Letters())
    texts = ["aaa", "aab", "abb", "bbb", "bcc", "ccc"]
    made.add_texts(texts, [{"n": i, "even": i % 2 == 0} for i in range(6)], ids=texts)
    return made


def test_an_empty_store_finds_nothing():
    empty = FaissVectorStore(embedding=Letters())
    assert empty.similarity_search("a") == []
    assert empty.max_marginal_relevance_search("a") == []
    assert empty.batch_similarity_search([]) == []
    assert empty.delete(["x"]) is True
    assert empty.get_by_ids(["x"]) == []


def test_scores_are_cosines_and_filters_fill_up(store):
    (first, score), *_ = store.similarity_search_with_score("a", k=2)
    assert (first.id, score) == ("aaa", pytest.approx(1, abs=1e-5))
    assert [d.id for d in store.similarity_search("a", k=1, filter={"even": False})] == ["aab"]
    assert [d.id for d in store.similarity_search("a", k=1, filter={"n": 5})] == ["ccc"]
    assert store.similarity_search("a", k=3, filter={"missing": None}) == []
    assert [d.id for d in store.similarity_search("c", k=9, filter=lambda d: d.metadata["n"] > 3)] == [
        "ccc",
        "bcc",
    ]
    (_, relevance), *_ = store.similarity_search_with_relevance_scores("a", k=1)
    assert relevance == pytest.approx(1, abs=1e-5)


def test_a_batch_is_embedded_in_one_call(store):
    found = store.batch_similarity_search(["a", "b", "c"], k=1)
    assert [d.id for (d,) in found] == ["aaa", "bbb", "ccc"]
    before = store.embedding.calls
    store.batch_similarity_search(["a", "b", "c"], k=1)
    assert store.embedding.calls == before + 1


def test_queries_that_are_embedded_in_their_own_way_stay_so():
    class Asymmetric(Letters):
        def embed_query(self, text):
            return [-v for v in super().embed_query(text)]

    store = FaissVectorStore.from_texts(["aaa", "ccc"], Asymmetric(), ids=["a", "c"])
    assert [d.id for (d,) in store.batch_similarity_search(["aaa", "ccc"], k=1)] == ["c", "a"]


def test_mmr_prefers_what_is_different(store):
    near = [d.id for d in store.max_marginal_relevance_search("aab", k=2, lambda_mult=1.0)]
    mixed = [d.id for d in store.max_marginal_relevance_search("aab", k=2, lambda_mult=0.0)]
    assert near == ["aab", "aaa"]
    assert mixed == ["aab", "ccc"]


def test_upserts_replace(store):
    store.add_documents([Document(page_content="ccc", id="aaa")])
    assert store.get_by_ids(["aaa"])[0].page_content == "ccc"
    assert len(store.index) == 6
    assert store.add_texts(["a", "b"], ids=["same", "same"]) == ["same", "same"]
    assert [d.page_content for d in store.get_by_ids(["same"])] == ["b"]


def test_only_none_is_a_missing_id(store):
    first, second, third = store.add_texts(["a", "b", "c"], ids=[0, "", None])
    assert (first, second) == ("0", "")
    assert third
    assert [d.page_content for d in store.get_by_ids(["0", "", third])] == ["a", "b", "c"]


def test_what_does_not_match(store):
    with pytest.raises(ConfigurationError, match="1 ids do not match 2"):
        store.add_texts(["a", "b"], ids=["x"])
    with pytest.raises(ConfigurationError, match="2 metadatas do not match 1"):
        store.add_texts(["a"], [{}, {}])
    with pytest.raises(ConfigurationError, match="k must be"):
        store.similarity_search("a", k=0)


def test_saving_and_loading(store, tmp_path):
    store.save_local(tmp_path / "s")
    loaded = FaissVectorStore.load_local(tmp_path / "s", Letters())
    assert [d.id for d in loaded.similarity_search("c", k=2)] == ["ccc", "bcc"]
    assert loaded.get_by_ids(["abb"])[0].metadata == {"n": 2, "even": True}
    assert not list(tmp_path.rglob("*.pkl"))
    with pytest.raises(IndexMismatchError):
        FaissVectorStore.load_local(tmp_path / "s", DeterministicFakeEmbedding(size=3))


def test_a_community_index_is_taken_over_without_its_pickle(tmp_path):
    import faiss
    import numpy as np

    file = tmp_path / "index.faiss"
    flat = faiss.IndexFlatL2(3)
    flat.add(np.array([[2, 0, 0], [0, 3, 0]], dtype=np.float32))
    faiss.write_index(flat, str(file))
    documents = [Document(page_content="aa"), Document(page_content="bbb", metadata={"n": 1})]
    taken = FaissVectorStore.from_community_index(file, documents, Letters())
    ((found, score),) = taken.similarity_search_with_score("b", k=1)
    # The file's own metric: (3 - 1)^2.
    assert (found.page_content, found.metadata, score) == ("bbb", {"n": 1}, pytest.approx(4, abs=1e-5))
    cosine = FaissVectorStore.from_community_index(file, documents, Letters(), distance_strategy="COSINE")
    ((_, score),) = cosine.similarity_search_with_score("b", k=1)
    assert score == pytest.approx(1, abs=1e-5)
    with pytest.raises(ConfigurationError, match="2 vectors do not match 1"):
        FaissVectorStore.from_community_index(file, documents[:1], Letters())
    file.write_bytes(b"nonsense")
    with pytest.raises(IndexCorruptError):
        FaissVectorStore.from_community_index(file, documents, Letters())


def test_the_store_as_a_guarded_retriever(store):
    guarded = RetrievalGate("constant:never").guard(store.as_retriever())
    assert isinstance(guarded, GatedRetriever)
    assert guarded.invoke("a") == []
