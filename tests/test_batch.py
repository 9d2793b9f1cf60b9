"""Batches by hand-worked numbers: padding, positions, a cached prefix, and which rows share a batch."""

import pytest

torch = pytest.importorskip("torch")

from rgate_integrations.models.batch import (  # noqa: E402
    Batch,
    CachedPrefix,
    group_by_length,
    pad_left,
    positions,
)
from rgate_integrations.models.decoding import entropy, row_seed  # noqa: E402
from rgate_integrations.models.hidden import pooled, spans_of  # noqa: E402

CPU = torch.device("cpu")


class FakeCache:
    """Stands for keys and values: only how often it was repeated matters here."""

    rows = 1

    def batch_repeat_interleave(self, times):
        self.rows *= times


def test_rows_are_padded_on_the_left_and_positions_count_tokens():
    ids, mask = pad_left([[7, 8], [1, 2, 3, 4]], 0, CPU)
    assert ids.tolist() == [[0, 0, 7, 8], [1, 2, 3, 4]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_padding_stands_between_a_cached_prefix_and_the_rest():
    prefix = CachedPrefix((5, 6, 7), FakeCache())
    batch = Batch.of([[5, 6, 7, 1, 2], [5, 6, 7, 1, 2, 3, 4]], prefix, 0, CPU)
    assert batch.ids.tolist() == [[5, 6, 7, 0, 0, 1, 2], [5, 6, 7, 1, 2, 3, 4]]
    assert batch.mask.tolist() == [[1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    inputs = batch.inputs
    assert inputs["input_ids"].tolist() == [[0, 0, 1, 2], [1, 2, 3, 4]], "only what is not cached is read"
    assert inputs["position_ids"].tolist() == [[2, 2, 3, 4], [3, 4, 5, 6]]
    assert inputs["attention_mask"].shape == (2, 7), "but all of it is attended to"
    assert (batch.cache.rows, prefix.cache.rows) == (2, 1), "the prefix itself is never given to the model"


def test_a_rows_states_have_the_prefix_and_no_padding():
    prefix = CachedPrefix((5, 6), FakeCache(), {3: torch.tensor([[50.0], [60.0]])})
    batch = Batch.of([[5, 6, 1], [5, 6, 1, 2, 3]], prefix, 0, CPU)
    columns = torch.tensor(
        [[[-1.0], [-1.0], [1.0], [10.0]], [[1.0], [2.0], [3.0], [10.0]]]
    )  # one was written
    assert batch.row_states({3: columns}, 0, prompt=3)[3].flatten().tolist() == [50, 60, 1]
    assert batch.row_states({3: columns}, 0, prompt=3, written=1)[3].flatten().tolist() == [50, 60, 1, 10]
    assert batch.row_states({3: columns}, 1, prompt=5)[3].flatten().tolist() == [50, 60, 1, 2, 3]


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
    assert pooled(states, spans, layers).tolist() == [[1.5], [5.0], [2.5]]


def test_impossible_tokens_have_no_part_in_the_entropy():
    even = torch.log(torch.tensor([[0.5, 0.5, 0.0]]))
    assert entropy(even).tolist() == pytest.approx([0.6931], abs=1e-4)


def test_a_seed_depends_on_seed_sample_and_prompt():
    seeds = {row_seed(s, n, ids) for s in (0, 1) for n in (0, 1) for ids in ((1, 2), (12,))}
    assert len(seeds) == 8
    assert row_seed(0, 0, [1, 2]) == row_seed(0, 0, (1, 2))
