"""Tables of `end_to_end`: what each way costs and how often it is right, and the same calculated for larger LLMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Calls:
    """Tokens of a way's mean question."""

    prompt: float
    written: float


@dataclass(frozen=True)
class Machine:
    """A GPU that runs an LLM, one request at a time.

    Reading is bound by arithmetic, 2 operations a parameter and token; writing by memory, all parameters a token.
    """

    gpu: dict[str, Any]
    llm: dict[str, Any]

    def seconds(self, calls: Calls) -> float:
        """Return how long a way's mean question takes."""
        operations = 2 * self.llm["parameters"] * calls.prompt
        reading = operations / (self.gpu["tflops"] * 1e12 * self.gpu["share_of_tflops"])
        moved = self.llm["parameters"] * self.llm["bytes_a_parameter"] * calls.written
        writing = moved / (self.gpu["terabytes_a_second"] * 1e12 * self.gpu["share_of_bandwidth"])
        return float(reading + writing)


def calculated(answers: Sequence[Answered], prices: dict[str, Any]) -> list[Row]:
    """Return what each way would cost a million questions with larger LLMs: calculated, not measured.

    Tokens, retrieval rates, and the time of gate and search are as measured here. A larger LLM knows more, so that
    its gate would skip more; that is not counted. An LLM on a GPU is judged by time, one behind an API by money.
    """
    ways = by_way(answers)
    rows = []
    for name, own in ways.items():
        calls = _mean_calls(list(own.values()))
        beside = _mean([a.gate + a.search for a in own.values()])
        row = {"way": name}
        for llm in prices["llms"]:
            machine = Machine(prices["gpu"], llm)
            hours = 1e6 * machine.seconds(calls) / 3_600
            row[f"{llm['name']}: s a question"] = f"{machine.seconds(calls) + beside:.2f}"
            row[f"{llm['name']}: GPU hours"] = f"{hours:.0f}"
            row[f"{llm['name']}: $"] = f"{hours * prices['gpu']['dollars_an_hour']:,.0f}"
            row[f"{llm['name']}: pays above a skip rate of"] = _pays_above(ways, name, machine.seconds, True)
        for price in prices["prices"]:
            dollars = Price(price).dollars
            saved = 1e6 * (dollars(_mean_calls(list(ways["always"].values()))) - dollars(calls))
            row[f"{price['name']}: $ saved"] = f"{saved:,.0f}"
            row[f"{price['name']}: pays above a skip rate of"] = _pays_above(ways, name, dollars, False)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Price:
    """What tokens of an LLM behind an API cost, in dollars a million."""

    price: dict[str, Any]

    def dollars(self, calls: Calls) -> float:
        """Return what a way's mean question costs."""
        return float(calls.prompt * self.price["input"] + calls.written * self.price["output"]) / 1e6


def _pays_above(
    ways: dict[str, dict[str, Answered]], name: str, cost: Callable[[Calls], float], timed: bool
) -> str:
    """Return the share of questions that a way must skip so that it costs no more than always.

    Args:
        ways: The answers.
        name: The way.
        cost: What calls of an LLM cost, in seconds or dollars.
        timed: Whether it is seconds: gate and search take some, too.
    """
    if name in ("never", "always", "oracle"):
        return ""
    own, never, always = (list(ways[way].values()) for way in (name, "never", "always"))
    gate = _mean([a.gate for a in own]) - _mean([a.gate for a in always]) if timed else 0.0
    search = _mean([a.search for a in always]) - _mean([a.search for a in never]) if timed else 0.0
    spared = cost(_mean_calls(always)) - cost(_mean_calls(never)) + search
    wasted = cost(_wasted(own, ways["always"]))
    # Skipping a share s saves s times what is spared, and costs the gate, and (1 - s) times what was wasted.
    share = max(0.0, gate + wasted) / (spared + wasted)
    return f"{100 * share:.0f} %" if 0 <= share < 1 else "never"


def _wasted(own: list[Answered], always: dict[str, Answered]) -> Calls:
    """Return what a question that is retrieved for costs beyond always: calls that asked, or an answer begun."""
    retrieved = [a for a in own if a.retrieved]
    if not retrieved:
        return Calls(0.0, 0.0)
    prompt = _mean([a.prompt - always[a.id].prompt for a in retrieved])
    return Calls(max(0.0, prompt), max(0.0, _mean([a.written - always[a.id].written for a in retrieved])))


def _mean_calls(each: Sequence[Answered]) -> Calls:
    return Calls(_mean([a.prompt for a in each]), _mean([a.written for a in each]))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
