"""The passage index: edges first, then searching, then what happens to files."""

import threading

import numpy as np
import pytest

from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexMismatchError,
    IndexNotFoundError,
)
from rgate_integrations.index import Passage, PassageIndex, fuse, read_passages
from rgate_integrations.index.passages import PassageStore
from tests.patience import PATIENCE


class Letters:
    """An embedder without a model: counts letters. What it gives for passages with a "z" can be spoilt."""

    def __init__(self, name="letters", spoil=None):
        self.name = name
        self.identity = f"{name}-1"
        self.spoil = spoil
        self.calls = 0

    def embed(self, texts):
        self.calls += 1
        counts = np.array([[t.lower().count(c) + 0.01 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts])
        counts = counts.reshape(len(texts), 26)
        vectors = (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)
        return self.spoil(vectors) if self.spoil and any("z" in text for text in texts) else vectors


def passages(n=5):
    return [
        Passage(id=f"p{i}", title=f"T{i}", text="abcdefghij"[i % 10] * 8, metadata={"i": i}) for i in range(n)
    ]


@pytest.fixture
def index():
    return PassageIndex.build(passages(), Letters())


def assert_untouched(index):
    """What `passages` made is there, and nothing else; what is added next is found under its own vector."""
    assert list(index) == passages()
    assert len(index) == 5
    found = index.search(["aaa", "zzz", "xyz"], k=99)
    assert {hit.passage.id for hits in found for hit in hits} == {"p0", "p1", "p2", "p3", "p4"}
    index.add([Passage("after", "qqqq")])
    assert index.search(["qqqq"], 1)[0][0].passage.id == "after"
    nearest = index.search(["zzzz"], 1)[0][0]
    assert nearest.score < 0.9, f"{nearest} came back for a passage that is not there"


def test_an_empty_index_finds_nothing(tmp_path):
    index = PassageIndex(Letters())
    index.add([])
    for empty in (index, PassageIndex.load(index.save(tmp_path / "empty"), Letters())):
        assert len(empty) == 0
        assert empty.search(["anything"]) == [[]]
        assert empty.search([]) == []
        assert empty.delete(["p1"]) == 0


def test_search_finds_the_nearest_in_one_embedding_call(index):
    before = index.embedder.calls
    found = index.search(["aaa", "ccc"], k=2)
    assert index.embedder.calls == before + 1
    assert [hits[0].passage.id for hits in found] == ["p0", "p2"]
    assert (found[0][0].passage, found[0][0].query) == (passages()[0], "aaa")
    assert 1.0 >= found[0][0].score >= found[0][1].score
    assert [len(hits) for hits in index.search(["a"], k=99)] == [5]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda index: index.search("a string"), ConfigurationError, "list of queries"),
        (lambda index: index.search(["a"], k=0), ConfigurationError, "at least 1"),
        (
            lambda index: index.search(["a"], k="3"),
            ConfigurationError,
            "at least 1, not '3'",
        ),
        (
            lambda index: index.search_vectors(np.eye(3), 1),
            ConfigurationError,
            "dimension 3 do not fit an index of",
        ),
        (
            lambda index: index.add([Passage("new", "x")], np.eye(3)[:1]),
            ConfigurationError,
            "dimension 3 do not",
        ),
        (
            lambda index: index.add([Passage("new", "x")], np.full((1, 26), np.inf)),
            ConfigurationError,
            "infinity",
        ),
        (lambda index: index.add([Passage("p1", "again")]), DataFormatError, "'p1' is there twice"),
        (
            lambda index: index.add([Passage("x", "1"), Passage("x", "2")]),
            DataFormatError,
            "'x' is there twice",
        ),
        (lambda index: index.add([Passage("y", "  ")]), DataFormatError, "'y' has no text"),
        (lambda index: PassageIndex(metric="l3"), ConfigurationError, "'l3'.*inner_product"),
    ],
)
def test_wrong_arguments(index, call, error, says):
    with pytest.raises(error, match=says):
        call(index)
    assert_untouched(index)


@pytest.mark.parametrize(
    ("metric", "scores"),
    [
        ("cosine", {"abb": 0.9487, "aa": 0.7071, "bbbb": 0.7071}),
        ("inner_product", {"bbbb": 4, "abb": 3, "aa": 2}),
        ("l2", {"abb": -1, "aa": -2, "bbbb": -10}),  # higher is nearer
    ],
)
def test_the_metric_of_an_index(metric, scores):
    class Plain:
        name = identity = "plain"

        def embed(self, texts):
            return [[text.count("a"), text.count("b")] for text in texts]

    index = PassageIndex(Plain(), metric=metric)
    index.add([Passage(text, text) for text in ("aa", "abb", "bbbb")])
    assert {hit.passage.id: round(hit.score, 4) for hit in index.search(["ab"], 3)[0]} == scores


def test_deleting_and_adding_again(index):
    assert index.delete(["p0", "p3", "not there"]) == 2
    assert sorted(hit.passage.id for hit in index.search(["aaa"], k=5)[0]) == ["p1", "p2", "p4"]
    index.add([Passage(id="p0", text="aaaa")])
    assert index.search(["aaa"], k=1)[0][0].passage.text == "aaaa"


def test_whole_numbers_and_the_empty_text_are_ids():
    index = PassageIndex.build([Passage(0, "aaaa"), Passage("", "bbbb")], Letters())
    assert [passage.id for passage in index] == ["0", ""]
    assert index.get([0]) == index.get(["0"]) == [index.search(["aaaa"], 1)[0][0].passage]
    assert index.vectors([0, ""]).shape == (2, 26)
    for name in (0, "0", ""):
        with pytest.raises(DataFormatError, match="is there twice"):
            index.add([Passage(name, "again")])
    index.upsert([Passage(0, "cccc")])
    assert [passage.text for passage in index.get(["0"])] == ["cccc"]
    assert index.delete([0, ""]) == 2


# --- all or nothing ----------------------------------------------------------------------------------------


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("how", ["add", "upsert"])
@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.float32(1), b"x", CIRCLE, "\ud800", 10**5_000, {"deep": [{("a", "b"): 1}]}],
    ids=range(8),
)
def test_metadata_that_json_cannot_hold_changes_nothing(index, how, value):
    wrong = Passage("wrong", "zzzz", metadata={"fine": (1, 2), "bad key": value})
    with pytest.raises(DataFormatError, match=r"'wrong'.*JSON: 'bad key'"):
        getattr(index, how)([Passage("good", "yyyy"), wrong])
    assert_untouched(index)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Passage("x\ud800", "zzzz"), "The id"),
        (Passage("x", "zzzz\ud800"), "The text of the passage 'x'"),
        (Passage("x", "zzzz", title=["T"]), "The title of the passage 'x'"),
        (Passage("x", None), "The text of the passage 'x'"),
        (Passage(None, "zzzz"), "The id of the passage None"),
        (Passage("x", "zzzz", metadata=["a"]), "The metadata of the passage 'x'"),
    ],
)
def test_passages_that_cannot_be_stored_change_nothing(index, wrong, why):
    with pytest.raises(DataFormatError, match=why):
        index.upsert([Passage("good", "yyyy"), wrong])
    assert_untouched(index)


def broken(vectors):
    raise ConnectionError("https://user:secret@example.org is down")


@pytest.mark.parametrize("how", ["add", "upsert"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda vectors: vectors[:, :20].copy(),
        lambda vectors: vectors[1:],
        lambda vectors: vectors[0],
        lambda vectors: vectors * np.nan,
        lambda vectors: [["a"] for _ in vectors],
        lambda vectors: None,
        broken,
    ],
    ids=["dimension", "too few", "one row", "nan", "no numbers", "none", "an error"],
)
def test_an_embedder_that_fails_changes_nothing(how, spoil):
    index = PassageIndex(Letters(spoil=lambda vectors: vectors[0]))
    with pytest.raises(ConfigurationError):
        index.add([Passage("first", "zzzz")])
    index.add(passages())  # a first write that fails has set no dimension
    index.embedder.spoil = spoil
    with pytest.raises(ConfigurationError) as caught:
        getattr(index, how)([Passage("p1" if how == "upsert" else "newer", "zzzz"), Passage("new", "zzzz")])
    assert caught.value.hint
    assert "secret" not in str(caught.value)
    index.embedder.spoil = None
    assert_untouched(index)


@pytest.mark.parametrize("how", ["upsert", "delete"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["add_with_ids", "remove_ids", "passages"])
def test_a_write_that_stops_half_way_is_rolled_back(index, monkeypatch, how, method, error):
    faiss = pytest.importorskip("faiss")
    owner, name = (PassageStore, "replace") if method == "passages" else (faiss.IndexIDMap2, method)
    works, left = getattr(owner, name), [error]

    def stops_once(*given):
        done = works(*given)
        if left:
            raise left.pop()
        return done

    monkeypatch.setattr(owner, name, stops_once)
    if (how, method) == ("delete", "add_with_ids"):
        return  # nothing is added
    with pytest.raises(error):
        getattr(index, how)(["p1"] if how == "delete" else [Passage("p1", "zzzz"), Passage("new", "zzzz")])
    assert_untouched(index)


def test_of_two_writers_of_one_id_one_is_refused():
    both, refused = threading.Barrier(2, timeout=PATIENCE), []

    class Together(Letters):
        def embed(self, texts):
            both.wait()  # neither is written by now
            return super().embed(texts)

    index = PassageIndex(Together())

    def add(text):
        try:
            index.add([Passage("same", text)])
        except DataFormatError as error:
            refused.append(error)

    writers = [threading.Thread(target=add, args=(text,)) for text in ("aaaa", "bbbb")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=PATIENCE)
    assert len(refused) == len(index) == len(list(index)) == 1


# --- files -------------------------------------------------------------------------------------------------


def test_saving_and_loading(index, tmp_path):
    root = index.save(tmp_path / "i")
    loaded = PassageIndex.load(root, Letters())
    assert loaded.search(["bbb", "eee"], 3) == index.search(["bbb", "eee"], 3)
    loaded.add([Passage(id="new", text="zzz")])
    loaded.save(root)
    assert PassageIndex.load(root, Letters()).search(["zzz"], 1)[0][0].passage.id == "new"
    assert len(list(root.glob("v-*"))) == 1
    with pytest.raises(IndexMismatchError, match=r"'letters'.*not with 'other'"):
        PassageIndex.load(root, Letters("other"))
    with pytest.raises(IndexNotFoundError, match=r"no index.*rgate index build"):
        PassageIndex.load(tmp_path, Letters())
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigurationError, match="is a file"):
        index.save(tmp_path / "mine")


def test_reading_a_corpus(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"id": 7, "title": "T", "text": "x", "year": 1999}\n\n{"text": "x"}\n{"id": "", "text": "x"}\n'
    )
    assert list(read_passages(path)) == [
        Passage(id="7", title="T", text="x", metadata={"year": 1999}),
        Passage(id="3", text="x"),
        Passage(id="", text="x"),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [("{", "not JSON"), ("[]", "no text"), ('{"text": 3}', "no text"), ('{"text": " "}', "empty")],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, line, why):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataFormatError, match=f"line 2: .*{why}"):
        list(read_passages(path))


def test_reciprocal_rank_fusion():
    assert fuse([["a", "b", "c"], ["b", "d"]], key=lambda x: x) == ["b", "a", "d", "c"]
    assert fuse([["a", "b"], []], key=lambda x: x, k=1) == ["a"]
    assert fuse([], key=lambda x: x) == []


@pytest.mark.model
def test_real_embeddings_find_by_meaning(minilm, tmp_path):
    texts = {
        "hamlet": "Hamlet is a tragedy written by William Shakespeare.",
        "jupiter": "Jupiter is the largest planet of the solar system.",
        "bread": "Bread is baked from flour, water and yeast.",
    }
    queries = [
        "Which play did the bard of Avon write?",
        "biggest body around the sun",
        "what do bakers make?",
    ]
    root = PassageIndex.build([Passage(id=k, text=v) for k, v in texts.items()]).save(tmp_path / "i")
    found = PassageIndex.load(root).search(queries, 1)
    assert [hits[0].passage.id for hits in found] == ["hamlet", "jupiter", "bread"]
