"""Jobs that read given texts: their log-probabilities token by token, and their pooled hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.decoding import entropy, margin
from rgate_integrations.models.encoding import EncodedPrompt
from rgate_integrations.models.hidden import layer_numbers, layer_states, pooled, spans_of
from rgate_integrations.models.model_runner import BatchJob, ModelRunner
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


class TokenValues(NamedTuple):
    """What a model thinks of a text, a value a token.

    Attributes:
        logprobs: Log-probability of each token, <= 0.
        entropies: Entropy in nats of the distribution that it was chosen from, >= 0.
        margins: How far the likeliest token was ahead of the second there, >= 0.
    """

    logprobs: Sequence[float] = ()
    entropies: Sequence[float] = ()
    margins: Sequence[float] = ()


class ReadTexts(BatchJob[TokenValues]):
    """Reads texts as continuations of prompts.

    Args:
        runner: Runs the model.
        prompt: The template of the prompts.
        rows: The prompts.
        texts: Token ids of the text after each; not empty.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompt: PromptTemplate,
        rows: Sequence[EncodedPrompt],
        texts: Sequence[Sequence[int]],
    ) -> None:
        self.runner = runner
        self.texts = texts
        # A token's probability is read at the token before it: the last token of a text is not read at all, and of
        # the prompt the last one must be.
        self.sequences = [(*row.ids, *text[:-1]) for row, text in zip(rows, texts, strict=True)]
        self.lengths = [len(sequence) for sequence in self.sequences]
        self.prefix = runner.shared_prefix(prompt, self.sequences, [len(text) for text in texts])

    def run_batch(self, indices: Sequence[int]) -> list[TokenValues]:
        """Read one batch of texts."""
        batch = self.runner.batch([self.sequences[i] for i in indices], self.prefix)
        width = max(len(self.texts[i]) for i in indices)
        logprobs = self.runner.tail_logprobs(batch, width)
        results = []
        for row, i in enumerate(indices):
            text = self.texts[i]
            tail = logprobs[row, width - len(text) :]
            chosen = tail[range(len(text)), text].tolist()
            values = tuple(min(v, 0.0) for v in chosen)
            results.append(TokenValues(values, tuple(entropy(tail).tolist()), tuple(margin(tail).tolist())))
        return results


class PoolStates(BatchJob[Float32Array]):
    """Reads prompts and the texts that continue them; pools hidden states, each (layers, hidden size).

    Args:
        runner: Runs the model.
        prompt: The template of the prompts.
        rows: The prompts.
        texts: Token ids of the text after each; may be empty.
        layers: Which states, and how each is pooled.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompt: PromptTemplate,
        rows: Sequence[EncodedPrompt],
        texts: Sequence[Sequence[int]],
        layers: Sequence[PooledLayer],
    ) -> None:
        self.runner = runner
        self.rows = rows
        self.texts = texts
        self.layers = layers
        self.sequences = [(*row.ids, *text) for row, text in zip(rows, texts, strict=True)]
        self.lengths = [len(sequence) for sequence in self.sequences]
        self.prefix = runner.shared_prefix(prompt, self.sequences)

    def run_batch(self, indices: Sequence[int]) -> list[Float32Array]:
        """Read one batch, as far up as the highest layer that is wanted."""
        numbers = layer_numbers(self.layers)
        batch = self.runner.batch([self.sequences[i] for i in indices], self.prefix, numbers)
        states = layer_states(self.runner.model.base_model, batch.inputs, numbers)
        results = []
        for row, i in enumerate(indices):
            own = batch.row_states(states, row, self.lengths[i])
            spans = spans_of(self.rows[i].question, len(self.rows[i].ids), len(self.texts[i]))
            results.append(pooled(own, spans, self.layers))
        return results
