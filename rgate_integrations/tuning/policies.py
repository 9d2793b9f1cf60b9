"""Policies that choose a threshold on held-out questions: a budget, a bound on the loss, or the least cost.

The first two give a guarantee that holds with the given confidence over the draw of the calibration questions, for
new questions from the same source. Both test the thresholds in a fixed order and stop at the first that fails
(fixed sequence testing), which needs no correction for the number of thresholds: Angelopoulos et al. 2021,
"Learn then Test", proposition 3 and section 2.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from typing import Any, ClassVar, Protocol

import numpy as np

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.runtime.arrays import BoolArray, Float64Array

ALWAYS = 1.01
"""A threshold above every probability: always retrieve."""


@dataclass(frozen=True)
class ThresholdChoice:
    """The threshold that a policy chose.

    Attributes:
        threshold: Retrieve iff p_known is below it.
        guarantee: One sentence: what is guaranteed, or why nothing can be.
        guaranteed: Whether it is.
        facts: Numbers behind it, as JSON values.
    """

    threshold: float
    guarantee: str
    guaranteed: bool
    facts: dict[str, Any]


class Policy(Protocol):
    """Chooses a threshold from P(known) and the correctness of both arms, each of shape (n,).

    ``thresholds`` are tried besides a fixed grid. For a guarantee to hold they must come from other questions.
    """

    name: ClassVar[str]

    def choose(
        self,
        p: Float64Array,
        closed_book: BoolArray,
        rag: BoolArray,
        seed: int,
        thresholds: Float64Array | None = None,
    ) -> ThresholdChoice:
        """Choose."""


def provenance_of(policy: Any, choice: ThresholdChoice, p: Float64Array, seed: int) -> dict[str, Any]:
    """Return where a threshold comes from, as JSON values.

    ``scores`` are the quantiles of P(known) that `rgate_integrations.tuning.evaluation.measure_drift` compares with.
    """
    return {
        "policy": {"name": policy.name, **vars(policy)},
        "guarantee": choice.guarantee,
        "guaranteed": choice.guaranteed,
        **choice.facts,
        "seed": seed,
        "date": date.today().isoformat(),
        "scores": np.quantile(p, np.linspace(0, 1, 101)).round(5).tolist(),
    }


def _grid(thresholds: Float64Array | None) -> Float64Array:
    """Thresholds in ascending order. Fixed before the data are seen, as fixed sequence testing requires."""
    even, tails = np.linspace(0, 1, 101), 1 / (1 + np.exp(-np.linspace(-12, 12, 97)))
    given = [] if thresholds is None else [np.clip(thresholds, 0, 1)]
    return np.unique(np.concatenate([even, tails, *given]))


@dataclass(frozen=True)
class Budget:
    """Retrieve for at most a share of the questions, with confidence.

    The retrieval rate grows with the threshold, so thresholds are tested from 0 upward while the exact upper
    confidence bound (Clopper and Pearson 1934) of the rate stays within the budget.

    Attributes:
        rate: The greatest retrieval rate, in [0, 1].
        confidence: Of the guarantee, in (0, 1).

    Raises:
        ConfigurationError: A number is out of its range.
    """

    rate: float
    confidence: float = 0.95
    name: ClassVar[str] = "budget"

    def __post_init__(self) -> None:
        if not (0 <= self.rate <= 1 and 0 < self.confidence < 1):
            raise ConfigurationError(f"{self} is out of range.", hint="rate in [0, 1], confidence in (0, 1)")

    def choose(
        self,
        p: Float64Array,
        closed_book: BoolArray,
        rag: BoolArray,
        seed: int,
        thresholds: Float64Array | None = None,
    ) -> ThresholdChoice:
        """Choose the greatest threshold whose retrieval rate is surely within the budget."""
        n, threshold, bound = len(p), 0.0, 0.0
        for candidate in [*_grid(thresholds), ALWAYS]:
            retrieved = int((p < candidate).sum())
            # Retrieving for nobody is no estimate: p_known < 0 never happens, whatever the question.
            upper = 0.0 if candidate == 0 else upper_bound(retrieved, n, self.confidence)
            if upper > self.rate:
                break
            threshold, bound = float(candidate), upper
        guarantee = (
            f"Retrieves for at most {self.rate:.1%} of the questions, with confidence {self.confidence:.0%}."
        )
        if threshold == 0:
            guarantee = (
                f"No threshold above 0 can guarantee at most {self.rate:.1%}, n = {n}: it never retrieves."
            )
        facts = {"n": n, "retrieval_rate": float((p < threshold).mean()), "upper_bound": bound}
        return ThresholdChoice(threshold, guarantee, threshold > 0, facts)


@dataclass(frozen=True)
class MaxLoss:
    """Lose at most some in-accuracy against always-retrieve, with confidence.

    The loss of a question is 1 where it is skipped and only retrieval gets it right, -1 where it is skipped and
    only the answer without retrieval is right, else 0. For each threshold, from always-retrieve downward, the
    hypothesis "the mean loss is above ``loss``" is tested by betting (Waudby-Smith and Ramdas 2024, "Estimating
    means of bounded random variables by betting", section 4), which is valid at every n and adapts to how seldom
    the arms differ.

    Attributes:
        loss: The greatest loss of in-accuracy, in (0, 1].
        confidence: Of the guarantee, in (0, 1).

    Raises:
        ConfigurationError: A number is out of its range.
    """

    loss: float
    confidence: float = 0.95
    name: ClassVar[str] = "max-loss"

    def __post_init__(self) -> None:
        if not (0 < self.loss <= 1 and 0 < self.confidence < 1):
            raise ConfigurationError(f"{self} is out of range.", hint="loss in (0, 1], confidence in (0, 1)")

    def choose(
        self,
        p: Float64Array,
        closed_book: BoolArray,
        rag: BoolArray,
        seed: int,
        thresholds: Float64Array | None = None,
    ) -> ThresholdChoice:
        """Choose the least threshold whose loss is surely within the bound."""
        n, level = len(p), 1 - self.confidence
        order = np.random.default_rng(seed).permutation(n)
        p, gain = p[order], (rag.astype(float) - closed_book)[order]
        threshold = ALWAYS
        for candidate in _grid(thresholds)[::-1]:
            if betting_p_value(np.where(p >= candidate, gain, 0.0), self.loss, level) > level:
                break
            threshold = float(candidate)
        skipped = p >= threshold
        guaranteed = bool(skipped.any())
        guarantee = (
            f"Loses at most {self.loss:.1%} in-accuracy against always retrieving, with confidence "
            f"{self.confidence:.0%}."
        )
        if not guaranteed:
            guarantee = (
                f"No threshold that skips can guarantee a loss of at most {self.loss:.1%} with confidence "
                f"{self.confidence:.0%} and n = {n}: it always retrieves."
            )
        loss = float(np.where(skipped, gain, 0.0).mean())
        facts = {"n": n, "retrieval_rate": float(1 - skipped.mean()), "loss": loss}
        return ThresholdChoice(threshold if guaranteed else ALWAYS, guarantee, guaranteed, facts)


@dataclass(frozen=True)
class MinCost:
    """The cheapest threshold for given costs, in any one unit (say milliseconds).

    With a price for a wrong answer the expected cost a question is minimised; without one, the cost for each
    right answer. This is an estimate, not a guarantee.

    Attributes:
        retrieval: Extra cost of answering with retrieval.
        draft: Cost of the gate's decision.
        answer: Cost of an answer without retrieval.
        wrong: Price of a wrong answer, or None.

    Raises:
        ConfigurationError: A cost is below 0.
    """

    retrieval: float
    draft: float = 0.0
    answer: float = 0.0
    wrong: float | None = None
    name: ClassVar[str] = "cost"

    def __post_init__(self) -> None:
        if min(self.retrieval, self.draft, self.answer, self.wrong or 0.0) < 0:
            raise ConfigurationError("A cost cannot be negative.")

    def choose(
        self,
        p: Float64Array,
        closed_book: BoolArray,
        rag: BoolArray,
        seed: int,
        thresholds: Float64Array | None = None,
    ) -> ThresholdChoice:
        """Choose the threshold with the least cost; of equal ones that which retrieves least."""
        least, threshold = math.inf, ALWAYS
        for candidate in [*_grid(thresholds), ALWAYS]:
            retrieve = p < candidate
            right = float(np.where(retrieve, rag, closed_book).mean())
            cost = self.draft + self.answer + float(retrieve.mean()) * self.retrieval
            if self.wrong is not None:
                cost += (1 - right) * self.wrong
            else:
                cost = cost / right if right else math.inf
            if cost < least - 1e-12:
                least, threshold = cost, float(candidate)
        rate = float((p < threshold).mean())
        per = "question" if self.wrong is not None else "right answer"
        estimate = f"The least cost on these questions: {least:.4g} a {per}, retrieving for {rate:.1%}."
        return ThresholdChoice(
            threshold, estimate, True, {"n": len(p), "retrieval_rate": rate, "cost": least}
        )


def upper_bound(successes: int, n: int, confidence: float) -> float:
    """Return the exact one-sided upper confidence bound of a binomial share (Clopper and Pearson 1934)."""
    try:
        from scipy.stats import beta
    except ImportError as error:
        raise missing_dependency("scipy", "train") from error
    return 1.0 if successes >= n else float(beta.ppf(confidence, successes + 1, n - successes))


def betting_p_value(losses: Float64Array, bound: float, level: float) -> float:
    """Return a valid p-value of "the mean of the losses is above ``bound``".

    The capital of a gambler who bets against the hypothesis is a non-negative supermartingale under it, so its
    inverse maximum is a p-value (Ville's inequality). The bets are the predictable plug-in of the paper.

    Args:
        losses: In [-1, 1], in random order, shape (n,).
        bound: The mean that is tested.
        level: Level at which the test will be used; tunes the bets, not their validity.
    """
    x, m = (losses + 1) / 2, (bound + 1) / 2
    n = len(x)
    if not n or m >= 1:
        return 1.0 if not n else 0.0
    count = np.arange(1, n + 1)
    mean = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    bets = np.minimum(np.sqrt(2 * math.log(1 / level) / (n * before)), 0.9 / (1 - m))
    capital = np.cumsum(np.log1p(bets * (m - x)))
    return float(min(1.0, math.exp(-max(float(capital.max()), 0.0))))
