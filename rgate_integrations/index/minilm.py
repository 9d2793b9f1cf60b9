"""The default embedder, all-MiniLM-L6-v2, on ONNX Runtime: float32, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import numpy as np

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.reader import open_session
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.threads import usable_cores

GRAPH, WEIGHTS = "graph.onnx", "model.safetensors"
DIMENSION = 384

_MOST_TOKENS = 256  # of a text; what is longer is cut, as the model's own configuration says
_TEXTS = 32  # of one run
_TESTED = ("What is the capital of France?", "Paris is the capital and largest city of France.")
_SIMILARITY = 0.7724  # cosine of these two
_TOLERANCE = 1e-3


class MiniLM:
    """The model of a folder. Safe for threads.

    Args:
        folder: What `rgate download all-minilm-l6-v2` wrote.

    Raises:
        ModelLoadError: A file is missing or damaged, there is too little memory, or ONNX Runtime does not run here.
    """

    def __init__(self, folder: Path) -> None:
        self._threads = usable_cores()
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._tokenizer.enable_truncation(_MOST_TOKENS)
            self._tokenizer.no_padding()
            graph = resources.files("rgate_integrations") / "weights" / "embedder" / GRAPH
            self._session = open_session(graph.read_bytes(), folder)
            one, other = self.encode(_TESTED)
        # ONNX Runtime and tokenizers raise classes of their own, or plain Exception.
        except Exception as error:
            raise ModelLoadError(
                f"The embedder in {str(folder)!r} could not be loaded: {(str(error).splitlines() or [''])[0]}",
                hint="Remove the folder, then: rgate download all-minilm-l6-v2",
            ) from error
        if not abs(float(one @ other) - _SIMILARITY) < _TOLERANCE:
            raise ModelLoadError(
                f"The embedder in {str(folder)!r} does not give the vectors that it should.",
                hint="Remove the folder, then: rgate download all-minilm-l6-v2",
            )

    def encode(self, texts: Sequence[str]) -> Float32Array:
        """Return normalised vectors, shape (texts, 384)."""
        if not texts:
            return np.zeros((0, DIMENSION), np.float32)
        rows = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # texts of like length share a batch
        batches = [order[start : start + _TEXTS] for start in range(0, len(order), _TEXTS)]
        vectors = np.empty((len(rows), DIMENSION), np.float32)

        def read(batch: list[int]) -> None:
            vectors[batch] = self._run([rows[i] for i in batch])

        if len(batches) == 1 or self._threads == 1:
            for batch in batches:
                read(batch)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(read, batches))
        return vectors

    def _run(self, rows: Sequence[Sequence[int]]) -> Float32Array:
        width = max(len(row) for row in rows)
        ids = np.zeros((len(rows), width), np.int64)
        mask = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        found: Float32Array = self._session.run(None, {"ids": ids, "mask": mask})[0]
        return found
