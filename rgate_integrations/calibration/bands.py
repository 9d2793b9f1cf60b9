"""Chooses a cascade's band: for which questions the first gate's word is enough, and what that costs in accuracy.

The band is chosen on one part of the questions and measured on the other, which has not seen it. The choice keeps
the mean loss on its own part within bounds; that promises nothing about new questions, for among many bands a lucky
one is taken. The held-out part then tests this one band, by betting as `MaxLoss` does: a promise is made if it shows,
with confidence, that new questions of the same kind lose no more. Half a point takes many thousands of questions to
show, so mostly there is an estimate with its interval, and no promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rgate_integrations.calibration.calibrate import LEAST, Calibration, origin
from rgate_integrations.calibration.policies import ALWAYS, Chosen, betting_p_value
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.evaluation.evaluate import DraftKind, judge
from rgate_integrations.evaluation.metrics import Booleans, Floats, paired_interval
from rgate_integrations.evaluation.paired import PairedFile
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.combined import CascadeGate


@dataclass(frozen=True)
class Band:
    """A cascade's band, and what it does on held-out questions; shares and differences are of 1, not of 100.

    Attributes:
        low: Below it the first gate's "unknown" stands.
        high: From it on the first gate's "known" stands; above 1 it never does.
        threshold: Retrieve iff P(known) is below it; low <= threshold <= high.
        chosen_on: Questions on which the band was chosen; the numbers below are of the others.
        n: Number of held-out questions.
        spared: Share of them that needs no draft.
        retrieval_rate: Share of them that is retrieved for.
        retrieval_difference: `retrieval_rate` minus that of the second gate for all.
        in_accuracy: Share of them that is answered rightly.
        difference: `in_accuracy` minus that of the second gate for all.
        interval: Its 95 % bootstrap interval, paired.
        kept: Whether they show that new questions lose no more than was allowed.
        promise: One sentence: what is promised, or why nothing can be.
    """

    low: float
    high: float
    threshold: float
    chosen_on: int
    n: int
    spared: float
    retrieval_rate: float
    retrieval_difference: float
    in_accuracy: float
    difference: float
    interval: tuple[float, float]
    kept: bool
    promise: str


def choose_band(
    first: Floats,
    second: Floats,
    threshold: float,
    closed_book: Booleans,
    rag: Booleans,
    *,
    loss: float = 0.005,
    more_retrieval: float = 0.0,
    confidence: float = 0.95,
    share: float = 0.5,
    seed: int = 0,
) -> Band:
    """Choose the band that spares the most drafts at a bounded loss, and measure it on held-out questions.

    Quantiles of the first gate's P(known) are tried for both ends. The second gate for all is always among them, so
    there is a band. Accuracy alone could often be kept by drafting for none and retrieving for more; hence the bound
    on retrieval.

    Args:
        first: P(known) of the first gate, in [0, 1], shape (n,), of questions that it was not trained on.
        second: P(known) of the second gate, likewise.
        threshold: The second gate's threshold.
        closed_book: Whether the answer without retrieval is right, shape (n,).
        rag: Whether the answer with retrieval is right, shape (n,).
        loss: The greatest mean loss of in-accuracy against the second gate for all, in [0, 1).
        more_retrieval: How much the retrieval rate may grow against it where the band is chosen; 1 is no bound.
        confidence: Of the promise, which is about the loss alone, in (0, 1).
        share: Share of the questions that choose, in (0, 1).
        seed: Seed of the split and of the bootstrap.

    Raises:
        DataFormatError: The shapes differ, a score is no number in [0, 1], or a part has fewer than 20 questions.
        ConfigurationError: An option is outside of its range.
    """
    if not (0 <= loss < 1 and 0 < confidence < 1 and 0 < share < 1 and min(threshold, more_retrieval) >= 0):
        raise ConfigurationError(
            f"One is out of range: loss {loss}, more_retrieval {more_retrieval}, confidence {confidence}, share "
            f"{share}, threshold {threshold}.",
            hint="0 <= loss < 1, confidence and share between 0 and 1, the others at least 0",
        )
    n = len(first)
    if any(a.shape != (n,) for a in (first, second, closed_book, rag)):
        raise DataFormatError(f"{n} scores of the first gate do not match the other arrays.")
    if not all(((a >= 0) & (a <= 1)).all() for a in (first, second)):  # NaN is in no range
        raise DataFormatError("A score is not a number in [0, 1].")
    order, fitting = np.random.default_rng(seed).permutation(n), round(n * share)
    if min(fitting, n - fitting) < LEAST:
        raise DataFormatError(
            f"{n} questions are {fitting} to choose a band on and {n - fitting} to measure it on.",
            hint=f"At least {LEAST} are needed for each, and thousands to tell half a point.",
        )
    chosen, held_out = order[:fitting], order[fitting:]
    low, high = _best(
        first[chosen], second[chosen], threshold, closed_book[chosen], rag[chosen], loss, more_retrieval
    )
    first, second = first[held_out], second[held_out]
    closed_book, rag = closed_book[held_out], rag[held_out]
    retrieve, thorough = cascaded(first, second, low, high) < threshold, second < threshold
    right = np.where(retrieve, rag, closed_book)
    difference = right.astype(float) - np.where(thorough, rag, closed_book)
    kept = betting_p_value(-difference, loss, 1 - confidence) <= 1 - confidence
    within = (
        f"at most {loss:.1%} in-accuracy against its second gate for all, with confidence {confidence:.0%}"
    )
    return Band(
        low=low,
        high=high,
        threshold=threshold,
        chosen_on=fitting,
        n=len(held_out),
        spared=float(_decided(first, low, high).mean()),
        retrieval_rate=float(retrieve.mean()),
        retrieval_difference=float(retrieve.mean() - thorough.mean()),
        in_accuracy=float(right.mean()),
        difference=float(difference.mean()),
        interval=paired_interval(difference, seed=seed),
        kept=kept,
        promise=f"Loses {within}."
        if kept
        else f"{len(held_out)} held-out questions do not show that it loses {within}.",
    )


def calibrate_band(
    gate: CascadeGate,
    files: Sequence[PairedFile],
    *,
    loss: float = 0.005,
    more_retrieval: float = 0.0,
    confidence: float = 0.95,
    draft: DraftKind = "proxy",
    share: float = 0.5,
    seed: int = 0,
    report: Callable[[int], None] | None = None,
) -> Calibration:
    """Set a cascade's band on paired data that neither of its gates was trained on; its threshold stays.

    Args:
        gate: The cascade.
        files: Paired data, from the traffic the gate will see.
        loss: The greatest mean loss of in-accuracy against the second gate for all; see `choose_band`.
        more_retrieval: How much the retrieval rate may grow against it.
        confidence: Of the promise.
        draft: What the gate reads, see `rgate_integrations.evaluation.evaluate.judge`.
        share: Share of the questions that choose.
        seed: Seed of the split and of the bootstrap.
        report: Told how many questions are done; each is judged twice.

    Raises:
        ConfigurationError: The gate is no cascade.
        DataFormatError: There are fewer than 40 questions.
    """
    if not isinstance(gate, CascadeGate):
        raise ConfigurationError(
            "Only a cascade has a band.", hint="--gate cascade:FIRST,SECOND, or load_gate('cascade', ...)"
        )
    questions = [q for f in files for q in f.records]
    say = report or (lambda done: None)
    # An empty band leaves all to the first gate, and the widest all to the second.
    first = judge(gate.with_options(low=0.0, high=0.0), questions, draft=draft, report=say)
    second = judge(
        gate.with_options(low=0.0, high=ALWAYS),
        questions,
        draft=draft,
        report=lambda done: say(len(questions) + done),
    )
    band = choose_band(
        first.p,
        second.p,
        gate.threshold,
        first.closed_book,
        first.rag,
        loss=loss,
        more_retrieval=more_retrieval,
        confidence=confidence,
        share=share,
        seed=seed,
    )
    facts = {k: v for k, v in asdict(band).items() if k not in ("threshold", "promise", "kept")}
    p = cascaded(first.p, second.p, band.low, band.high)
    provenance = {
        "policy": {
            "name": "band",
            "loss": loss,
            "more_retrieval": more_retrieval,
            "confidence": confidence,
        },
        "promise": band.promise,
        "kept": band.kept,
        **facts,
        **origin(files, draft, seed, p),
    }
    banded: Gate = gate.with_options(low=band.low, high=band.high)
    return Calibration(banded, Chosen(band.threshold, band.promise, band.kept, facts), provenance)


def cascaded(first: Floats, second: Floats, low: float, high: float) -> Floats:
    """Return P(known) of a cascade: the first gate's outside the band, the second's inside; shape (n,)."""
    return np.where(_decided(first, low, high), first, second)


def _decided(first: Floats, low: float, high: float) -> Booleans:
    """Whether the first gate decides alone; shape (n,)."""
    return (first < low) | (first >= high)


def _best(
    first: Floats,
    second: Floats,
    threshold: float,
    closed_book: Booleans,
    rag: Booleans,
    loss: float,
    more_retrieval: float,
) -> tuple[float, float]:
    """Return the band that spares the most drafts; of equal ones that with the most right answers."""
    n, retrieve = len(first), (second < threshold).astype(float)
    answered = np.where(retrieve, rag, closed_book)
    cuts = np.unique(np.append(np.quantile(first, np.linspace(0, 1, 101)), threshold))
    lows = np.append(0.0, cuts[cuts <= threshold])
    highs = np.append(cuts[cuts >= threshold], max(ALWAYS, threshold))
    below, above = first[:, None] < lows, first[:, None] >= highs  # no question is both

    def total(under: Floats, over: Floats) -> Floats:
        """Sum over the questions below each low and above each high, shape (lows, highs)."""
        found: Floats = (under @ below)[:, None] + (over @ above)[None, :]
        return found

    right = total(rag.astype(float) - answered, closed_book.astype(float) - answered)
    retrieved, spared = total(1 - retrieve, -retrieve), total(np.ones(n), np.ones(n))
    allowed = (right >= -loss * n - 1e-9) & (retrieved <= more_retrieval * n + 1e-9)
    # All are whole numbers, and `right` is at most n: it decides between equal shares only.
    at_low, at_high = np.unravel_index(
        int(np.where(allowed, spared + right / (4 * n), -1.0).argmax()), spared.shape
    )
    return float(lows[at_low]), float(highs[at_high])
