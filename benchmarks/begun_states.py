"""Hidden states of questions and of the first 8, 16, 32 and 64 tokens of an answer, for `begun`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from heads import Kept, key

from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.proxy.hidden import layer_numbers, layer_states, pooled, spans_of
from rgate_integrations.proxy.local import DEFAULT_MODEL, LocalProxy
from rgate_integrations.proxy.model_runner import ModelRunner
from rgate_integrations.proxy.reading import PoolStates

CUTS = (8, 16, 32, 64)
DEEP = (16, 18, 20, 22)
LAYERS = (
    *(PooledLayer(n, "draft", "mean") for n in DEEP),
    *(PooledLayer(n, "draft", "last") for n in DEEP),
    PooledLayer(18, "prompt", "last"),
)
BETWEEN = "\n\n"  # question and answer, in the name of what is kept


@dataclass(frozen=True)
class Answers:
    """Recorded answers; n of them.

    Attributes:
        states: Shape (n, cuts, layers, hidden size).
        known: Whether they are right, shape (n,).
        sets: Data set, or LLM, of each.
        questions: The questions.
    """

    states: np.ndarray
    known: np.ndarray
    sets: np.ndarray
    questions: list[str]


class BegunStates(PoolStates):
    """Reads each answer once, and pools it as it was after each of the cuts: a shorter one is its beginning."""

    def run_batch(self, indices):  # noqa: ANN001, ANN201, D102
        numbers = layer_numbers(LAYERS)
        batch = self.runner.batch([self.sequences[i] for i in indices], self.prefix, numbers)
        states = layer_states(self.runner.model.base_model, batch.inputs, numbers)
        found = []
        for row, i in enumerate(indices):
            own = batch.row_states(states, row, self.lengths[i])
            prompt = len(self.rows[i].ids)
            for cut in CUTS:
                spans = spans_of(self.rows[i].question, prompt, min(cut, len(self.texts[i])))
                found.append(pooled(own, spans, LAYERS))
        return np.stack(found).reshape(len(indices), len(CUTS), len(LAYERS), -1)


def read_states(cache: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the states of questions and answers, computed where they are not kept yet."""
    names = [" ".join(question.split()) + BETWEEN + text for question, text in pairs]
    kept = Kept(cache / "begun")
    if any(key(name) not in kept.vectors for name in names):
        proxy = LocalProxy(DEFAULT_MODEL, dtype="bfloat16", max_batch_size=32).load()
        kept.fill(names, lambda some: _read(proxy.runner, some), part=512)
    return np.stack([kept.vectors[key(name)] for name in names])


def _read(runner: ModelRunner, names: list[str]) -> list[np.ndarray]:
    rows, texts = [], []
    for name in names:
        question, _, text = name.partition(BETWEEN)
        text = runner.encoder.cut(text, CUTS[-1]) or text
        row = runner.encoder.encode(ANSWER, {"question": question})
        rows.append(row)
        texts.append(runner.encoder.continuation(row, runner.encoder.plain(text.strip())))
    return runner.run(BegunStates(runner, ANSWER, rows, texts, LAYERS))
