"""`FaissVectorStore`: what must not be lost, what must be found, and what must be refused."""

import asyncio
import copy
import datetime
import math
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rgate_integrations.errors import ConfigurationError, DataFormatError, IndexMismatchError
from rgate_integrations.langchain import FaissVectorStore
from tests.patience import PATIENCE

METRICS = ["COSINE", "MAX_INNER_PRODUCT", "EUCLIDEAN_DISTANCE"]


class Letters(Embeddings):
    """How often a, b and c are in a text. Blocking and awaited calls are counted apart."""

    def __init__(self):
        self.blocking = self.awaited = 0

    def _vectors(self, texts):
        return [[float(t.count("a")), float(t.count("b")), float(t.count("c"))] for t in texts]

    def embed_documents(self, texts):
        self.blocking += 1
        return self._vectors(texts)

    def embed_query(self, text):
        self.blocking += 1
        return self._vectors([text])[0]

    async def aembed_documents(self, texts):
        self.awaited += 1
        return self._vectors(texts)

    async def aembed_query(self, text):
        self.awaited += 1
        return self._vectors([text])[0]


TEXTS = ["aaa", "aab", "abb", "bbb", "bcc", "ccc"]


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


# --- nothing is lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 1),
        uuid.UUID(int=1),
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.zeros(2),
        Path("x"),
        {1: "a key that JSON would turn into text"},
        {"deep": {None: 1}},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("way", ["add", "upsert", "from_documents", "aadd"])
async def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_stored(store, value, way):
    before = content(store)
    documents = [
        Document(page_content="b", id="fine"),
        Document(
            page_content="c", id="aaa" if way == "upsert" else "wrong", metadata={"ok": 1, "bad": value}
        ),
    ]

    async def write():
        if way == "from_documents":
            FaissVectorStore.from_documents(documents, Letters())
        elif way == "aadd":
            await store.aadd_documents(documents)
        else:
            store.add_documents(documents)

    with pytest.raises(DataFormatError, match="'bad'") as caught:
        await write()
    assert "convert" in caught.value.hint
    assert content(store) == before
    assert ids(store.similarity_search("c", k=9))[0] == "ccc"


def test_metadata_comes_back_as_json_holds_it(store, tmp_path):
    given = {"text": "é", "n": 1, "x": 0.5, "yes": True, "none": None, "list": [1, {"a": [2]}], "t": (1, 2)}
    store.add_texts(["ab"], [given | {"f": np.float64(2.5)}], ids=["new"])
    wanted = given | {"t": [1, 2], "f": 2.5}
    store.save_local(tmp_path / "s")
    loaded = FaissVectorStore.load_local(tmp_path / "s", Letters())
    for each in (store, loaded):
        assert each.get_by_ids(["new"])[0].metadata == wanted


def test_metadata_nested_too_deep_is_refused(store):
    deep = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(DataFormatError, match="'deep'"):
        store.add_texts(["a"], [{"deep": deep}])
    assert len(content(store)) == 6


async def test_200_concurrent_writers_lose_nothing(store):
    async def add(i):
        return await store.aadd_documents([Document(page_content="ab" * (i % 7 + 1), id=f"d{i}")])

    added = await asyncio.gather(*(add(i) for i in range(200)))
    assert added == [[f"d{i}"] for i in range(200)]
    assert content(store).keys() == {*TEXTS, *(f"d{i}" for i in range(200))}


async def test_of_200_writers_of_one_id_the_last_one_stays(store):
    await asyncio.gather(
        *(store.aadd_documents([Document(page_content="b" * i, id="same")]) for i in range(1, 201))
    )
    (found,) = store.get_by_ids(["same"])
    assert 1 <= len(found.page_content) <= 200
    assert len(content(store)) == 7


def test_readers_beside_a_writer_never_miss_a_document(store):
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                assert len(store.similarity_search("a", k=3)) == 3
                assert len(store.max_marginal_relevance_search("a", k=3, fetch_k=6)) == 3
                assert len(store.similarity_search("a", k=2, filter={"n": {"$lt": 9}})) == 2
                assert ids(store.get_by_ids(["aaa"])) == ["aaa"]
            except BaseException as error:
                wrong.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(200):
        store.add_texts(["aaa", "aab"], [{"n": turn % 5}] * 2, ids=["aaa", f"t{turn}"])
        store.delete([f"t{turn}"])
    stop.set()
    for reader in readers:
        reader.join(timeout=PATIENCE)
    assert wrong == []


# --- ids and texts -----------------------------------------------------------------------------------------


async def test_ids_may_be_whole_numbers_or_uuids(store):
    name = uuid.UUID(int=7)
    assert store.add_texts(["ab", "bc"], ids=[0, name]) == ["0", str(name)]
    for asked in ([0], ["0"]):
        assert ids(store.get_by_ids(asked)) == ["0"]
        assert ids(await store.aget_by_ids(asked)) == ["0"]
    assert ids(store.get_by_ids([name, None, 1.5, "\ud800", object()])) == [str(name)]
    assert store.delete([0, name]) is True
    assert store.get_by_ids([0, name]) == []


def test_one_string_is_not_a_list_of_ids(store):
    with pytest.raises(ConfigurationError, match="list of ids"):
        store.get_by_ids("aaa")
    with pytest.raises(ConfigurationError, match="list of ids"):
        store.delete("aaa")


@pytest.mark.parametrize("strategy", METRICS)
@pytest.mark.parametrize("blank", ["", "  \n"])
async def test_a_blank_text_is_stored_like_any_other(strategy, blank, tmp_path):
    documents = [Document(page_content=t, id=f"{i}") for i, t in enumerate(["aaa", blank, "ccc"])]
    store = FaissVectorStore.from_documents(documents, Letters(), distance_strategy=strategy)
    assert [d.page_content for d in store.get_by_ids(["0", "1", "2"])] == ["aaa", blank, "ccc"]
    assert await store.aadd_documents([Document(page_content=blank, id="0")]) == ["0"]
    assert store.get_by_ids(["0"])[0].page_content == blank
    store.save_local(tmp_path / "s")
    assert len(content(FaissVectorStore.load_local(tmp_path / "s", Letters()))) == 3


async def test_awaited_texts_that_do_not_match_their_ids_are_refused(store):
    for wrong in ({"ids": ["x"]}, {"metadatas": [{}]}):
        with pytest.raises(ConfigurationError, match="do not match 2"):
            await store.aadd_texts(["a", "b"], **wrong)
    assert len(content(store)) == 6


# --- vectors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", METRICS)
@pytest.mark.parametrize(
    "vector", [[1.0], [1.0, 0.0, 0.0, 0.0], [], ["a", "b", "c"], [[1.0, 2.0, 3.0]], [math.nan] * 3]
)
async def test_a_vector_that_does_not_fit_is_a_typed_error(strategy, vector):
    store = made(strategy)
    for search in (
        store.similarity_search_by_vector,
        store.similarity_search_with_score_by_vector,
        store.max_marginal_relevance_search_by_vector,
    ):
        with pytest.raises(ConfigurationError):
            search(vector, 2)
    with pytest.raises(ConfigurationError):
        await store.asimilarity_search_with_score_by_vector(vector, 2)
    with pytest.raises(ConfigurationError):
        store.add_embeddings([("new", vector)])
    assert len(content(store)) == 6


def test_embeddings_that_change_their_dimension_are_a_typed_error(store):
    store.embedding._vectors = lambda texts: [[1.0, 2.0]] * len(texts)
    with pytest.raises(ConfigurationError, match="dimension 2"):
        store.add_texts(["a"])
    with pytest.raises(ConfigurationError, match="dimension 2"):
        store.similarity_search("a")
    assert len(content(store)) == 6


# "aab" is [2, 1, 0]; the query "a" is [1, 0, 0].
EXPECTED = {
    "COSINE": (2 / math.sqrt(5), 2 / math.sqrt(5) / 2 + 0.5),
    "MAX_INNER_PRODUCT": (2.0, 1 / (1 + math.exp(-2))),
    "EUCLIDEAN_DISTANCE": (2.0, 1 / (1 + math.sqrt(2))),  # (2 - 1)^2 + 1^2
}


@pytest.mark.parametrize("strategy", METRICS)
async def test_scores_and_relevance_of_each_metric(strategy):
    store = made(strategy)
    score, relevance = EXPECTED[strategy]
    scores = {d.id: s for d, s in store.similarity_search_with_score("a", k=6)}
    assert scores["aab"] == pytest.approx(score, abs=1e-5)
    assert scores == {d.id: s for d, s in await store.asimilarity_search_with_score("a", k=6)}
    relevances = store.similarity_search_with_relevance_scores("a", k=6)
    by_id = {d.id: r for d, r in relevances}
    assert by_id["aab"] == pytest.approx(relevance, abs=1e-5)
    values = [r for _, r in relevances]
    assert values == sorted(values, reverse=True)
    assert all(0 <= r <= 1 for r in values)
    few = await store.asimilarity_search_with_relevance_scores("a", k=6, score_threshold=relevance - 1e-4)
    assert [d.id for d, r in few] == [d.id for d, r in relevances if r >= relevance - 1e-4]


@pytest.mark.parametrize("strategy", METRICS)
def test_the_nearest_by_each_metric_are_those_of_numpy(strategy):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(200, 8)) * rng.uniform(0.5, 3, size=(200, 1))
    pairs = [(f"t{i}", vector.tolist()) for i, vector in enumerate(vectors)]
    store = FaissVectorStore.from_embeddings(
        pairs, Letters(), ids=[f"{i}" for i in range(200)], distance_strategy=strategy
    )
    asked = rng.normal(size=8)
    products = vectors @ asked
    by = {
        "COSINE": products / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked),
        "MAX_INNER_PRODUCT": products,
        "EUCLIDEAN_DISTANCE": ((vectors - asked) ** 2).sum(axis=1),
    }[strategy]
    order = np.argsort(by if strategy == "EUCLIDEAN_DISTANCE" else -by)[:10]
    found = store.similarity_search_with_score_by_vector(asked.tolist(), k=10)
    assert [d.id for d, _ in found] == [f"{i}" for i in order]
    np.testing.assert_allclose([s for _, s in found], by[order], rtol=1e-4)


def test_identical_texts_are_fully_relevant(store, recwarn):
    for strategy in ("COSINE", "EUCLIDEAN_DISTANCE"):
        ((found, relevance),) = made(strategy).similarity_search_with_relevance_scores("abb", k=1)
        assert (found.id, relevance) == ("abb", pytest.approx(1, abs=1e-3))
    assert not [w for w in recwarn if "Relevance" in str(w.message)]


def test_the_users_own_relevance_and_strategies():
    store = made("MAX_INNER_PRODUCT", relevance_score_fn=lambda score: score / 10)
    ((_, relevance),) = store.similarity_search_with_relevance_scores("a", k=1)
    assert relevance == pytest.approx(0.3)
    with pytest.raises(ConfigurationError, match="JACCARD") as caught:
        FaissVectorStore(Letters(), distance_strategy="JACCARD")
    assert "COSINE" in caught.value.hint
    with pytest.raises(ConfigurationError, match="COSINE"):
        FaissVectorStore(Letters(), index=store.index, distance_strategy="COSINE")
    assert FaissVectorStore(Letters(), index=store.index).distance_strategy == "MAX_INNER_PRODUCT"


@pytest.mark.parametrize("strategy", METRICS)
def test_a_score_threshold_cuts_on_the_right_side(strategy):
    store = made(strategy)
    scored = store.similarity_search_with_score("a", k=6)
    limit = scored[2][1]
    few = store.similarity_search_with_score("a", k=6, score_threshold=limit)
    assert len(few) >= 3
    assert few == scored[: len(few)]
    assert all(s == limit for _, s in few[2:])


# --- filters -----------------------------------------------------------------------------------------------

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
    ({"n": {"$nin": [1, 5]}}, "0234x"),
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
    ({"nested": {"a": 1}}, "x"),
    (lambda document: document.metadata.get("n", 0) > 3, "45"),
]


@pytest.mark.parametrize(("given", "wanted"), FILTERS, ids=lambda value: str(value)[:14])
async def test_filters(store, given, wanted):
    store.add_texts(["abc"], [{"tags": ["x"], "nested": {"a": 1}}], ids=["x"])
    names = [*TEXTS, "x"]
    expected = {"x" if w == "x" else TEXTS[int(w)] for w in wanted}
    found = store.similarity_search("abc", k=9, filter=given)
    assert set(ids(found)) == expected <= set(names)
    assert ids(await store.asimilarity_search("abc", k=9, filter=given)) == ids(found)
    assert set(ids(store.max_marginal_relevance_search("abc", k=9, filter=given))) == expected
    retriever = store.as_retriever(search_kwargs={"k": 9, "filter": given})
    assert set(ids(retriever.invoke("abc"))) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": {"$regex": "x"}},
        {"$xor": []},
        {"n": {"$gt": 1, "other": 2}},
        {"$and": {"n": 1}},
        {"$or": [1]},
        {"$or": []},
        {"$not": [{"n": 1}]},
        {"n": {"$in": 3}},
        {"n": {"$in": "abc"}},
        {"n": {"$not": 3}},
        {3: 1},
        ["n", 1],
        "n",
    ],
    ids=str,
)
async def test_a_filter_that_cannot_be_meant_is_a_typed_error(store, wrong):
    for each in (store, FaissVectorStore(Letters())):  # an empty store, too
        with pytest.raises(ConfigurationError):
            each.similarity_search("a", filter=wrong)
        with pytest.raises(ConfigurationError):
            await each.amax_marginal_relevance_search("a", filter=wrong)


def test_what_is_nested_too_deeply_or_no_number_is_a_typed_error(store):
    for name in ("$not", "$and", "n"):
        deep = {"n": 1}
        for _ in range(2_000):
            deep = {"$and": [deep]} if name == "$and" else {name: deep}
        with pytest.raises(ConfigurationError, match="more than 64 deep"):
            store.similarity_search("a", filter=deep)
    for k in ("3", 1.5, 0):
        with pytest.raises(ConfigurationError, match="whole number"):
            store.similarity_search("a", k=k)


def test_an_unknown_operator_is_named_with_those_that_exist(store):
    with pytest.raises(ConfigurationError, match=r"\$gtt") as caught:
        store.similarity_search("a", filter={"n": {"$gtt": 1}})
    assert "$gt" in caught.value.hint


# --- async -------------------------------------------------------------------------------------------------


async def test_awaited_methods_embed_natively():
    store = FaissVectorStore(Letters())
    await store.aadd_documents([Document(page_content="aab", id="1", metadata={"n": 1})])
    await store.aadd_texts(["bbb", "ccc"], [{"n": 2}, {"n": 3}], ids=["2", "3"])
    assert ids(await store.asimilarity_search("b", k=1)) == ["2"]
    assert [
        d.id for d, _ in await store.asimilarity_search_with_score("c", k=1, filter={"n": {"$gt": 1}})
    ] == ["3"]
    assert ids(await store.amax_marginal_relevance_search("a", k=1)) == ["1"]
    assert [[d.id for d in each] for each in await store.abatch_similarity_search(["a", "c"], k=1)] == [
        ["1"],
        ["3"],
    ]
    ((found, _),) = await store.asimilarity_search_with_relevance_scores("b", k=1)
    assert found.id == "2"
    assert ids(await store.as_retriever(search_kwargs={"k": 1}).ainvoke("c")) == ["3"]
    assert ids(await store.asimilarity_search_by_vector([0.0, 1.0, 0.0], k=1)) == ["2"]
    assert ids(await store.amax_marginal_relevance_search_by_vector([0.0, 1.0, 0.0], k=1)) == ["2"]
    assert await store.adelete(["2"]) is True
    assert store.embedding.blocking == 0
    other = await FaissVectorStore.afrom_texts(["a", "b"], Letters(), ids=["x", "y"])
    more = await FaissVectorStore.afrom_documents([Document(page_content="a", id="z")], Letters())
    assert (content(other).keys(), content(more).keys()) == ({"x", "y"}, {"z"})
    assert other.embedding.blocking == more.embedding.blocking == 0


# --- what langchain_community's store has --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", METRICS)
async def test_embeddings_that_are_there_are_not_computed_again(strategy):
    pairs = [("x", [1.0, 0.0, 0.0]), ("y", [0.0, 2.0, 0.0])]
    store = FaissVectorStore.from_embeddings(
        pairs, Letters(), [{"n": 1}, {"n": 2}], ids=["1", "2"], distance_strategy=strategy
    )
    assert store.add_embeddings([("z", [0.0, 0.0, 3.0]), ("new y", [0.0, 2.0, 0.1])], ids=["3", "2"]) == [
        "3",
        "2",
    ]
    other = await FaissVectorStore.afrom_embeddings(pairs, Letters(), ids=["1", "2"])
    assert store.embedding.blocking == store.embedding.awaited == other.embedding.blocking == 0
    assert content(store) == {"1": ("x", {"n": 1}), "2": ("new y", {}), "3": ("z", {})}
    ((found, _),) = store.similarity_search_with_score_by_vector([0.0, 2.0, 0.0], k=1)
    assert found.id == "2"
    assert ids(store.similarity_search_by_vector([0.0, 0.0, 1.0], k=1)) == ids(
        d for d, _ in await store.asimilarity_search_with_score_by_vector([0.0, 0.0, 1.0], k=1)
    )
    assert FaissVectorStore.from_embeddings([], Letters()).similarity_search("a") == []
    with pytest.raises(ConfigurationError, match="2 ids do not match 1"):
        store.add_embeddings([("z", [0.0, 0.0, 3.0])], ids=["a", "b"])


@pytest.mark.parametrize("strategy", METRICS)
def test_merging_takes_over_documents_with_their_vectors(strategy):
    store, other = made(strategy), FaissVectorStore(Letters(), distance_strategy=strategy)
    other.add_texts(["cca", "bbb"], [{"from": "other"}, {"from": "other"}], ids=["new", "aaa"])
    other.add_texts([" "], ids=["blank"])
    embedded = store.embedding.blocking
    store.merge_from(other)
    assert store.embedding.blocking <= embedded + 1  # to see that both embed alike, never the documents
    assert content(store)["new"] == ("cca", {"from": "other"})
    assert content(store)["aaa"] == ("bbb", {"from": "other"}), "the same id: the merged one takes its place"
    assert len(content(store)) == 8
    assert len(content(other)) == 3
    ((_, score),) = store.similarity_search_with_score("cca", k=1, filter={"from": "other"})
    fresh = FaissVectorStore(Letters(), distance_strategy=strategy)
    fresh.add_texts(["cca"])
    ((_, wanted),) = fresh.similarity_search_with_score("cca", k=1)
    assert score == pytest.approx(wanted, abs=1e-5)
    store.merge_from(store)
    assert len(content(store)) == 8
    store.merge_from(FaissVectorStore(Letters(), distance_strategy=strategy))
    assert len(content(store)) == 8


def test_what_cannot_be_merged_is_refused(store):
    class Other(Letters):
        def _vectors(self, texts):
            return [[v + 9 for v in vector] for vector in super()._vectors(texts)]

    before = content(store)
    with pytest.raises(ConfigurationError, match="EUCLIDEAN_DISTANCE"):
        store.merge_from(made("EUCLIDEAN_DISTANCE"))
    with pytest.raises(IndexMismatchError, match="embeddings"):
        store.merge_from(FaissVectorStore.from_texts(["abc"], Other()))
    with pytest.raises(ConfigurationError, match="FaissVectorStore"):
        store.merge_from(object())
    assert content(store) == before


@pytest.mark.parametrize("strategy", METRICS)
def test_a_saved_store_knows_its_metric(strategy, tmp_path):
    store = made(strategy)
    store.save_local(tmp_path / "s")
    loaded = FaissVectorStore.load_local(tmp_path / "s", Letters())
    assert loaded.distance_strategy == strategy
    assert loaded.similarity_search_with_score("ab", k=6) == store.similarity_search_with_score("ab", k=6)
    assert loaded.similarity_search_with_relevance_scores(
        "ab"
    ) == store.similarity_search_with_relevance_scores("ab")
    other = next(metric for metric in METRICS if metric != strategy)
    with pytest.raises(ConfigurationError, match=strategy):
        FaissVectorStore.load_local(tmp_path / "s", Letters(), distance_strategy=other)


def test_an_empty_store_is_saved_with_its_metric(tmp_path):
    FaissVectorStore(Letters(), distance_strategy="EUCLIDEAN_DISTANCE").save_local(tmp_path / "s")
    loaded = FaissVectorStore.load_local(tmp_path / "s", Letters())
    assert loaded.distance_strategy == "EUCLIDEAN_DISTANCE"
    loaded.add_texts(["aaa"])
    assert loaded.similarity_search_with_score("a")[0][1] == pytest.approx(4)


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


@pytest.mark.parametrize("strategy", METRICS)
def test_a_store_can_be_pickled_and_copied(strategy):
    store = made(strategy)
    store.delete(["bcc"])
    for twin in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):  # noqa: S301  our own
        assert content(twin) == content(store)
        assert twin.similarity_search_with_score("ab", k=9) == store.similarity_search_with_score("ab", k=9)
        twin.add_texts(["ccc"], ids=["new"])
        assert "new" in content(twin)
        assert "new" not in content(store)
    empty = pickle.loads(pickle.dumps(FaissVectorStore(Letters(), distance_strategy=strategy)))  # noqa: S301
    empty.add_texts(["a"])
    assert len(content(empty)) == 1


def test_a_store_is_pickled_whole_beside_a_writer(store):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            store.add_texts(["ab"], ids=["w"])
            store.delete(["w"])

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            for _ in range(30):
                twin = pickle.loads(pickle.dumps(store))  # noqa: S301
                assert len(twin.similarity_search("a", k=9)) == len(content(twin)) in (6, 7)
        finally:
            stop.set()
        writing.result(timeout=PATIENCE)


def test_a_misspelt_option_is_an_error():
    with pytest.raises(TypeError, match="distance_stratgy"):
        FaissVectorStore.from_texts(["a"], Letters(), distance_stratgy="COSINE")
