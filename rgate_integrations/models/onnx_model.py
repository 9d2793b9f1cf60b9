"""Base class of `Reader` and `Encoder`: runs ONNX Runtime on the CPU, tests itself, reads in parallel."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from rgate_integrations.errors import ModelLoadError, first_line, limit_hint
from rgate_integrations.models.download import cache_dir, fetch_path
from rgate_integrations.runtime.arrays import Float32Array, PositionArray
from rgate_integrations.runtime.threads import ForkSafeLock, count_cores, map_parallel, reset_after_fork

SELF_TEST = "self_test.json"
MAX_HISTORY = 768
"""Maximum number of tokens of the earlier turns; of a longer history, only the end is read."""
_MIN_COSINE = 0.999  # other CPUs round float32 differently, but stay far above this

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# By class and cache folder. Kept for the life of the process, because gates come and go, and a model takes 100 MB.
_models: dict[tuple[type, Path], Any] = {}
_loading = ForkSafeLock()  # one of several concurrent callers loads the model for all
_sharing = ForkSafeLock()
_arena_makers: list[int] = []  # the id of the process that made the arena for all sessions


class OnnxSession:
    """An ONNX graph with its weights, ready to run. Safe for threads and forks.

    A forked child opens its own session on first use. If another thread was using the parent's session at the fork,
    the locks of that session would never be released in the child.

    Args:
        graph: The content of the graph's file, which names the files of its weights.
        folder: The folder with these files.

    Raises:
        Exception: The files cannot be loaded; ONNX Runtime raises its own classes, or plain Exception.
    """

    def __init__(self, graph: bytes, folder: Path) -> None:
        self._graph = graph
        self._folder = str(folder)
        self._session: Any = self._open()
        self._inherited: list[Any] = []
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Stop using the parent's session."""
        self._inherited.append(self._session)  # kept forever, because destroying it would take its locks
        self._session = None

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
        """Return the graph's outputs of the given names, in that order; ``inputs`` are arrays by name."""
        if self._session is None:
            self._session = self._open()
        return self._session.run(outputs, inputs)

    def _open(self) -> Any:
        # Its telemetry sends data to Microsoft, and makes a forked child hang or crash at its end.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # we parallelise over texts instead, with one thread per batch
        # Errors only: its warnings about the graph are of no use to users.
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", self._folder)
        if _share_arena(onnxruntime):
            options.add_session_config_entry("session.use_env_allocators", "1")
        return onnxruntime.InferenceSession(self._graph, options, providers=["CPUExecutionProvider"])


def _share_arena(onnxruntime: Any) -> bool:
    """Return whether all sessions of this process can share an arena, and make it on the first call.

    An arena keeps the most memory that it ever needed, so one takes less than one per session. A child that was
    forked cannot use its parent's, which another thread may have locked at the fork.
    """
    with _sharing:
        if not _arena_makers:
            arena, default = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
            with suppress(RuntimeError):  # another library of this process has made one
                memory = onnxruntime.OrtMemoryInfo("Cpu", arena, 0, default)
                onnxruntime.create_and_register_allocator(memory, None)
            _arena_makers.append(os.getpid())
        return _arena_makers == [os.getpid()]


class OnnxModel(ABC):
    """Base class of models in int8 on ONNX Runtime. Thread-safe.

    Results for a text do not depend on its batch or the number of threads: activations are quantised per token,
    matrices of integers are multiplied, and attention never crosses texts.

    Args:
        folder: The folder with its files.
        threads: Number of threads that read the texts of a call; by default one per core, or ``OMP_NUM_THREADS``.
            A single short text is read by one thread, which leaves the CPU to an LLM on the same machine.
        self_test: Whether to compare the states of a few texts with those that ship with the package. Off only while
            the model's files are made.

    Raises:
        ModelLoadError: A file is missing or damaged, there is not enough memory, or ONNX Runtime does not run
            on this machine or computes wrong states.
    """

    title: ClassVar[str]
    """The model's name in error messages."""
    entry: ClassVar[str]
    """The model's name in the catalogue."""
    shipped: ClassVar[Path]
    """The folder with the model's graphs and self-test, which come with this package."""

    def __init__(self, folder: Path, *, threads: int | None = None, self_test: bool = True) -> None:
        self.threads = threads or count_cores()
        try:
            self._load(folder)
            if self_test:
                self._check_states()
        # ONNX Runtime and the tokenizers raise their own classes, or plain Exception.
        except Exception as error:
            reason = first_line(error)
            raise ModelLoadError(
                f"{self.title} in {str(folder)!r} could not be loaded: {reason}",
                hint=limit_hint(reason)
                or f"Remove the folder and run `rgate download {self.entry}`. "
                "If it fails again, report it with your CPU's model.",
            ) from error

    @classmethod
    def shared(cls) -> Self:
        """Return the process-wide model of the cache, downloading or loading it for the first caller.

        A loaded model does not look at the cache again, so that it goes on whatever happens to its files.

        Raises:
            ModelLoadError: It is missing while downloads are forbidden, or it cannot be loaded.
            DownloadError: It is missing, and could not be downloaded.
            ConfigurationError: The user has no home folder; see `cache_dir`.
        """
        key = cls, cache_dir()
        if key not in _models:
            folder = fetch_path(cls.entry, "gate's model")
            with _loading:
                if key not in _models:  # another thread may have loaded it meanwhile
                    _models[key] = cls(folder)
        return _models[key]

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """Open the model's files."""

    @abstractmethod
    def _compute_test_states(self, text: str) -> Float32Array:
        """Return the states of a text; the first values are compared with those in the self-test's file."""

    def _check_states(self) -> None:
        """Raise ValueError if hidden states are wrong, because of wrong files or a CPU that computes differently."""
        for text, values in json.loads((self.shipped / SELF_TEST).read_text(encoding="utf-8")).items():
            expected = np.array(values)
            states = self._compute_test_states(text)[..., : expected.shape[-1]]
            norms = np.linalg.norm(states) * np.linalg.norm(expected)
            cosine = float((states * expected).sum() / norms)
            if not cosine >= _MIN_COSINE:  # written this way to include NaN
                raise ValueError(
                    f"its self-test failed: wrong hidden states (cosine similarity to the right ones {cosine:.3f})"
                )

    def _run_batches(
        self,
        texts: Sequence[_Item],
        lengths: Sequence[int],
        max_tokens: int,
        run: Callable[[list[_Item]], Sequence[_Result]],
    ) -> list[_Result]:
        """Read texts in parallel batches, and return the results in the order of the texts.

        Texts of similar length share a batch, so that attention computes little padding. All threads get about the
        same number of tokens, because a call takes as long as its slowest thread.

        Args:
            texts: The texts.
            lengths: Their lengths in tokens.
            max_tokens: Number of tokens at which a batch is full.
            run: Function that reads a batch.
        """
        share = min(-(-sum(lengths) // self.threads), max_tokens)
        batches: list[list[int]] = []
        used = share
        for i in sorted(range(len(texts)), key=lengths.__getitem__):
            if used >= share:
                batches.append([])
                used = 0
            batches[-1].append(i)
            used += lengths[i]
        runs = [[texts[i] for i in batch] for batch in batches]
        results = map_parallel(run, runs, self.threads)
        by_index = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
        return [by_index[i] for i in range(len(texts))]


def pack_texts(
    texts: Sequence[Sequence[int]], filler: int
) -> tuple[PositionArray, dict[str, PositionArray], PositionArray]:
    """Return positions and indices for texts whose tokens are laid out one after another, without padding.

    Only attention needs a padded row per text. The graph makes these rows from the indices.

    Args:
        texts: The token ids of each text.
        filler: The index that pads ``rows`` after the end of a text. The graph must ignore what it reads there.

    Returns:
        Three values:

        - each token's position in its text;
        - two inputs of the graph: ``rows``, shape (texts, longest text), has the index of each token among those of
          all texts; ``tokens`` has the positions in the flattened ``rows`` that are not padding;
        - the index of the first token of each text, from the second text on.
    """
    lengths = np.array(list(map(len, texts)))
    begins = lengths.cumsum() - lengths
    columns = np.arange(lengths.max())
    inside = columns < lengths[:, None]
    rows = np.where(inside, begins[:, None] + columns, filler)
    layout = {"rows": rows.astype(np.int64), "tokens": np.flatnonzero(inside).astype(np.int64)}
    return np.broadcast_to(columns, inside.shape)[inside].astype(np.int64), layout, begins[1:]
