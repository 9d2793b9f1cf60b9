"""Approximate search for large indexes: inverted lists, tuned to a measured recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rgate_integrations.arrays import Float32Array, PositionArray

_QUERIES, _K = 200, 10


@dataclass(frozen=True)
class Tuned:
    """An approximate index and what it finds.

    Attributes:
        index: A FAISS index with the ids of the exact one.
        lists: Number of inverted lists.
        probes: Lists that a search looks into.
        recall: Share of the exact ten nearest neighbours that it finds, on sampled queries.
    """

    index: Any
    lists: int
    probes: int
    recall: float


def approximate(exact: Any, faiss: Any, *, target: float = 0.95, seed: int = 0) -> Tuned:
    """Turn an exact index into inverted lists, probing as many of them as the target recall needs.

    The queries are stored vectors with noise, for there are no others; recall is measured against the exact index.

    Args:
        exact: An ``IndexIDMap2`` over an ``IndexFlatIP``.
        faiss: The module.
        target: Recall of the ten nearest neighbours to reach, in (0, 1].
        seed: Seed of the samples.
    """
    n, dimension = int(exact.ntotal), int(exact.d)
    rng = np.random.default_rng(seed)
    ids = faiss.vector_to_array(exact.id_map)
    lists = max(1, min(int(4 * np.sqrt(n)), n // 40))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.seed = 8, seed + 1
    sample = np.sort(rng.choice(n, min(n, 50 * lists), replace=False))
    index.train(_take(exact.index, sample))
    index.set_direct_map_type(faiss.DirectMap.Hashtable)  # for deleting and for reading vectors back
    step = 50_000
    for start in range(0, n, step):
        some = exact.index.reconstruct_n(start, min(step, n - start))
        index.add_with_ids(some, ids[start : start + step])
    queries = _take(exact.index, rng.choice(n, min(n, _QUERIES), replace=False))
    queries += rng.normal(scale=0.5 / np.sqrt(dimension), size=queries.shape).astype(np.float32)
    wanted = exact.search(queries, min(_K, n))[1]
    probes, recall = 1, 0.0
    while True:
        index.nprobe = probes
        found = index.search(queries, min(_K, n))[1]
        recall = float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, wanted, strict=True)]))
        if recall >= target or probes >= lists:
            return Tuned(index, lists, probes, recall)
        probes = min(probes * 2, lists)


def _take(flat: Any, rows: PositionArray) -> Float32Array:
    return np.stack([flat.reconstruct(int(r)) for r in rows]).astype(np.float32)
