"""Shows on standard error how far a download is, and keeps other libraries quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rgate_integrations.models.catalog import Entry

Say: TypeAlias = Callable[[str], None]
"""Called with what is being done now, such as ``"fetching"``."""


@contextmanager
def shown(item: Entry, folder: Path, *, quiet: bool = False) -> Iterator[Say]:
    """Show what is done with an entry, and a bar of how much of it is in a folder.

    On a stream that is not a terminal each step is one plain line instead.
    """
    console = Console(stderr=True, highlight=False, quiet=quiet)
    if not console.is_terminal:
        yield lambda step: console.print(f"{item.name}: {step}")
        return
    columns = (
        SpinnerColumn(),
        TextColumn(f"{item.name} {{task.description}}", markup=False),
        BarColumn(bar_width=12),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with _FolderProgress(*columns, console=console, transient=True, folder=folder) as progress:
        task = progress.add_task("starting", total=item.megabytes * 1e6)
        yield lambda step: progress.update(task, description=step)


class _FolderProgress(Progress):
    """Measures a folder each time it is drawn, so that it does not matter who writes into it."""

    def __init__(self, *columns: Any, folder: Path, **options: Any) -> None:
        self.folder = folder
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn now."""
        with suppress(OSError):  # files come and go meanwhile
            size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            for task in self.tasks:
                self.update(task.id, completed=min(size, task.total or size))
        return super().get_renderables()


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
