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

from rgate_integrations.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.calibration.calibrate import LEAST, Calibration, origin
from rgate_integrations.calibration.policies import ALWAYS, Chosen, betting_p_value
from rgate_integrations.engine import DecisionEngine
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.evaluation.evaluate import judge
from rgate_integrations.evaluation.metrics import paired_interval
from rgate_integrations.evaluation.paired import PairedFile
from rgate_integrations.gates.combined import CascadeGate
from rgate_integrations.training.drafts import DraftKind


@dataclass(frozen=True)
class BandOptions:
    """What a band may cost, and how it is chosen.

    Attributes:
        loss: The greatest mean loss of in-accuracy against the second gate for all, in [0, 1).
        more_retrieval: How much the retrieval rate may grow against it where the band is chosen; 1 is no bound.
        confidence: Of the promise, which is about the loss alone, in (0, 1).
        share: Share of the questions that choose, in (0, 1).
        seed: Seed of the split and of the bootstrap.
        two_sided: Whether the first gate's "known" may stand, too; otherwise only its "unknown" does.

    Raises:
        ConfigurationError: An option is outside of its range.
    """

    loss: float = 0.005
    more_retrieval: float = 0.0
    confidence: float = 0.95
    share: float = 0.5
    seed: int = 0
    two_sided: bool = True

    def __post_init__(self) -> None:
        in_range = 0 <= self.loss < 1 and 0 < self.confidence < 1 and 0 < self.share < 1
        if not in_range or not self.more_retrieval >= 0:
            raise ConfigurationError(
                f"One is out of range: {self}.",
                hint="0 <= loss < 1, confidence and share between 0 and 1, more_retrieval at least 0",
            )


@dataclass(frozen=True)
class Band:
    """A cascade's band, and what it does on held-out questions; shares and differences are of 1, not of 100.

    Attributes:
        low: Below it the first gate's "unknown" stands.
        high: From it on the first gate's "known" stands; above 1 it never does.
        threshold: Retrieve iff P(known) is below it; low <= threshold <= high.
        chosen_on: Questions on which the band was chosen; the numbers below are of the others.
        n: Number of held-out questions.
        early_exit_rate: Share of them that the first gate decides alone, so that they need no draft.
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
    early_exit_rate: float
    retrieval_rate: float
    retrieval_difference: float
    in_accuracy: float
    difference: float
    interval: tuple[float, float]
    kept: bool
    promise: str


def choose_band(
    first: Float64Array,
    second: Float64Array,
    threshold: float,
    closed_book: BoolArray,
    rag: BoolArray,
    options: BandOptions | None = None,
) -> Band:
    """Choose the band with the most early exits at a bounded loss, and measure it on held-out questions.

    Quantiles of the first gate's P(known) are tried for both ends. The second gate for all is always among them, so
    there is a band. Accuracy alone could often be kept by drafting for none and retrieving for more; hence the bound
    on retrieval.

    Args:
        first: P(known) of the first gate, in [0, 1], shape (n,), of questions that it was not trained on.
        second: P(known) of the second gate, likewise.
        threshold: The second gate's threshold, at least 0.
        closed_book: Whether the answer without retrieval is right, shape (n,).
        rag: Whether the answer with retrieval is right, shape (n,).
        options: What the band may cost; the defaults when None.

    Raises:
        DataFormatError: The shapes differ, a score is no number in [0, 1], or a part has fewer than 20 questions.
        ConfigurationError: The threshold is negative or no number.
    """
    options = options or BandOptions()
    if not threshold >= 0:
        raise ConfigurationError(f"The threshold is out of range: {threshold}.", hint="at least 0")
    questions = _Questions(first, second, closed_book, rag)
    questions.check()
    choosing, held_out = _split(len(first), options)
    low, high = _best(questions.part(choosing), threshold, options)
    return _measured(questions.part(held_out), (low, high), threshold, options, len(choosing))


def calibrate_band(
    gate: DecisionEngine,
    files: Sequence[PairedFile],
    options: BandOptions | None = None,
    *,
    draft: DraftKind = "proxy",
    report: Callable[[int], None] | None = None,
) -> Calibration:
    """Set a cascade's band on paired data that neither of its gates was trained on; its threshold stays.

    Args:
        gate: The cascade.
        files: Paired data, from the traffic the gate will see.
        options: What the band may cost; the defaults when None.
        draft: What the gate reads, see `rgate_integrations.evaluation.evaluate.judge`.
        report: Told how many questions are done; each is judged twice.

    Raises:
        ConfigurationError: The gate is no cascade.
        DataFormatError: There are fewer than 40 questions.
    """
    if not isinstance(gate.gate, CascadeGate):
        raise ConfigurationError(
            "Only a cascade has a band.", hint="--gate cascade:FIRST,SECOND, or load_gate('cascade', ...)"
        )
    options = options or BandOptions()
    questions = [q for f in files for q in f.records]

    def report_second(done: int) -> None:
        if report is not None:
            report(len(questions) + done)

    # An empty band leaves all to the first gate, and the widest all to the second.
    first = judge(gate.with_options(low=0.0, high=0.0), questions, draft=draft, report=report)
    second = judge(gate.with_options(low=0.0, high=ALWAYS), questions, draft=draft, report=report_second)
    band = choose_band(first.p, second.p, gate.threshold, first.closed_book, first.rag, options)
    facts = asdict(band)
    for name in ("threshold", "promise", "kept"):  # these have names of their own in what is saved
        del facts[name]
    policy = {
        "name": "band",
        "loss": options.loss,
        "more_retrieval": options.more_retrieval,
        "confidence": options.confidence,
    }
    p = cascaded(first.p, second.p, band.low, band.high)
    provenance = {
        "policy": policy,
        "promise": band.promise,
        "kept": band.kept,
        **facts,
        **origin(files, draft, options.seed, p),
    }
    chosen = Chosen(band.threshold, band.promise, band.kept, facts)
    return Calibration(gate.with_options(low=band.low, high=band.high), chosen, provenance)


def cascaded(first: Float64Array, second: Float64Array, low: float, high: float) -> Float64Array:
    """Return P(known) of a cascade: the first gate's outside the band, the second's inside; shape (n,)."""
    return np.where(_exits_early(first, low, high), first, second)


def _exits_early(first: Float64Array, low: float, high: float) -> BoolArray:
    """Whether the first gate decides alone; shape (n,)."""
    return (first < low) | (first >= high)


@dataclass(frozen=True)
class _Questions:
    """P(known) of both gates and which arms are right; all of shape (n,)."""

    first: Float64Array
    second: Float64Array
    closed_book: BoolArray
    rag: BoolArray

    def check(self) -> None:
        n = len(self.first)
        if any(a.shape != (n,) for a in (self.first, self.second, self.closed_book, self.rag)):
            raise DataFormatError(f"{n} scores of the first gate do not match the other arrays.")
        for p in (self.first, self.second):
            if not ((p >= 0) & (p <= 1)).all():  # NaN is in no range
                raise DataFormatError("A score is not a number in [0, 1].")

    def part(self, positions: PositionArray) -> _Questions:
        return _Questions(
            self.first[positions], self.second[positions], self.closed_book[positions], self.rag[positions]
        )

    def answered(self, retrieve: BoolArray) -> Float64Array:
        """Return 1.0 where the answer is right and 0.0 where it is wrong."""
        return np.where(retrieve, self.rag, self.closed_book).astype(float)


def _split(n: int, options: BandOptions) -> tuple[PositionArray, PositionArray]:
    """Return the questions that choose the band, and those on which it is measured."""
    order = np.random.default_rng(options.seed).permutation(n)
    choosing = round(n * options.share)
    if min(choosing, n - choosing) < LEAST:
        raise DataFormatError(
            f"{n} questions are {choosing} to choose a band on and {n - choosing} to measure it on.",
            hint=f"At least {LEAST} are needed for each, and thousands to tell half a point.",
        )
    return order[:choosing], order[choosing:]


def _best(questions: _Questions, threshold: float, options: BandOptions) -> tuple[float, float]:
    """Return the band with the most early exits; of equal ones that with the most right answers."""
    first, n = questions.first, len(questions.first)
    cuts = np.unique(np.append(np.quantile(first, np.linspace(0, 1, 101)), threshold))
    lows = np.append(0.0, cuts[cuts <= threshold])
    never = max(ALWAYS, threshold)
    highs = np.append(cuts[cuts >= threshold], never) if options.two_sided else np.array([never])
    below, above = first[:, None] < lows, first[:, None] >= highs  # no question is both

    # What changes against the second gate for all: a question below the band is retrieved for, one above is not.
    by_second = questions.second < threshold
    answered, retrieving = questions.answered(by_second), by_second.astype(float)
    gained = _sums((questions.rag - answered) @ below, (questions.closed_book - answered) @ above)
    retrieved = _sums((1 - retrieving) @ below, -retrieving @ above)
    exits = _sums(below.sum(axis=0), above.sum(axis=0))
    allowed = (gained >= -options.loss * n - 1e-9) & (retrieved <= options.more_retrieval * n + 1e-9)
    # All are whole numbers, and `gained` is at most n: it decides between equal numbers of exits only.
    value = np.where(allowed, exits + gained / (4 * n), -1.0)
    at_low, at_high = np.unravel_index(int(value.argmax()), value.shape)
    return float(lows[at_low]), float(highs[at_high])


def _sums(below: Float64Array, above: Float64Array) -> Float64Array:
    """Return what comes of each band, shape (lows, highs), from what comes of each low and of each high."""
    return below[:, None] + above[None, :]


def _measured(
    questions: _Questions,
    ends: tuple[float, float],
    threshold: float,
    options: BandOptions,
    chosen_on: int,
) -> Band:
    """Measure a band on questions that did not choose it."""
    low, high = ends
    n = len(questions.first)
    retrieve = cascaded(questions.first, questions.second, low, high) < threshold
    by_second = questions.second < threshold
    right = questions.answered(retrieve)
    difference = right - questions.answered(by_second)
    level = 1 - options.confidence
    kept = betting_p_value(-difference, options.loss, level) <= level
    within = (
        f"at most {options.loss:.1%} in-accuracy against its second gate for all, with confidence "
        f"{options.confidence:.0%}"
    )
    promise = f"Loses {within}." if kept else f"{n} held-out questions do not show that it loses {within}."
    return Band(
        low=low,
        high=high,
        threshold=threshold,
        chosen_on=chosen_on,
        n=n,
        early_exit_rate=float(_exits_early(questions.first, low, high).mean()),
        retrieval_rate=float(retrieve.mean()),
        retrieval_difference=float(retrieve.mean() - by_second.mean()),
        in_accuracy=float(right.mean()),
        difference=float(difference.mean()),
        interval=paired_interval(difference, seed=options.seed),
        kept=kept,
        promise=promise,
    )
