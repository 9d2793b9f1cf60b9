"""Tables and claims of `papers`: estimates with intervals, verdicts, and their places in the pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rgate_integrations.runtime.files import write_atomically
from rgate_integrations.tuning.metrics import auc, paired_interval

SAMPLES, SEED = 1_000, 0
HOLDS, FAILS, OPEN = "holds", "does not hold", "not settled"
UNTESTED = "cannot be tested here"


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, by bootstrap over questions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def per_cent(self) -> str:
        """The number as a per cent."""
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def change(self) -> str:
        """The number as a difference, with its sign."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def points(self) -> str:
        """The number as a difference of per cents."""
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    def verdict(self, above: float = 0.0) -> str:
        """Whether the number is above a bound: the whole interval must lie on one side of it."""
        if self.low > above:
            return HOLDS
        return FAILS if self.high < above else OPEN


def difference(ours: np.ndarray, theirs: np.ndarray | float = 0.0) -> Estimate:
    """Return the mean difference of values of the same questions, paired."""
    values = np.asarray(ours, float) - theirs
    return Estimate(float(values.mean()), *paired_interval(values, SAMPLES, SEED))


def estimated(statistic: Callable[[np.ndarray], float], sets: Sequence[str]) -> Estimate:
    """Estimate a statistic of questions, which are drawn anew within each data set.

    Args:
        statistic: Gets the positions of the questions drawn.
        sets: Data set of each question.
    """
    rng = np.random.default_rng(SEED)
    names = np.asarray(sets)
    places = [np.flatnonzero(names == name) for name in np.unique(names)]
    drawn = []
    for _ in range(SAMPLES):
        rows = np.concatenate([rng.choice(place, len(place)) for place in places])
        drawn.append(statistic(rows))
    value = statistic(np.arange(len(names)))
    if np.isnan(drawn).all():
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def share(holds: np.ndarray) -> Estimate:
    """Estimate the share of questions of which something holds."""
    return difference(holds)


def gap_of(effect: np.ndarray, condition: np.ndarray) -> Estimate:
    """Estimate by how much the mean of an effect is greater where a condition holds than where it does not."""
    values = np.asarray(effect, float)

    def gap(rows: np.ndarray) -> float:
        inside = condition[rows]
        return float(values[rows][inside].mean() - values[rows][~inside].mean())

    return estimated(gap, condition.astype(str))


def all_agree(verdicts: Sequence[str]) -> str:
    """Return the verdict that all share, or that it is not settled."""
    return verdicts[0] if len(set(verdicts)) == 1 else OPEN


def mean_auc(scores: np.ndarray, known: np.ndarray, sets: np.ndarray) -> float:
    """Return the mean AUC of the data sets that have both labels; NaN if none has."""
    found = []
    for name in np.unique(sets):
        own = sets == name
        if known[own].any() and not known[own].all():
            found.append(auc(scores[own], known[own]))
    return float(np.mean(found)) if found else float("nan")


def auc_estimate(scores: np.ndarray, known: np.ndarray, sets: np.ndarray) -> Estimate:
    """Estimate the mean AUC of the data sets."""
    return estimated(lambda rows: mean_auc(scores[rows], known[rows], sets[rows]), sets)


def auc_difference(first: np.ndarray, second: np.ndarray, known: np.ndarray, sets: np.ndarray) -> Estimate:
    """Estimate by how much the mean AUC of one score is above that of another, on the same questions."""

    def gain(rows: np.ndarray) -> float:
        pair = [mean_auc(scores[rows], known[rows], sets[rows]) for scores in (first, second)]
        return pair[0] - pair[1]

    return estimated(gain, sets)


@dataclass(frozen=True)
class PaperTable:
    """A table of a page.

    Attributes:
        name: Its place in the page: between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
        caption: What it shows, in a sentence or two.
        columns: The heads.
        rows: The cells.
    """

    name: str
    caption: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return caption and table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.caption}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and what became of it here.

    Attributes:
        paper: Short name of the paper.
        claim: What it says.
        theirs: Its figures.
        ours: The figures here, with intervals.
        verdict: `HOLDS`, `FAILS`, `OPEN` or `UNTESTED`.
    """

    paper: str
    claim: str
    theirs: str
    ours: str
    verdict: str


Part = tuple[PaperTable, list[Claim]]
"""What a part of a pipeline finds: its table, and what became of the claims that it tests."""


def claims_table(claims: Sequence[Claim], name: str = "claims", *, papers: bool = False) -> PaperTable:
    """Return claims as a table."""
    columns = ["claim", "in the paper", "here [95 %]", "verdict"]
    rows = [[each.claim, each.theirs, each.ours, f"**{each.verdict}**"] for each in claims]
    if papers:
        columns = ["paper", *columns]
        rows = [[each.paper, *row] for each, row in zip(claims, rows, strict=True)]
    return PaperTable(name, "", columns, rows)


def insert(page: Path, tables: Sequence[PaperTable]) -> None:
    """Write tables into their places of a page.

    Raises:
        ValueError: The page has no place for one of them.
    """
    text = page.read_text(encoding="utf-8")
    for table in tables:
        begin, end = f"<!-- {table.name} -->", f"<!-- /{table.name} -->"
        place = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not place.search(text):
            raise ValueError(f"{page} has no place for the table {table.name!r}: {begin} … {end}")
        written = f"{begin}\n\n{table.markdown().strip()}\n\n{end}"
        text = place.sub(lambda _, written=written: written, text)
    write_atomically(page, text)
