"""What the reader and the encoder share: ONNX Runtime on the CPU, a self-test, and texts read side by side."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.threads import ForkSafeLock, count_cores, reset_after_fork

SELF_TEST = "self_test.json"
_MIN_COSINE = 0.999  # other CPUs round float32 differently, but stay far above

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Model = TypeVar("_Model", bound="OnnxModel")


class OnnxSession:
    """A graph and its weights, ready to run. Safe for threads and forks.

    A forked child opens its own session when it first runs one: in the parent another thread may have been inside,
    and the locks that it held are never released in the child.

    Args:
        graph: The graph, which names the files of its weights.
        folder: Where these files are.

    Raises:
        Exception: ONNX Runtime raises classes of its own, or plain Exception.
    """

    def __init__(self, graph: bytes, folder: Path) -> None:
        self._graph = graph
        self._folder = folder
        self._session: Any = self._open()
        self._inherited: list[Any] = []
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Stop using the parent's session."""
        self._inherited.append(self._session)  # referenced for ever: to destroy it would take its locks
        self._session = None

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
        """Return the named outputs for some inputs."""
        if self._session is None:
            self._session = self._open()
        results: list[Any] = self._session.run(outputs, inputs)
        return results

    def _open(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # texts are read side by side instead, each by one thread
        options.log_severity_level = 3
        folder = str(self._folder)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return onnxruntime.InferenceSession(self._graph, options, providers=["CPUExecutionProvider"])


class OnnxModel(ABC):
    """A model on ONNX Runtime in int8. Safe for threads.

    A text's numbers do not depend on its batch or on the number of threads: activations are quantised per token,
    the products are of integers, and attention looks at each text alone.

    Args:
        folder: Where its files are.
        threads: How many texts of a batch are read side by side; by default one a core, or ``OMP_NUM_THREADS``.
            A single text is read by one thread, to leave the CPU to an LLM beside it.
        self_test: Whether to compare the states of a few texts with the shipped ones. Off only while the model's
            files are being made.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    title: ClassVar[str]
    """What errors call it."""
    entry: ClassVar[str]
    """Its name in the catalogue."""
    shipped: ClassVar[Path]
    """Where its graph and its self-test are."""

    def __init__(self, folder: Path, *, threads: int | None = None, self_test: bool = True) -> None:
        self.threads = threads or count_cores()
        try:
            self._load(folder)
            if self_test:
                self._check_states()
        # ONNX Runtime and the tokenizers raise classes of their own, or plain Exception.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ModelLoadError(
                f"{self.title} in {str(folder)!r} could not be loaded: {reason}",
                hint=f"Remove the folder, then: rgate download {self.entry}. If that does not help, report your CPU.",
            ) from error

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """Open the files."""

    @abstractmethod
    def _compute_test_states(self, text: str) -> Float32Array:
        """Return the states of a text of the self-test; the file has their first values."""

    def _check_states(self) -> None:
        """Raise ValueError unless the states are right: wrong files, or a CPU that computes something else."""
        for text, values in json.loads((self.shipped / SELF_TEST).read_text(encoding="utf-8")).items():
            expected = np.array(values)
            states = self._compute_test_states(text)[..., : expected.shape[-1]]
            norms = np.linalg.norm(states) * np.linalg.norm(expected)
            cosine = float((states * expected).sum() / norms)
            if not cosine >= _MIN_COSINE:  # also if it is NaN
                raise ValueError(f"its states are wrong (cosine {cosine:.3f} to the shipped ones)")

    def _run_batches(
        self,
        texts: Sequence[_Item],
        lengths: Sequence[int],
        max_tokens: int,
        run: Callable[[list[_Item]], Sequence[_Result]],
    ) -> list[_Result]:
        """Read texts in batches, side by side; returns the results in the order of the texts.

        Texts of like length share a batch, so that little of attention is padding, and each thread gets as many
        tokens as the others, since a call ends with the slowest.

        Args:
            texts: The texts.
            lengths: Their lengths in tokens.
            max_tokens: Tokens after which a batch is full.
            run: Reads a batch.
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
        if len(runs) == 1:
            results = [run(runs[0])]  # starting a thread would cost a single question more than it gains
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                results = list(pool.map(run, runs))
        by_index = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
        return [by_index[i] for i in range(len(texts))]


# For the life of the process: weights take 100 MB, and gates come and go.
_models: dict[tuple[type, Path], Any] = {}
_loading = ForkSafeLock()  # of callers at once, one loads the model for all


def load_shared(model: type[_Model], folder: Path) -> _Model:
    """Return the process-wide model of a folder, loading it for the first caller."""
    with _loading:
        if (model, folder) not in _models:
            _models[model, folder] = model(folder)
        shared: _Model = _models[model, folder]
        return shared
