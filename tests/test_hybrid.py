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


def test_nothing_to_find():
    empty = BM25Index([])
    assert empty.search(["x"]) == [[]]
    assert empty.search([]) == []
    only_stop_words = BM25Index([Passage("1", "the of and")])
    assert only_stop_words.search(["the"]) == [[]]
    assert HybridIndex(PassageIndex(Words())).search(["x"]) == [[]]


def test_bm25_finds_words_and_nothing_else(index):
    bm25 = BM25Index(index)
    hamlet, capital, nothing, stop = bm25.search(["who wrote Hamlet", "capital", "xyzzy", "the of"], k=3)
    assert [h.passage.id for h in hamlet] == ["hamlet"]
    assert {h.passage.id for h in capital} == {"paris", "rome"}
    assert nothing == stop == []
    assert hamlet[0].score > 0
    assert hamlet[0].query == "who wrote Hamlet"
    with pytest.raises(ConfigurationError):
        bm25.search("hamlet")
    with pytest.raises(ConfigurationError):
        bm25.search(["hamlet"], k=0)


def test_hybrid_fuses_both_sides_and_reranks(index):
    hybrid = HybridIndex(index)
    assert hybrid.search(["capital of Italy"], k=1)[0][0].passage.id == "rome"
    assert len(hybrid.search(["capital of Italy"], k=10)[0]) == 4
    backwards = HybridIndex(index, rerank=lambda question, texts: [float("Danube" in t) for t in texts])
    assert backwards.search(["capital of Italy"], k=1)[0][0].passage.id == "danube"


def test_words_follow_what_is_written_to_the_dense_index(index):
    hybrid = HybridIndex(index)
    index.upsert([Passage("danube", "Vienna lies on it."), Passage("oslo", "Oslo is in Norway.")])
    index.delete(["hamlet"])
    assert [h.passage.text for h in hybrid.bm25.search(["Vienna"])[0]] == ["Vienna lies on it."]
    assert hybrid.bm25.search(["Danube", "Hamlet"]) == [[], []]
    assert hybrid.search(["Norway"], k=1)[0][0].passage.id == "oslo"
    found = hybrid.search(["Danube Hamlet tragedy"], k=10)[0]
    assert {h.passage.id: h.passage.text for h in found} == {p.id: p.text for p in index}
    assert slimplm_search(hybrid, "Which play?", ["Hamlet tragedy"]) == []


def test_a_write_that_fails_changes_neither_side(index):
    hybrid = HybridIndex(index)
    before = hybrid.search(["capital of Italy"], k=10)
    words = hybrid.bm25
    with pytest.raises(DataFormatError, match=r"'rome'.*'when'"):
        index.upsert(
            [Passage("oslo", "The capital of Norway."), Passage("rome", "x", metadata={"when": {1}})]
        )
    assert hybrid.search(["capital of Italy"], k=10) == before
    assert hybrid.bm25 is words  # not indexed again: nothing has changed


def test_the_chain_of_slimplm_is_round_robin_within_a_budget(index):
    hybrid = HybridIndex(index)
    queries = ["capital", "Hamlet tragedy", "Danube countries"]
    found = [h.passage.id for h in slimplm_search(hybrid, "capital of Italy", queries)]
    assert found == ["rome", "hamlet", "danube", "paris"]
    short = slimplm_search(hybrid, "capital of Italy", queries, token_budget=14)
    assert [h.passage.id for h in short] == ["rome", "hamlet"]
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
    embedder = Vectors()
    index = PassageIndex.build([Passage(str(i), f"v{i}") for i in range(3_000)], embedder)
    assert index.approximation is None
    exact = [[h.passage.id for h in hits] for hits in index.search([f"v{i}" for i in range(100)], 5)]
    index.optimise(exact_up_to=1_000, recall=0.9)
    assert index.approximation["recall"] >= 0.9
    assert index.approximation["probes"] < index.approximation["lists"]
    found = [[h.passage.id for h in hits] for hits in index.search([f"v{i}" for i in range(100)], 5)]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(exact, found, strict=True)]) > 0.85
    index.save(tmp_path)
    loaded = PassageIndex.load(tmp_path, embedder)
    assert loaded.approximation == index.approximation
    assert loaded.search(["v7"], 1)[0][0].passage.id == "7"
    assert loaded.delete(["7", "nothing"]) == 1
    assert loaded.search(["v7"], 1)[0][0].passage.id != "7"
    loaded.add([Passage("new", "v7")])
    assert loaded.search(["v7"], 1)[0][0].passage.id == "new"
    np.testing.assert_allclose(loaded.vectors(["new"])[0], embedder.vectors[7], atol=1e-6)


def test_a_stopped_build_continues(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"id": "{i}", "text": "v{i}"}}\n' for i in range(2_500)))

    class Stops(Vectors):
        def embed(self, texts):
            if self.texts >= 2_048:
                raise KeyboardInterrupt
            return super().embed(texts)

    with pytest.raises(KeyboardInterrupt):
        build_resumable(corpus, tmp_path / "index", Stops())
    assert not (tmp_path / "index" / "index.json").exists()
    seen = []
    again = Vectors()
    index = build_resumable(corpus, tmp_path / "index", again, seen.append)
    assert again.texts == 2_500 - 2_048
    assert (len(index), seen[-1]) == (2_500, 2_500)
    loaded = PassageIndex.load(tmp_path / "index", again)
    assert loaded.search(["v2400"], 1)[0][0].passage.id == "2400"
    assert not (tmp_path / "index" / ".building").exists()
    corpus.write_text('{"id": "0", "text": "v0"}\n')
    other = Vectors()
    assert len(build_resumable(corpus, tmp_path / "index", other)) == 1
    corpus.write_text("\n")
    with pytest.raises(DataFormatError, match="no passages"):
        build_resumable(corpus, tmp_path / "index", other)
    assert len(PassageIndex.load(tmp_path / "index", other)) == 1
