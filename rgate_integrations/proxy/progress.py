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
    TextColumn,
    TimeElapsedColumn,
)

from rgate_integrations.proxy.catalog import DownloadReport, Entry


@contextmanager
def shown(item: Entry, *, console: Console | None = None) -> Iterator[DownloadReport]:
    """Show a bar with bytes while an entry is fetched and a spinner while it is converted.

    On a stream that is not a terminal each step is one plain line instead.
    """
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last = ""

        def plain(line: str, size: int | None) -> None:
            nonlocal last
            step = line.partition(" ")[0]  # one line for all parts
            if step != last:
                console.print(f"{item.name}: {step if size is None else f'{step} {item.megabytes} MB'}")
                last = step

        yield plain
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[name]} {task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        total = item.megabytes
        task = progress.add_task("starting", total=None, name=item.name, amount="")

        def live(line: str, size: int | None) -> None:
            if size is not None:
                done = min(round(size / 1e6), total)
                progress.update(
                    task, description=line, total=total, completed=done, amount=f"{done}/{total} MB"
                )
            elif progress.tasks[-1].description != line:  # nothing to count: a bar that only moves
                for old in progress.task_ids:
                    progress.remove_task(old)
                progress.add_task(line, total=None, name=item.name, amount="")

        yield live


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
