"""The picture of `end_to_end`: accuracy against time and against tokens, a point a way, gates as curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from answer_tables import by_way

if TYPE_CHECKING:
    from end_to_end import Answered

SHOWN = {
    "never": "never",
    "always": "always",
    "LLM asked, LangChain prompt": "LLM asked\n(LangChain prompt)",
    "LLM asked, LlamaIndex selector": "LLM asked (LlamaIndex selector)",
    "LLM asked to answer or retrieve": "LLM asked to answer or retrieve",
    "nearest examples": "nearest examples",
    "gate, question alone": "RetrievalGate()",
    "look first": "look first",
    "answer first, FLARE's trigger": "FLARE's trigger",
    "answer first": "answer first",
    "answer first, unknown claims": "answer first, unknown claims",
    "oracle": "oracle",
}
PLACES = {
    "always": (0, -12, "center"),
    "nearest examples": (-4, -10, "right"),
    "gate, question alone": (-3, 5, "right"),
    "answer first, FLARE's trigger": (-5, -10, "right"),
    "answer first, unknown claims": (0, 6, "center"),
    "answer first": (6, -2, "left"),
    "LLM asked, LangChain prompt": (6, -4, "left"),
    "look first": (-4, 4, "right"),
    "LLM asked to answer or retrieve": (0, -12, "left"),
}
"""Where the name of a way stands, in points from its own: these have others near them."""


class PartialAnswerInfo(NamedTuple):
    """A begun answer: what the gate says of it, and what it had cost by then."""

    p_known: float
    prompt: int
    seconds: float


class Point(NamedTuple):
    """Mean tokens read, mean seconds, and share right."""

    prompt: float
    seconds: float
    right: float


def draw(path: Path, title: str, answers: Sequence[Answered], begun: dict[str, PartialAnswerInfo]) -> None:
    """Draw accuracy against mean time and against mean prompt tokens.

    Args:
        path: The SVG file.
        title: Whose answers these are, and how many.
        answers: All answers.
        begun: The beginnings of the direct answers, by question.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rgate", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    ways = by_way(answers)
    curves = {
        "RetrievalGate(), all thresholds": _question_curve(ways),
        "answer first, all thresholds": _begun_curve(ways, begun),
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, name, label in zip(
        axes, ("seconds", "prompt"), ("seconds a question", "prompt tokens a question"), strict=True
    ):
        for curve, style in zip(curves.items(), ("-", "--"), strict=True):
            xs = [getattr(p, name) for p in curve[1]]
            axis.plot(xs, [100 * p.right for p in curve[1]], style, linewidth=1.2, label=curve[0])
        for way, shown in SHOWN.items():
            if way in ways and len(ways[way]) == len(ways["always"]):
                point = _point(list(ways[way].values()))
                axis.plot([getattr(point, name)], [100 * point.right], "o", markersize=5, color="black")
                right, up, side = PLACES.get(way, (4, 4, "left"))
                axis.annotate(
                    shown,
                    (getattr(point, name), 100 * point.right),
                    xytext=(right, up),
                    textcoords="offset points",
                    fontsize=7,
                    horizontalalignment=side,
                )
        axis.set_xlim(right=1.17 * axis.get_xlim()[1])  # room for the names of what costs most
        axis.set_xlabel(f"{label}, mean")
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    axes[0].set_ylabel("right, %")
    axes[0].legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _question_curve(ways: dict[str, dict[str, Answered]]) -> list[Point]:
    """Return the points of the gate that reads the question alone, from never to always."""
    gated = ways["gate, question alone"]
    spent = {name: Spent(0, each.gate) for name, each in gated.items()}
    return _curve(ways, {name: each.p_known or 0.0 for name, each in gated.items()}, spent)


def _begun_curve(ways: dict[str, dict[str, Answered]], begun: dict[str, PartialAnswerInfo]) -> list[Point]:
    """Return the points of a gate that reads every begun answer."""
    spent = {name: Spent(each.prompt, each.seconds) for name, each in begun.items()}
    return _curve(ways, {name: each.p_known for name, each in begun.items()}, spent)


class Spent(NamedTuple):
    """What a question costs before it is retrieved for."""

    prompt: int
    seconds: float


def _curve(
    ways: dict[str, dict[str, Answered]], p_known: dict[str, float], spent: dict[str, Spent]
) -> list[Point]:
    points = []
    for threshold in [0.0, *sorted(set(p_known.values())), 1.1]:
        chosen, extra = [], []
        for name, p in p_known.items():
            if name in ways["always"]:
                retrieves = p < threshold
                chosen.append(ways["always" if retrieves else "never"][name])
                extra.append(spent[name] if retrieves else Spent(0, 0.0))
        point = _point(chosen)
        points.append(
            Point(
                point.prompt + float(np.mean([e.prompt for e in extra])),
                point.seconds + float(np.mean([e.seconds for e in extra])),
                point.right,
            )
        )
    return points


def _point(each: list[Answered]) -> Point:
    right = [a.right for a in each if a.right is not None]
    return Point(
        float(np.mean([a.prompt for a in each])),
        float(np.mean([a.total for a in each])),
        float(np.mean(right)),
    )
