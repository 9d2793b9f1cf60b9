"""A question is embedded once, whoever asks: the calls of the real model's `encode` are counted."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.index.minilm import MiniLM
from rgate_integrations.models.download import cached_path

pytestmark = pytest.mark.model

TEXTS = {"oulu": "Aarno Maliniemi was born in Oulu.", "lena": "The Lena flows through Yakutsk."}


@pytest.fixture
def encoded(minilm, monkeypatch):
    """The batches that the model embeds, with no query remembered from earlier tests."""
    calls, encode = [], MiniLM.encode

    def counting(self, texts):
        calls.append(list(texts))
        return encode(self, texts)

    model = MiniLM(cached_path(minilm))
    monkeypatch.setattr("rgate_integrations.index.embedder._models", {})
    monkeypatch.setattr("rgate_integrations.index.embedder.MiniLM", lambda folder: model)
    monkeypatch.setattr(MiniLM, "encode", counting)
    return calls


@pytest.fixture
def index(encoded):
    index = PassageIndex.build([Passage(i, t) for i, t in TEXTS.items()])
    encoded.clear()
    return index


@pytest.fixture
def gate(encoded, tmp_path):
    """A neighbours gate that always retrieves; its labelled questions are embedded."""
    path = tmp_path / "labelled.jsonl"
    path.write_text(
        '{"question": "who wrote hamlet?", "known": true}\n{"question": "who?", "known": false}\n'
    )
    gate = load_gate(f"neighbours:{path}", threshold=1.01)
    assert gate.decide("Is this a question?").error is None
    encoded.clear()
    return gate


def test_gate_index_and_guard_embed_a_question_once(encoded, index, gate):
    from rgate_integrations.langchain import IndexRetriever, RetrievalGate

    question = "Where was Aarno Maliniemi born?"
    assert gate.decide(question).error is None
    assert encoded == [[question]]
    assert index.search([question], 1)[0][0].passage.id == "oulu"
    (found,) = RetrievalGate(gate).guard(IndexRetriever(index=index, k=1)).invoke(question)
    assert found.id == "oulu"
    assert encoded == [[question]]
    hybrid = HybridIndex(PassageIndex.build(index))
    encoded.clear()
    assert hybrid.search([question], 1)[0][0].passage.id == "oulu"
    assert encoded == []


def test_a_batch_is_one_call_for_what_is_new(encoded, index, gate):
    gate.decide_batch(["Who is A?", "Where is B?", "Who is A?", "When is C?"])
    assert encoded == [["Who is A?", "Where is B?", "When is C?"]]
    index.search(["When is C?", "How is D?", "Who is A?", "Why is E?"])
    assert encoded[1:] == [["How is D?", "Why is E?"]]


def test_vectors_are_those_of_embedding_without_memory(encoded):
    embedder, texts = SentenceEmbedder(), ["Who is A?", "", "who is a?", "x" * 5_000, "Who is A?"]
    first = embedder.embed_queries(texts)
    np.testing.assert_allclose(first, embedder.embed(texts), atol=1e-6)
    first[:] = 0.0
    np.testing.assert_allclose(embedder.embed_queries(texts[::-1]), embedder.embed(texts[::-1]), atol=1e-6)
    assert embedder.embed_queries([]).shape == embedder.embed([]).shape == (0, 384)


def test_every_name_of_a_model_shares_its_queries_and_documents_are_not_kept(encoded, minilm):
    SentenceEmbedder(minilm).embed(["a"])
    SentenceEmbedder(minilm).embed_queries(["a"])
    SentenceEmbedder(str(cached_path(minilm))).embed_queries(["a"])
    SentenceEmbedder(minilm).embed(["a"])
    assert encoded == [["a"]] * 3


def test_the_question_that_was_not_asked_for_longest_is_forgotten(encoded):
    embedder = SentenceEmbedder()
    embedder.embed_queries([f"{i}" for i in range(1_026)])
    encoded.clear()
    embedder.embed_queries(["2", "1025"])
    assert encoded == []
    embedder.embed_queries(["0"])
    embedder.embed_queries(["2", "3"])
    assert encoded == [["0"], ["3"]]


def test_threads_embed_a_question_once(encoded):
    questions = [f"Who is number {i}?" for i in range(12)]
    expected = SentenceEmbedder().embed(questions)
    encoded.clear()

    def ask(start):
        order = [(start + i) % 12 for i in range(8)]
        return order, SentenceEmbedder().embed_queries([questions[i] for i in order])

    with ThreadPoolExecutor(8) as pool:
        for order, vectors in pool.map(ask, range(24)):
            np.testing.assert_allclose(vectors, expected[order], atol=1e-6)
    assert sorted(text for batch in encoded for text in batch) == sorted(questions)


LONG = "Paris is the capital of France. " * 100


def test_vectors_are_those_of_sentence_transformers(minilm):
    from sentence_transformers import SentenceTransformer

    texts = [*TEXTS.values(), "", "  Çatalhöyük  ", "日本語", LONG]
    expected = SentenceTransformer(str(cached_path(minilm)), device="cpu").encode(
        texts, normalize_embeddings=True
    )
    assert MiniLM(cached_path(minilm)).encode(texts) == pytest.approx(expected, abs=1e-5)


def test_a_text_has_one_vector_whatever_is_beside_it(minilm):
    model = MiniLM(cached_path(minilm))
    together = model.encode([*TEXTS.values(), LONG, *map(str, range(40))])
    for vector, text in zip(together, TEXTS.values(), strict=False):
        assert model.encode([text])[0] == pytest.approx(vector, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.safetensors", lambda content: content[:1_000_000], "could not be loaded"),
        ("tokenizer.json", lambda content: content[:1_000], "could not be loaded"),
        ("tokenizer.json", None, "could not be loaded"),
        (
            "model.safetensors",
            lambda content: content[:60_000_000] + bytes(len(content) - 60_000_000),
            "not give",
        ),
    ],
    ids=["short weights", "short tokenizer", "no tokenizer", "other weights"],
)
def test_missing_and_damaged_files_say_how_to_get_them_again(minilm, tmp_path, name, damage, says):
    file = shutil.copytree(cached_path(minilm), tmp_path / "model") / name
    content = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(content))
    with pytest.raises(ModelLoadError, match=f"{says}.*rgate download all-minilm-l6-v2"):
        MiniLM(file.parent)


def test_an_index_needs_neither_torch_nor_transformers(minilm):
    code = (
        "import sys; from rgate_integrations.index import Passage, PassageIndex;"
        "index = PassageIndex.build([Passage('1', 'The Lena flows through Yakutsk.')]);"
        "found = index.search(['Which river?'], 1)[0][0].passage.id;"
        "print(found, [m for m in ('torch', 'transformers', 'sentence_transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1 []"
