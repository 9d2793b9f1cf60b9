"""The passage index: edges first, then searching, then what happens to files."""

import json
import subprocess
import sys

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
from rgate_integrations.index.fusion import fuse


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
    with pytest.raises(DataFormatError, match="'p1' is there twice"):
        index.add([Passage(id="p1", text="again")])
    with pytest.raises(DataFormatError, match="'x' is there twice"):
        index.add([Passage(id="x", text="1"), Passage(id="x", text="2")])
    with pytest.raises(DataFormatError, match="'y' has no text"):
        index.add([Passage(id="y", text="  ")])
    assert len(index) == 5


def test_deleting_and_adding_again():
    index = PassageIndex.build(passages(), Letters())
    assert index.delete(["p0", "p3", "not there"]) == 2
    assert len(index) == 3
    assert "p0" not in [h.passage.id for h in index.search(["aaa"], k=5)[0]]
    index.add([Passage(id="p0", text="aaaa")])
    assert index.search(["aaa"], k=1)[0][0].passage.text == "aaaa"


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


KILLED = """
import os, random, signal, sys, time
from rgate_integrations.index import PassageIndex
from tests.test_index import Letters, passages

root, index, rng = sys.argv[1], PassageIndex.build(passages(400), Letters()), random.Random(1)
for _ in range(30):
    child = os.fork()
    if not child:
        while True:
            index.save(root)
    time.sleep(rng.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(len(PassageIndex.load(root, Letters())))
"""


def test_killed_while_saving_an_index_is_always_loadable(tmp_path):
    root = PassageIndex.build(passages(3), Letters()).save(tmp_path / "i")
    # A process of its own forks the ones to be killed: one with a model's threads could not.
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root)], capture_output=True, text=True, check=True, timeout=300
    )
    sizes = done.stdout.split()
    assert len(sizes) == 30
    assert set(sizes) <= {"3", "400"}
    assert "400" in sizes, "no save was ever complete: nothing was tested"
    PassageIndex.build(passages(4), Letters()).save(root)
    assert len(list(root.glob("v-*"))) == 1


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
