"""Hidden states of questions and of the first 8, 16, 32 and 64 tokens of an answer, for `begun`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from heads import VectorCache, hash_question

from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.reader import Reader, ReaderRow, pool_row

CUTS = (8, 16, 32, 64)
DEEP = (16, 18, 20, 22)
LAYERS = (
    *(PooledLayer(n, "draft", "mean") for n in DEEP),
    *(PooledLayer(n, "draft", "last") for n in DEEP),
    PooledLayer(18, "prompt", "last"),
)
SEPARATOR = "\n\n"  # parts question and answer in the cache key
BATCH = 4  # answers in one forward pass


@dataclass(frozen=True)
class Answers:
    """n recorded answers.

    Attributes:
        states: Shape (n, cuts, layers, hidden size).
        known: Whether each is right, shape (n,).
        sets: Data set or LLM of each, shape (n,).
        questions: The questions.
    """

    states: np.ndarray
    known: np.ndarray
    sets: np.ndarray
    questions: list[str]


def read_states(cache: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the states of questions and answers; computes those that the cache lacks."""
    names = [" ".join(question.split()) + SEPARATOR + text for question, text in pairs]
    store = VectorCache(cache / "begun")
    if any(hash_question(name) not in store.vectors for name in names):
        reader = Reader.shared()
        store.fill(names, lambda batch: _read(reader, batch), part=256)
    return np.stack([store.vectors[hash_question(name)] for name in names])


def _read(reader: Reader, names: list[str]) -> np.ndarray:
    """Read each answer once and pool it at each cut: the states of a prefix do not depend on what follows."""
    rows = []
    for name in names:
        question, _, text = name.partition(SEPARATOR)
        rows.append(reader.encode(question, reader.truncate(text.strip(), CUTS[-1]) or text.strip()))
    numbers = sorted({layer for layer, _, _ in LAYERS})
    pooled = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        for row, states in zip(batch, reader.states([row.ids for row in batch], numbers), strict=True):
            for cut in CUTS:
                partial_row = ReaderRow(row.ids[: row.prompt + cut], row.question, row.prompt)
                partial_states = {number: values[: len(partial_row.ids)] for number, values in states.items()}
                pooled.append(pool_row(partial_states, partial_row, LAYERS))
    return np.stack(pooled).reshape(len(rows), len(CUTS), len(LAYERS), -1)
