"""`FaissVectorStore`: what must not be lost, what must be found, and what must be refused."""

import copy
import math
import pickle
import uuid

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, IndexNotFoundError
from rgate_integrations.langchain import FaissVectorStore

TEXTS = ["aaa", "aab", "abb", "bbb", "bcc", "ccc"]


class Letters(Embeddings):
    """How often a, b and c are in a text."""

    def embed_documents(self, texts):
        return [[float(text.count(letter)) for letter in "abc"] for text in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


@pytest.fixture
def store():
    return FaissVectorStore.from_texts(
        TEXTS, Letters(), [{"n": i, "even": i % 2 == 0} for i in range(6)], ids=TEXTS
    )


def ids(documents):
    return [document.id for document in documents]


# --- writing -----------------------------------------------------------------------------------------------


def test_metadata_comes_back_as_json_holds_it_and_is_the_callers_own(store, tmp_path):
    given = {"text": "é", "n": 1, "x": 0.5, "yes": True, "none": None, "list": [1, {"a": [2]}], "t": (1, 2)}
    mutable = copy.deepcopy(given) | {"f": np.float64(2.5)}
    store.add_texts(["ab"], [mutable], ids=["new"])
    mutable["list"].append("later")
    store.save_local(tmp_path)
    saved = FaissVectorStore.load_local(tmp_path, Letters())
    for each in (store, saved, pickle.loads(pickle.dumps(store))):  # noqa: S301
        for _ in range(2):
            (found,) = each.get_by_ids(["new"])
            assert found.metadata == given | {"t": [1, 2], "f": 2.5}
            found.metadata["list"][1]["a"].append("changed")


def test_ids_may_be_whole_numbers_or_uuids_and_none_is_a_new_one(store):
    name = uuid.UUID(int=7)
    added = store.add_texts(["ab", "", "bc", " \n"], [None] * 4, ids=[0, "", name, None])
    assert added[:3] == ["0", "", str(name)]
    found = store.get_by_ids([added[3], 0, "", name])
    assert [(each.id, each.metadata) for each in found] == [(each, {}) for each in (added[3], *added[:3])]
    assert store.get_by_ids([None, 1.5, "\ud800", object()]) == []
    assert store.delete([0, name, "not there"]) is True
    assert store.get_by_ids([0, name]) == []


def test_texts_replace_those_of_their_id_and_the_last_of_equal_ids_counts(store):
    assert store.add_texts(["ccc", "a", "b"], ids=["aaa", "same", "same"]) == ["aaa", "same", "same"]
    assert [d.page_content for d in store.get_by_ids(["aaa", "same"])] == ["ccc", "b"]
    assert len(store.index) == 7


ONE_STRING = "must be in a list, but got the string 'a"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        # Regression: `add_texts` stored each letter.
        (lambda store: store.get_by_ids("a"), ONE_STRING),
        (lambda store: store.delete("a"), ONE_STRING),
        (lambda store: store.add_texts("a"), ONE_STRING),
        (lambda store: store.add_texts(["a"], ids="a"), ONE_STRING),
        (lambda store: store.add_texts(["a", "b"], ids=["x"]), "there are 2 texts"),
        (lambda store: store.add_texts(["a", "b"], ids=list("xyz")), "there are 2 texts"),
        (lambda store: store.add_texts(["a", "b"], metadatas=[{}]), "there are 2 texts"),
    ],
)
def test_a_single_string_or_lists_that_do_not_match_are_refused(store, call, said):
    with pytest.raises(ConfigurationError, match=said):
        call(store)
    assert len(store.index) == 6


# --- vectors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vector", [[1.0], [1.0, 0.0, 0.0, 0.0], [], ["a", "b", "c"], [[1.0, 2.0, 3.0]], [math.nan] * 3]
)
def test_a_vector_that_does_not_fit_is_a_typed_error(store, vector):
    for search in (store.similarity_search_by_vector, store.max_marginal_relevance_search_by_vector):
        with pytest.raises(ConfigurationError):
            search(vector, 2)


def test_scores_are_cosines_and_relevance_is_in_0_to_1(store):
    scored = store.similarity_search_with_score("a", k=6)
    cosine = 2 / math.sqrt(5)  # "aab" is [2, 1, 0]; the query "a" is [1, 0, 0]
    assert {d.id: score for d, score in scored}["aab"] == pytest.approx(cosine, abs=1e-5)
    found = store.similarity_search_with_relevance_scores("a", k=6)
    assert [relevance for _, relevance in found] == pytest.approx([(score + 1) / 2 for _, score in scored])
    few = store.similarity_search_with_relevance_scores("a", k=6, score_threshold=(cosine + 1) / 2 - 1e-4)
    assert ids(d for d, _ in few) == ["aaa", "aab"]


def test_embeddings_that_are_there_are_not_computed_again():
    """The embeddings would give another dimension."""
    store = FaissVectorStore.from_embeddings(
        [("x", [1.0, 0.0, 0.0]), ("y", [0.0, 2.0, 0.0])],
        DeterministicFakeEmbedding(size=5),
        [{"n": 1}, {"n": 2}],
        ids=["1", "2"],
    )
    (nearest,) = store.similarity_search_by_vector([0.0, 2.0, 0.0], k=1)
    assert nearest == Document(page_content="y", metadata={"n": 2}, id="2")
    pairs = [("x", [1.0, 0.0]), ("y", [0.0, 1.0]), ("z", [1.0, 1.0])]
    repeated = FaissVectorStore.from_embeddings(
        pairs, DeterministicFakeEmbedding(size=5), ids=["1", "2", "1"]
    )
    assert [each.page_content for each in repeated.similarity_search_by_vector([0.9, 1.1], k=2)] == ["z", "y"]
    empty = FaissVectorStore.from_embeddings([], Letters())
    assert empty.similarity_search("a") == empty.max_marginal_relevance_search("a") == []


# --- searching ---------------------------------------------------------------------------------------------


def test_queries_are_embedded_in_their_own_way_and_mmr_prefers_what_is_different(store, monkeypatch):
    assert ids(store.max_marginal_relevance_search("aab", k=2, lambda_mult=1.0)) == ["aab", "aaa"]
    assert ids(store.max_marginal_relevance_search("aab", k=2, lambda_mult=0.0)) == ["aab", "ccc"]
    monkeypatch.setattr(Letters, "embed_query", lambda self, text: [0.0, 0.0, 1.0])
    assert ids(store.similarity_search("aaa", k=1)) == ["ccc"]


def test_what_has_no_direction_is_as_near_as_anything_also_to_mmr():
    """Regression: LangChain's MMR raised a bare ValueError for vectors of zeros, as of words that nobody knows."""
    store = FaissVectorStore.from_texts(["xyz", "abc"], Letters(), ids=["none", "abc"])
    assert ids(store.max_marginal_relevance_search("xyz", k=2)) == ids(store.similarity_search("xyz", k=2))
    assert ids(store.max_marginal_relevance_search("abc", k=2)) == ["abc", "none"]
    away = [-1.0, -1.0, -1.0]
    assert ids(store.max_marginal_relevance_search_by_vector(away, k=2)) == ["none", "abc"]


@pytest.mark.parametrize("k", [0, -1, "5"])
def test_a_number_of_documents_that_cannot_be_meant_is_a_typed_error(store, k):
    """Regression: the searches for variety returned nothing, or raised a bare TypeError."""
    for search in (store.similarity_search, store.max_marginal_relevance_search):
        with pytest.raises(ConfigurationError, match=f"k must be a whole number of at least 1, not {k!r}"):
            search("a", k=k)


FILTERS = [
    ({}, "012345x"),
    ({"n": 3}, "3"),
    ({"n": {"$eq": 3}}, "3"),
    ({"n": {"$ne": 3}}, "01245x"),
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
    ({"n": {"$or": [{"$gt": 3}, 0]}}, "045"),
    ({"$not": {"n": {"$gt": 3}}}, "0123x"),
    ({"$and": [{"n": {"$gt": 1}}, {"even": True}]}, "24"),
    ({"$or": [{"n": 0}, {"n": {"$gte": 5}}]}, "05"),
    ({"$or": [{"n": 0}, {"$and": [{"even": True}, {"n": 4}]}], "even": True}, "04"),
    ({"n": {"$gt": "a text"}}, ""),
    ({"n": {"a": 1}}, ""),
    ({"missing": None}, ""),
    ({"missing": {"$gt": 1}}, ""),
    ({"tags": {"$eq": ["x"]}}, "x"),
    ({"tags": {"$nin": {"x"}}}, "012345x"),
    ({"nested": {"a": 1}}, "x"),
    ({"nested": {"a": {"$lt": 1}}}, ""),
    (lambda document: document.metadata.get("n", 0) > 3, "45"),
]


@pytest.mark.parametrize(("given", "wanted"), FILTERS, ids=lambda value: str(value)[:14])
async def test_filters(store, given, wanted):
    store.add_texts(["abc"], [{"tags": ["x"], "nested": {"a": 1}}], ids=["x"])
    expected = {"x" if w == "x" else TEXTS[int(w)] for w in wanted}
    found = store.similarity_search("abc", k=9, filter=given)
    assert set(ids(found)) == expected
    assert set(ids(store.max_marginal_relevance_search("abc", k=9, filter=given))) == expected
    assert await store.as_retriever(search_kwargs={"k": 9, "filter": given}).ainvoke("abc") == found
    assert store.similarity_search("abc", k=1, filter=given) == found[:1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"n": {"$gtt": "x"}}, r"\$gtt"),
        ({"$xor": []}, r"\$xor"),
        ({"n": 99, "$and": {"n": 1}}, "list"),
        ({"$not": {"n": {"$in": 3}}}, "list"),
        ({"$or": [{}, {"n": {"$in": "abc"}}]}, "list"),
        ({"$not": 5}, "does not say which key"),
        ({"$and": [{"n": 1}, {"$or": [5]}]}, "does not say which key"),
        ({"$gt": 3}, "does not say which key"),
        (["n", 1], "list"),
        ("n", "str"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_a_typed_error(store, wrong, says):
    for each in (store, FaissVectorStore(Letters())):  # an empty store, too
        with pytest.raises(ConfigurationError, match=says):
            each.similarity_search("a", filter=wrong)


def test_a_dotted_key_is_a_key_and_no_path(store):
    store.add_texts(["abc"], [{"flat.x": 1, "nested": {"x": 1}}], ids=["x"])
    assert ids(store.similarity_search("abc", filter={"flat.x": 1})) == ["x"]
    with pytest.raises(ConfigurationError, match=r"no key 'nested.x', .* Hint: Use {'nested': {'x': …}}.$"):
        store.similarity_search("abc", filter={"nested.x": 1})


def test_none_deletes_all_and_an_empty_list_nothing(store):
    assert store.delete([]) is store.delete(["missing"]) is True
    assert len(store.index) == 6
    assert store.delete() is True
    assert (len(store.index), store.similarity_search("abc")) == (0, [])
    assert store.add_texts(["abc"], ids=["x"]) == ["x"]


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "damaged"])
def test_what_cannot_be_loaded_names_what_makes_it(tmp_path, broken):
    if broken:
        (tmp_path / "index.safetensors").write_bytes(b"damaged")
    with pytest.raises((IndexNotFoundError, IndexCorruptError)) as caught:
        FaissVectorStore.load_local(tmp_path, Letters())
    assert "save_local" in caught.value.hint
    assert str(tmp_path) in caught.value.message
