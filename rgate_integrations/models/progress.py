"""Shows on standard error how far a download is, and keeps other libraries quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from rgate_integrations.models.catalog import DownloadReport, Entry


@contextmanager
def shown(item: Entry, *, console: Console | None = None) -> Iterator[DownloadReport]:
    """Show a bar with bytes while an entry is fetched and a spinner while it is converted.

    On a stream that is not a terminal each step is one plain line instead.
    """
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _PlainLines(item, console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[name]} {task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(item, progress)


class _PlainLines:
    """Prints one line a step."""

    def __init__(self, item: Entry, console: Console) -> None:
        self.item = item
        self.console = console
        self.last = ""

    def __call__(self, line: str, size: int | None) -> None:
        step = line.partition(" ")[0]  # one line for all parts
        if step != self.last:
            amount = "" if size is None else f" {self.item.megabytes} MB"
            self.console.print(f"{self.item.name}: {step}{amount}")
            self.last = step


class _Bar:
    """Moves a bar: with bytes while there are some to count, and to and fro otherwise."""

    def __init__(self, item: Entry, progress: Progress) -> None:
        self.item = item
        self.progress = progress
        self.task = self._restart("starting")

    def __call__(self, line: str, size: int | None) -> None:
        if size is not None:
            total = self.item.megabytes
            done = min(round(size / 1e6), total)
            self.progress.update(
                self.task, description=line, total=total, completed=done, amount=f"{done}/{total} MB"
            )
        elif self.progress.tasks[-1].description != line:
            self.task = self._restart(line)

    def _restart(self, line: str) -> TaskID:
        for old in self.progress.task_ids:
            self.progress.remove_task(old)
        return self.progress.add_task(line, total=None, name=self.item.name, amount="")


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence transformers' progress bars and advice while loading."""
    logging_module = transformers.utils.logging
    verbosity, bars = logging_module.get_verbosity(), logging_module.is_progress_bar_enabled()
    logging_module.set_verbosity_error()
    logging_module.disable_progress_bar()
    try:
        yield
    finally:
        logging_module.set_verbosity(verbosity)
        if bars:
            logging_module.enable_progress_bar()
