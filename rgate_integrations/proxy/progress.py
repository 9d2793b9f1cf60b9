"""Shows on standard error how far a download is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from rgate_integrations.proxy.catalog import Entry
from rgate_integrations.proxy.download import Report


@contextmanager
def shown(item: Entry, *, console: Console | None = None) -> Iterator[Report]:
    """Show a bar with bytes while an entry is fetched and a spinner while it is converted.

    On a stream that is not a terminal each step is one plain line instead.
    """
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last = ""

        def plain(line: str, size: int | None) -> None:
            nonlocal last
            step = line.partition(",")[0]  # one line for all parts
            if step != last:
                more = f" {item.megabytes} MB" if size is not None else ""
                console.print(f"{item.name}: {line.partition(', part')[0]}{more}", soft_wrap=True)
                last = step

        yield plain
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[name]}: {task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        total = item.megabytes * 1_000_000
        task = progress.add_task("starting", total=total, name=item.name)

        def live(line: str, size: int | None) -> None:
            if size is None:  # nothing to count: a moving bar
                progress.update(task, description=line, total=None)
            else:
                progress.update(task, description=line, completed=min(size, total))

        yield live
