"""`FaissVectorStore`: what must not be lost, what must be found, and what must be refused."""

import copy
import datetime
import functools
import math
import pickle
import uuid
from pathlib import Path

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from rgate_integrations.errors import ConfigurationError, DataFormatError, IndexMismatchError
from rgate_integrations.langchain import FaissVectorStore
from rgate_integrations.langchain.vectorstore import METRICS

TEXTS = ["aaa", "aab", "abb", "bbb", "bcc", "ccc"]
every_metric = pytest.mark.parametrize("strategy", list(METRICS))


class Letters(Embeddings):
    """How often a, b and c are in a text. Calls are counted."""

    def __init__(self):
        self.blocking = 0

    def vectors(self, texts):
        return [[float(t.count("a")), float(t.count("b")), float(t.count("c"))] for t in texts]

    def embed_documents(self, texts):
        self.blocking += 1
        return self.vectors(texts)

    def embed_query(self, text):
        return self.embed_documents([text])[0]


def made(strategy="COSINE", **options):
    store = FaissVectorStore(Letters(), distance_strategy=strategy, **options)
    store.add_texts(TEXTS, [{"n": i, "even": i % 2 == 0} for i in range(6)], ids=TEXTS)
    return store


@pytest.fixture
def store():
    return made()


def ids(documents):
    return [document.id for document in documents]


def content(store):
    """All that is in a store: text and metadata by id."""
    return {p.id: (p.text, dict(p.metadata)) for p in store.index}


# --- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 1),
        uuid.UUID(int=1),
        np.int64(1),
        np.zeros(2),
        Path("x"),
        {1: 2},
        {"x": {None: 1}},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", ["new", "aaa"])
def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_stored(store, value, name):
    before = content(store)
    documents = [Document(page_content="b"), Document(page_content="c", id=name, metadata={"bad": value})]
    with pytest.raises(DataFormatError, match="'bad'") as caught:
        store.add_documents(documents)
    assert "convert" in caught.value.hint
    assert content(store) == before


def test_metadata_comes_back_as_json_holds_it(store, tmp_path):
    given = {"text": "é", "n": 1, "x": 0.5, "yes": True, "none": None, "list": [1, {"a": [2]}], "t": (1, 2)}
    store.add_texts(["ab"], [given | {"f": np.float64(2.5)}], ids=["new"])
    store.save_local(tmp_path)
    for each in (store, FaissVectorStore.load_local(tmp_path, Letters())):
        assert each.get_by_ids(["new"])[0].metadata == given | {"t": [1, 2], "f": 2.5}


async def test_ids_may_be_whole_numbers_or_uuids_and_none_is_a_new_one(store):
    name = uuid.UUID(int=7)
    zero, blank, uid, fresh = store.add_texts(["ab", "a", "bc", "c"], ids=[0, "", name, None])
    assert (zero, blank, uid) == ("0", "", str(name))
    assert ids(store.get_by_ids([fresh, 0, "", name])) == [fresh, "0", "", str(name)]
    assert ids(await store.aget_by_ids(["0"])) == ["0"]
    assert ids(store.get_by_ids([name, None, 1.5, "\ud800", object()])) == [str(name)]
    assert store.delete([0, name, "not there"]) is True
    assert store.get_by_ids([0, name]) == []
    for method in (store.get_by_ids, store.delete):
        with pytest.raises(ConfigurationError, match="list of ids"):
            method("aaa")


def test_upserts_replace_and_the_last_of_equal_ids_counts(store):
    store.add_documents([Document(page_content="ccc", id="aaa")])
    assert store.add_texts(["a", "b"], ids=["same", "same"]) == ["same", "same"]
    assert [d.page_content for d in store.get_by_ids(["aaa", "same"])] == ["ccc", "b"]
    assert len(content(store)) == 7


@every_metric
@pytest.mark.parametrize("blank", ["", "  \n"])
def test_a_blank_text_is_stored_like_any_other(strategy, blank, tmp_path):
    store = FaissVectorStore.from_texts(["aaa", blank], Letters(), ids=["0", "1"], distance_strategy=strategy)
    store.save_local(tmp_path)
    assert content(FaissVectorStore.load_local(tmp_path, Letters())) == {"0": ("aaa", {}), "1": (blank, {})}


async def test_what_does_not_match_is_refused(store):
    for wrong in ({"ids": ["x"]}, {"metadatas": [{}]}):
        with pytest.raises(ConfigurationError, match="do not match 2"):
            store.add_texts(["a", "b"], **wrong)
        with pytest.raises(ConfigurationError, match="do not match 2"):
            await store.aadd_texts(["a", "b"], **wrong)
    with pytest.raises(TypeError, match="distance_stratgy"):
        FaissVectorStore.from_texts(["a"], Letters(), distance_stratgy="COSINE")
    assert len(content(store)) == 6


# --- vectors -----------------------------------------------------------------------------------------------


@every_metric
@pytest.mark.parametrize(
    "vector", [[1.0], [1.0, 0.0, 0.0, 0.0], [], ["a", "b", "c"], [[1.0, 2.0, 3.0]], [math.nan] * 3]
)
def test_a_vector_that_does_not_fit_is_a_typed_error(strategy, vector):
    store = made(strategy)
    for search in (store.similarity_search_by_vector, store.max_marginal_relevance_search_by_vector):
        with pytest.raises(ConfigurationError):
            search(vector, 2)
    if vector:
        with pytest.raises(ConfigurationError):
            FaissVectorStore.from_embeddings([("a", [1.0, 2.0, 3.0]), ("new", vector)], Letters())
    assert len(content(store)) == 6


def test_embeddings_that_change_their_dimension_are_a_typed_error(store):
    store.embedding.vectors = lambda texts: [[1.0, 2.0]] * len(texts)
    for write in (store.similarity_search, lambda text: store.add_texts([text])):
        with pytest.raises(ConfigurationError, match="dimension 2"):
            write("a")
    assert len(content(store)) == 6


# "aab" is [2, 1, 0]; the query "a" is [1, 0, 0].
EXPECTED = {
    "COSINE": (2 / math.sqrt(5), 2 / math.sqrt(5) / 2 + 0.5),
    "MAX_INNER_PRODUCT": (2.0, 1 / (1 + math.exp(-2))),
    "EUCLIDEAN_DISTANCE": (2.0, 1 / (1 + math.sqrt(2))),  # (2 - 1)^2 + 1^2
}


@every_metric
async def test_scores_relevance_and_thresholds_of_each_metric(strategy):
    store = made(strategy)
    score, relevance = EXPECTED[strategy]
    scored = store.similarity_search_with_score("a", k=6)
    assert {d.id: s for d, s in scored}["aab"] == pytest.approx(score, abs=1e-5)
    assert scored == await store.asimilarity_search_with_score("a", k=6)
    relevances = store.similarity_search_with_relevance_scores("a", k=6)
    assert {d.id: r for d, r in relevances}["aab"] == pytest.approx(relevance, abs=1e-5)
    values = [r for _, r in relevances]
    assert values == sorted(values, reverse=True)
    assert all(0 <= r <= 1 for r in values)
    few = await store.asimilarity_search_with_relevance_scores("a", k=6, score_threshold=relevance - 1e-4)
    assert few == [(d, r) for d, r in relevances if r >= relevance - 1e-4]


def test_the_users_own_relevance_and_strategies():
    store = made("MAX_INNER_PRODUCT", relevance_score_fn=lambda score: score / 10)
    ((_, relevance),) = store.similarity_search_with_relevance_scores("a", k=1)
    assert relevance == pytest.approx(0.3)
    assert FaissVectorStore(Letters(), index=store.index).distance_strategy == "MAX_INNER_PRODUCT"
    for wrong, options in (("JACCARD", {}), ("COSINE", {"index": store.index})):
        with pytest.raises(ConfigurationError, match=wrong):
            FaissVectorStore(Letters(), distance_strategy=wrong, **options)


# --- searching ---------------------------------------------------------------------------------------------


def test_an_empty_store_finds_nothing():
    empty = FaissVectorStore(embedding=Letters())
    assert empty.similarity_search("a") == empty.max_marginal_relevance_search("a") == []
    assert empty.get_by_ids(["x"]) == []
    assert empty.delete(["x"]) is True


def test_queries_are_embedded_in_their_own_way():
    class Asymmetric(Letters):
        def embed_query(self, text):
            return [-v for v in super().embed_query(text)]

    own = FaissVectorStore.from_texts(["aaa", "ccc"], Asymmetric(), ids=["a", "c"])
    assert ids(own.similarity_search("aaa", k=1)) == ["c"]


def test_mmr_prefers_what_is_different(store):
    assert ids(store.max_marginal_relevance_search("aab", k=2, lambda_mult=1.0)) == ["aab", "aaa"]
    assert ids(store.max_marginal_relevance_search("aab", k=2, lambda_mult=0.0)) == ["aab", "ccc"]


FILTERS = [
    ({}, "012345x"),
    ({"n": 3}, "3"),
    ({"n": {"$eq": 3}}, "3"),
    ({"n": {"$ne": 3}}, "01245x"),
    ({"n": {"$neq": 3}}, "01245x"),
    ({"n": {"$gt": 3}}, "45"),
    ({"n": {"$gte": 3}}, "345"),
    ({"n": {"$lt": 2}}, "01"),
    ({"n": {"$lte": 2}}, "012"),
    ({"n": {"$gt": 1, "$lt": 4}}, "23"),
    ({"n": {"$in": [1, 5, 99]}}, "15"),
    ({"n": {"$nin": {1, 5}}}, "0234x"),
    ({"n": [1, 5, 99]}, "15"),
    ({"n": []}, ""),
    ({"n": {"$not": {"$gt": 3}}}, "0123x"),
    ({"$not": {"n": {"$gt": 3}}}, "0123x"),
    ({"$and": [{"n": {"$gt": 1}}, {"even": True}]}, "24"),
    ({"$or": [{"n": 0}, {"n": {"$gte": 5}}]}, "05"),
    ({"$or": [{"n": 0}, {"$and": [{"even": True}, {"n": 4}]}], "even": True}, "04"),
    ({"n": {"$gt": "a text"}}, ""),
    ({"missing": None}, ""),
    ({"missing": {"$gt": 1}}, ""),
    ({"tags": {"$eq": ["x"]}}, "x"),
    ({"tags": {"$nin": {"x"}}}, "012345x"),
    ({"nested": {"a": 1}}, "x"),
    (lambda document: document.metadata.get("n", 0) > 3, "45"),
]


@pytest.mark.parametrize(("given", "wanted"), FILTERS, ids=lambda value: str(value)[:14])
async def test_filters(store, given, wanted):
    store.add_texts(["abc"], [{"tags": ["x"], "nested": {"a": 1}}], ids=["x"])
    expected = {"x" if w == "x" else TEXTS[int(w)] for w in wanted}
    found = store.similarity_search("abc", k=9, filter=given)
    assert set(ids(found)) == expected
    assert set(ids(store.max_marginal_relevance_search("abc", k=9, filter=given))) == expected
    retriever = store.as_retriever(search_kwargs={"k": 9, "filter": given})
    assert await retriever.ainvoke("abc") == found
    if expected:
        assert ids(store.similarity_search("abc", k=1, filter=given)) == ids(found)[:1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": {"$gtt": "x"}},
        {"$xor": []},
        {"n": {"$gt": 1, "other": 2}},
        {"n": 99, "$and": {"n": 1}},
        {"$or": [{}, 1]},
        {"$or": []},
        {"$not": [{"n": 1}]},
        {"n": {"$in": 3}},
        {"n": {"$in": "abc"}},
        {"n": {"$not": 3}},
        {3: 1},
        ["n", 1],
        "n",
        pytest.param(functools.reduce(lambda inner, _: {"$not": inner}, range(2000), {"n": 1}), id="deep"),
    ],
    ids=str,
)
async def test_a_filter_that_cannot_be_meant_is_a_typed_error(store, wrong):
    for each in (store, FaissVectorStore(Letters())):  # an empty store, too
        with pytest.raises(ConfigurationError):
            each.similarity_search("a", filter=wrong)
        with pytest.raises(ConfigurationError):
            await each.amax_marginal_relevance_search("a", filter=wrong)


def test_unknown_operators_are_named(store):
    with pytest.raises(ConfigurationError, match=r"\$gtt") as caught:
        store.similarity_search("a", filter={"n": {"$gtt": 1}})
    assert "$gt," in caught.value.hint
    for k in ("3", 1.5, 0):
        with pytest.raises(ConfigurationError, match="whole number"):
            store.similarity_search("a", k=k)


async def test_awaited_methods():
    store = await FaissVectorStore.afrom_texts(["aab"], Letters(), [{"n": 1}], ids=["1"])
    await store.aadd_documents([Document(page_content="bbb", id="2")])
    await store.aadd_texts(["ccc"], [{"n": 3}], ids=["3"])
    above = {"n": {"$gt": 1}}
    assert [d.id for d, _ in await store.asimilarity_search_with_score("b", k=1, filter=above)] == ["3"]
    assert ids(await store.amax_marginal_relevance_search("a", k=1)) == ["1"]
    assert ids(await store.as_retriever(search_kwargs={"k": 1}).ainvoke("c")) == ["3"]
    assert ids(await store.asimilarity_search_by_vector([0.0, 1.0, 0.0], k=1)) == ["2"]
    assert await store.adelete(["2"]) is True


# --- what langchain_community's store has, and saving --------------------------------------------------------


@every_metric
def test_embeddings_that_are_there_are_not_computed_again(strategy):
    pairs = [("x", [1.0, 0.0, 0.0]), ("y", [0.0, 2.0, 0.0])]
    store = FaissVectorStore.from_embeddings(
        pairs, Letters(), [{"n": 1}, {"n": 2}], ids=["1", "2"], distance_strategy=strategy
    )
    assert store.embedding.blocking == 0
    assert content(store) == {"1": ("x", {"n": 1}), "2": ("y", {"n": 2})}
    assert ids(store.similarity_search_by_vector([0.0, 2.0, 0.0], k=1)) == ["2"]
    assert FaissVectorStore.from_embeddings([], Letters()).similarity_search("a") == []


@every_metric
def test_a_saved_or_copied_store_is_the_same(strategy, tmp_path):
    store = made(strategy)
    store.delete(["bcc"])
    store.save_local(tmp_path / "s")
    assert not list(tmp_path.rglob("*.pkl"))
    loaded = FaissVectorStore.load_local(tmp_path / "s", Letters(), allow_dangerous_deserialization=True)
    for twin in (loaded, pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):  # noqa: S301  our own
        assert twin.distance_strategy == strategy
        assert content(twin) == content(store)
        assert twin.similarity_search_with_score("ab", k=9) == store.similarity_search_with_score("ab", k=9)
        twin.add_texts(["ccc"], ids=["new"])
        assert "new" in content(twin)
        assert "new" not in content(store)
    other = next(metric for metric in METRICS if metric != strategy)
    with pytest.raises(ConfigurationError, match=strategy):
        FaissVectorStore.load_local(tmp_path / "s", Letters(), distance_strategy=other)
    with pytest.raises(IndexMismatchError):
        FaissVectorStore.load_local(tmp_path / "s", DeterministicFakeEmbedding(size=3))


@every_metric
def test_an_empty_store_keeps_its_metric(strategy, tmp_path):
    empty = FaissVectorStore(Letters(), distance_strategy=strategy)
    empty.save_local(tmp_path)
    for twin in (FaissVectorStore.load_local(tmp_path, Letters()), pickle.loads(pickle.dumps(empty))):  # noqa: S301
        twin.add_texts(["aaa"])
        assert (twin.distance_strategy, len(content(twin))) == (strategy, 1)


def test_stores_of_several_names_share_a_folder(tmp_path):
    made().save_local(tmp_path, "first")
    FaissVectorStore.from_texts(["a"], Letters(), ids=["only"]).save_local(str(tmp_path), index_name="second")
    made().save_local(tmp_path)
    assert len(content(FaissVectorStore.load_local(tmp_path, Letters(), "first"))) == 6
    assert content(FaissVectorStore.load_local(tmp_path, Letters(), index_name="second")).keys() == {"only"}
    assert len(content(FaissVectorStore.load_local(str(tmp_path), embeddings=Letters()))) == 6
    for wrong in ("../x", "", "a/b", ".", "..", "/x"):
        with pytest.raises(ConfigurationError, match="index_name"):
            made().save_local(tmp_path, wrong)
