"""Fits the head for segments in context on whole requests; the adapted layers stay fixed. See `kinds`."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import segments_head
import torch
from adapted_kinds import LAYERS
from encoder_states import FACT_LAYERS, KIND_LAYERS, EncoderStates
from kind_rows import KINDS, NAMES, SMOOTHING, UNITS, find_related, make_head, read_labelled_requests
from labels import KIND_OF
from segment_rows import SegmentRow

from rgate_integrations.gates.artifacts import KindHead
from rgate_integrations.runtime.segments import layout, segments

EPOCHS, BATCH, RATE, DECAY, DROPOUT = 5, 64, 5e-4, 0.05, 0.1
LOWEST = 4.0
"""Weight of the loss of the lowest P(answered) of a request's segments, relative to that of the segments' kinds."""
KNOWN = 0.5
"""P(the LLM knows the fact) in that loss."""
TIMES = {"turns": 3}
"""How often the requests of a source are used. Those of turns are short, and depend on what was said before."""
BIASES = {"always": 0.0, "if_known": 3.75, "never": 3.75}
"""Added to the logits of kinds, since errors differ in cost: a request that needs passages should not be skipped.
The mean with the first head halves them, and the mean with the segment's own logits halves them again."""
UNLABELLED = -1
ANSWERED = {"always": 1.0, "if_known": float("nan"), "never": 0.0}
"""Whether the LLM alone answers a request, by the `Kind.answerable` of its kind."""


@dataclass(frozen=True)
class WholeRequest:
    """A request of several segments, or with earlier turns.

    Attributes:
        states: The states of its segments, shape (segments, layers of `KIND_LAYERS`, 384), float16.
        layout: Shape (segments, 11).
        kinds: Index of each segment's kind, `UNLABELLED` if it is not certain; shape (segments,).
        weights: How much each segment counts, shape (segments,).
        answered: Whether the LLM alone answers the request: 0 or 1; NaN if that depends on the LLM.
        times: How often the request is used.
    """

    states: np.ndarray
    layout: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    answered: float
    times: int


def read_requests(data: Path, states: EncoderStates, left_out: Collection[str] = ()) -> list[WholeRequest]:
    """Read the training requests that the head in context judges.

    Args:
        data: Folder of the data.
        states: Their states at the layers of `KIND_LAYERS`; computes those that it lacks.
        left_out: Requests to leave out, along with every request that contains one.
    """
    by_text: dict[tuple[str, str], list[SegmentRow]] = defaultdict(list)
    for row in read_labelled_requests(data)[1]:
        by_text[row.text, row.history].append(row)
    excluded = find_related([text for text, _ in by_text], left_out, data)
    used = {}
    for (text, history), rows in by_text.items():
        if text not in excluded and (history or len(segments(text)) > 1):
            used[text, history] = rows
    states.fill(used)
    return [_make_request(rows, states) for rows in used.values()]


def _make_request(rows: Sequence[SegmentRow], states: EncoderStates) -> WholeRequest:
    first = rows[0]
    features = layout(first.text)
    kinds, weights = np.full(len(features), UNLABELLED), np.zeros(len(features), np.float32)
    for row in rows:
        if row.kind:
            kinds[row.index] = NAMES.index(row.kind)
            weights[row.index] = row.weight
    answered = ANSWERED[KINDS[NAMES.index(KIND_OF[first.whole])].answerable]
    times = TIMES.get(first.source, 1)
    return WholeRequest(states.segments(first.text, first.history), features, kinds, weights, answered, times)


def fit(requests: Sequence[WholeRequest], alone_head: KindHead, seed: int = 0) -> KindHead:
    """Fit the head; deterministic for the same requests and seed.

    Its logits are averaged with those of ``alone_head``, as in the gate. The loss is that of the kinds of labelled
    segments, plus that of the lowest P(answered) of all segments, which decides about a request.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    inputs, alone_logits, bounds = _stack(requests, alone_head)
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0) + 1e-2
    hidden, output = torch.nn.Linear(len(mean), UNITS), torch.nn.Linear(UNITS, len(NAMES))
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    kinds = torch.from_numpy(np.concatenate([request.kinds for request in requests]))
    weights = torch.from_numpy(np.concatenate([request.weights for request in requests]))
    answered = torch.tensor([request.answered for request in requests])
    shares = torch.tensor([ANSWERED[kind.answerable] for kind in KINDS]).nan_to_num(KNOWN)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    used = torch.tensor([i for i, request in enumerate(requests) for _ in range(request.times)])
    steps = len(used) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in used[torch.randperm(len(used))][: steps * BATCH].split(BATCH):
            rows = torch.cat([torch.arange(*bounds[i]) for i in chosen.tolist()])
            owners = torch.cat(
                [torch.full((bounds[i][1] - bounds[i][0],), n) for n, i in enumerate(chosen.tolist())]
            )
            logits = (net((inputs[rows] - mean) / scale) + alone_logits[rows]) / 2
            labelled = kinds[rows] != UNLABELLED
            losses = torch.nn.functional.cross_entropy(
                logits[labelled], kinds[rows][labelled], reduction="none", label_smoothing=SMOOTHING
            )
            loss = (losses * weights[rows][labelled]).sum() / weights[rows][labelled].sum().clamp(min=1.0)
            p_answered = torch.softmax(logits, dim=1) @ shares
            lowest = torch.ones(len(chosen)).scatter_reduce(0, owners, p_answered, "amin")
            certain = ~answered[chosen].isnan()
            lowest = lowest[certain].clamp(1e-4, 1 - 1e-4)
            errors = torch.nn.functional.binary_cross_entropy(
                lowest, answered[chosen][certain], reduction="sum"
            )
            loss = loss + LOWEST * errors / certain.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return make_head(LAYERS, hidden, output, (mean.numpy(), scale.numpy()), BIASES)


def _stack(
    requests: Sequence[WholeRequest], alone_head: KindHead
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Return all segments' inputs, the logits of ``alone_head`` before its `BIASES` are added, and requests' rows."""
    states = np.concatenate([request.states for request in requests])
    features = np.concatenate([request.layout for request in requests])
    columns = [KIND_LAYERS.index(layer) for layer in LAYERS]
    inputs = np.concatenate([states[:, columns].reshape(len(states), -1), features], axis=1, dtype=np.float32)
    alone = np.concatenate(
        [states[:, : len(FACT_LAYERS)].reshape(len(states), -1), features], axis=1, dtype=np.float32
    )
    added = segments_head.BIASES
    biases = np.array([kind.bias - added[kind.answerable] for kind in alone_head.kinds], np.float32)
    hidden = np.maximum(alone @ alone_head.hidden.T + alone_head.hidden_bias, 0)
    logits = hidden @ alone_head.output.T + biases
    ends = np.cumsum([len(request.kinds) for request in requests]).tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    return torch.from_numpy(inputs), torch.from_numpy(logits), bounds
