"""The first look of answer first, chosen on a user's questions: what is retrieved for before an answer is begun."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.tuning.metrics import paired_interval

_LOSS = 0.005  # right answers that a first look may cost where it is chosen, as a share
_MORE_RETRIEVAL = 0.02  # and questions that it may retrieve for in addition


@dataclass(frozen=True)
class FirstLook:
    """From which P(known) on an answer is begun, and what that does on held-out questions.

    Differences are against beginning every answer; shares and differences are of 1, not of 100.

    Attributes:
        low: Below it the question is retrieved for at once.
        chosen_on: Questions on which it was chosen; the numbers below are of the others.
        n: Number of held-out questions.
        early_exit_rate: Share of them that is retrieved for at once.
        retrieval_difference: By how much the retrieval rate changes.
        difference: By how much the share of right answers changes.
        interval: Its 95 % bootstrap interval, paired.
    """

    low: float
    chosen_on: int
    n: int
    early_exit_rate: float
    retrieval_difference: float
    difference: float
    interval: tuple[float, float]


def choose_first_look(
    question: Float64Array,
    begun: Float64Array,
    threshold: float,
    direct: BoolArray,
    rag: BoolArray,
    seed: int = 0,
) -> FirstLook:
    """Choose the first look on one half of the questions, and measure it on the other.

    It sends as many questions as possible to retrieval at once while few right answers are lost and the retrieval
    rate hardly grows. Accuracy alone could often be kept by retrieving for more, hence the second bound.

    Args:
        question: Held-out P(known) of the question alone, shape (n,).
        begun: Held-out P(known) of the begun answer, shape (n,).
        threshold: That of the gate for begun answers.
        direct: Whether the answer without retrieval is right, shape (n,).
        rag: Whether the answer with retrieval is right, shape (n,).
        seed: Seed of the split and of the bootstrap.
    """
    half = np.random.default_rng(seed).permutation(len(question))
    choosing, held_out = np.split(half, [round(len(half) / 2)])
    # What an early exit changes: only a question whose answer would have gone on is now retrieved for instead.
    goes_on = begun >= threshold
    gained = np.where(goes_on, rag.astype(int) - direct.astype(int), 0)

    candidates = np.unique(np.quantile(question[choosing], np.linspace(0, 1, 101)))
    low, exits = 0.0, 0
    for candidate in [*candidates[candidates < threshold], threshold]:
        early = question[choosing] < candidate
        loss = -gained[choosing][early].sum() / len(choosing)
        more = goes_on[choosing][early].sum() / len(choosing)
        if early.sum() > exits and loss <= _LOSS and more <= _MORE_RETRIEVAL:
            low, exits = float(candidate), int(early.sum())

    early = question[held_out] < low
    difference = np.where(early, gained[held_out], 0).astype(float)
    return FirstLook(
        low=low,
        chosen_on=len(choosing),
        n=len(held_out),
        early_exit_rate=float(early.mean()),
        retrieval_difference=float((early & goes_on[held_out]).mean()),
        difference=float(difference.mean()),
        interval=paired_interval(difference, seed=seed),
    )
