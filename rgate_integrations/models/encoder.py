"""Reads texts in a hundred languages with multilingual-e5-small, by ONNX Runtime: int8, no torch.

One pass gives a text's sentence vector and the states of its parts at several layers. They depend on nothing beside
the text: each token has a scale of its own, the products are of integers, and attention looks at each text alone. So
the numbers are the same in any batch and on any number of threads.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.encoder_file import (
    HIDDEN,
    LAYERS,
    POSITIONS,
    TABLE,
    TOKENS,
    WEIGHTS,
    dequantise,
)
from rgate_integrations.models.onnx_session import OnnxSession
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.threads import ForkSafeLock, count_cores

ENCODER = "multilingual-e5-small"
FINGERPRINT = "1571fc9827503943"
"""Beginning of the SHA-256 of the 4-bit weights."""
STATES = (8, 10, 12)
"""The layers that are pooled by default: after so many of twelve. The last gives the sentence vector."""
STAGES = (8, LAYERS)
"""Where the graph is cut in two: what lies above the layers that are wanted is not computed."""
SELF_TEST = "self_test.json"
MAX_TOKENS = 3_072
"""Of a longer text the beginning is read."""

Prefix: TypeAlias = Literal["query: ", "passage: "]
Range: TypeAlias = tuple[int, int]
"""Begin and end."""

_SHIPPED = SHIPPED / "encoder"
_BEGIN, _END = 0, 2  # tokens around each text
_SURROGATE = re.compile("[\ud800-\udfff]")  # halves of a character, which UTF-8 cannot write
_OVERLAP = 128
"""A text over 512 tokens is read in windows that share so many; a token counts where it stands further inside."""
_BATCH_TOKENS = 128  # of one run: more is slower, since it leaves the caches of a core
_SAME = 0.999  # cosine that another CPU's rounding of float32 stays far above


def graph_file(stage: int) -> str:
    """Return the name of the graph that ends with a layer of `STAGES`."""
    return f"graph_{stage}.onnx"


@dataclass(frozen=True)
class Encoded:
    """What was read of a text.

    Attributes:
        whole: Means over all tokens, shape (layers, 384).
        parts: Means over each part, shape (parts, layers, 384).
        tokens: Length of the text, in tokens.
    """

    whole: Float32Array = field(repr=False)
    parts: Float32Array = field(repr=False)
    tokens: int

    @property
    def vector(self) -> Float32Array:
        """The last layer's mean at length 1, shape (384,): e5's sentence vector, if that layer is the twelfth."""
        last: Float32Array = self.whole[-1] / np.linalg.norm(self.whole[-1])
        return last


class _Row(NamedTuple):
    """A text in tokens, and the ranges of tokens to be pooled: the first is all of it."""

    ids: list[int]
    ranges: list[Range]


class _Window(NamedTuple):
    """Tokens that are read at once, and which of them are pooled for each range of their text."""

    ids: list[int]
    ranges: list[Range]


class Encoder:
    """multilingual-e5-small. Safe for threads.

    Args:
        folder: What `rgate_integrations.models.encoder_file.make_encoder` wrote.
        threads: How many texts are read side by side in a batch; by default one a core, or ``OMP_NUM_THREADS``.
            A single text is read by one thread: so it takes nothing from an LLM on the same CPU.
        self_test: Whether to read texts whose states are known; not while their file is being made.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    def __init__(self, folder: Path, *, threads: int | None = None, self_test: bool = True) -> None:
        self.threads = threads or count_cores()
        try:
            from sentencepiece import SentencePieceProcessor

            self._tokens = SentencePieceProcessor(model_file=str(folder / TOKENS))
            # 54 MB, of which only the rows of tokens that occur are read.
            self._table = np.memmap(folder / WEIGHTS, np.uint8, "r", shape=TABLE)
            self._sessions = {}
            for stage in STAGES:
                self._sessions[stage] = OnnxSession((_SHIPPED / graph_file(stage)).read_bytes(), folder)
            if self_test:
                self.check()
        # ONNX Runtime raises classes of its own, or plain Exception.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelLoadError(
                f"The encoder in {str(folder)!r} could not be loaded: {reason}",
                hint=f"Remove the folder, then: rgate download {ENCODER}. Else report your CPU.",
            ) from error

    def check(self) -> None:
        """Read a few texts whose states are known.

        Raises:
            ValueError: The states are others: the files are not those of this version, or this CPU computes
                something else.
        """
        for text, known in json.loads((_SHIPPED / SELF_TEST).read_text(encoding="utf-8")).items():
            found = self.encode([text])[0].whole[:, : len(known[0])]
            cosine = float((found * known).sum() / (np.linalg.norm(found) * np.linalg.norm(known)))
            if not cosine >= _SAME:  # nor is NaN
                raise ValueError(f"it does not give the states that it should (cosine {cosine:.3f})")

    def vectors(self, texts: Sequence[str], prefix: Prefix) -> Float32Array:
        """Return e5's sentence vectors, shape (texts, 384), of length 1.

        Args:
            texts: The texts.
            prefix: What the texts are: e5 reads what is searched for as ``"query: "``, and what is found as
                ``"passage: "``.
        """
        found = [each.vector for each in self.encode(texts, layers=(LAYERS,), prefix=prefix)]
        return np.array(found, np.float32).reshape(-1, HIDDEN)

    def encode(
        self,
        texts: Sequence[str],
        parts: Sequence[Sequence[Range]] | None = None,
        *,
        layers: Sequence[int] = STATES,
        prefix: Prefix = "query: ",
    ) -> list[Encoded]:
        """Read texts, each once.

        Args:
            texts: The texts; what is longer than 3,072 tokens is cut.
            parts: Of each text, ranges of characters, in order and apart, whose states are pooled by themselves. One
                that has no tokens of its own, such as white space, has those of its neighbour.
            layers: The layers that are pooled, from 1 to 12. What lies above them is not computed.
            prefix: What the texts are; see `vectors`.
        """
        before = [_BEGIN, *self._tokens.encode(prefix)]
        own: Iterable[Sequence[Range]] = parts or [()] * len(texts)
        rows = [self._row(text, each, before) for text, each in zip(texts, own, strict=True)]
        by_row = [list(_windows(row, len(before))) for row in rows]
        sums = iter(self._read(list(chain.from_iterable(by_row)), layers))
        results = []
        for row, windows in zip(rows, by_row, strict=True):
            total = np.sum([next(sums) for _ in windows], axis=0, dtype=np.float32)
            counts = np.array([end - begin for begin, end in row.ranges], np.float32)
            means = total / counts[:, None, None]
            results.append(Encoded(means[0], means[1:], len(row.ids)))
        return results

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without those around it; nothing in it is a control token."""
        found: list[int] = self._tokens.encode(_SURROGATE.sub("\ufffd", text))
        return found

    def log_frequency(self, word: str) -> float:
        """Return the natural log of a word's share of text in a hundred languages, as its tokens have it."""
        return float(sum(map(self._tokens.get_score, self.ids(word))))

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        ends = self._ends(text)
        return text[: ends[tokens - 1]] if len(ends) > tokens else None

    def keep_end(self, text: str, tokens: int) -> str:
        """Return the last tokens of a text, or all of it if it has no more."""
        ends = self._ends(text)
        return text[ends[-tokens - 1] :] if len(ends) > tokens else text

    def _ends(self, text: str) -> list[int]:
        """Return where each token of a text ends, in characters."""
        offsets = self._tokens.encode(_SURROGATE.sub("\ufffd", text), return_type="offset_mapping")["offsets"]
        return [end for _, end in offsets]

    def _row(self, text: str, parts: Sequence[Range], before: list[int]) -> _Row:
        if not parts:
            ids = [*before, *self.ids(text)[:MAX_TOKENS], _END]
            return _Row(ids, [(0, len(ids))])
        mapped = self._tokens.encode(_SURROGATE.sub("\ufffd", text), return_type="offset_mapping")
        ids = [*before, *mapped["ids"][:MAX_TOKENS], _END]
        ends = [end for _, end in mapped["offsets"][:MAX_TOKENS]]
        ranges = [(0, len(ids))]
        for begin, end in parts:
            # A token may begin with the white space before it, so its end says where it belongs.
            first = min(bisect_right(ends, begin), max(len(ends) - 1, 0))
            last = max(bisect_right(ends, end), first + 1)
            ranges.append((len(before) + first, len(before) + last))
        return _Row(ids, ranges)

    def _read(self, windows: list[_Window], layers: Sequence[int]) -> list[Float32Array]:
        """Return for each window the sums of the states of its ranges, shape (ranges, layers, 384)."""
        lengths = [len(window.ids) for window in windows]
        # Texts of like length share a run, so that little of attention is padding; and each thread gets as much as
        # the others, since a call ends with the slowest.
        share = min(-(-sum(lengths) // self.threads), _BATCH_TOKENS)
        batches: list[list[int]] = []
        used = share
        for i in sorted(range(len(windows)), key=lengths.__getitem__):
            if used >= share:
                batches.append([])
                used = 0
            batches[-1].append(i)
            used += lengths[i]
        read = partial(self._sums, layers=layers)
        runs = [[windows[i] for i in batch] for batch in batches]
        if len(runs) == 1:
            results = list(map(read, runs))  # no thread is started for a question
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                results = list(pool.map(read, runs))
        by_place = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
        return [by_place[i] for i in range(len(windows))]

    def _sums(self, windows: Sequence[_Window], layers: Sequence[int]) -> list[Float32Array]:
        found = []
        states = self.states([window.ids for window in windows], layers)
        for window, each in zip(windows, states, strict=True):
            sums = np.zeros((len(window.ranges), len(layers), HIDDEN), np.float32)
            for i, (begin, end) in enumerate(window.ranges):
                if begin < end:
                    sums[i] = each[:, begin:end].sum(axis=1)
            found.append(sums)
        return found

    def states(self, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Float32Array]:
        """Return for each text of at most 512 tokens the states of each of them, (layers, tokens, 384). One run."""
        lengths = np.array(list(map(len, texts)))
        ends = lengths.cumsum()
        columns = np.arange(lengths.max())
        # Tokens lie one after the other, without padding; only attention sees a row a text, as `rows` says. Behind
        # the end of a text stands a row that the graph has for that, at which nothing looks.
        inside = columns < lengths[:, None]
        rows = np.where(inside, (ends - lengths)[:, None] + columns, ends[-1])
        feed = {"rows": rows.astype(np.int64), "tokens": np.flatnonzero(inside).astype(np.int64)}
        embedded = dequantise(self._table[np.concatenate(texts)]).reshape(-1, HIDDEN)
        places = np.broadcast_to(columns, inside.shape)[inside].astype(np.int64)
        below = {"embedded": embedded, "places": places}
        found: dict[int, Float32Array] = {}
        for stage, session in self._sessions.items():
            # Its last layer is what the next stage begins with.
            numbers = sorted({stage, *(layer for layer in layers if layer <= stage)} - found.keys())
            arrays = session.run([f"layer_{number}" for number in numbers], below | feed)
            found |= dict(zip(numbers, arrays, strict=True))
            if stage >= max(layers):
                break
            below = {f"layer_{stage}": found[stage]}
        stacked = np.stack([found[layer] for layer in layers])
        return np.split(stacked, ends[:-1], axis=1)


def _windows(row: _Row, before: int) -> Iterable[_Window]:
    """Yield the windows that a text is read in, one up to 512 tokens; each token counts in one of them.

    Args:
        row: The text.
        before: How many tokens stand before it, in every window.
    """
    room = POSITIONS - before - 1
    content = row.ids[before:-1]
    starts = range(0, max(len(content) - _OVERLAP, 1), room - _OVERLAP)
    for start in starts:
        ids = [*row.ids[:before], *content[start : start + room], _END]
        # The first counts from its beginning, the last up to its end, others from the middle of what they share.
        begin = 0 if start == 0 else start + before + _OVERLAP // 2
        end = len(row.ids) if start == starts[-1] else start + before + room - _OVERLAP // 2
        ranges = [(max(first, begin) - start, min(last, end) - start) for first, last in row.ranges]
        yield _Window(ids, ranges)


def join_segments(lines: Sequence[Sequence[str]]) -> tuple[str, list[Range]]:
    """Return the text of segments by line, and the range of each: what `Encoder.encode` takes.

    Args:
        lines: See `rgate_integrations.runtime.segments.split_lines`.
    """
    text, ranges = "", []
    for line in lines:
        for segment in line:
            ranges.append((len(text), len(text) + len(segment)))
            text += segment + " "
        text = text[:-1] + "\n"
    return text[:-1], ranges


# One a folder for all. Guarded, so that callers at once do not load it twice.
_encoders: dict[Path, Encoder] = {}
_loading = ForkSafeLock()


def shared_encoder(folder: Path) -> Encoder:
    """Return the process-wide encoder of a folder; of callers at once, one loads it for all."""
    with _loading:
        if folder not in _encoders:
            _encoders[folder] = Encoder(folder)
        return _encoders[folder]
