"""``rgate download``: models and the demo's corpus into the cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rgate_integrations.errors import RGateError
from rgate_integrations.proxy.catalog import CATALOGUE, entry
from rgate_integrations.proxy.download import cache_dir, cached_path, fetch


def download(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to download; nothing lists the catalogue.")
    ] = None,
) -> None:
    """Download models and passages into the cache; without names, list what there is."""
    if not names:
        _show_catalogue()
        return
    console = Console(stderr=True, highlight=False)
    failed: RGateError | None = None
    for item in [entry(name) for name in names]:
        if cached_path(item.name):
            console.print(f"{item.name}: already there")
            continue
        try:
            with console.status(f"{item.name}: starting") as status:
                fetch(item, report=lambda line, s=status, n=item.name: s.update(f"{n}: {line}"))  # type: ignore[misc]
        except RGateError as error:
            console.print(f"{item.name}: failed", style="red")
            failed = failed or error
            continue
        console.print(f"{item.name}: done ({cache_dir() / item.name})", soft_wrap=True)
    if failed:
        raise failed


def _show_catalogue() -> None:
    table = Table()
    table.add_column("name", min_width=max(map(len, CATALOGUE)))
    for column in ("in cache", "MB", "licence", "what for"):
        table.add_column(column, justify="right" if column == "MB" else "left")
    for item in CATALOGUE.values():
        there = "yes" if cached_path(item.name) else "no"
        table.add_row(item.name, there, str(item.megabytes), item.licence, item.purpose)
    console = Console()
    console.print(table)
    console.print(f"Cache: {cache_dir()}", highlight=False, soft_wrap=True)
    console.print("rgate download NAME… brings them into the cache.")
