"""Batches by hand-worked numbers: padding, positions, a cached prefix, and which rows share a batch."""

import pytest

torch = pytest.importorskip("torch")

from rgate_integrations.models.base import pool_states, spans_of  # noqa: E402
from rgate_integrations.models.decoding import (  # noqa: E402
    CachedPrefix,
    Decoder,
    entropy_and_margin,
    group_by_length,
    pad_left,
    positions,
    row_seed,
)

CPU = torch.device("cpu")


class FakeCache:
    """Stands for keys and values: only how often it was repeated matters here."""

    rows = 1

    def batch_repeat_interleave(self, times):
        self.rows *= times


class FakeModel:
    """Notes what it was given; the state that goes into its only layer is the token id."""

    def __init__(self):
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])
        self.base_model = self
        self.inputs = []

    def __call__(self, **inputs):
        self.inputs.append(inputs)
        self.layers[0](inputs["input_ids"][..., None].float())
        self.past_key_values, self.logits = inputs["past_key_values"], torch.zeros(2, 1, 9)
        return self


def test_rows_are_padded_on_the_left_and_positions_count_tokens():
    ids, mask = pad_left([[7, 8], [1, 2, 3, 4]], 0, CPU)
    assert ids.tolist() == [[0, 0, 7, 8], [1, 2, 3, 4]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_padding_stands_between_a_cached_prefix_and_the_rest():
    prefix, model = CachedPrefix((5, 6, 7), FakeCache()), FakeModel()
    decoder = Decoder([[5, 6, 7, 1, 2], [5, 6, 7, 1, 2, 3, 4]], 0, CPU, prefix=prefix)
    decoder.read(model)
    decoder.read(model)  # nothing is left to read
    (inputs,) = model.inputs
    assert inputs["input_ids"].tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]], "only what is not cached is read"
    assert inputs["position_ids"].tolist() == [[2, 2, 3, 4], [3, 4, 5, 6]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 1], [1] * 7], (
        "but all of it is attended to"
    )
    assert (decoder.cache.rows, prefix.cache.rows) == (2, 1), "the prefix itself is never given to the model"


def test_a_rows_states_have_no_padding_and_nothing_after_its_end():
    decoder, model = Decoder([[1], [1, 2, 3]], 0, CPU, layers=[0]), FakeModel()
    decoder.read(model)
    for mask in ([[1], [1]], [[0], [1]]):  # the first row ends after one token
        decoder.append(torch.tensor([[8], [9]]), torch.tensor(mask))
        decoder.read(model)
    assert decoder.row_states(0)[0].flatten().tolist() == [1, 8]
    assert decoder.row_states(1)[0].flatten().tolist() == [1, 2, 3, 9, 9]
    assert model.inputs[-1]["position_ids"].tolist() == [[1], [4]]


@pytest.mark.parametrize(
    ("lengths", "size", "tokens", "groups"),
    [
        ([], 4, 100, []),
        ([3, 9, 5], 4, 100, [[1, 2, 0]]),
        ([3, 9, 5], 2, 100, [[1, 2], [0]]),
        ([3, 9, 5], 4, 18, [[1, 2], [0]]),  # a third row would be padded to 9 too: 27
        ([3, 9, 5], 4, 1, [[1], [2], [0]]),  # one is always allowed
        ([2, 2, 2], 4, 100, [[0, 1, 2]]),  # ties keep their order
        ([40, 900, 30, 500], 4, 9_999, [[1, 3], [0, 2]]),  # short ones do not wait for a long one
        ([20, 128, 30], 4, 9_999, [[1, 2, 0]]),  # where padding is cheaper than a pass of their own
    ],
)
def test_rows_of_like_length_share_a_batch(lengths, size, tokens, groups):
    assert group_by_length(lengths, size, tokens) == groups


def test_spans_and_pooling():
    spans = spans_of(range(1, 3), prompt=4, draft=2)
    assert spans == {"question": range(1, 3), "prompt": range(4), "draft": range(4, 6), "all": range(6)}
    assert set(spans_of(range(0), prompt=4, draft=0).values()) == {range(4)}
    states = {7: torch.arange(6.0)[:, None]}
    layers = [(7, "question", "mean"), (7, "draft", "last"), (7, "all", "mean")]
    assert torch.stack(pool_states(states, spans, layers)).tolist() == [[1.5], [5.0], [2.5]]


def test_impossible_tokens_have_no_part_in_the_entropy():
    entropies, margins = entropy_and_margin(torch.log(torch.tensor([[0.5, 0.5, 0.0]])))
    assert entropies.tolist() == pytest.approx([0.6931], abs=1e-4)
    assert margins.tolist() == [0.0]


def test_a_seed_depends_on_seed_sample_and_prompt():
    seeds = {row_seed(s, n, ids) for s in (0, 1) for n in (0, 1) for ids in ((1, 2), (12,))}
    assert len(seeds) == 8
    assert row_seed(0, 0, [1, 2]) == row_seed(0, 0, (1, 2))
