"""BM25, hybrid search and SlimPLM's chain, on hand-made passages."""

import numpy as np
import pytest

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import BM25Index, HybridIndex, Passage, PassageIndex, slimplm_search

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
