"""How the commands print: text, which may come from models, passages and files of others, JSON, and progress."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, TaskID
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


def advance(progress: Progress, task: TaskID, done: int) -> None:
    """Show how much of a task is done; ``partial(advance, progress, task)`` is a ``report=`` argument."""
    progress.update(task, completed=done)


def hit_as_json(hit: Hit) -> dict[str, Any]:
    """Return a passage that was found as JSON values."""
    passage = hit.passage
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": round(hit.score, 4)}


def _harmless(text: str) -> str:
    return _HALF_PAIRS.sub("\ufffd", _COMMANDS.sub("", text))


class _Bar:
    """A bar on standard error, shown inside a ``with`` statement."""

    def __init__(self, name: str, total: int | None, *, transient: bool) -> None:
        self._bar = Progress(console=Terminal(stderr=True), transient=transient)
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


class QuestionBar(_Bar):
    """Is told how many questions are done.

    Args:
        name: What is done, in words.
        total: How many questions there are.
    """

    def __init__(self, name: str, total: int) -> None:
        super().__init__(name, total, transient=True)

    def __call__(self, done: int) -> None:
        """Show it."""
        self._bar.update(self._task, completed=done)


class TrainingBar(_Bar):
    """Is told what is being done, how far it is, and how far it goes."""

    def __init__(self) -> None:
        super().__init__("reading questions", None, transient=False)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show it."""
        self._bar.update(self._task, description=what, completed=done, total=total)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False)
