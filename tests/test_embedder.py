"""The embedder: a question is embedded once, whoever asks; the encoder's are across languages."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.models.download import cached_path, download
from rgate_integrations.models.encoder import ENCODER, Encoder
from rgate_integrations.runtime.files import write_atomically

pytestmark = pytest.mark.model

TEXTS = {"oulu": "Aarno Maliniemi was born in Oulu.", "lena": "The Lena flows through Yakutsk."}


@pytest.fixture
def encoded(embedder_model, monkeypatch):
    """The batches that the model embeds, with no query remembered from earlier tests."""
    calls, vectors = [], Encoder.vectors

    def counting(self, texts, prefix):
        calls.append(list(texts))
        return vectors(self, texts, prefix)

    monkeypatch.setattr("rgate_integrations.index.embedder._models", {})
    monkeypatch.setattr(Encoder, "vectors", counting)
    return calls


def test_gate_index_and_guard_embed_a_question_once(encoded, tmp_path):
    lines = '{"question": "who wrote it?", "known": true}\n{"question": "who?", "known": false}\n'
    path = write_atomically(tmp_path / "labelled.jsonl", lines)
    gate = load_gate(f"neighbours:{path}", threshold=1.01)
    index = PassageIndex.build([Passage(i, t) for i, t in TEXTS.items()])
    encoded.clear()
    question = "Where was Aarno Maliniemi born?"
    assert gate.decide(question).error is None
    for each in (index, HybridIndex(index)):
        (found,) = RetrievalGate(gate).guard(IndexRetriever(index=each, k=1)).invoke(question)
        assert found.id == "oulu"
    assert [batch for batch in encoded if question in batch] == [[question]]
    gate.decide_batch(["Who is A?", "Where is B?", "Who is A?", "When is C?"])
    index.search(["When is C?", "How is D?", "Who is A?", "Why is E?"])
    assert encoded[-2:] == [["Who is A?", "Where is B?", "When is C?"], ["How is D?", "Why is E?"]]


def test_one_string_is_not_a_list_of_texts():
    """Regression: each of its letters was embedded."""
    for embed in (SentenceEmbedder().embed, SentenceEmbedder().embed_queries):
        with pytest.raises(ConfigurationError, match="in a list, but got the string 'Oulu'"):
            embed("Oulu")


def test_vectors_are_those_of_embedding_without_memory(encoded):
    embedder, texts = SentenceEmbedder(), ["Who is A?", "", "who is a?", "x" * 5_000, "Who is A?"]
    first = embedder.embed_queries(texts)
    expected = Encoder.shared().vectors(texts, "query: ")
    np.testing.assert_array_equal(first, expected)
    first[:] = 0.0
    np.testing.assert_array_equal(embedder.embed_queries(texts[::-1]), expected[::-1])
    assert embedder.embed([]).shape == (0, 384)
    assert len(embedder.embed_queries([])) == 0


def test_all_embedders_of_a_model_share_its_last_queries_and_documents_are_not_kept(
    encoded, embedder_model, monkeypatch
):
    monkeypatch.setattr("rgate_integrations.index.embedder._MAX_QUERIES", 8)
    SentenceEmbedder(embedder_model).embed(["a"])
    SentenceEmbedder(embedder_model).embed_queries(["a"])
    SentenceEmbedder().embed_queries(["a"])
    SentenceEmbedder(str(cached_path(embedder_model))).embed(["a"])
    assert encoded == [["a"]] * 3
    for texts in (map(str, range(10)), ["2", "9"], ["0"]):
        SentenceEmbedder().embed_queries(list(texts))
    assert encoded[-1:] == [["0"]], "the oldest are forgotten"


def test_threads_embed_a_question_once(encoded):
    questions = [f"Who is number {i}?" for i in range(12)]
    orders = [questions[start:] + questions[:start] for start in range(12)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(SentenceEmbedder().embed_queries, orders))
    assert sorted(itertools.chain(*encoded)) == sorted(questions)
    np.testing.assert_array_equal(found[5], np.roll(found[0], -5, axis=0))


def test_the_encoder_reads_passages_and_queries_each_in_its_way_and_across_languages(tmp_path):
    download(ENCODER)
    model = Encoder.shared()
    german = {
        "urlaub": "Jeder Mitarbeiter hat 30 Tage Urlaub im Jahr.",
        "heizung": "Die Heizung wird im Mai gewartet.",
    }
    PassageIndex.build([Passage(i, t) for i, t in german.items()], SentenceEmbedder(ENCODER)).save(tmp_path)
    index = PassageIndex.load(tmp_path)
    assert index.embedder.name == ENCODER
    queries = ["How many days off do I get?", "暖房の点検はいつですか。"]
    assert [hits[0].passage.id for hits in index.search(queries, k=1)] == list(german)
    np.testing.assert_array_equal(index.embed_queries(queries), model.vectors(queries, "query: "))
    np.testing.assert_array_equal(
        index.vectors(list(german)), model.vectors(list(german.values()), "passage: ")
    )
