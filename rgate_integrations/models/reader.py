"""Reads questions and partial answers with the first layers of the default model, on ONNX Runtime in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import (
    HasStates,
    HiddenStates,
    PooledLayer,
    RequestLayers,
    RequestStates,
    Values,
    draft_tokens_or_text,
    layer_numbers,
    pool_states,
)
from rgate_integrations.models.catalog import DEFAULT_MODEL, READER
from rgate_integrations.models.encoding import TextEncoder
from rgate_integrations.models.onnx_model import MAX_HISTORY, OnnxModel, OnnxSession, pack_texts
from rgate_integrations.models.reader_file import TOKENIZER
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.segments import Segmented, join_segments

FINGERPRINT = "90a1a11611da98e1"
"""Fingerprint of the whole default model; see `rgate_integrations.models.model_runner.fingerprint`."""
STATES = (14, 16, 18, 20, 22)
"""The layers whose states can be read. Layer n means the input of the n-th layer, counted from 0."""
GRAPH = "graph.onnx"
PREFIX_TOKENS = 19
"""Number of tokens of the prompt before the question; their keys and values are constants of the graph."""

# The prefix has no states here, so a mean over the whole prompt is impossible.
_POOLED = {
    ("question", "mean"),
    ("question", "last"),
    ("prompt", "last"),
    ("draft", "mean"),
    ("draft", "last"),
    ("all", "last"),
}
_AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
_MAX_QUESTION = 3_072  # tokens; the engine has already truncated requests by characters
_BATCH_TOKENS = 256  # larger batches take more memory, and are not faster
# Window size and overlap, in tokens, for longer texts. With windows, time grows with the length and not with its
# square, memory does not grow, and windows are read in parallel.
_WINDOW, _OVERLAP = 256, 64


class ReaderRow(NamedTuple):
    """A question, with earlier turns before it and an answer's beginning after it, in tokens.

    The prompt's fixed beginning is not included; see `PREFIX_TOKENS`.

    Attributes:
        ids: Tokens of history, question, the rest of the prompt, and the answer.
        question: Positions of the question's tokens in ``ids``; empty if it has none.
        prompt: Number of tokens before the answer.
    """

    ids: tuple[int, ...]
    question: range
    prompt: int


class Reader(OnnxModel, TextEncoder):
    """The first 22 layers of SmolLM2-135M-Instruct, from a folder that `reader_file.make_reader` wrote."""

    title = "The gate's model"
    entry = READER
    shipped = SHIPPED / "reader"

    def _load(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        TextEncoder.__init__(self, Tokenizer.from_file(str(folder / TOKENIZER)))
        self._session = OnnxSession((self.shipped / GRAPH).read_bytes(), folder)
        self._after_question = self.ids(_AFTER_QUESTION)

    def _compute_test_states(self, text: str) -> Float32Array:
        (states,) = self.states([self.encode(text).ids], (max(STATES),))
        return states[max(STATES)][-1:]

    def pool(self, rows: Sequence[ReaderRow], layers: Sequence[PooledLayer]) -> list[HiddenStates]:
        """Return the pooled hidden states of each row.

        Args:
            rows: The rows, made by `encode` or `encode_request`.
            layers: The states to return; only those for which `can_read` returns True.
        """
        rows = _drop_unread(rows, layers)
        return [
            HiddenStates(pool_row(states, row, layers), PREFIX_TOKENS + len(row.ids))
            for row, states in zip(rows, self._read(rows, layer_numbers(layers)), strict=True)
        ]

    def _read(self, rows: Sequence[ReaderRow], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return the states of each row by layer, each of shape (tokens, hidden size)."""
        windows, counts = [], []
        for row in rows:
            # Windows start at fixed positions, so that later text never changes a token's window.
            starts = range(0, max(len(row.ids) - _OVERLAP, 1), _WINDOW - _OVERLAP)
            windows += [row.ids[start : start + _WINDOW] for start in starts]
            counts.append(len(starts))
        run = partial(self.states, numbers=numbers)
        results = iter(self._run_batches(windows, list(map(len, windows)), _BATCH_TOKENS, run))
        joined = []
        for count in counts:
            first, *others = islice(results, count)
            states = {}
            for layer in numbers:
                # A token in two windows gets its states from the first, in which it has more context before it.
                states[layer] = np.concatenate(
                    [first[layer], *(window[layer][_OVERLAP:] for window in others)]
                )
            joined.append(states)
        return joined

    def states(self, texts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return the states of each text by layer number, each of shape (tokens, hidden size), from a single run.

        Args:
            texts: The token ids of each text, without the prompt's prefix.
            numbers: The layers, of those in `STATES`.
        """
        # No token looks at those after it, so any token may stand after the end of a text.
        positions, layout, begins = pack_texts(texts, filler=0)
        inputs = {"ids": np.concatenate(texts).astype(np.int64), "positions": PREFIX_TOKENS + positions}
        layers = self._session.run([f"layer_{number}" for number in numbers], inputs | layout)
        by_text = zip(*(np.split(layer, begins) for layer in layers), strict=True)
        return [dict(zip(numbers, states, strict=True)) for states in by_text]

    def encode(self, question: str, draft: str | Sequence[int] = "") -> ReaderRow:
        """Tokenize a question, truncated to 3,072 tokens, and the beginning of its answer."""
        if isinstance(draft, str):
            draft = self.ids(self.plain(draft))
        return self._row([], self.plain(" ".join(question.split())), draft)

    def encode_request(self, text: Segmented) -> ReaderRow:
        """Tokenize a request, truncated to 3,072 tokens, with the end of its history before it."""
        history = self.ids(self.plain(text.history))[-MAX_HISTORY:]
        lines = []
        for line in text.lines:
            lines.append([" ".join(self.plain(segment).split()) for segment in line])
        request, _ = join_segments(lines)
        return self._row(history, request, ())

    def _row(self, history: list[int], question: str, draft: Sequence[int]) -> ReaderRow:
        before = [*history, *self.ids(question)[:_MAX_QUESTION]]
        prompt = [*before, *self._after_question]
        return ReaderRow((*prompt, *draft), range(len(history), len(before)), len(prompt))


def _drop_unread(rows: Sequence[ReaderRow], layers: Sequence[PooledLayer]) -> Sequence[ReaderRow]:
    """Return rows cut after the question if only questions are pooled: later tokens do not change their states."""
    if any(span != "question" for _, span, _ in layers):
        return rows
    shorter = []
    for row in rows:
        # For an empty question, the rest of the prompt is pooled instead.
        end = row.question.stop if row.question else len(row.ids)
        shorter.append(row._replace(ids=row.ids[:end], prompt=min(row.prompt, end)))
    return shorter


def pool_row(
    states: Mapping[int, Float32Array], row: ReaderRow, layers: Sequence[PooledLayer]
) -> Float32Array:
    """Return the pooled states of a row, shape (layers, hidden size)."""
    draft = len(row.ids) - row.prompt
    return np.array(pool_states(states, row.question, row.prompt, draft, layers), np.float32)


def can_read(prompt: PromptTemplate, layers: Sequence[PooledLayer]) -> bool:
    """Return whether a `Reader` can provide these states for this prompt; False without layers."""
    is_pooled = all(layer in STATES and (span, pooling) in _POOLED for layer, span, pooling in layers)
    return prompt == ANSWER and len(layers) > 0 and is_pooled


class ReaderProxy(HasStates):
    """The part of the default model that the shipped gates use: a `Reader`, loaded on first use.

    It cannot generate or score. `rgate_integrations.models.proxies` says when the whole model is used instead.
    """

    name = DEFAULT_MODEL
    fingerprint = FINGERPRINT
    num_layers = 30

    @property
    def reader(self) -> Reader:
        """The reader, shared within the process.

        Raises:
            ModelLoadError: The model is missing while downloads are forbidden, or it cannot be loaded.
            DownloadError: The model is missing and could not be downloaded.
            ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
        """
        return Reader.shared()

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Return pooled hidden states; see `HasStates.hidden`.

        Use it only for a prompt and layers for which `can_read` returns True: this is not checked here.
        """
        questions = [fields["question"] for fields in values]
        texts: list[str | Sequence[int]] = [""] * len(questions)
        if drafts is not None:
            texts = [draft_tokens_or_text(draft, DEFAULT_MODEL) for draft in drafts]
        reader = self.reader
        return reader.pool(list(map(reader.encode, questions, texts)), layers)

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Return pooled hidden states of requests, see `HasStates.request_states`, read after their earlier turns.

        Segments are read as by default: separately, without the earlier turns, and then so is the request.

        Use it only for a prompt and layers for which `can_read` returns True: this is not checked here.
        """
        if layers.segments:
            return super().request_states(prompt, texts, layers)
        reader = self.reader
        pooled = reader.pool(list(map(reader.encode_request, texts)), layers.whole)
        no_states = np.empty(0, np.float32)
        return [RequestStates(whole.states, no_states, whole.prompt_tokens) for whole in pooled]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that."""
        return self.reader.truncate(text, tokens)
