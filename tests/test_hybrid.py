"""BM25, hybrid and approximate search, on hand-made passages."""

import numpy as np
import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.bm25 import BM25Index

TEXTS = {
    "paris": "Paris is the capital of France.",
    "rome": "Rome is the capital of Italy.",
    "hamlet": "Hamlet is a tragedy by William Shakespeare.",
    "danube": "The Danube flows through ten countries.",
}


class Words:
    """Embeds a text as a bag of hashed words."""

    name = identity = "words"

    def embed(self, texts):
        vectors = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[sum(map(ord, word.strip(".?"))) % 64] += 1
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(norms, 1e-9)


@pytest.fixture
def index():
    return PassageIndex.build([Passage(i, t) for i, t in TEXTS.items()], Words())


def ids(hits):
    return [hit.passage.id for hit in hits]


def test_nothing_to_find():
    empty = BM25Index([])
    assert (empty.search(["x"]), empty.search([])) == ([[]], [])
    assert BM25Index([Passage("1", "the of and")]).search(["the"]) == [[]]
    assert HybridIndex(PassageIndex(Words())).search(["x"]) == [[]]


def test_bm25_finds_words_and_nothing_else(index):
    bm25 = BM25Index(index)
    hamlet, capital, *nothing = bm25.search(["who wrote Hamlet", "capital", "xyzzy", "the of"], k=3)
    assert ids(hamlet) == ["hamlet"]
    assert set(ids(capital)) == {"paris", "rome"}
    assert nothing == [[], []]
    assert (hamlet[0].score > 0, hamlet[0].query) == (True, "who wrote Hamlet")
    with pytest.raises(ConfigurationError):
        bm25.search("hamlet")


def test_hybrid_fuses_both_sides(index):
    hybrid = HybridIndex(index)
    assert ids(hybrid.search(["capital of Italy"], k=10)[0])[0] == "rome"
    assert len(hybrid.search(["capital of Italy"], k=10)[0]) == 4


def test_words_follow_what_is_written_to_the_dense_index(index):
    hybrid = HybridIndex(index)
    words = hybrid.bm25
    with pytest.raises(DataFormatError, match=r"'rome'.*'when'"):
        index.upsert([Passage("oslo", "Oslo."), Passage("rome", "x", metadata={"when": {1}})])
    assert hybrid.bm25 is words  # not indexed again: nothing has changed
    index.upsert([Passage("danube", "Vienna lies on it."), Passage("oslo", "Oslo is in Norway.")])
    index.delete(["hamlet"])
    assert [ids(hits) for hits in hybrid.bm25.search(["Vienna", "Danube", "Hamlet"])] == [["danube"], [], []]
    assert ids(hybrid.search(["Norway"], k=1)[0]) == ["oslo"]
    found = hybrid.search(["Danube Hamlet tragedy"], k=10)[0]
    assert {hit.passage.id: hit.passage.text for hit in found} == {each.id: each.text for each in index}


@pytest.mark.parametrize("factory", ["HNSW8", "IVF8,Flat"])
def test_an_approximate_index_is_searched_saved_and_not_written_to(tmp_path, factory):
    vectors = np.random.default_rng(0).normal(size=(500, 24)).astype(np.float32)
    index = PassageIndex(Words())
    with pytest.raises(ConfigurationError, match="passages in it"):
        index.approximate(factory)
    index.add([Passage(str(i), f"v{i}") for i in range(500)], vectors)
    with pytest.raises(ConfigurationError, match="cannot make"):
        index.approximate("Sphere5")
    index.approximate(factory)
    loaded = PassageIndex.load(index.save(tmp_path), Words())
    assert loaded.approximation == factory
    assert [ids(hits) for hits in loaded.search_vectors(vectors[:50], 1)] == [[str(i)] for i in range(50)]
    np.testing.assert_allclose(loaded.vectors(["7"]), index.vectors(["7"]))
    for write in (lambda: loaded.delete(["7"]), lambda: loaded.upsert([Passage("7", "x")], vectors[:1])):
        with pytest.raises(ConfigurationError, match="no writes"):
            write()
    assert len(loaded) == len(list(loaded)) == 500
