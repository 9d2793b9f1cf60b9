"""Approximate search for large indexes: inverted lists, tuned to a measured recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array, PositionArray

_QUERIES = 200  # sampled to measure the recall
_K = 10  # neighbours of each that count
_STEP = 50_000  # vectors copied at a time


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
        exact: An ``IndexIDMap2`` over an ``IndexFlat``.
        faiss: The module.
        target: Recall of the ten nearest neighbours to reach, in (0, 1].
        seed: Seed of the samples.
    """
    rng = np.random.default_rng(seed)
    n = int(exact.ntotal)
    # FAISS advises about 4 sqrt(n) lists, and at least 39 vectors a list to train them.
    lists = max(1, min(int(4 * np.sqrt(n)), n // 40))
    sample = np.sort(rng.choice(n, min(n, 50 * lists), replace=False))
    index = _inverted_lists(exact, faiss, lists, sample, seed)
    queries = _noisy_vectors(exact, rng)
    wanted = exact.search(queries, min(_K, n))[1]
    probes = 1
    while True:
        index.nprobe = probes
        found = index.search(queries, min(_K, n))[1]
        recall = _recall(found, wanted)
        if recall >= target or probes >= lists:
            return Tuned(index, lists, probes, recall)
        probes = min(probes * 2, lists)


def _inverted_lists(exact: Any, faiss: Any, lists: int, sample: PositionArray, seed: int) -> Any:
    """Return an index of inverted lists over the vectors of an exact one, trained on a sample of its rows."""
    dimension = int(exact.d)
    metric = exact.metric_type
    index = faiss.IndexIVFFlat(faiss.IndexFlat(dimension, metric), dimension, lists, metric)
    index.cp.niter = 8
    index.cp.seed = seed + 1
    index.train(_take(exact.index, sample))
    index.set_direct_map_type(faiss.DirectMap.Hashtable)  # for deleting and for reading vectors back
    ids = faiss.vector_to_array(exact.id_map)
    for start in range(0, len(ids), _STEP):  # in steps, so that the vectors are not in memory a third time
        some = ids[start : start + _STEP]
        index.add_with_ids(exact.index.reconstruct_n(start, len(some)), some)
    return index


def _noisy_vectors(exact: Any, rng: np.random.Generator) -> Float32Array:
    """Return stored vectors with noise, as queries: without it each would be its own nearest neighbour."""
    n = int(exact.ntotal)
    vectors = _take(exact.index, rng.choice(n, min(n, _QUERIES), replace=False))
    noise = rng.normal(scale=0.5 / np.sqrt(int(exact.d)), size=vectors.shape)
    return vectors + noise.astype(np.float32)


def _recall(found: PositionArray, wanted: PositionArray) -> float:
    """Return the mean share of the wanted neighbours that were found."""
    shares = []
    for mine, exact in zip(found, wanted, strict=True):
        shares.append(len(set(mine) & set(exact)) / len(exact))
    return float(np.mean(shares))


def _take(flat: Any, rows: PositionArray) -> Float32Array:
    return np.stack([flat.reconstruct(int(row)) for row in rows]).astype(np.float32)
