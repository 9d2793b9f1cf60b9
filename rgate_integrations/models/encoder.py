"""Reads texts in a hundred languages with multilingual-e5-small, on ONNX Runtime in int8.

One pass gives a text's sentence vector and the states of its parts at several layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import call
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import (
    HasStates,
    HiddenStates,
    PooledLayer,
    RequestLayers,
    RequestStates,
    Values,
    layer_numbers,
)
from rgate_integrations.models.encoder_file import (
    BRANCH,
    BRANCH_LAYERS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    TABLE,
    TOKENS,
    WEIGHTS,
    adapter_digest,
    dequantise,
)
from rgate_integrations.models.onnx_model import MAX_HISTORY, OnnxModel, OnnxSession, pack_texts
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array, unit
from rgate_integrations.runtime.files import SHIPPED
from rgate_integrations.runtime.segments import Range, Segmented, join_segments
from rgate_integrations.runtime.text import encodable
from rgate_integrations.runtime.threads import map_parallel

ENCODER = "multilingual-e5-small"
FINGERPRINT = "1571fc9827503943"
"""The first digits of the SHA-256 of the 4-bit weights."""
STATES = (8, 10, 12)
"""The layers to pool by default. The last gives the sentence vector."""
ALL_LAYERS = LAYERS + BRANCH_LAYERS
"""Number of layers. Layers 13 to 16 are copies of 9 to 12 that also follow layer 8, adapted to classify requests."""
STAGES = (BRANCH, LAYERS, ALL_LAYERS)
"""Last layer of each graph. The later graphs start from the first's output, and only run if needed."""
MAX_TOKENS = 3_072
"""Maximum number of tokens of a text; the rest is ignored."""

Prefix: TypeAlias = Literal["query: ", "passage: "]

_BEGIN, _END = 0, 2  # ids of the tokens around each text
# A text of more than 512 tokens is read in windows, which overlap by this many. A token counts in the window where it
# is farther from the edge.
_OVERLAP = 128
_BATCH_TOKENS = 128  # larger batches do not fit into a core's caches, and are slower


def graph_file(stage: int) -> str:
    """Return the file name of the graph whose last layer is ``stage``; see `STAGES`."""
    return f"graph_{stage}.onnx"


class Tokens(NamedTuple):
    """The token ids of a text or of one of its windows, and the ranges of tokens to pool, the whole text's first."""

    ids: list[int]
    ranges: list[Range]


class Encoder(OnnxModel):
    """multilingual-e5-small, loaded from a folder that `encoder_file.make_encoder` wrote."""

    title = "The encoder"
    entry = ENCODER
    shipped = SHIPPED / "encoder"

    def _load(self, folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        loads: list[Callable[[], Any]] = [partial(SentencePieceProcessor, model_file=str(folder / TOKENS))]
        for stage in STAGES:
            loads.append(partial(OnnxSession, (self.shipped / graph_file(stage)).read_bytes(), folder))
        # Reading the vocabulary takes longest, so the graphs are opened beside it.
        self._tokens, *sessions = map_parallel(call, loads, 2)
        self._sessions = dict(zip(STAGES, sessions, strict=True))
        # Memory-mapped, so that only the rows of tokens that occur are read, not all 54 MB.
        self._table = np.memmap(folder / WEIGHTS, np.uint8, "r", shape=TABLE)

    def _compute_test_states(self, text: str) -> Float32Array:
        return self.encode([text], layers=(*STATES, ALL_LAYERS))[0].whole

    def vectors(self, texts: Sequence[str], prefix: Prefix) -> Float32Array:
        """Return e5's sentence vectors, normalised, shape (texts, 384).

        Args:
            texts: The texts.
            prefix: ``"query: "`` for queries, ``"passage: "`` for passages; e5 was trained with these prefixes.
        """
        encoded = self.encode(texts, layers=(LAYERS,), prefix=prefix)
        return unit(np.array([text.whole[-1] for text in encoded], np.float32).reshape(-1, HIDDEN))

    def encode(
        self,
        texts: Sequence[str],
        parts: Sequence[Sequence[Range]] | None = None,
        *,
        layers: Sequence[int] = STATES,
        prefix: Prefix = "query: ",
    ) -> list[RequestStates]:
        """Return the pooled states of each text, and of its parts as segments.

        A text of more than 512 tokens is read in overlapping windows.

        Args:
            texts: The texts; each is truncated to 3,072 tokens.
            parts: For each text, ranges of characters to pool separately, ascending and disjoint; None for no
                parts. A part without tokens of its own, such as white space, gets a neighbouring token.
            layers: The layers to pool, from 1 to 16; see `ALL_LAYERS`.
            prefix: What the texts are; see `vectors`.
        """
        pairs = zip(texts, parts or [()] * len(texts), strict=True)
        rows = [self.tokens(text, text_parts, prefix=prefix) for text, text_parts in pairs]
        before = len(self._tokens_before(prefix))
        windows = [list(_windows(row, before)) for row in rows]
        every = list(chain.from_iterable(windows))
        lengths = [len(window.ids) for window in every]
        sums = iter(self._run_batches(every, lengths, _BATCH_TOKENS, partial(self._sums, layers=layers)))
        results = []
        for row, row_windows in zip(rows, windows, strict=True):
            total = np.sum([next(sums) for _ in row_windows], axis=0, dtype=np.float32)
            counts = np.array([end - begin for begin, end in row.ranges], np.float32)
            means = total / counts[:, None, None]
            results.append(RequestStates(means[0], means[1:], len(row.ids)))
        return results

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without prefix and end token. No part of it becomes a control token."""
        return list(self._tokens.encode(encodable(text)))

    def log_frequency(self, word: str) -> float:
        """Return the natural log of a word's frequency in texts in a hundred languages, estimated from its tokens."""
        return float(sum(map(self._tokens.get_score, self.ids(word))))

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that."""
        _, ends = self._tokenize(text)
        return text[: ends[tokens - 1]] if len(ends) > tokens else None

    def keep_end(self, text: str, tokens: int) -> str:
        """Return the last ``tokens`` tokens of a text, or the whole text if it is no longer than that."""
        _, ends = self._tokenize(text)
        return text[ends[-tokens - 1] :] if len(ends) > tokens else text

    def _tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the end of each token in characters."""
        mapping = self._tokens.encode(encodable(text), return_type="offset_mapping")
        return mapping["ids"], [end for _, end in mapping["offsets"]]

    def tokens(self, text: str, parts: Sequence[Range] = (), *, prefix: Prefix = "query: ") -> Tokens:
        """Return a text's token ids, with prefix and end token, and the token ranges of the text and of ``parts``."""
        before = self._tokens_before(prefix)
        tokens, ends = self._tokenize(text) if parts else (self.ids(text), [])
        ids, ends = [*before, *tokens[:MAX_TOKENS], _END], ends[:MAX_TOKENS]
        ranges = [(0, len(ids))]
        for begin, end in parts:
            # A token may start with the white space before a part, so its end decides to which part it belongs.
            first = min(bisect_right(ends, begin), max(len(ends) - 1, 0))
            last = max(bisect_right(ends, end), first + 1)
            ranges.append((len(before) + first, len(before) + last))
        return Tokens(ids, ranges)

    def _tokens_before(self, prefix: Prefix) -> list[int]:
        return [_BEGIN, *self._tokens.encode(prefix)]

    def _sums(self, windows: Sequence[Tokens], layers: Sequence[int]) -> list[Float32Array]:
        """Return the sums of states over each window's ranges, each of shape (ranges, layers, 384)."""
        results = []
        by_window = self.states([window.ids for window in windows], layers)
        for window, states in zip(windows, by_window, strict=True):
            # A range without tokens in this window may end before it begins.
            sums = [states[:, begin : max(begin, end)].sum(axis=1) for begin, end in window.ranges]
            results.append(np.stack(sums))
        return results

    def states(self, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Float32Array]:
        """Return the states of each text, shape (layers, tokens, 384). A text is at most 512 token ids."""
        ids = np.concatenate(texts)
        # After the last token, the graph has a dummy token, which attention ignores.
        positions, layout, begins = pack_texts(texts, filler=len(ids))
        inputs = {"embedded": dequantise(self._table[ids]).reshape(-1, HIDDEN), "places": positions}
        states: dict[int, Float32Array] = {}
        below = 0
        for stage, session in self._sessions.items():
            # The later graphs start from layer 8, so it is always needed.
            needed = sorted(layer for layer in {*layers, BRANCH} if below < layer <= stage)
            if needed:
                arrays = session.run([f"layer_{number}" for number in needed], inputs | layout)
                states |= dict(zip(needed, arrays, strict=True))
            inputs = {f"layer_{BRANCH}": states[BRANCH]}
            below = stage
        return np.split(np.stack([states[layer] for layer in layers]), begins, axis=1)


def _windows(row: Tokens, before: int) -> Iterable[Tokens]:
    """Yield the windows in which a text is read; a text of up to 512 tokens has only one.

    Windows overlap, but the ranges to pool do not: each token is pooled in one window only.

    Args:
        row: The text.
        before: Number of tokens before the text, which every window repeats.
    """
    room = POSITIONS - before - 1
    content = row.ids[before:-1]
    starts = range(0, max(len(content) - _OVERLAP, 1), room - _OVERLAP)
    for start in starts:
        ids = [*row.ids[:before], *content[start : start + room], _END]
        # Neighbouring windows are cut in the middle of their overlap.
        begin = 0 if start == 0 else start + before + _OVERLAP // 2
        end = len(row.ids) if start == starts[-1] else start + before + room - _OVERLAP // 2
        ranges = [(max(first, begin) - start, min(last, end) - start) for first, last in row.ranges]
        yield Tokens(ids, ranges)


# --- as a proxy ----------------------------------------------------------------------------------------------------


class EncoderProxy(HasStates):
    """multilingual-e5-small for gates: an `Encoder` that is loaded on first use.

    It reads requests without a prompt. It can read neither drafts nor partial answers, and cannot write or
    score text.
    """

    name = ENCODER
    num_layers = LAYERS
    question_layers = STATES

    @property
    def fingerprint(self) -> str:
        """Text that identifies the weights and the adapted layers: a hash of each, joined by a hyphen."""
        return f"{FINGERPRINT}-{adapter_digest()}"

    @property
    def encoder(self) -> Encoder:
        """The encoder, shared in the process.

        Raises:
            ModelLoadError: It is missing while downloads are forbidden, or it cannot be loaded.
            DownloadError: It is missing, and could not be downloaded.
            ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
        """
        return Encoder.shared()

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Return pooled hidden states of questions; see `HasStates.hidden`.

        Raises:
            EvidenceError: ``drafts`` is not None, a layer is not between 1 and 16, or something other than a
                mean over the question is requested.
        """
        if drafts is not None:
            raise EvidenceError(
                f"{ENCODER} reads questions, but not drafts or partial answers.",
                hint="Use a proxy that reads them, such as proxy='smollm2-135m-instruct' (--proxy).",
            )
        numbers = _check_layers(layers)
        questions = [" ".join(fields["question"].split()) for fields in values]
        encoded = self.encoder.encode(questions, layers=numbers)
        return [HiddenStates(_select(text.whole, layers, numbers), text.prompt_tokens) for text in encoded]

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Return pooled states of requests and of their segments, from a single pass; see `HasStates.request_states`.

        Raises:
            EvidenceError: A layer is not between 1 and 16, or something other than a mean over the question is
                requested.
        """
        numbers = _check_layers(layers.every)
        inputs = [self.join(text) for text in texts]
        encodings = self.encoder.encode(*zip(*inputs, strict=True), layers=numbers) if texts else []
        results = []
        for text, encoded in zip(texts, encodings, strict=True):
            whole, segments = encoded.whole, encoded.segments
            if len(segments) > len(text.segments):
                whole, segments = segments[0], segments[1:]
            states = RequestStates(
                _select(whole, layers.whole, numbers),
                _select(segments, layers.segments, numbers),
                encoded.prompt_tokens,
            )
            results.append(states)
        return results

    def join(self, text: Segmented) -> tuple[str, list[Range]]:
        """Return one text (the end of the history, then the request) and the ranges of characters to pool.

        The ranges are those of the request's segments. If there is a history, the range of the whole request comes
        before them. The history itself is not pooled: it only contributes through attention.
        """
        history = self.encoder.keep_end(text.history, MAX_HISTORY)
        request, ranges = join_segments(text.lines)
        every = [(0, len(request)), *ranges] if history else ranges
        return history + request, [(len(history) + begin, len(history) + end) for begin, end in every]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that."""
        return self.encoder.truncate(text, tokens)


def _check_layers(layers: Sequence[PooledLayer]) -> list[int]:
    """Return the numbers of the layers to pool, ascending.

    Raises:
        EvidenceError: A layer is not between 1 and 16, or something other than a mean over the question is
            requested.
    """
    for layer, span, pooling in layers:
        if not 0 < layer <= ALL_LAYERS or (span, pooling) != ("question", "mean"):
            raise EvidenceError(
                f"This gate cannot use the proxy {ENCODER}: it needs layer {layer} with span {span!r} and pooling "
                f"{pooling!r}, but this proxy has only layers 1 to {ALL_LAYERS}, averaged over the question.",
                hint="Use the model that the gate was made for, such as proxy='smollm2-135m-instruct'.",
            )
    return layer_numbers(layers)


def _select(pooled: Float32Array, layers: Sequence[PooledLayer], numbers: Sequence[int]) -> Float32Array:
    """Return the states of the requested layers, shape (..., layers, 384).

    Args:
        pooled: The states of all layers that were read, shape (..., numbers, 384).
        layers: The requested layers, in the order to return.
        numbers: Numbers of the layers in ``pooled``, in order.
    """
    return pooled[..., [numbers.index(layer) for layer, _, _ in layers], :]
