"""The passage index: edges first, then searching, then writes that fail, then what it reads."""

import copy
import datetime
import math
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from string import ascii_lowercase
from unittest.mock import Mock, patch

import numpy as np
import pytest

from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    IndexMismatchError,
    IndexNotFoundError,
)
from rgate_integrations.index import Passage, PassageIndex, fuse, read_passages
from rgate_integrations.index.passage_index import FILE
from tests.patience import PATIENCE


class Letters:
    """An embedder without a model: counts letters. What it gives for passages with a "z" can be spoilt."""

    def __init__(self, name="letters", spoil=None):
        self.name = name
        self.identity = f"{name}-1"
        self.spoil = spoil

    def embed(self, texts):
        counts = np.array([t.lower().count(c) + 0.01 for t in texts for c in ascii_lowercase]).reshape(-1, 26)
        vectors = (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)
        return self.spoil(vectors) if self.spoil and any("z" in text for text in texts) else vectors


def passages(n=5):
    return [Passage(f"p{i}", "abcdefghij"[i % 10] * 8, f"T{i}", metadata={"i": i}) for i in range(n)]


@pytest.fixture
def index():
    return PassageIndex.build(passages(), Letters())


def found(index, query, k=99):
    return [hit.passage.id for hit in index.search([query], k)[0]]


def assert_holds(index, wanted):
    """These passages are there and nothing else, each under its own vector; what is added next is found, too."""
    wanted = [*wanted, Passage("after", "qqqq")]
    index.add(wanted[-1:])
    assert list(index) == wanted
    for passage in wanted:
        assert found(index, passage.searchable, 1) == [passage.id]
    assert sorted(found(index, "aaa")) == sorted(passage.id for passage in wanted)
    assert index.get([wanted[0].id, "missing"]) == wanted[:1]


def test_an_empty_index_finds_nothing(tmp_path):
    index = PassageIndex(Letters())
    index.add([])
    for empty in (index, PassageIndex.load(index.save(tmp_path / "empty"), Letters())):
        assert len(empty) == 0
        assert empty.search(["anything"]) == [[]]
        assert empty.search([]) == []
        assert empty.delete(["p1"]) == 0
        assert_holds(empty, [])


def test_search_finds_the_nearest_in_one_embedding_call(index):
    with patch.object(index.embedder, "embed", wraps=index.embedder.embed) as embed:
        first, third = index.search(["aaa", "ccc"], k=2)
    embed.assert_called_once_with(["aaa", "ccc"])
    assert [hits[0].passage.id for hits in (first, third)] == ["p0", "p2"]
    assert (first[0].passage, first[0].query) == (passages()[0], "aaa")


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (Passage("p0", "x"), "Several passages have the id 'p0'"),
        (Passage("x", "x", metadata={"x": {1}}), "JSON"),
    ],
)
def test_a_passage_that_cannot_be_stored_is_an_error_before_any_is_embedded(last, says):
    """Regression: for the last of 50,000, it was an error after minutes of embedding the others."""
    embedder = Mock(wraps=Letters())
    with pytest.raises(DataFormatError, match=says):
        PassageIndex.build([*passages(1_100), last], embedder)
    embedder.embed.assert_not_called()


def test_the_nearest_are_those_of_numpy_by_cosine():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(500, 16)) * rng.uniform(0, 9, size=(500, 1))
    vectors[0] = 0.0
    queries = rng.normal(size=(20, 16))
    index = PassageIndex(Letters())
    index.add([Passage(str(i), "x") for i in range(500)], vectors)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(queries, axis=1)[:, None]
    cosines = queries @ vectors.T / np.maximum(lengths, 1e-9)
    for own, hits in zip(cosines, index.search_vectors(queries, 10), strict=True):
        nearest = np.argsort(-own)[:10]
        assert [int(hit.passage.id) for hit in hits] == nearest.tolist()
        assert [hit.score for hit in hits] == pytest.approx(own[nearest], abs=1e-5)


NEW = [Passage("new", "x")]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        # Regression: a ValueError about zip().
        (
            lambda index: index.search_vectors(np.ones((1, 26)), 1, ["a", "b"]),
            ConfigurationError,
            "do not match 2 texts",
        ),
        (lambda index: index.search("a string"), ConfigurationError, "in a list, but got the string"),
        (lambda index: index.search(["a", None]), ConfigurationError, "must be a string"),
        (lambda index: index.search(["a"], k=0), ConfigurationError, "at least 1"),
        (lambda index: index.search(["a"], k="3"), ConfigurationError, "at least 1, not '3'"),
        (
            lambda index: index.search_vectors(np.eye(3), 1),
            ConfigurationError,
            "match 3 texts and dimension 26",
        ),
        (lambda index: index.add(NEW, np.eye(3)[:1]), ConfigurationError, "match 1 texts and dimension 26"),
        (lambda index: index.add(NEW, np.full((1, 26), np.inf)), ConfigurationError, "infinity"),
        (lambda index: index.add(NEW, [[]]), ConfigurationError, "do not match 1"),
        (
            lambda index: index.add([Passage("p1", "again")]),
            DataFormatError,
            "already has a passage with the id 'p1'",
        ),
        (lambda index: index.upsert(NEW * 2), DataFormatError, "Several passages have the id 'new'"),
    ],
)
def test_wrong_arguments(index, call, error, says):
    with pytest.raises(error, match=says):
        call(index)
    assert_holds(index, passages())


def test_one_string_is_not_a_list_of_ids():
    """Regression: ``delete("12")`` removed the passages "1" and "2", and kept "12"."""
    index = PassageIndex.build([Passage(name, "abc") for name in ("1", "2", "12")], Letters())
    for read in (index.delete, index.get, index.vectors):
        with pytest.raises(ConfigurationError, match="in a list, but got the string '12'"):
            read("12")
    assert [passage.id for passage in index] == ["1", "2", "12"]
    assert index.delete(["12"]) == 1


def test_deleting_replacing_and_adding_again(index):
    assert index.delete(["p0", "p3", "not there"]) == 2
    assert sorted(found(index, "ccc")) == ["p1", "p2", "p4"]
    index.upsert([Passage("p1", "hhhh"), Passage("p0", "gggg")])
    assert_holds(index, [passages()[2], passages()[4], Passage("p1", "hhhh"), Passage("p0", "gggg")])
    assert index.delete([passage.id for passage in index]) == 5
    assert found(index, "a") == []
    assert_holds(index, [])


@pytest.mark.parametrize(
    "twin_of",
    [copy.copy, copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))],  # noqa: S301  our own
)
def test_a_copy_and_its_original_are_written_apart(index, twin_of):
    twin = twin_of(index)
    for each, text in ((index, "mmmm"), (twin, "tttt")):
        each.add([Passage("new", text)])
        assert_holds(each, [*passages(), Passage("new", text)])


# --- all or nothing ----------------------------------------------------------------------------------------


CIRCLE = []
CIRCLE.append(CIRCLE)
NO_JSON = [
    *(object(), {1, 2}, np.float32(1), np.zeros(2), b"x", CIRCLE, "\ud800", 10**5_000),
    *(math.nan, [math.inf]),
    *(uuid.UUID(int=1), datetime.date(2026, 1, 1), {("a", "b"): 1}),
]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *(
            (
                Passage("x", "zz", metadata={"fine": (1, 2), "bad": value}),
                "passage 'x' cannot be stored as JSON: .",
            )
            for value in NO_JSON
        ),
        *(
            (Passage("x", "zzzz", **wrong), "passage 'x'.*JSON: .")
            for wrong in ({"title": ["T"]}, {"metadata": 1})
        ),
        *((Passage("x", text), "passage 'x'.*JSON: .") for text in ("zzzz\ud800", None)),
        *((Passage(name, "zzzz"), "cannot be stored as JSON: .") for name in ("x\ud800", 5)),
        ("a text", "passage 'a text'.*JSON: ."),
    ],
    ids=range(20),
)
def test_passages_that_cannot_be_stored_change_nothing(index, wrong, says):
    index.embedder.spoil = pytest.fail  # it is not even asked
    with pytest.raises(DataFormatError, match=f"{says}.*Hint: "):
        index.upsert([Passage("p1", "zzzz"), wrong])
    assert_holds(index, passages())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda vectors: vectors[:, :20].copy(),
        lambda vectors: vectors[1:],
        lambda vectors: vectors[0],
        lambda vectors: vectors * np.nan,
        lambda vectors: [["a"] for _ in vectors],
        lambda vectors: None,
        Mock(side_effect=ConfigurationError("down", hint="wait")),
    ],
    ids=["dimension", "too few", "one row", "nan", "no numbers", "none", "an error"],
)
def test_an_embedder_that_fails_changes_nothing(spoil):
    index = PassageIndex(Letters(spoil=lambda vectors: vectors[0]))
    with pytest.raises(ConfigurationError):
        index.add([Passage("first", "zzzz")])
    index.add(passages())  # a first write that fails has set no dimension
    index.embedder.spoil = spoil
    with pytest.raises(ConfigurationError, match=r" Hint: "):
        index.upsert([Passage("p1", "zzzz"), Passage("new", "zzzz")])
    assert_holds(index, passages())


def test_of_two_writers_of_one_id_one_is_refused():
    both = threading.Barrier(2, timeout=PATIENCE)

    def together(vectors):
        both.wait()  # neither is written by now
        return vectors

    index = PassageIndex(Letters(spoil=together))
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(index.add, [Passage("same", text)]) for text in ("zaaa", "zbbb")]
    assert {type(writer.exception()) for writer in writers} == {DataFormatError, type(None)}
    assert len(index) == 1


# --- files -------------------------------------------------------------------------------------------------


def test_saving_and_loading(index, tmp_path):
    root = index.save(tmp_path / "i")
    loaded = PassageIndex.load(root, Letters())
    assert loaded.search(["bbb", "eee"], 3) == index.search(["bbb", "eee"], 3)
    assert loaded.fingerprint == index.fingerprint
    loaded.add([Passage("new", "zzz")])
    loaded.save(root)
    assert_holds(PassageIndex.load(root, Letters()), [*passages(), Passage("new", "zzz")])
    with pytest.raises(IndexMismatchError, match=r"'letters'.*not with 'other'"):
        PassageIndex.load(root, Letters("other"))
    with pytest.raises(IndexNotFoundError, match=r"no index.*rgate index build"):
        PassageIndex.load(tmp_path, Letters())
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path / "mine", tmp_path):  # a file, and a folder with it
        with pytest.raises(ConfigurationError, match=r"is a file|contains other files"):
            index.save(taken)
    assert {path.name for path in tmp_path.iterdir()} == {"i", "mine"}


@pytest.mark.parametrize("left", [f".{FILE}-0123456789ab", f".{FILE}.lock"])
def test_what_a_killed_first_save_left_does_not_stop_the_next(index, tmp_path, left):
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / left).touch()
    assert [path.name for path in index.save(tmp_path / "i").iterdir()] == [FILE]


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
    [
        ("{", "not JSON"),
        ("[]", "text is missing"),
        ('{"text": 3}', "not a string"),
        ('{"text": " "}', "empty"),
    ],
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
