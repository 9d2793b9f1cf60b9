"""Reads questions and partial answers with the first layers of the default model, on ONNX Runtime in int8."""

from __future__ import annotations

from bisect import bisect_right
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
    RequestStates,
    Values,
    draft_tokens_or_text,
)
from rgate_integrations.models.catalog import DEFAULT_MODEL, READER
from rgate_integrations.models.download import fetch_path
from rgate_integrations.models.encoding import TextEncoder
from rgate_integrations.models.onnx_model import OnnxModel, OnnxSession, load_shared
from rgate_integrations.models.pooling import PooledLayer, RequestLayers, layer_numbers, pool_states
from rgate_integrations.models.reader_file import TOKENIZER
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.segments import Segmented

FINGERPRINT = "90a1a11611da98e1"
"""That of the whole default model; see `rgate_integrations.models.model_runner.fingerprint`."""
STATES = (14, 16, 18, 20, 22)
"""The layers whose states can be read: the input of layer n, counted from 0."""
GRAPH = "graph.onnx"
PREFIX_TOKENS = 19
"""Tokens of the prompt before the question; their keys and values are constants of the graph."""

# The prefix has no states here, so there is no mean over the whole prompt.
_POOLED = {
    ("question", "mean"),
    ("question", "last"),
    ("prompt", "last"),
    ("draft", "mean"),
    ("draft", "last"),
    ("all", "last"),
}
_AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
_MAX_QUESTION = 3_072  # tokens; the engine has cut requests before, by characters
_MAX_HISTORY = 768  # tokens of the earlier turns; of longer ones the end is read
_BATCH_TOKENS = 256  # larger batches are no faster, and take more memory
# A longer text is read in windows of so many tokens, each beginning with the last ones of the window before. So time
# grows with the length and not with its square, memory does not grow, and windows are read side by side.
_WINDOW, _OVERLAP = 256, 64


class ReaderRow(NamedTuple):
    """One text in tokens.

    Attributes:
        ids: Tokens of the question, of what follows it, and of the answer.
        question: How many are the question's and its history's.
        prompt: How many come before the answer.
        segments: Where each segment of the question begins and ends.
    """

    ids: tuple[int, ...]
    question: int
    prompt: int
    segments: tuple[tuple[int, int], ...] = ()


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
        last: Float32Array = states[max(STATES)][-1]
        return last

    def hidden(
        self,
        questions: Sequence[str],
        drafts: Sequence[str | Sequence[int]] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states; see `rgate_integrations.models.base.HasStates.hidden`.

        Args:
            questions: The questions.
            drafts: The beginnings of the answers, one a question: text, or the model's own tokens; or None.
            layers: Which states, of those that `can_read` allows.
        """
        rows = _drop_unread(list(map(self.encode, questions, drafts or [""] * len(questions))), layers)
        results = []
        for row, states in zip(rows, self._read(rows, layer_numbers(layers)), strict=True):
            results.append(HiddenStates(pool_row(states, row, layers), PREFIX_TOKENS + len(row.ids)))
        return results

    def request_states(self, texts: Sequence[Segmented], layers: RequestLayers) -> list[RequestStates]:
        """Pool hidden states of requests; see `rgate_integrations.models.base.HasStates.request_states`."""
        rows = _drop_unread(list(map(self.encode_segments, texts)), layers.every)
        results = []
        for row, states in zip(rows, self._read(rows, layer_numbers(layers.every)), strict=True):
            request = (row.segments[0][0], row.segments[-1][1])  # without its history
            whole = pool_row(states, row, layers.whole, request)
            segments = [pool_row(states, row, layers.segments, segment) for segment in row.segments]
            results.append(RequestStates(whole, np.stack(segments), PREFIX_TOKENS + len(row.ids)))
        return results

    def _read(self, rows: Sequence[ReaderRow], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return the states of the tokens of each row, (tokens, hidden size), by layer."""
        windows, counts = [], []
        for row in rows:
            # Windows start at fixed positions, so that what follows a token never changes its window.
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
                # A token of two windows has the states of the first, in which it saw more before it.
                parts = [first[layer], *(window[layer][_OVERLAP:] for window in others)]
                states[layer] = np.concatenate(parts)
            joined.append(states)
        return joined

    def states(self, texts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return for each text the states of each of its tokens, (tokens, hidden size), by layer. One run."""
        lengths = np.array(list(map(len, texts)))
        starts = np.concatenate([[0], lengths.cumsum()])
        columns = np.arange(lengths.max())
        # Tokens lie one after the other, without padding; only attention sees a row a text, as `rows` says. Behind
        # the end of a text stands the number of its first token, at which nothing looks.
        inside = columns < lengths[:, None]
        rows = np.where(inside, starts[:-1, None] + columns, starts[:-1, None])
        inputs = {
            "ids": np.concatenate(texts).astype(np.int64),
            "positions": PREFIX_TOKENS + np.broadcast_to(columns, inside.shape)[inside],
            "rows": rows.astype(np.int64),
            "tokens": np.flatnonzero(inside).astype(np.int64),
        }
        layers = self._session.run([f"layer_{number}" for number in numbers], inputs)
        by_text = zip(*(np.split(layer, starts[1:-1]) for layer in layers), strict=True)
        return [dict(zip(numbers, states, strict=True)) for states in by_text]

    def encode(self, question: str, draft: str | Sequence[int] = "") -> ReaderRow:
        """Return a question, and the beginning of its answer, in tokens."""
        return self._row(self.ids(self.plain(" ".join(question.split())))[:_MAX_QUESTION], draft)

    def encode_segments(self, text: Segmented) -> ReaderRow:
        """Return a request in tokens, with the range of each of its segments."""
        history = self.ids(self.plain(text.history))[-_MAX_HISTORY:]
        lines, parts = [], []
        for line in text.lines:
            # Segment by segment: a control token in one must not move where the next begins.
            plain = [" ".join(self.plain(segment).split()) for segment in line]
            parts += plain
            lines.append(" ".join(plain))
        encoded = self.tokenize("\n".join(lines))
        ends = [end for _, end in encoded.offsets[:_MAX_QUESTION]]
        segments, begin, end = [], len(history), -1
        for segment in parts:
            end += 1 + len(segment)  # in characters; one of white space stands between two segments
            following = len(history) + bisect_right(ends, end, begin - len(history))
            # A segment without tokens of its own, such as a control token, gets its neighbour's.
            first = min(begin, len(history) + max(len(ends) - 1, 0))
            segments.append((first, max(following, first + 1)))
            begin = following
        return self._row([*history, *encoded.ids[:_MAX_QUESTION]], "", tuple(segments))

    def _row(
        self, question: list[int], draft: str | Sequence[int], segments: tuple[tuple[int, int], ...] = ()
    ) -> ReaderRow:
        if isinstance(draft, str):
            draft = self.ids(self.plain(draft))
        prompt = [*question, *self._after_question]
        return ReaderRow((*prompt, *draft), len(question), len(prompt), segments)


def _drop_unread(rows: list[ReaderRow], layers: Sequence[PooledLayer]) -> list[ReaderRow]:
    """Cut off what nothing is pooled of: what follows a question does not change its states."""
    if any(span != "question" for _, span, _ in layers):
        return rows
    shorter = []
    for row in rows:
        end = row.question or len(row.ids)  # what follows an empty question stands for it
        shorter.append(row._replace(ids=row.ids[:end], prompt=min(row.prompt, end)))
    return shorter


def pool_row(
    states: Mapping[int, Float32Array],
    row: ReaderRow,
    layers: Sequence[PooledLayer],
    segment: tuple[int, int] | None = None,
) -> Float32Array:
    """Pool the states of a text or, without its draft, of a segment of its question; shape (layers, hidden size)."""
    if not layers:
        return np.zeros((0, 0), np.float32)
    # A segment's states never include a draft that was read behind it.
    draft = 0 if segment else len(row.ids) - row.prompt
    question = range(*segment) if segment and row.question else range(row.question)
    return np.stack(pool_states(states, question, row.prompt, draft, layers))


def can_read(prompt: PromptTemplate, layers: Sequence[PooledLayer]) -> bool:
    """Return whether the reader gives these states under this prompt."""
    if prompt != ANSWER or not layers:
        return False
    return all(layer in STATES and (span, pooling) in _POOLED for layer, span, pooling in layers)


class ReaderProxy(HasStates):
    """The default model as far as the shipped gates read it: `Reader`, loaded on first use.

    It neither writes nor scores. `rgate_integrations.models.proxies` says when the whole model is used instead.

    Attributes:
        max_batch_size: How many questions share a pass.
    """

    name = DEFAULT_MODEL
    fingerprint = FINGERPRINT
    num_layers = 30
    max_batch_size = 16

    @property
    def reader(self) -> Reader:
        """The reader, shared in the process.

        Raises:
            ModelLoadError: It is missing and may not be downloaded here, or it cannot be loaded.
            DownloadError: It is missing, and could not be downloaded.
        """
        return shared_reader(fetch_path(READER, "gate's model"))

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states, of those that `can_read` allows; see `HasStates.hidden`."""
        texts = [draft_tokens_or_text(draft, DEFAULT_MODEL) for draft in drafts or ()]
        return self.reader.hidden([fields["question"] for fields in values], texts, layers)

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Pool hidden states of requests in one pass, of those that `can_read` allows."""
        return self.reader.request_states(texts, layers)

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None if it is not longer."""
        return self.reader.truncate(text, tokens)


def shared_reader(folder: Path) -> Reader:
    """Return the process-wide reader of a folder."""
    return load_shared(Reader, folder)
