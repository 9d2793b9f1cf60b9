"""Reciprocal rank fusion of several result lists."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def fuse(
    rankings: Sequence[Sequence[_Item]],
    key: Callable[[_Item], Hashable],
    *,
    k: int | None = None,
    constant: float = 60,
) -> list[_Item]:
    """Merge rankings by reciprocal rank (Cormack et al. 2009): each item scores the sum of 1 / (constant + rank).

    Args:
        rankings: Result lists, best first.
        key: Tells which items are the same; the one ranked best is returned.
        k: How many to return; all when None.
        constant: Damps the difference between the first ranks.

    Returns:
        The items, best first; ties keep the order of first appearance.
    """
    scores: dict[Hashable, float] = {}
    best: dict[Hashable, tuple[int, _Item]] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            name = key(item)
            scores[name] = scores.get(name, 0.0) + 1 / (constant + rank)
            if name not in best or rank < best[name][0]:
                best[name] = (rank, item)
    ordered = sorted(scores, key=lambda name: -scores[name])
    return [best[name][1] for name in ordered[:k]]
