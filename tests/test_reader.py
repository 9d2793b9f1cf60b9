"""The gate's own model: its numbers, what they do not depend on, and what happens without its file."""

import os
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgate_integrations import load_gate
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.base import PooledLayer, RequestLayers
from rgate_integrations.models.catalog import READER
from rgate_integrations.models.download import cached_path, download
from rgate_integrations.models.local import TransformersProxy
from rgate_integrations.models.reader import FINGERPRINT, STATES, Reader, ReaderProxy
from rgate_integrations.models.reader_file import READER_WEIGHTS, TOKENIZER, quantise
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.segments import Segmented
from tests.damaged import with_damage, zeroed
from tests.test_encoder import cosines

LAYERS = (
    PooledLayer(14, "question", "mean"),
    PooledLayer(18, "all", "last"),
    PooledLayer(22, "draft", "mean"),
    PooledLayer(20, "prompt", "last"),
)
QUESTIONS = [
    "What is the capital of France?",
    "a",
    "What does our contract say about late delivery? " * 30,
    "Écris 東京 🙂 " * 7,
    "who wrote hamlet",
    "Which year did the treaty that ended the war between the two kingdoms come into force, and where?",
]
ODD = [
    "Hamlet",
    "the parcel 12/4",
    "東京",
    "our  wiki",
    "<|im_end|>",
    "Ada's e\u0301tude",
    "x" * 40,
    "π",
    "it",
    "‮abc",
]
DRAFTS = ["Paris.", "", "I do not know " * 20, "<|im_end|> x", "Shakespeare", "In 1648, in Münster."]


PEAK = """
import resource
from rgate_integrations import load_gate
gate = load_gate(on_error="raise")
peaks = []
for text, questions in (
    ("What is the capital of France, and of Spain, and who was born there? " * 4, 64),
    ("A list of the parcels that were sent. " * 400, 4),
):
    gate.decide_batch([text] * questions)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(peaks[1] - peaks[0])
"""


@pytest.fixture(scope="module")
def reader():
    download(READER)
    return Reader.shared()


def states_of(reader, questions, drafts=None, layers=LAYERS):
    rows = map(reader.encode, questions, drafts or [""] * len(questions))
    return [each.states for each in reader.pool(list(rows), layers)]


@pytest.mark.model
def test_states_are_close_to_those_of_transformers(reader, smollm2):
    exact = TransformersProxy("smollm2-135m-instruct", dtype="float32")
    layers = [PooledLayer(layer, "question", "mean") for layer in STATES]
    asked = [QUESTIONS[0], *QUESTIONS[4:]]
    wanted = [each.states for each in exact.hidden(ANSWER, [{"question": q} for q in asked], None, layers)]
    assert cosines(np.array(states_of(reader, asked, None, layers)), np.array(wanted)).min() > 0.998


@pytest.mark.model
def test_its_tokens_are_those_of_the_whole_model(reader, smollm2):
    encoder = smollm2.encoder
    some, other = (encoder.encode(ANSWER, {"question": each}).ids for each in ("a", "1"))
    prefix = len(os.path.commonprefix([some, other]))  # noqa: RUF071  of tokens
    for question in [*QUESTIONS, "<|im_start|>system\nYou know. 12345 \t x"]:
        whole = encoder.encode(ANSWER, {"question": " ".join(question.split())})
        assert reader.encode(question).ids == whole.ids[prefix:]
        assert reader.encode(question).question == range(len(whole.question))
    assert smollm2.fingerprint == FINGERPRINT


@pytest.mark.model
def test_no_company_changes_one_bit(reader):
    alone = [states_of(reader, [q], [d])[0] for q, d in zip(QUESTIONS, DRAFTS, strict=True)]
    for each in (reader, *(Reader(cached_path(READER), threads=threads) for threads in (1, 3))):
        np.testing.assert_array_equal(states_of(each, QUESTIONS * 2, DRAFTS * 2), alone * 2)


@pytest.mark.model
def test_long_and_odd_neighbours_change_no_bit_of_a_decision():
    """Regression: 6 of 40 short questions differed by up to 0.006."""
    gate = load_gate(on_error="raise")
    short = [
        f"{which} {what}?" for which in ("Who wrote", "When was", "Where is", "What about") for what in ODD
    ]
    neighbours = ["a " * 3000, "\u200b\u0301" * 500, "🙂" * 200, QUESTIONS[2] * 20, "1" * 900]
    alone = [gate.decide(each).p_known for each in short]
    mixed = [*short[20:], *neighbours, *short[:20]]
    together = dict(zip(mixed, gate.decide_batch(mixed), strict=True))
    assert [together[each].p_known for each in short] == alone


@pytest.mark.model
def test_what_follows_a_question_changes_nothing_and_is_read_only_where_it_is_asked_for(reader):
    alone = (PooledLayer(18, "question", "mean"), PooledLayer(18, "question", "last"))
    both = (*alone, PooledLayer(18, "prompt", "last"))
    for question, draft in zip((*QUESTIONS, "<|im_end|>"), (*DRAFTS, "x"), strict=True):
        (less,) = reader.pool([reader.encode(question)], alone)
        more, with_draft = reader.pool([reader.encode(question), reader.encode(question, draft)], both)
        assert np.array_equal(less.states, more.states[:2])
        assert np.array_equal(more.states, with_draft.states)
        assert less.prompt_tokens < more.prompt_tokens or question == "<|im_end|>"


@pytest.mark.model
def test_what_follows_changes_nothing_in_a_long_text_either(reader):
    sentence = "The parcel was sent to the depot and weighed before noon, as the list says. "
    short, long = (
        reader.encode_request(Segmented.from_text((sentence * times).strip())) for times in (60, 120)
    )
    cut = long._replace(question=short.question)
    # The last one makes it read what follows the question.
    layers = [PooledLayer(18, "question", "mean"), PooledLayer(18, "question", "last")]
    layers.append(PooledLayer(18, "prompt", "last"))
    (read,), (of_long,) = reader.pool([short], layers), reader.pool([cut], layers)
    assert len(long.ids) > 1.9 * len(short.ids) > 1_000
    assert np.array_equal(read.states[:2], of_long.states[:2])
    assert not np.array_equal(read.states[2], of_long.states[2])


@pytest.mark.model
def test_a_request_is_read_after_its_earlier_turns_of_which_the_end_counts():
    history = ["user: What is the capital of Italy?", "assistant: Rome."]
    texts = [Segmented.from_text("And for Graz?", turns) for turns in ((), history, ["x " * 900, *history])]
    layers = RequestLayers((PooledLayer(18, "question", "mean"),))
    alone, after, after_many = ReaderProxy().request_states(ANSWER, texts, layers)
    assert not np.allclose(alone.whole, after.whole)
    assert alone.prompt_tokens < after.prompt_tokens < after_many.prompt_tokens < 900
    (question,) = ReaderProxy().hidden(ANSWER, [{"question": "And for Graz?"}], None, layers.whole)
    assert np.array_equal(alone.whole, question.states)
    assert alone.prompt_tokens == question.prompt_tokens


@pytest.mark.model
@pytest.mark.parametrize("history", [(), ("assistant: Rome.",)])
@pytest.mark.parametrize("text", ["<|im_end|>", "🙂", "a", "Who?\n<|im_end|>\nWhen?"])
def test_a_request_of_control_tokens_has_states(text, history):
    layers = RequestLayers((PooledLayer(18, "question", "mean"), PooledLayer(18, "question", "last")))
    (read,) = ReaderProxy().request_states(ANSWER, [Segmented.from_text(text, history)], layers)
    assert read.whole.shape == (2, 576)
    assert np.isfinite(read.whole).all()


@pytest.mark.model
def test_segments_are_read_as_questions():
    layers = (PooledLayer(14, "question", "mean"),)
    text = Segmented.from_text("What is 2 + 2? Who?", ["assistant: Rome."])
    (read,) = ReaderProxy().request_states(ANSWER, [text], RequestLayers(layers, layers))
    questions = [{"question": each} for each in ("What is 2 + 2? Who?", "What is 2 + 2?", "Who?")]
    alone = [each.states for each in ReaderProxy().hidden(ANSWER, questions, None, layers)]
    assert np.array_equal([read.whole, *read.segments], alone)


@pytest.mark.model
@pytest.mark.slow
def test_memory_does_not_grow_with_the_length(reader):
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 150  # MiB; 9 heads of 2,500 by 2,500 weights would be 225


@pytest.mark.model
def test_question_and_begun_answer_are_read_in_one_pass(reader):
    gate = load_gate("answer:default,default-answer", on_error="raise")
    with patch.object(reader, "states", wraps=reader.states) as states:
        gate.decide("What is the capital of Chile?", draft="The capital of Chile is")
    states.assert_called_once()


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (READER_WEIGHTS, None, "could not be loaded"),
        (TOKENIZER, None, "could not be loaded"),
        # Tenths: the embedding ends at 0.28.
        (READER_WEIGHTS, lambda content: content[: 3 * len(content) // 10], "could not be loaded"),
        (READER_WEIGHTS, lambda content: content[: 9 * len(content) // 10], "could not be loaded"),
        (READER_WEIGHTS, lambda content: zeroed(content, 3, 10), "wrong hidden states"),
        (READER_WEIGHTS, lambda content: zeroed(content, 9, 10), "wrong hidden states"),
    ],
)
def test_missing_and_damaged_files_are_noticed(reader, tmp_path, name, damage, says):
    with pytest.raises(ModelLoadError, match=f"{says}.* Hint: .*rgate download {READER}"):
        Reader(with_damage(cached_path(READER), tmp_path / "reader", name, damage))


@pytest.mark.usefixtures("own_cache")
def test_without_its_file_every_question_is_retrieved_for():
    decision = load_gate("default-answer").decide("What is the capital of France?", draft="Paris")
    assert decision.retrieve
    assert f"rgate download {READER}" in str(decision.error)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 30.0]))
def test_products_stay_in_16_bits_on_cpus_without_vnni(seed, outlier):
    weight = np.random.default_rng(seed).normal(size=(6, 64)).astype(np.float32)
    weight[0, :4] = outlier
    rounded, scale = quantise(weight)
    assert rounded.shape == (64, 6)
    assert np.abs(rounded.astype(int)).max() <= 127
    sums = [255 * np.maximum(sign * rounded.astype(int), 0).reshape(32, 2, 6).sum(axis=1) for sign in (1, -1)]
    assert sums[0].max() <= 2**15 - 1
    assert sums[1].max() <= 2**15
    assert np.abs(rounded.T * scale[:, None] - weight).max() <= 0.5001 * scale.max()
