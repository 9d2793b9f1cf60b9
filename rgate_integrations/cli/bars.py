"""Progress bars of the commands, as the callables that are told how far things are."""

from __future__ import annotations

from typing import Self

from rich.progress import Progress

from rgate_integrations.cli.output import Terminal


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
