"""How the commands print: text, which may come from models, passages and files of others, JSON, and progress."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

if TYPE_CHECKING:
    from rgate_integrations.errors import RGateError
    from rgate_integrations.index.retriever import Hit

# Control characters, of which ESC and CSI begin sequences that terminals obey; those that turn the direction of
# writing around; line separators. rich gives them no width, so a layout stays what it is without them.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_HALF_PAIRS = re.compile(r"[\ud800-\udfff]")
# Those that JSON leaves as they are.
_IN_JSON = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(Console):
    """A console on which text is text: nothing in it commands the terminal.

    Args:
        stderr: Whether it writes to standard error.
        width: Number of columns; that of the terminal when None.

    Attributes:
        silent: Whether nothing is written to standard error but errors, as ``rgate -q`` asks for.
    """

    silent: ClassVar[bool] = False

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, quiet=stderr and Terminal.silent)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Lay out what is printed; all that is printed comes through here."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, such as for moving a progress bar
                yield segment
            else:
                yield Segment(_harmless(segment.text), segment.style)


class PrintedLog(logging.Handler):
    """Prints what the package logs to standard error, as text."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        Terminal(stderr=True).print(self.format(record), style="dim", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print JSON values on one line; what terminals would obey is escaped, so that the value stays the same."""
    line = json.dumps(value, ensure_ascii=False)
    typer.echo(_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", line))


def print_error(error: RGateError) -> None:
    """Print an error and its hint to standard error."""
    console = Terminal(stderr=True)
    console.quiet = False
    console.print("error:", style="bold red", end=" ")
    # Not wrapped: in a pipe, a hint that is a command must stay one line.
    console.print(error.message, markup=False, soft_wrap=True)
    if error.hint:
        console.print("hint:", style="bold", end="  ")
        console.print(error.hint, markup=False, soft_wrap=True)


def hit_as_json(hit: Hit) -> dict[str, Any]:
    """Return a passage that was found as JSON values."""
    passage = hit.passage
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": round(hit.score, 4)}


def _harmless(text: str) -> str:
    return _HALF_PAIRS.sub("\ufffd", _COMMANDS.sub("", text))


class Bar(Progress):
    """A progress bar on standard error, shown inside a ``with`` statement.

    Args:
        columns: What it shows; rich's usual columns when there are none.
        what: What is done, in words.
        total: How much there is to do; None if that is told later.
        transient: Whether it vanishes at the end.
    """

    def __init__(
        self, *columns: ProgressColumn, what: str, total: int | None = None, transient: bool = True
    ) -> None:
        super().__init__(*columns, console=Terminal(stderr=True), transient=transient)
        self._task = self.add_task(what, total=total)

    def count(self, done: int, total: int | None = None) -> None:
        """Show how much is done, and of how much."""
        self.update(self._task, completed=done, total=total)

    def tell(self, what: str, done: int, total: int) -> None:
        """Show what is being done, how far it is, and how far it goes."""
        self.update(self._task, description=what, completed=done, total=total)


def training_bar() -> Bar:
    """Return the bar of what begins with reading questions, and stays when it is done."""
    return Bar(what="reading questions", transient=False)
