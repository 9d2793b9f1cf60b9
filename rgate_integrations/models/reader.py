"""Reads questions and begun answers with the first layers of the default model, by ONNX Runtime: int8, no torch.

What a text gives depends on nothing beside it: each token has a scale of its own, the products are of integers, and
attention looks at each text alone. So the numbers are the same in any batch and on any number of threads.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ModelLoadError
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
from rgate_integrations.models.onnx_session import OnnxSession
from rgate_integrations.models.pooling import (
    PooledLayer,
    RequestLayers,
    layer_numbers,
    pool_states,
)
from rgate_integrations.models.reader_file import TOKENIZER
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.segments import Segmented
from rgate_integrations.runtime.threads import ForkSafeLock, count_cores

FINGERPRINT = "90a1a11611da98e1"
"""That of the whole default model; see `rgate_integrations.models.model_runner.fingerprint`."""
STATES = (14, 16, 18, 20, 22)
"""The layers whose states can be had: what goes into layer n, counted from 0."""
GRAPH, SELF_TEST = "graph.onnx", "self_test.json"
PREFIX_TOKENS = 19
"""Tokens of the prompt before the question; their keys and values are constants of the graph."""

_POOLED = {
    ("question", "mean"),
    ("question", "last"),
    ("prompt", "last"),
    ("draft", "mean"),
    ("draft", "last"),
    ("all", "last"),
}
"""What can be pooled: the prefix has no states here, so there is no mean over the whole prompt."""
_AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
_MAX_QUESTION = 3_072  # tokens; the engine cuts requests before, by characters
_MAX_HISTORY = 768
"""Tokens of what was said before; of more the end is read."""
_BATCH_TOKENS = 256  # of one run: more is no faster, and takes more memory
_WINDOW, _OVERLAP = 256, 64
"""A longer text is read in windows of so many tokens, each of which begins with the last ones of the window before:
so time grows with the length and not with its square, memory does not grow, and windows are read side by side."""
_SAME = 0.999  # cosine that another CPU's rounding of float32 stays far above


class ReaderRow(NamedTuple):
    """One text in tokens.

    Attributes:
        ids: Tokens of the question, of what follows it, and of the answer.
        question: How many are the question's, with what was said before it.
        prompt: How many come before the answer.
        segments: Where each segment of the question begins and ends.
    """

    ids: tuple[int, ...]
    question: int
    prompt: int
    segments: tuple[tuple[int, int], ...] = ()


class Reader(TextEncoder):
    """The first 22 layers of SmolLM2-135M-Instruct. Safe for threads.

    Args:
        folder: What `rgate_integrations.models.reader_file.make_reader` wrote.
        threads: How many texts are read side by side in a batch; by default one a core, or ``OMP_NUM_THREADS``.
            A single text is read by one thread: so it takes nothing from an LLM on the same CPU.
        self_test: Whether to read questions whose states are known; not while their file is being made.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    def __init__(self, folder: Path, *, threads: int | None = None, self_test: bool = True) -> None:
        self.threads = threads or count_cores()
        try:
            from tokenizers import Tokenizer

            super().__init__(Tokenizer.from_file(str(folder / TOKENIZER)))
            self._session = OnnxSession((SHIPPED / "reader" / GRAPH).read_bytes(), folder)
            self._after_question = self.ids(_AFTER_QUESTION)
            if self_test:
                self.check()
        # ONNX Runtime and tokenizers raise classes of their own, or plain Exception.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelLoadError(
                f"The gate's model in {str(folder)!r} could not be loaded: {reason}",
                hint=f"Remove the folder, then: rgate download {READER}. Else report your CPU.",
            ) from error

    def check(self) -> None:
        """Read a few questions whose states are known.

        Raises:
            ValueError: The states are others: the files are not those of this version, or this CPU computes
                something else.
        """
        known_states = json.loads((SHIPPED / "reader" / SELF_TEST).read_text(encoding="utf-8"))
        for question, known in known_states.items():
            (states,) = self.states([self.encode(question).ids], (max(STATES),))
            found = states[max(STATES)][-1][: len(known)]
            cosine = float(found @ known / (np.linalg.norm(found) * np.linalg.norm(known)))
            if not cosine >= _SAME:  # nor is NaN
                raise ValueError(f"it does not give the states that it should (cosine {cosine:.3f})")

    def hidden(
        self,
        questions: Sequence[str],
        drafts: Sequence[str | Sequence[int]] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states; see `rgate_integrations.models.base.HasStates.hidden`.

        Args:
            questions: The questions.
            drafts: What the answers begin with, one a question: text, or the model's own tokens; or None.
            layers: Which states, of those that `can_read` allows.
        """
        rows = _without_unread(list(map(self.encode, questions, drafts or [""] * len(questions))), layers)
        results = []
        for row, states in zip(rows, self._read(rows, layer_numbers(layers)), strict=True):
            results.append(HiddenStates(pool_row(states, row, layers), PREFIX_TOKENS + len(row.ids)))
        return results

    def request_states(self, texts: Sequence[Segmented], layers: RequestLayers) -> list[RequestStates]:
        """Pool hidden states of requests; see `rgate_integrations.models.base.HasStates.request_states`."""
        rows = _without_unread(list(map(self.encode_segments, texts)), layers.every)
        results = []
        for row, states in zip(rows, self._read(rows, layer_numbers(layers.every)), strict=True):
            request = (row.segments[0][0], row.segments[-1][1])  # without what was said before
            whole = pool_row(states, row, layers.whole, request)
            segments = [pool_row(states, row, layers.segments, segment) for segment in row.segments]
            results.append(RequestStates(whole, np.stack(segments), PREFIX_TOKENS + len(row.ids)))
        return results

    def _read(self, rows: Sequence[ReaderRow], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return the states of the tokens of each row, (tokens, hidden size), by layer.

        Rows are cut into windows, windows of like length are read in one run, and each row's are joined again.
        """
        windows, counts = [], []
        for row in rows:
            # From its beginning: what follows a token changes nothing about its own window.
            starts = range(0, max(len(row.ids) - _OVERLAP, 1), _WINDOW - _OVERLAP)
            windows += [row.ids[start : start + _WINDOW] for start in starts]
            counts.append(len(starts))
        batches = _batches(list(map(len, windows)), self.threads)
        with ThreadPoolExecutor(self.threads) as pool:
            texts = [[windows[i] for i in batch] for batch in batches]
            results = pool.map(partial(self.states, numbers=numbers), texts)
            read = dict(zip(chain(*batches), chain.from_iterable(results), strict=True))
        in_order = iter([read[i] for i in range(len(windows))])
        joined = []
        for count in counts:
            first, *others = islice(in_order, count)
            states = {}
            for (
                layer
            ) in numbers:  # a token of two windows has the states of the first, which saw more before it
                parts = [first[layer], *(window[layer][_OVERLAP:] for window in others)]
                states[layer] = np.concatenate(parts)
            joined.append(states)
        return joined

    def states(self, texts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return for each text the states of each of its tokens, (tokens, hidden size), by layer. One run."""
        lengths = np.array(list(map(len, texts)))
        starts = np.concatenate([[0], lengths.cumsum()])
        columns = np.arange(lengths.max())
        # Tokens lie one after the other, without padding; only attention sees a row a text, as `places` says.
        inside = columns < lengths[:, None]
        # Where a text has no more tokens, its first one stands in; nothing looks at it.
        places = np.where(inside, starts[:-1, None] + columns, starts[:-1, None])
        inputs = {
            "ids": np.concatenate(texts).astype(np.int64),
            "positions": PREFIX_TOKENS + np.broadcast_to(columns, inside.shape)[inside],
            "rows": places.astype(np.int64),
            "tokens": np.flatnonzero(inside).astype(np.int64),
        }
        layers = self._session.run([f"layer_{number}" for number in numbers], inputs)
        by_layer = [np.split(layer, starts[1:-1]) for layer in layers]
        return [dict(zip(numbers, own, strict=True)) for own in zip(*by_layer, strict=True)]

    def encode(self, question: str, draft: str | Sequence[int] = "") -> ReaderRow:
        """Return a question, and what its answer begins with, in tokens."""
        return self._row(self.ids(self.plain(" ".join(question.split())))[:_MAX_QUESTION], draft)

    def encode_segments(self, text: Segmented) -> ReaderRow:
        """Return a request in tokens, with the place of each of its segments."""
        before = self.ids(self.plain(text.history))[-_MAX_HISTORY:]
        lines, parts = [], []
        for line in text.lines:
            # Segment by segment: a control token in one must not move where the next begins.
            plain = [" ".join(self.plain(segment).split()) for segment in line]
            parts += plain
            lines.append(" ".join(plain))
        encoded = self.tokenize("\n".join(lines))
        asked = encoded.ids[:_MAX_QUESTION]
        ends = [end for _, end in encoded.offsets[:_MAX_QUESTION]]
        segments, begin, end = [], 0, -1
        for segment in parts:
            end += 1 + len(segment)  # in characters; one of white space stands between two segments
            following = bisect_right(ends, end, begin)
            # One that has no tokens of its own, such as a control token, has those of its neighbour.
            first = min(begin, max(len(ends) - 1, 0))
            segments.append((len(before) + first, len(before) + max(following, first + 1)))
            begin = following
        return self._row([*before, *asked], "", tuple(segments))

    def _row(
        self, question: list[int], draft: str | Sequence[int], segments: tuple[tuple[int, int], ...] = ()
    ) -> ReaderRow:
        if isinstance(draft, str):
            draft = self.ids(self.plain(draft))
        prompt = [*question, *self._after_question]
        return ReaderRow((*prompt, *draft), len(question), len(prompt), segments)


def _without_unread(rows: list[ReaderRow], layers: Sequence[PooledLayer]) -> list[ReaderRow]:
    """Return rows without what nothing is pooled of: what follows a question does not change its states."""
    if any(span != "question" for _, span, _ in layers):
        return rows
    ends = [row.question or len(row.ids) for row in rows]  # what follows an empty question stands for it
    return [
        row._replace(ids=row.ids[:end], prompt=min(row.prompt, end))
        for row, end in zip(rows, ends, strict=True)
    ]


def _batches(lengths: Sequence[int], threads: int) -> list[list[int]]:
    """Share texts out to threads; returns indices, a list a run.

    Texts of like length share a run, so that little of attention is padding. Each thread gets as much as the others,
    since a call ends with the slowest.
    """
    share = min(-(-sum(lengths) // threads), _BATCH_TOKENS)
    batches: list[list[int]] = []
    used = share
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if used >= share:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += lengths[i]
    return batches


def pool_row(
    states: Mapping[int, Float32Array],
    row: ReaderRow,
    layers: Sequence[PooledLayer],
    segment: tuple[int, int] | None = None,
) -> Float32Array:
    """Pool the states of a text or, without its draft, of a segment of its question; shape (layers, hidden size)."""
    if not layers:
        return np.zeros((0, 0), np.float32)
    # The whole of a segment is what comes before it, even if a draft was read behind it.
    draft = 0 if segment else len(row.ids) - row.prompt
    question = range(*segment) if segment and row.question else range(row.question)
    return np.stack(pool_states(states, question, row.prompt, draft, layers))


def can_read(prompt: PromptTemplate, layers: Sequence[PooledLayer]) -> bool:
    """Return whether the reader gives these states under this prompt."""
    is_known = [layer in STATES and (span, pooling) in _POOLED for layer, span, pooling in layers]
    return prompt == ANSWER and bool(layers) and all(is_known)


class ReaderProxy(HasStates):
    """The default model as far as the shipped gates read it: `Reader`, loaded when it is first used.

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
            ModelLoadError: It is missing and is not fetched here, or it cannot be loaded.
            DownloadError: It is missing, and could not be fetched.
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
        return self.reader.hidden([each["question"] for each in values], _readable(drafts), layers)

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Pool hidden states of requests in one pass, of those that `can_read` allows."""
        return self.reader.request_states(texts, layers)

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        return self.reader.truncate(text, tokens)


def _readable(drafts: Sequence[Draft] | None) -> list[str | tuple[int, ...]]:
    return [draft_tokens_or_text(draft, DEFAULT_MODEL) for draft in drafts or ()]


# One a folder for all gates: its weights take 100 MB. Guarded, so that callers at once do not load it twice.
_readers: dict[Path, Reader] = {}
_loading = ForkSafeLock()


def shared_reader(folder: Path) -> Reader:
    """Return the process-wide reader of a folder; of callers at once, one loads it for all."""
    with _loading:
        if folder not in _readers:
            _readers[folder] = Reader(folder)
        return _readers[folder]
