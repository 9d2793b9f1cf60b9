"""BM25, hybrid search and SlimPLM's chain, on hand-made passages."""

import numpy as np
import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.index.building import build_resumable
from rgate_integrations.index.hybrid import slimplm_search

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


def test_hybrid_fuses_both_sides_and_reranks(index):
    hybrid = HybridIndex(index)
    assert ids(hybrid.search(["capital of Italy"], k=10)[0])[0] == "rome"
    assert len(hybrid.search(["capital of Italy"], k=10)[0]) == 4
    backwards = HybridIndex(index, rerank=lambda question, texts: [float("Danube" in t) for t in texts])
    assert ids(backwards.search(["capital of Italy"], k=1)[0]) == ["danube"]


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
    assert slimplm_search(hybrid, "Which play?", ["Hamlet tragedy"]) == []


def test_the_chain_of_slimplm_is_round_robin_within_a_budget(index):
    hybrid, queries = HybridIndex(index), ["capital", "Hamlet tragedy", "Danube countries"]
    for budget, found in ((1_000, ["rome", "hamlet", "danube", "paris"]), (14, ["rome", "hamlet"])):
        assert ids(slimplm_search(hybrid, "capital of Italy", queries, token_budget=budget)) == found
    assert slimplm_search(hybrid, "capital of Italy", ["xyzzy"]) == []
    with pytest.raises(ConfigurationError):
        slimplm_search(hybrid, "q", queries, token_budget=0)


class Vectors:
    """Embeds "v17" as the 17th of some random vectors; counts the texts."""

    name = identity = "vectors"

    def __init__(self, n=3_000, dimension=24):
        made = np.random.default_rng(0).normal(size=(n, dimension)).astype(np.float32)
        centres = np.random.default_rng(1).normal(size=(30, dimension)).astype(np.float32) * 3
        made += centres[np.arange(n) % 30]
        self.vectors = made / np.linalg.norm(made, axis=1, keepdims=True)
        self.texts = 0

    def embed(self, texts):
        self.texts += len(texts)
        return np.stack([self.vectors[int(t.removeprefix("v"))] for t in texts])


def test_large_indexes_become_approximate_and_stay_usable(tmp_path):
    embedder, queries = Vectors(), [f"v{i}" for i in range(100)]
    index = PassageIndex.build([Passage(str(i), f"v{i}") for i in range(3_000)], embedder)
    assert index.approximation is None
    exact = index.search(queries, 5)
    index.optimise(exact_up_to=1_000, recall=0.9)
    assert index.approximation["recall"] >= 0.9
    assert index.approximation["probes"] < index.approximation["lists"]
    shared = [set(ids(a)) & set(ids(b)) for a, b in zip(exact, index.search(queries, 5), strict=True)]
    assert sum(map(len, shared)) > 0.85 * 500
    loaded = PassageIndex.load(index.save(tmp_path), embedder)
    assert loaded.approximation == index.approximation
    assert ids(loaded.search(["v7"], 1)[0]) == ["7"]
    assert loaded.delete(["7", "nothing"]) == 1
    loaded.add([Passage("new", "v7")])
    assert ids(loaded.search(["v7"], 1)[0]) == ["new"]
    np.testing.assert_allclose(loaded.vectors(["new"])[0], embedder.vectors[7], atol=1e-6)


def test_a_stopped_build_continues(tmp_path):
    corpus, root = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(f'{{"id": "{i}", "text": "v{i}"}}\n' for i in range(2_500)))

    class Stops(Vectors):
        def embed(self, texts):
            if self.texts >= 2_048:
                raise KeyboardInterrupt
            return super().embed(texts)

    with pytest.raises(KeyboardInterrupt):
        build_resumable(corpus, root, Stops())
    assert not (root / "index.json").exists()
    seen, again = [], Vectors()
    assert len(build_resumable(corpus, root, again, seen.append)) == seen[-1] == 2_500
    assert again.texts == 2_500 - 2_048
    assert ids(PassageIndex.load(root, again).search(["v2400"], 1)[0]) == ["2400"]
    assert not (root / ".building").exists()
    corpus.write_text('{"id": "0", "text": "v0"}\n')
    assert len(build_resumable(corpus, root, again)) == 1
    corpus.write_text("\n")
    with pytest.raises(DataFormatError, match="no passages"):
        build_resumable(corpus, root, again)
    assert len(PassageIndex.load(root, again)) == 1
