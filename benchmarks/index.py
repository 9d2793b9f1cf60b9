"""Time and memory to build and search indexes of 10,000 to 1,000,000 passages, with synthetic vectors.

python benchmarks/index.py
"""

import resource
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from base import argument_parser, print_table

from rgate_integrations.index import Passage, PassageIndex

QUERIES, DIMENSION = 1_000, 384


def make_vectors(n: int) -> np.ndarray:
    """Return normalised vectors in clusters, shape (n, 384); computed in parts to save memory."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(max(8, n // 200), DIMENSION)).astype(np.float32)
    vectors = centres[rng.integers(0, len(centres), n)]
    for start in range(0, n, 50_000):
        part = vectors[start : start + 50_000]
        part += 0.6 * rng.normal(size=part.shape).astype(np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def measure_sizes() -> None:
    """Print time and memory of larger and larger indexes."""
    rows = []
    embedder: Any = SimpleNamespace(
        name="made up", identity="made up", embed=None
    )  # embeds nothing: vectors are given
    for n in (10_000, 100_000, 1_000_000):
        vectors = make_vectors(n)
        index = PassageIndex(embedder)
        start = time.perf_counter()
        for at in range(0, n, 20_000):
            batch = range(at, min(n, at + 20_000))
            index.add([Passage(str(i), f"passage {i}") for i in batch], vectors[batch.start : batch.stop])
        built = time.perf_counter()
        index.search_vectors(vectors[:: n // QUERIES][:QUERIES], 5)
        rate = QUERIES / (time.perf_counter() - built)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append([f"{n:,}", f"{built - start:.1f} s", f"{rate:,.0f}", f"{peak:.2f} GiB"])
    print_table(["passages", "built in", "queries/s", "peak memory"], rows)


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    measure_sizes()
