"""The passage index: edges first, then searching, then what happens to files."""

import json
import threading

import numpy as np
import pytest

from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
)
from rgate_integrations.index import Passage, PassageIndex, read_passages
from rgate_integrations.index.folder import describe_file
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.passages import PassageStore
from tests.patience import PATIENCE


class Letters:
    """An embedder without a model: counts letters."""

    def __init__(self, name="letters"):
        self.name = name
        self.calls = 0

    @property
    def identity(self):
        return f"{self.name}-1"

    def embed(self, texts):
        self.calls += 1
        counts = np.array([[t.lower().count(c) + 0.01 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts])
        counts = counts.reshape(len(texts), 26)
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


def passages(n=5):
    return [
        Passage(id=f"p{i}", title=f"T{i}", text="abcdefghij"[i % 10] * 8, metadata={"i": i}) for i in range(n)
    ]


def test_an_empty_index_finds_nothing():
    index = PassageIndex(Letters())
    assert len(index) == 0
    assert index.search(["anything"]) == [[]]
    assert index.search([]) == []
    assert index.delete(["p1"]) == 0
    index.add([])
    assert len(index) == 0


def test_search_finds_the_nearest_in_one_embedding_call():
    embedder = Letters()
    index = PassageIndex.build(passages(), embedder)
    before = embedder.calls
    found = index.search(["aaa", "ccc"], k=2)
    assert embedder.calls == before + 1
    assert [hits[0].passage.id for hits in found] == ["p0", "p2"]
    assert found[0][0].passage == passages()[0]
    assert found[0][0].query == "aaa"
    assert 1.0 >= found[0][0].score >= found[0][1].score
    assert [len(h) for h in index.search(["a"], k=99)] == [5]


def test_wrong_arguments():
    index = PassageIndex.build(passages(), Letters())
    with pytest.raises(ConfigurationError, match="list of queries"):
        index.search("a string")
    with pytest.raises(ConfigurationError, match="at least 1"):
        index.search(["a"], k=0)
    with pytest.raises(ConfigurationError, match="k must be a whole number, at least 1, not '3'"):
        index.search(["a"], k="3")
    with pytest.raises(DataFormatError, match="'p1' is there twice"):
        index.add([Passage(id="p1", text="again")])
    with pytest.raises(DataFormatError, match="'x' is there twice"):
        index.add([Passage(id="x", text="1"), Passage(id="x", text="2")])
    with pytest.raises(DataFormatError, match="'y' has no text"):
        index.add([Passage(id="y", text="  ")])
    assert len(index) == 5


def test_the_metric_of_an_index():
    class Plain:
        name = identity = "plain"

        def embed(self, texts):
            return np.array([[float(t.count("a")), float(t.count("b"))] for t in texts], dtype=np.float32)

    def scores(metric):
        index = PassageIndex(Plain(), metric=metric)
        index.add([Passage("aa", "aa"), Passage("abb", "abb"), Passage("bbbb", "bbbb")])
        return {hit.passage.id: round(hit.score, 4) for hit in index.search(["ab"], 3)[0]}

    assert scores("cosine") == {"abb": 0.9487, "aa": 0.7071, "bbbb": 0.7071}
    assert scores("inner_product") == {"bbbb": 4, "abb": 3, "aa": 2}
    assert scores("l2") == {"abb": -1, "aa": -2, "bbbb": -10}, "higher is nearer"
    with pytest.raises(ConfigurationError, match="l3") as caught:
        PassageIndex(Plain(), metric="l3")
    assert "inner_product" in caught.value.hint


def test_deleting_and_adding_again():
    index = PassageIndex.build(passages(), Letters())
    assert index.delete(["p0", "p3", "not there"]) == 2
    assert len(index) == 3
    assert "p0" not in [h.passage.id for h in index.search(["aaa"], k=5)[0]]
    index.add([Passage(id="p0", text="aaaa")])
    assert index.search(["aaa"], k=1)[0][0].passage.text == "aaaa"


def circle():
    made = []
    made.append(made)
    return made


def write(index, how, given):
    """Write passages in one of the three ways."""
    if how == "add with vectors":
        index.add(given, Letters().embed([p.searchable for p in given]))
    else:
        getattr(index, how)(given)


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


@pytest.mark.parametrize("how", ["add", "upsert", "add with vectors"])
@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.float32(1), b"x", circle(), "\ud800", {"deep": [{("a", "b"): 1}]}]
)
def test_metadata_that_json_cannot_hold_changes_nothing(how, value):
    index = PassageIndex.build(passages(), Letters())
    wrong = Passage("wrong", "zzzz", metadata={"fine": 1, "bad key": value})
    with pytest.raises(DataFormatError, match=r"'wrong'.*'bad key'") as caught:
        write(index, how, [Passage("good", "yyyy"), wrong])
    assert "JSON" in caught.value.hint
    assert "'fine'" not in str(caught.value)
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
def test_passages_that_cannot_be_stored_change_nothing(wrong, why):
    index = PassageIndex.build(passages(), Letters())
    with pytest.raises(DataFormatError, match=why):
        index.upsert([Passage("good", "yyyy"), wrong])
    assert_untouched(index)


class Failing(Letters):
    """Letters, but what it gives for passages with a "z" is spoilt."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil

    def embed(self, texts):
        vectors = super().embed(texts)
        return self.spoil(vectors) if any("z" in text for text in texts) else vectors


def broken(vectors):
    raise ConnectionError("https://user:secret@example.org is down")


SPOILT = {
    "another dimension": lambda vectors: vectors[:, :20].copy(),
    "too few": lambda vectors: vectors[1:],
    "one row": lambda vectors: vectors[0],
    "nan": lambda vectors: vectors * np.nan,
    "no numbers": lambda vectors: [["a"] for _ in vectors],
    "none": lambda vectors: None,
    "an error": broken,
}


@pytest.mark.parametrize("how", ["add", "upsert"])
@pytest.mark.parametrize("kind", SPOILT)
def test_an_embedder_that_fails_changes_nothing(how, kind):
    embedder = Failing(SPOILT[kind])
    index = PassageIndex.build(passages(), embedder)
    ids = ["p1", "new"] if how == "upsert" else ["new", "newer"]
    with pytest.raises(ConfigurationError) as caught:
        write(index, how, [Passage(name, "zzzz") for name in ids])
    assert caught.value.hint
    assert "secret" not in str(caught.value)
    embedder.spoil = lambda vectors: vectors
    assert_untouched(index)


def test_a_first_write_that_fails_sets_no_dimension():
    embedder = Failing(SPOILT["none"])
    index = PassageIndex(embedder)
    with pytest.raises(ConfigurationError):
        index.add([Passage("new", "zzzz")])
    with pytest.raises(ConfigurationError):
        index.add([Passage("new", "x")], np.full((1, 3), np.inf))
    embedder.spoil = lambda vectors: vectors
    index.add(passages())
    assert_untouched(index)
    with pytest.raises(ConfigurationError, match="dimension 3 do not fit an index of dimension 26"):
        index.add([Passage("new", "x")], np.eye(3)[:1])
    with pytest.raises(ConfigurationError, match="dimension 3 do not fit an index of dimension 26"):
        index.search_vectors(np.eye(3), 1)


@pytest.mark.parametrize("method", ["add_with_ids", "remove_ids"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_write_that_stops_in_faiss_is_rolled_back(monkeypatch, method, error):
    faiss = pytest.importorskip("faiss")
    index = PassageIndex.build(passages(), Letters())
    works = getattr(faiss.IndexIDMap2, method)
    left = [error]

    def stops_once(*given):
        done = works(*given)
        if left:
            raise left.pop()
        return done

    monkeypatch.setattr(faiss.IndexIDMap2, method, stops_once)
    with pytest.raises(error):
        index.upsert([Passage("p1", "zzzz"), Passage("new", "zzzz")])
    assert not left
    assert_untouched(index)


@pytest.mark.parametrize("how", ["upsert", "delete"])
def test_a_write_that_stops_in_sqlite_is_rolled_back(monkeypatch, how):
    index, replace = PassageIndex.build(passages(), Letters()), PassageStore.replace

    def stops(*given):
        replace(*given)
        raise KeyboardInterrupt

    given = ["p1", "p2"] if how == "delete" else [Passage("p1", "zzzz"), Passage("new", "zzzz")]
    with monkeypatch.context() as patched:
        patched.setattr(PassageStore, "replace", stops)
        with pytest.raises(KeyboardInterrupt):
            getattr(index, how)(given)
    assert_untouched(index)


def test_readers_never_see_half_of_a_write():
    index = PassageIndex.build([*passages(), Passage("moving", "zzzz")], Letters())
    done = threading.Event()
    wrong = []

    def read():
        while not done.is_set():
            try:
                ids = [hit.passage.id for hit in index.search(["zzzz"], k=99)[0]]
                assert ids[0] == "moving", ids
                assert len(ids) in (6, 8), ids
                assert len(list(index)) in (6, 8)
                assert [p.id for p in index.get(["moving"])] == ["moving"]
                assert index.vectors(["moving"]).shape == (1, 26)
            except Exception as error:
                wrong.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(300):
        index.upsert([Passage("moving", "z" * (turn + 1)), Passage("x", "xxxx"), Passage("y", "yyyy")])
        index.delete(["x", "y"])
    done.set()
    for reader in readers:
        reader.join(timeout=PATIENCE)
    assert wrong == []


def test_of_two_writers_of_one_id_one_is_refused():
    both = threading.Barrier(2, timeout=PATIENCE)

    class Together(Letters):
        def embed(self, texts):
            both.wait()  # both have been checked by now, and neither is written
            return super().embed(texts)

    index = PassageIndex(Together())
    refused = []

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
    assert len(refused) == 1
    assert len(index) == len(list(index)) == 1


def test_whole_numbers_and_the_empty_text_are_ids(tmp_path):
    index = PassageIndex.build([Passage(0, "aaaa"), Passage("", "bbbb")], Letters())
    assert [p.id for p in index] == ["0", ""]
    assert index.search(["aaaa"], 1)[0][0].passage == Passage("0", "aaaa")
    assert index.get([0]) == index.get(["0"]) == [Passage("0", "aaaa")]
    assert index.vectors([0, ""]).shape == (2, 26)
    for name in (0, "0", ""):
        with pytest.raises(DataFormatError, match="is there twice"):
            index.add([Passage(name, "again")])
    index.upsert([Passage(0, "cccc")])
    assert [p.text for p in index.get(["0"])] == ["cccc"]
    assert index.delete([0, ""]) == 2
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"id": 0, "text": "x"}\n{"id": "", "text": "x"}\n{"id": null, "text": "x"}\n{"text": "x"}\n'
    )
    assert [p.id for p in read_passages(path)] == ["0", "", "3", "4"]


def test_a_saved_index_with_a_vector_too_many_is_refused(tmp_path):
    root = PassageIndex.build(passages(), Letters()).save(tmp_path / "i")
    fewer = PassageIndex.build(passages(4), Letters()).save(tmp_path / "fewer")
    manifest = json.loads((root / "index.json").read_text())
    (kept,) = root.glob("v-*/passages.sqlite")
    (short,) = fewer.glob("v-*/passages.sqlite")
    kept.write_bytes(short.read_bytes())
    manifest["files"]["passages.sqlite"] = describe_file(kept)
    (root / "index.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexCorruptError, match="5 vectors for 4 passages"):
        PassageIndex.load(root, Letters())


def test_saving_and_loading(tmp_path):
    index = PassageIndex.build(passages(), Letters())
    index.save(tmp_path / "i")
    loaded = PassageIndex.load(tmp_path / "i", Letters())
    assert loaded.search(["bbb", "eee"], 3) == index.search(["bbb", "eee"], 3)
    loaded.add([Passage(id="new", text="zzz")])
    loaded.save(tmp_path / "i")
    again = PassageIndex.load(tmp_path / "i", Letters())
    assert again.search(["zzz"], 1)[0][0].passage.id == "new"
    assert len(list((tmp_path / "i").glob("v-*"))) == 1
    PassageIndex(Letters()).save(tmp_path / "empty")
    assert PassageIndex.load(tmp_path / "empty", Letters()).search(["a"]) == [[]]


def test_folders_that_are_no_index(tmp_path):
    with pytest.raises(IndexNotFoundError, match="no index") as caught:
        PassageIndex.load(tmp_path, Letters())
    assert "rgate index build" in caught.value.hint
    root = PassageIndex.build(passages(), Letters()).save(tmp_path / "i")
    with pytest.raises(IndexMismatchError, match=r"'letters'.*not with 'other'"):
        PassageIndex.load(root, Letters("other"))
    manifest = json.loads((root / "index.json").read_text())
    (root / "index.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(IndexMismatchError, match="newer"):
        PassageIndex.load(root, Letters())
    (root / "index.json").write_text("{")
    with pytest.raises(IndexCorruptError, match=r"index\.json"):
        PassageIndex.load(root, Letters())


@pytest.mark.parametrize("name", ["vectors.faiss", "passages.sqlite"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_files_are_named(tmp_path, name, damage):
    root = PassageIndex.build(passages(), Letters()).save(tmp_path / "i")
    (path,) = root.glob(f"v-*/{name}")
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-7] if damage == "truncate" else data[:-9] + b"x" + data[-8:])
    with pytest.raises(IndexCorruptError, match=name):
        PassageIndex.load(root, Letters())


def test_reading_a_corpus(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 7, "title": "T", "text": "x", "year": 1999}\n\n{"text": "only text"}\n')
    first, second = read_passages(path)
    assert first == Passage(id="7", title="T", text="x", metadata={"year": 1999})
    assert second == Passage(id="3", text="only text")
    for line, why in (
        ("{", "not JSON"),
        ("[]", "no text"),
        ('{"text": 3}', "no text"),
        ('{"text": " "}', "empty"),
    ):
        path.write_text('{"text": "fine"}\n' + line)
        with pytest.raises(DataFormatError, match=f"line 2: .*{why}"):
            list(read_passages(path))
    with pytest.raises(DataFormatError, match="cannot be read"):
        list(read_passages(tmp_path / "missing.jsonl"))


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
    index = PassageIndex.build([Passage(id=k, text=v) for k, v in texts.items()])
    queries = [
        "Which play did the bard of Avon write?",
        "biggest body around the sun",
        "what do bakers make?",
    ]
    assert [hits[0].passage.id for hits in index.search(queries, 1)] == ["hamlet", "jupiter", "bread"]
    index.save(tmp_path / "i")
    assert PassageIndex.load(tmp_path / "i").search(queries, 1) == index.search(queries, 1)
