"""Batches by hand-worked numbers: padding, positions, and which rows share a batch."""

import pytest

torch = pytest.importorskip("torch")

from rgate_integrations.models.base import pool_states, spans_of  # noqa: E402
from rgate_integrations.models.decoding import (  # noqa: E402
    group_by_length,
    pad_left,
    positions,
    row_seed,
)

CPU = torch.device("cpu")


def test_rows_are_padded_on_the_left_and_positions_count_tokens():
    ids, mask = pad_left([[7, 8], [1, 2, 3, 4]], 0, CPU)
    assert ids.tolist() == [[0, 0, 7, 8], [1, 2, 3, 4]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


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


def test_a_seed_depends_on_seed_sample_and_prompt():
    seeds = {row_seed(s, n, ids) for s in (0, 1) for n in (0, 1) for ids in ((1, 2), (12,))}
    assert len(seeds) == 8
    assert row_seed(0, 0, [1, 2]) == row_seed(0, 0, (1, 2))
