"""The encoder's states of requests and of their segments, cached on disk in parts, so that a stopped run resumes."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rgate_integrations.models.base import PooledLayer, RequestLayers
from rgate_integrations.models.encoder import EncoderProxy
from rgate_integrations.models.encoder_file import LAYERS
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.segments import Segmented

FACT_LAYERS = (6, 8, 10, 12)
"""The layers that the fact heads read; the mean of the last is the sentence vector."""
KIND_LAYERS = (*FACT_LAYERS, 14, 16)
"""The layers that the kind heads read."""
PART, BATCH = 1_024, 64


class EncoderStates:
    """Means of some layers over each request, and over each of its segments.

    Args:
        folder: The cache; each choice of layers and of adapted weights has its own subfolder.
        layers: The layers to read.
        proxy: The encoder, the shipped one unless given.
    """

    def __init__(self, folder: Path, layers: Sequence[int], proxy: EncoderProxy | None = None) -> None:
        self.proxy = proxy or EncoderProxy()
        self.pooled = tuple(PooledLayer(layer, "question", "mean") for layer in layers)
        weights = [self.proxy.fingerprint.split("-")[-1]] if max(layers) > LAYERS else []
        folder /= "-".join([*map(str, layers), *weights])
        self.folder = folder
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._positions: dict[str, tuple[int, int, slice]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        # The newest last: a text whose segments changed is in several parts.
        for path in sorted(folder.glob("*.npz"), key=os.path.getmtime):
            with np.load(path) as part:
                self._add(dict(part))

    def whole(self, text: str, history: str = "") -> np.ndarray:
        """Return the means over a request, shape (layers, 384)."""
        part, row, _ = self._positions[_key(text, history)]
        return self._parts[part][0][row]

    def segments(self, text: str, history: str = "") -> np.ndarray:
        """Return the means over each segment of a request, shape (segments, layers, 384)."""
        part, _, rows = self._positions[_key(text, history)]
        return self._parts[part][1][rows]

    def fill(self, requests: Iterable[tuple[str, str]]) -> None:
        """Compute the states that the cache lacks; each request comes with its history."""
        by_key = {_key(*request): request for request in requests}
        missing = [(key, request) for key, request in by_key.items() if not self._has(key, request[0])]
        missing.sort(key=lambda item: len(item[1][0]))  # texts of similar length share a batch
        for start in range(0, len(missing), PART):
            part_requests = missing[start : start + PART]
            results = []
            for at in range(0, len(part_requests), BATCH):
                texts = [
                    Segmented.from_text(text, [history] if history else [])
                    for _, (text, history) in part_requests[at : at + BATCH]
                ]
                results += self.proxy.request_states(ANSWER, texts, RequestLayers(self.pooled, self.pooled))
            part = {
                "keys": np.array([key for key, _ in part_requests]),
                "whole": np.stack([result.whole for result in results]).astype(np.float16),
                "segments": np.concatenate([result.segments for result in results]).astype(np.float16),
                "counts": np.array([len(result.segments) for result in results]),
            }
            np.savez(self.folder / f"{part_requests[0][0]}-{len(part_requests)}.npz", **part)  # type: ignore[arg-type]
            self._add(part)

    def _has(self, key: str, text: str) -> bool:
        """Return whether the cache has the states of a request, as it is split into segments now."""
        _, _, rows = self._positions.get(key, (0, 0, slice(0)))
        return rows.stop - (rows.start or 0) == len(Segmented.from_text(text).segments)

    def _add(self, part: dict[str, np.ndarray]) -> None:
        ends = part["counts"].cumsum()
        for row, (key, end, count) in enumerate(
            zip(part["keys"].tolist(), ends, part["counts"], strict=True)
        ):
            self._positions[key] = (len(self._parts), row, slice(int(end - count), int(end)))
        self._parts.append((part["whole"], part["segments"]))


def _key(text: str, history: str) -> str:
    texts = [text, history] if history else [text]
    return hashlib.sha256("\x1e".join(texts).encode()).hexdigest()[:16]
