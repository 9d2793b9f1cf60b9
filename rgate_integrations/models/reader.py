"""Reads questions and begun answers with the first layers of the default model, by ONNX Runtime: int8, no torch.

What a text gives depends on nothing beside it: each token has a scale of its own, the products are of integers, and
attention looks at each text alone. So the numbers are the same in any batch and on any number of threads.
"""

from __future__ import annotations

import itertools
import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.base import HiddenStates, PooledLayer, RequestLayers, RequestStates, Segmented
from rgate_integrations.models.onnx_session import open_session
from rgate_integrations.models.reader_file import TOKENIZER, WEIGHTS
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.threads import ForkSafeLock, usable_cores

READER = "smollm2-135m-reader"
READS = "smollm2-135m-instruct"
"""The model whose first layers these are."""
FINGERPRINT = "90a1a11611da98e1"
"""That of the whole model; see `rgate_integrations.models.fingerprint`."""
STATES = (14, 16, 18, 20, 22)
"""The layers whose states can be had: what goes into layer n, counted from 0."""
GRAPH, SELF_TEST = "graph.onnx", "self_test.json"
PREFIX_TOKENS = 19
"""Tokens of the prompt before the question; their keys and values are constants of the graph."""

_SPANS = {
    ("question", "mean"),
    ("question", "last"),
    ("prompt", "last"),
    ("draft", "mean"),
    ("draft", "last"),
}
_SPANS |= {("all", "last")}
_AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
_MAX_QUESTION = 3_072  # tokens; the engine cuts requests before, by characters
_MAX_HISTORY = 768
"""Tokens of what was said before; of more the end is read."""
_BATCH_TOKENS = 256  # of one run: more is no faster, and takes more memory
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

    def question_alone(self) -> ReaderRow:
        """Return it without what follows the question, on which the question's states do not depend."""
        if not self.question:
            return self
        return ReaderRow(self.ids[: self.question], self.question, self.question, self.segments)


class Reader:
    """The first 22 layers of SmolLM2-135M-Instruct. Safe for threads.

    Args:
        folder: What `rgate_integrations.models.reader_file.make_reader` wrote.
        threads: How many texts are read side by side in a batch; by default one a core, or ``OMP_NUM_THREADS``.
            A single text is read by one thread: so it takes nothing from an LLM on the same CPU.
        self_test: Whether to read a question whose states are known.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    def __init__(self, folder: Path, *, threads: int | None = None, self_test: bool = True) -> None:
        self.threads = threads or usable_cores()
        self.calls = 0
        self._counting = threading.Lock()
        try:
            import onnxruntime
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
            if not (folder / WEIGHTS).is_file():
                raise ModelLoadError(
                    f"There is no {WEIGHTS} in {str(folder)!r}.", hint=f"rgate download {READER}"
                )
            self._session = open_session((_shipped() / GRAPH).read_bytes(), folder)
            self._options = onnxruntime.RunOptions()
            self._options.only_execute_path_to_fetches = True  # not the layers above those that are wanted
            control = {each.content for each in self._tokenizer.get_added_tokens_decoder().values()}
            self._control = sorted(control, key=len, reverse=True)  # one may be a part of another
            self._after_question = self._ids(_AFTER_QUESTION)
            if self_test:
                self.check()
        except ModelLoadError:
            raise
        # ONNX Runtime and tokenizers raise classes of their own, or plain Exception.
        except Exception as error:
            raise ModelLoadError(
                f"The gate's model in {str(folder)!r} could not be loaded: {(str(error).splitlines() or [''])[0]}",
                hint=f"Remove the folder, then: rgate download {READER}",
            ) from error

    def check(self) -> None:
        """Read a few questions whose states are known.

        Raises:
            ModelLoadError: The states are others: the files are not those of this version, or this CPU computes
                something else.
        """
        for question, known in json.loads((_shipped() / SELF_TEST).read_text(encoding="utf-8")).items():
            (states,) = self.states([self.encode(question)], (max(STATES),))
            found = states[max(STATES)][-1][: len(known)]
            cosine = float(found @ known / (np.linalg.norm(found) * np.linalg.norm(known)))
            if not cosine >= _SAME:
                raise ModelLoadError(
                    f"The gate's model does not give the states that it should (cosine {cosine:.3f}).",
                    hint=f"Remove it from the cache, then: rgate download {READER}. Else report your CPU.",
                )

    def hidden(
        self,
        questions: Sequence[str],
        drafts: Sequence[str | Sequence[int]] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states; see `rgate_integrations.models.base.Proxy.hidden`.

        Args:
            questions: The questions.
            drafts: What the answers begin with, as text or tokens; None for the questions alone.
            layers: What `can_read` says yes to.
        """
        texts = drafts or [""] * len(questions)
        rows = [self.encode(question, draft) for question, draft in zip(questions, texts, strict=True)]
        if all(span == "question" for _, span, _ in layers):
            rows = [row.question_alone() for row in rows]
        read = self._read(rows, layers)
        return [
            HiddenStates(pooled(states, row, layers), PREFIX_TOKENS + len(row.ids))
            for states, row in zip(read, rows, strict=True)
        ]

    def request_states(
        self,
        texts: Sequence[Segmented],
        drafts: Sequence[str | Sequence[int]] | None,
        layers: RequestLayers,
    ) -> list[RequestStates]:
        """Pool hidden states of requests; see `rgate_integrations.models.base.Proxy.request_states`."""
        begun = drafts or [""] * len(texts)
        rows = [self.encode_segments(text, draft) for text, draft in zip(texts, begun, strict=True)]
        if all(span == "question" for _, span, _ in layers.every):
            rows = [row.question_alone() for row in rows]
        # Where a draft follows, the whole is what comes before it.
        whole = [PooledLayer(n, "prompt" if span == "all" else span, how) for n, span, how in layers.whole]
        found = []
        for states, row in zip(self._read(rows, layers.every), rows, strict=True):
            begin, end = row.segments[0][0], row.segments[-1][1]
            parts = [pooled(states, row, layers.segments, segment) for segment in row.segments]
            draft = pooled(states, row, layers.draft) if layers.draft else None
            of_whole = pooled(states, row, whole, (begin, end))
            tokens = PREFIX_TOKENS + len(row.ids)
            found.append(RequestStates(of_whole, np.stack(parts), draft, tokens))
        return found

    def _read(
        self, rows: Sequence[ReaderRow], layers: Sequence[PooledLayer]
    ) -> list[dict[int, Float32Array]]:
        """Return the states of every token of each row, by layer. Counts as one call."""
        with self._counting:
            self.calls += 1
        numbers = tuple(sorted({layer for layer, _, _ in layers}))
        # As much for each thread, since a batch ends with the slowest.
        share = -(-sum(len(row.ids) for row in rows) // self.threads)
        batches = list(_batches(rows, min(share, _BATCH_TOKENS)))
        if len(batches) == 1 or self.threads == 1:
            read = [self.states([rows[i] for i in batch], numbers) for batch in batches]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                read = list(pool.map(lambda batch: self.states([rows[i] for i in batch], numbers), batches))
        found: dict[int, dict[int, Float32Array]] = {}
        for batch, states in zip(batches, read, strict=True):
            found.update(zip(batch, states, strict=True))
        return [found[i] for i in range(len(rows))]

    def states(self, rows: Sequence[ReaderRow], numbers: Sequence[int]) -> list[dict[int, Float32Array]]:
        """Return for each text the states of each of its tokens, (tokens, hidden size), by layer. One run."""
        lengths = [len(row.ids) for row in rows]
        starts = np.cumsum([0, *lengths])
        columns = np.arange(max(lengths))
        inside = columns < np.array(lengths)[:, None]
        # Where a text has no more tokens, its first one stands in; nothing looks at it.
        places = np.where(inside, starts[:-1, None] + columns, starts[:-1, None])
        inputs = {
            "ids": np.concatenate([row.ids for row in rows]).astype(np.int64),
            "positions": PREFIX_TOKENS + np.concatenate([np.arange(length) for length in lengths]),
            "rows": places.astype(np.int64),
            "tokens": np.flatnonzero(inside).astype(np.int64),
        }
        layers = self._session.run([f"layer_{number}" for number in numbers], inputs, self._options)
        parts = [np.split(layer, starts[1:-1]) for layer in layers]
        return [
            {number: part[row] for number, part in zip(numbers, parts, strict=True)}
            for row in range(len(rows))
        ]

    def encode(self, question: str, draft: str | Sequence[int] = "") -> ReaderRow:
        """Return a question, and what its answer begins with, in tokens."""
        asked = self._ids(self._plain(" ".join(question.split())))[:_MAX_QUESTION]
        begun = self._ids(self._plain(draft)) if isinstance(draft, str) else list(draft)
        prompt = [*asked, *self._after_question]
        return ReaderRow((*prompt, *begun), len(asked), len(prompt))

    def encode_segments(self, text: Segmented, draft: str | Sequence[int] = "") -> ReaderRow:
        """Return a request in tokens, with the place of each of its segments."""
        before = self._ids(self._plain(text.history + "\n" if text.history else ""))[-_MAX_HISTORY:]
        lines = [[" ".join(self._plain(each).split()) for each in line] for line in text.lines]
        encoded = self._tokenizer.encode("\n".join(map(" ".join, lines)), add_special_tokens=False)
        asked = encoded.ids[:_MAX_QUESTION]
        ends = [end for _, end in encoded.offsets[:_MAX_QUESTION]]
        segments, begin, end = [], 0, -1
        for segment in itertools.chain(*lines):
            end += 1 + len(segment)
            following = bisect_right(ends, end, begin)
            # One that has no tokens of its own, such as a control token, has those of its neighbour.
            first = min(begin, max(len(ends) - 1, 0))
            segments.append((len(before) + first, len(before) + max(following, first + 1)))
            begin = following
        begun = self._ids(self._plain(draft)) if isinstance(draft, str) else list(draft)
        question = [*before, *asked]
        prompt = [*question, *self._after_question]
        return ReaderRow((*prompt, *begun), len(question), len(prompt), tuple(segments))

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[tokens - 1][1]] if len(offsets) > tokens else None

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _plain(self, text: str) -> str:
        """Replace the spellings of control tokens, so that a text cannot end its own turn."""
        for token in self._control:
            text = text.replace(token, " ")
        return text


def can_read(prompt: PromptTemplate, layers: Sequence[PooledLayer]) -> bool:
    """Return whether the reader gives these states under this prompt."""
    known = all(layer in STATES and (span, pooling) in _SPANS for layer, span, pooling in layers)
    return prompt == ANSWER and bool(layers) and known


_readers: dict[Path, Reader] = {}
_loading = ForkSafeLock()


def shared_reader(folder: Path) -> Reader:
    """Return the process-wide reader of a folder; of callers at once, one loads it for all."""
    if folder not in _readers:
        with _loading:
            if folder not in _readers:
                _readers[folder] = Reader(folder)
    return _readers[folder]


def reader_calls() -> int:
    """Return how many batches the readers of this process have read; loads none."""
    return sum(reader.calls for reader in _readers.values())


def _shipped() -> Any:
    return resources.files("rgate_integrations") / "weights" / "reader"


def _batches(rows: Sequence[ReaderRow], tokens: int) -> Iterator[list[int]]:
    """Yield positions of texts that are read in one run: of like length, so that little of attention is padding.

    Args:
        rows: The texts.
        tokens: A run has about so many, or one text.
    """
    batch: list[int] = []
    used = 0
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i].ids)):
        if batch and used >= tokens:
            yield batch
            batch, used = [], 0
        batch.append(i)
        used += len(rows[i].ids)
    if batch:
        yield batch


def pooled(
    states: Mapping[int, Float32Array],
    row: ReaderRow,
    layers: Sequence[PooledLayer],
    segment: tuple[int, int] | None = None,
) -> Float32Array:
    """Pool the states of one text, to shape (layers, hidden size); of its question, or of a segment of that."""
    whole = slice(0, len(row.ids))
    prompt = slice(0, row.prompt)
    question = slice(0, row.question) if segment is None else slice(*segment)
    spans = {
        "question": question if row.question else prompt,
        "prompt": prompt,
        "draft": slice(row.prompt, len(row.ids)) if len(row.ids) > row.prompt else prompt,
        "all": whole,
    }
    vectors = []
    for layer, span, pooling in layers:
        own = states[layer][spans[span]]
        vectors.append(own.mean(axis=0) if pooling == "mean" else own[-1])
    return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)
