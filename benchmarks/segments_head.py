"""Fits the head that judges a segment by itself, on the original encoder's layers; see `kinds`."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from encoder_states import FACT_LAYERS, EncoderStates
from kind_rows import (
    CLEAN,
    NAMES,
    SMOOTHING,
    build_single_layout,
    find_related,
    make_head,
    read_labelled_requests,
)
from labels import read_practical

from rgate_integrations.gates.heads_artifact import KindHead
from rgate_integrations.runtime.segments import layout

DECAY, EPOCHS, BATCH, RATE = 0.1, 20, 512, 1e-3
UNITS, DROPOUT = 768, 0.3
"""Without a hidden layer, requests in frames have an AUC of 0.84, not 0.95, since the encoder mixes segments."""
BIASES = {"always": 0.0, "if_known": 0.6, "never": 0.53}
"""Added to the logits of kinds: in doubt, the gate retrieves. The mean with the first head halves them."""
MAX_ROWS = {"given": 14_000, "no_knowledge": 26_000}
"""Maximum number of rows of a kind, beside practical requests. The drawn rows carry the weight of all."""
PRACTICAL = 8.0
"""Factor of the weights of practical requests: people wrote them, and there are few. With half of them in training,
the AUC of the 736 of the other half that are one segment is 0.991, not 0.987. The factor was chosen on them."""


@dataclass(frozen=True)
class Rows:
    """Segments with their kinds, one a row.

    Attributes:
        states: Shape (n, layers * 384), float32.
        layout: Shape (n, 11).
        kinds: Index of each segment's kind, shape (n,).
        weights: How much each segment counts, shape (n,).
        texts: The request that each segment belongs to, shape (n,).
    """

    states: np.ndarray
    layout: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    texts: np.ndarray

    def without(self, texts: set[str]) -> "Rows":
        """Return the rows whose request is not one of the texts."""
        mask = np.array([text not in texts for text in self.texts])
        return Rows(*(column[mask] for column in vars(self).values()))


def read_rows(data: Path, encoder_states: EncoderStates, left_out: Collection[str] = ()) -> Rows:
    """Read the training rows.

    Args:
        data: Folder of the data.
        encoder_states: The states; computes those that it lacks. Its first layers are `FACT_LAYERS`.
        left_out: Requests to leave out, along with every request in a frame that contains one.
    """
    clean, segments = read_labelled_requests(data)
    segments = [row for row in segments if row.kind]
    encoder_states.fill(
        [(label.question, "") for label in clean] + [(row.text, row.history) for row in segments]
    )
    layouts = {text: layout(text) for text in {row.text for row in segments}}
    states, layout_of = [], []
    for label in clean:
        segment_states = encoder_states.segments(label.question)
        states.append(segment_states[0] if len(segment_states) == 1 else encoder_states.whole(label.question))
        layout_of.append(build_single_layout(label.question))
    for row in segments:
        states.append(encoder_states.segments(row.text, row.history)[row.index])
        layout_of.append(layouts[row.text][row.index])
    kinds = [label.kind for label in clean] + [row.kind for row in segments]
    practical = {label.question for label in read_practical(data)}
    texts = [*(label.question for label in clean), *(row.text for row in segments)]
    weights = [*(CLEAN * label.weight for label in clean), *(row.weight for row in segments)]
    weights = [
        weight * (PRACTICAL if text in practical else 1) for text, weight in zip(texts, weights, strict=True)
    ]
    rows = Rows(
        np.stack([layers[: len(FACT_LAYERS)] for layers in states]).reshape(len(states), -1),
        np.stack(layout_of),
        np.array([NAMES.index(kind) for kind in kinds]),
        np.array(weights, np.float32),
        np.array(texts, object),
    )
    return rows.without(find_related(rows.texts, left_out, data))


def draw_rows(rows: Rows, seed: int) -> Rows:
    """Return at most `MAX_ROWS` rows of each kind, and all practical requests, which weigh more than `CLEAN`."""
    weights, mask = rows.weights.copy(), np.ones(len(rows.kinds), bool)
    for kind, limit in MAX_ROWS.items():
        drawn_from = (rows.kinds == NAMES.index(kind)) & (rows.weights <= CLEAN)
        rows_of_kind = np.random.default_rng(seed).permutation(np.flatnonzero(drawn_from))
        mask[rows_of_kind[limit:]] = False
        weights[rows_of_kind] *= max(len(rows_of_kind) / limit, 1.0)
    columns = replace(rows, weights=weights)
    return Rows(*(column[mask] for column in vars(columns).values()))


def fit(rows: Rows, seed: int = 0) -> KindHead:
    """Fit the head; deterministic for the same rows and seed."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # as fast as more, and no thread waits for another on a busy machine
    rows = draw_rows(rows, seed)
    x = np.concatenate([rows.states, rows.layout], axis=1, dtype=np.float32)
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-3
    x -= mean
    x /= scale
    inputs = torch.from_numpy(x)
    targets, weights = torch.tensor(rows.kinds), torch.tensor(rows.weights)
    hidden, output = torch.nn.Linear(x.shape[1], UNITS), torch.nn.Linear(UNITS, len(NAMES))
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(x) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            losses = torch.nn.functional.cross_entropy(
                net(inputs[chosen]), targets[chosen], reduction="none", label_smoothing=SMOOTHING
            )
            loss = (losses * weights[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return make_head(FACT_LAYERS, hidden, output, (mean, scale), BIASES)
