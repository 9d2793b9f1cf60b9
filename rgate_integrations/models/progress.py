"""Shows on standard error what a download is at, and keeps other libraries quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.console import Console

from rgate_integrations.models.catalog import Entry

Say: TypeAlias = Callable[[str], None]
"""Called with what is being done now, such as ``"fetching"``."""


@contextmanager
def shown(item: Entry, *, quiet: bool = False) -> Iterator[Say]:
    """Show what is done with an entry; on a stream that is not a terminal each step is one plain line."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    if not console.is_terminal:
        yield lambda step: console.print(f"{item.name}: {step}")
        return
    with console.status(item.name) as status:
        yield lambda step: status.update(f"{item.name} ({item.megabytes} MB): {step}")


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
