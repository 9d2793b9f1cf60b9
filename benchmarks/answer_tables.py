"""Tables of `end_to_end`: what each way costs, and how often it is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from end_to_end import Answered

SAMPLES, SEED = 10_000, 0
Row = dict[str, str]


def by_way(answers: Sequence[Answered]) -> dict[str, dict[str, Answered]]:
    """Return the answers by way and question."""
    found: dict[str, dict[str, Answered]] = {}
    for each in answers:
        found.setdefault(each.way, {})[each.id] = each
    return found


def overview(answers: Sequence[Answered], prices: list[dict[str, Any]]) -> list[Row]:
    """Return a row for each way; all have answered the same questions."""
    ways = by_way(answers)
    return [_row(name, own, ways["always"], prices) for name, own in ways.items()]


def _row(
    name: str, own: dict[str, Answered], always: dict[str, Answered], prices: list[dict[str, Any]]
) -> Row:
    each = list(own.values())
    judged = [a for a in each if a.right is not None]
    theirs = [always[a.id] for a in judged]
    low, high = paired_interval([bool(a.right) for a in judged], [bool(a.right) for a in theirs])
    difference = np.mean([a.right for a in judged]) - np.mean([a.right for a in theirs])
    total = sum(a.total for a in each)
    row = {
        "way": name,
        "right, %": f"{100 * np.mean([a.right for a in judged]):.1f}",
        "points against always [95 %]": ""
        if name == "always"
        else f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        "EM, %": f"{100 * np.mean([a.exact for a in judged]):.1f}",
        "F1, %": f"{100 * np.mean([a.f1 for a in judged]):.1f}",
        "retrieved, %": f"{100 * np.mean([a.retrieved for a in each]):.0f}",
        "LLM calls": f"{np.mean([a.calls for a in each]):.2f}",
        "read": f"{np.mean([a.prompt for a in each]):.0f}",
        "written": f"{np.mean([a.written for a in each]):.0f}",
        "first token, s (p50, p95)": _percentiles([a.first for a in each]),
        "total, s (p50, p95)": _percentiles([a.total for a in each]),
        "gate, % of time": f"{100 * sum(a.gate for a in each) / total:.1f}",
    }
    for price in prices:
        dollars = [(a.prompt * price["input"] + a.written * price["output"]) / 1e6 for a in each]
        row[f"$ per 1,000, {price['name']}"] = f"{1_000 * np.mean(dollars):.3f}"
    return row


def _percentiles(seconds: Sequence[float]) -> str:
    return f"{np.percentile(seconds, 50):.2f}, {np.percentile(seconds, 95):.2f}"


def paired_interval(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two means over the same questions, by bootstrap."""
    difference = np.array(ours, float) - np.array(theirs, float)
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, len(difference), (SAMPLES, len(difference)))
    low, high = np.percentile(difference[rows].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def by_kind(answers: Sequence[Answered]) -> list[Row]:
    """Return a row for each way, a column for each kind of question."""
    kinds = sorted({each.kind for each in answers})
    rows = []
    for name, own in by_way(answers).items():
        row = {"way": name}
        for kind in kinds:
            each = [a for a in own.values() if a.kind == kind]
            judged = [a.right for a in each if a.right is not None]
            right = f"{100 * np.mean(judged):.0f}" if judged else ""
            row[f"{kind} ({len(each)})"] = f"{right} ({100 * np.mean([a.retrieved for a in each]):.0f})"
        rows.append(row)
    return rows
