"""Saves and reads the figures of a day of `traffic`, and draws the picture at the beginning of the docs.

    python benchmarks/traffic.py --save benchmarks/traffic/figures.json
    python benchmarks/traffic_picture.py        writes docs/assets/traffic.svg and traffic-narrow.svg

The picture has a panel for each application and a point for each way: the share of needed retrievals missed against
that of needless ones avoided, with 95 % intervals. A way that skips at random lies on the diagonal.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from base import argument_parser
from traffic_requests import Choice, LabelledRequest, count_skipped, share_cell

from rgate_integrations.tuning.evaluation import wilson

FIGURES = Path(__file__).parent / "traffic" / "figures.json"
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "traffic.svg"

TITLES = {"library": "docs assistant", "helpdesk": "help desk", "encyclopedia": "general assistant"}
LABEL = "Needed retrievals missed against needless ones avoided, for three applications"
NAMED = ", gpt-4o"
TRIVIAL = ("always", "never")
_CROSS, _PLUS = "M-4-4L4 4M4-4L-4 4", "M-4.5 0h9M0-4.5v9"
MARKS = {
    "gate": ("#6366f1", "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z"),
    "gate, corpus": ("#0d9488", "M-4-4h8v8h-8z"),
    "look first": ("#d97706", "M0-5.5L5.5 4h-11z"),
    "semantic-router": ("#dc2626", _CROSS),
    "always": ("#808795", _PLUS),
    "never": ("#808795", _PLUS),
}
"""Colour and shape of each way. A gate that knows the LLM's name has the shape hollow."""
LEGEND = {
    "gate": "gate",
    "gate, corpus": "gate, corpus=",
    "look first": "gate, look first",
    "gate" + NAMED: "hollow: gpt-4o",
    "semantic-router": "semantic-router",
    "always": "always, never",
}
STYLE = (
    "svg{font:13px system-ui,sans-serif}text{fill:#374151}.c{fill:#fff}.g{stroke:#e5e7eb}.d{stroke:#9ca3af}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d5db}.c{fill:#1e2029}.g{stroke:#3b3f4c}.d{stroke:#6b7280}}"
)


@dataclass(frozen=True)
class Layout:
    """Positions in the picture, in pixels.

    Attributes:
        columns: Panels side by side.
        width: Width of a panel.
        height: Its height.
        entries: Entries of the legend side by side.
    """

    columns: int
    width: int
    height: int
    entries: int
    left: ClassVar[int] = 56
    above: ClassVar[int] = 32
    below: ClassVar[int] = 50
    line: ClassVar[int] = 22

    def panel(self, number: int) -> tuple[int, int]:
        """Return the upper left corner of a panel's axes."""
        row, column = divmod(number, self.columns)
        return self.left + column * (self.width + self.left), self.above + row * self._row

    def legend(self, number: int, panels: int) -> tuple[int, int]:
        """Return the left end of an entry's baseline in the legend."""
        row, column = divmod(number, self.entries)
        top = -(-panels // self.columns) * self._row + 14
        return 20 + column * (self.size(panels)[0] // self.entries), top + row * self.line

    def size(self, panels: int) -> tuple[int, int]:
        """Return width and height of the picture."""
        rows, lines = -(-panels // self.columns), -(-len(LEGEND) // self.entries)
        return self.columns * (self.width + self.left) + 20, rows * self._row + lines * self.line + 8

    @property
    def _row(self) -> int:
        return self.above + self.height + self.below


WIDE = Layout(columns=3, width=180, height=180, entries=3)
NARROW = Layout(columns=1, width=270, height=140, entries=2)


@dataclass(frozen=True)
class WayFigures:
    """Results of a way in one day.

    Attributes:
        avoided: Requests skipped of those that need no passages, and how many these are.
        missed: Requests skipped of those that need passages, and how many these are.
        added_ms: Median time of a decision, in milliseconds.
    """

    avoided: tuple[int, int]
    missed: tuple[int, int]
    added_ms: float

    @classmethod
    def from_choices(cls, requests: Sequence[LabelledRequest], choices: Sequence[Choice]) -> "WayFigures":
        """Count the decisions about a day's requests."""
        return cls(
            avoided=count_skipped(requests, choices, needs_passages=False),
            missed=count_skipped(requests, choices, needs_passages=True),
            added_ms=round(1e3 * median(choice.seconds for choice in choices), 1),
        )


Day = Mapping[str, WayFigures]
"""The figures of each way, for one application."""


def table(day: Day) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return columns and rows of a day's table, without the trivial ways."""
    first = next(iter(day.values()))
    columns = (
        "way",
        f"avoided, % of {first.avoided[1]}",
        f"missed, % of {first.missed[1]}",
        "added, ms (median)",
    )
    return columns, [
        [way, share_cell(*figures.avoided), share_cell(*figures.missed), f"{figures.added_ms:.1f}"]
        for way, figures in day.items()
        if way not in TRIVIAL
    ]


def save_figures(days: Mapping[str, Day], file: Path) -> None:
    """Write the figures of each application as JSON, a line for each way."""
    blocks = []
    for application, day in days.items():
        lines = [f"  {json.dumps(way)}: {json.dumps(asdict(figures))}" for way, figures in day.items()]
        blocks.append(f" {json.dumps(application)}: {{\n" + ",\n".join(lines) + "\n }")
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def read_figures(file: Path) -> dict[str, Day]:
    """Read the figures of each application, as `save_figures` writes them."""
    days = json.loads(file.read_text(encoding="utf-8"))
    return {
        application: {
            way: WayFigures(tuple(saved["avoided"]), tuple(saved["missed"]), saved["added_ms"])
            for way, saved in day.items()
        }
        for application, day in days.items()
    }


def draw(days: Mapping[str, Day], layout: Layout) -> str:
    """Return the picture as an SVG document."""
    width, height = layout.size(len(days))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="{LABEL}">',
        f"<style>{STYLE}</style>",
        f'<rect class="c" width="{width}" height="{height}" rx="6"/>',
    ]
    for number, (application, day) in enumerate(days.items()):
        left, top = layout.panel(number)
        parts += [
            f'<g transform="translate({left} {top})">',
            *_panel(TITLES[application], day, layout),
            "</g>",
        ]
    for number, (way, words) in enumerate(LEGEND.items()):
        x, y = layout.legend(number, len(days))
        parts += [_mark(way, x, y - 4), f'<text x="{x + 12}" y="{y}">{words}</text>']
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, day: Day, layout: Layout) -> list[str]:
    width, height = layout.width, layout.height
    parts = [_text(title, width / 2, -12, ' font-weight="600"')]
    for share in (0, 0.5, 1):
        x, y = width * share, height * (1 - share)
        parts.append(f'<path class="g" d="M{x:g} 0V{height}M0 {y:g}H{width}"/>')
        parts += [_text(f"{100 * share:g}", x, height + 17), _text(f"{100 * share:g}", -18, y + 4)]
    angle = math.degrees(math.atan2(height, width))
    parts += [
        f'<path class="d" stroke-dasharray="3 4" d="M0 {height}L{width} 0"/>',
        _text(
            "at random", 0, -5, f' transform="translate({width / 2:g} {height / 2:g}) rotate({-angle:.0f})"'
        ),
        _text("needless avoided, %", width / 2, height + 36),
        _text("needed missed, %", 0, 0, f' transform="translate(-35 {height / 2:g}) rotate(-90)"'),
    ]
    ways = [way for way in day if way.removesuffix(NAMED) in MARKS]
    for way in sorted(ways, key=lambda way: way.endswith(NAMED)):  # hollow marks lie on filled ones
        figures = day[way]
        across, up = (hits / n for hits, n in (figures.avoided, figures.missed))
        (left, right), (low, high) = wilson(across, figures.avoided[1]), wilson(up, figures.missed[1])
        x, y = width * across, height * (1 - up)
        bars = f"M{width * left:.1f} {y:.1f}H{width * right:.1f}"
        bars += f"M{x:.1f} {height * (1 - low):.1f}V{height * (1 - high):.1f}"
        colour = MARKS[way.removesuffix(NAMED)][0]
        parts += [f'<path stroke="{colour}" stroke-opacity=".55" d="{bars}"/>', _mark(way, x, y)]
    return parts


def _text(words: str, x: float, y: float, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle"{attributes}>{words}</text>'


def _mark(way: str, x: float, y: float) -> str:
    colour, shape = MARKS[way.removesuffix(NAMED)]
    filled = shape.endswith("z") and not way.endswith(NAMED)
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{shape}" stroke="{colour}" stroke-width="1.8"'
        f' fill="{colour if filled else "none"}"><title>{way}</title></path>'
    )


def files(out: Path) -> list[tuple[Layout, Path]]:
    """Return the pictures to draw: the wide one, and for small screens the narrow one beside it."""
    return [(WIDE, out), (NARROW, out.with_stem(f"{out.stem}-narrow"))]


def main() -> None:
    """Draw the saved figures."""
    parser = argument_parser(__doc__)
    parser.add_argument("--figures", type=Path, metavar="FILE", default=FIGURES)
    parser.add_argument("--out", type=Path, metavar="FILE", default=PICTURE)
    options = parser.parse_args()
    days = read_figures(options.figures)
    for layout, file in files(options.out):
        file.write_text(draw(days, layout), encoding="utf-8")


if __name__ == "__main__":
    main()
