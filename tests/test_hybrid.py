"""BM25 and hybrid search, on hand-made passages."""

import unicodedata

import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.index import BM25Index, HybridIndex, Passage, PassageIndex
from tests.test_index import Letters

TEXTS = {
    "paris": "Paris is the capital of France.",
    "rome": "Rome is the capital of Italy.",
    "hamlet": "Hamlet is a tragedy by William Shakespeare.",
    "danube": "The Danube flows through ten countries.",
}


@pytest.fixture
def index():
    return PassageIndex.build([Passage(i, t) for i, t in TEXTS.items()], Letters())


def ids(hits):
    return [hit.passage.id for hit in hits]


def test_nothing_to_find():
    empty = BM25Index([])
    assert (empty.search(["x"]), empty.search([])) == ([[]], [])
    assert BM25Index([Passage("1", "the of and")]).search(["the"]) == [[]]
    assert HybridIndex(PassageIndex(Letters())).search(["x"]) == [[]]


def test_bm25_finds_words_and_nothing_else(index):
    bm25 = BM25Index(index)
    (hamlet,), capital, *nothing = bm25.search(["who wrote Hamlet", "capital", "xyzzy", "the of"], k=3)
    assert (hamlet.passage.id, hamlet.query, hamlet.score > 0) == ("hamlet", "who wrote Hamlet", True)
    assert set(ids(capital)) == {"paris", "rome"}
    assert nothing == [[], []]
    with pytest.raises(ConfigurationError):
        bm25.search("hamlet")


def test_bm25_finds_passages_in_scripts_without_spaces():
    """Regression: a whole clause was a word, so that nothing was found in Chinese or Japanese."""
    texts = {"zh": "要重置密码,请点击登录页。", "ja": "エラーE-903が表示された場合", "fr": "Un mot de passe."}
    bm25 = BM25Index([Passage(i, t) for i, t in texts.items()])
    found = bm25.search(["怎么重置密码?", "E-903とは", "表示されました", "mot"], k=1)
    assert list(map(ids, found)) == [["zh"], ["ja"], ["ja"], ["fr"]]


def test_bm25_does_not_cut_words_at_vowel_signs():
    """Regression: "पानी" (water) and "पुनः" (again) were one letter each, and left out."""
    bm25 = BM25Index([Passage("1", "पानी की दरें"), Passage("2", "पुनः जाँच"), Passage("3", "مقدَّم الطلب")])
    assert [ids(found) for found in bm25.search(["पानी", "पुनः", "مقدَّم", "पी"])] == [["1"], ["2"], ["3"], []]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Die Schönbächler AG", "Schönbächler"),  # its accents are characters of their own
        ("Die Kranken\u00adkasse", "Krankenkasse"),
        ("The o\ufb03ce", "office"),
        ("ＡＢＣＤ", "ABCD"),
        ("pass\u200bword", "password"),
    ],
)
def test_bm25_finds_words_as_pdf_files_spell_them(text, query):
    """Regression: none of these words was found."""
    bm25 = BM25Index([Passage("1", unicodedata.normalize("NFD", text)), Passage("2", "Another one")])
    (found,) = bm25.search([query])
    assert ids(found) == ["1"]
    assert found[0].passage.text == unicodedata.normalize("NFD", text)


def test_hybrid_fuses_both_sides(index):
    (found,) = HybridIndex(index).search(["capital of Italy"], k=10)
    assert (ids(found)[0], len(found)) == ("rome", 4)
    assert HybridIndex(index).fingerprint != HybridIndex(index, pool=3).fingerprint


def test_words_follow_what_is_written_to_the_dense_index(index):
    hybrid = HybridIndex(index)
    words = hybrid.bm25
    with pytest.raises(DataFormatError, match="passage 'rome' cannot be stored"):
        index.upsert([Passage("oslo", "Oslo."), Passage("rome", "x", metadata={"when": {1}})])
    assert hybrid.bm25 is words  # not indexed again: nothing has changed
    index.upsert([Passage("danube", "Vienna lies on it."), Passage("oslo", "Oslo is in Norway.")])
    index.delete(["hamlet"])
    assert [ids(hits) for hits in hybrid.bm25.search(["Vienna", "Danube", "Hamlet"])] == [["danube"], [], []]
    assert ids(hybrid.search(["Norway"], k=1)[0]) == ["oslo"]
