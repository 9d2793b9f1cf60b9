"""The encoder as a gate's proxy: its states, what they do not depend on, and what it does not read."""

import numpy as np
import pytest

from rgate_integrations import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import PooledLayer, RequestLayers
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER, EncoderProxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.segments import Segmented

LAYERS = (PooledLayer(8, "question", "mean"), PooledLayer(6, "question", "mean"))
BOTH = RequestLayers(LAYERS[:1], LAYERS)
TEXTS = [
    "What is the capital of France?",
    "Thanks!",
    "你好！我的账单什么时候到期？谢谢。",
    "مرحبا! متى يجب أن أدفع الفاتورة؟",
    "Hi Anna,\n\nthe log is below. Why does it fail?\n10:21 ERROR x.y: failed (3)",
    "The parcel was sent to the depot and weighed before noon, as the list says. " * 40,
    "<s> 🙂 \ud800",
]


@pytest.fixture(scope="module")
def proxy():
    download(ENCODER)
    return EncoderProxy()


def read(proxy, texts, history=(), layers=BOTH):
    return proxy.request_states(ANSWER, [Segmented.from_text(text, history) for text in texts], layers)


@pytest.mark.parametrize("layer", [(17, "question", "mean"), (0, "question", "mean"), (8, "all", "last")])
def test_it_gives_means_over_the_question_alone(layer):
    layers = (PooledLayer(*layer),)
    with pytest.raises(EvidenceError, match="this proxy has only layers 1 to 16, averaged over the question"):
        EncoderProxy().hidden(ANSWER, [{"question": "Who?"}], None, layers)
    with pytest.raises(EvidenceError, match="averaged over the question"):
        read(EncoderProxy(), ["Who?"], layers=RequestLayers(LAYERS, layers))


def test_it_reads_no_begun_answer():
    with pytest.raises(EvidenceError, match=r"not drafts or partial answers.* Hint: .*smollm2-135m"):
        EncoderProxy().hidden(ANSWER, [{"question": "Who?"}], [Draft(text="Bo")], LAYERS)


@pytest.mark.model
def test_layers_come_in_the_order_in_which_they_are_asked_for(proxy):
    (found,) = read(proxy, TEXTS[:1])
    assert (found.whole.shape, found.segments.shape) == ((1, 384), (1, 2, 384))
    (turned,) = read(proxy, TEXTS[:1], layers=RequestLayers(LAYERS, LAYERS[::-1]))
    assert np.array_equal(turned.segments[:, ::-1], found.segments)
    (hidden,) = proxy.hidden(ANSWER, [{"question": f"  {TEXTS[0]} \n"}], None, LAYERS)
    assert np.array_equal(hidden.states, turned.whole)
    assert hidden.prompt_tokens == found.prompt_tokens


@pytest.mark.model
def test_what_was_said_before_changes_segments_and_adds_none(proxy):
    history = ["user: How many customers do we have in Sweden?", "assistant: 144."]
    text = "And in Italy? Thanks!"
    (alone,), (after,) = read(proxy, [text]), read(proxy, [text], history)
    assert after.segments.shape == alone.segments.shape == (2, 2, 384)
    assert not np.array_equal(after.segments, alone.segments)
    assert after.prompt_tokens > alone.prompt_tokens
    # The whole is that of the message, without the turns: the mean over the tokens of its segments.
    tokens = [len(proxy.encoder.ids(segment)) for segment in ("And in Italy?", "Thanks!")]
    of_segments = np.average(after.segments[:, 0], axis=0, weights=tokens)
    assert after.whole[0] == pytest.approx(of_segments, rel=1e-3, abs=1e-4)


@pytest.mark.model
def test_of_much_that_was_said_before_the_end_is_read(proxy):
    last = ["user: How many customers do we have in Sweden?", "assistant: 144."]
    turns = [f"user: Tell me about parcel {i}. assistant: It was sent." for i in range(500)]
    (long,), (longer,) = (read(proxy, ["And in Italy?"], [*some, *last]) for some in (turns[250:], turns))
    assert np.array_equal(long.segments, longer.segments)
    assert long.prompt_tokens == longer.prompt_tokens < 1_000


@pytest.mark.model
def test_a_text_is_cut_after_tokens(proxy):
    for text in TEXTS:
        assert proxy.truncate(text, 3_072) is None
        short = proxy.truncate(text, 1)
        assert text.startswith(short)
        assert len(proxy.encoder.ids(short)) <= 1
        end = proxy.encoder.keep_end(text, 1)
        assert text.endswith(end)
        assert 0 < len(end) <= len(text)
