"""How near two vectors are, by the names that LangChain's stores use, and how relevant that makes a document."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.vectors import Metric


class DistanceStrategy(StrEnum):
    """What a `FaissVectorStore` searches by. The names are those of ``langchain_community``.

    Attributes:
        COSINE: Scores are cosines, in [-1, 1]; higher is nearer.
        MAX_INNER_PRODUCT: Scores are inner products; higher is nearer.
        EUCLIDEAN_DISTANCE: Scores are squared Euclidean distances, of at least 0; *lower* is nearer.
    """

    COSINE = "COSINE"
    MAX_INNER_PRODUCT = "MAX_INNER_PRODUCT"
    EUCLIDEAN_DISTANCE = "EUCLIDEAN_DISTANCE"

    @property
    def metric(self) -> Metric:
        """The metric of the index below."""
        return _METRICS[self]

    @property
    def lower_is_nearer(self) -> bool:
        """Whether a score is a distance."""
        return self is DistanceStrategy.EUCLIDEAN_DISTANCE

    def score(self, nearness: float) -> float:
        """Return the score of a document from the index's, of which higher is always nearer."""
        return max(0.0, -nearness) if self.lower_is_nearer else nearness

    def relevance(self, score: float) -> float:
        """Map a score to LangChain's relevance in [0, 1]; higher is nearer.

        A cosine becomes ``(cosine + 1) / 2``, a distance ``1 / (1 + distance)``, and an inner product, which has no
        bounds, its logistic function.
        """
        return _RELEVANCES[self](score)


def as_strategy(given: str) -> DistanceStrategy:
    """Return the strategy of that name; a member of ``langchain_community``'s enumeration is such a name.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        return DistanceStrategy(given)
    except ValueError as error:
        raise ConfigurationError(
            f"There is no distance strategy {given!r}.", hint=f"Use one of {', '.join(DistanceStrategy)}."
        ) from error


def strategy_of(metric: Metric) -> DistanceStrategy:
    """Return the strategy that is a metric."""
    return next(strategy for strategy in DistanceStrategy if strategy.metric == metric)


def _of_cosine(cosine: float) -> float:
    return min(1.0, max(0.0, (cosine + 1) / 2))  # a rounded cosine may lie just outside


def _of_inner_product(product: float) -> float:
    # Two forms, so that neither exponential overflows.
    if product >= 0:
        return 1 / (1 + math.exp(-product))
    return math.exp(product) / (1 + math.exp(product))


def _of_squared_distance(squared: float) -> float:
    return 1 / (1 + math.sqrt(squared))


_METRICS: dict[DistanceStrategy, Metric] = {
    DistanceStrategy.COSINE: "cosine",
    DistanceStrategy.MAX_INNER_PRODUCT: "inner_product",
    DistanceStrategy.EUCLIDEAN_DISTANCE: "l2",
}
_RELEVANCES: dict[DistanceStrategy, Callable[[float], float]] = {
    DistanceStrategy.COSINE: _of_cosine,
    DistanceStrategy.MAX_INNER_PRODUCT: _of_inner_product,
    DistanceStrategy.EUCLIDEAN_DISTANCE: _of_squared_distance,
}
