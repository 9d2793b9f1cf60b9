"""``rgate doctor``: what is installed, what is cached, and the command that mends what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from typing import Annotated, Any

import typer
from rich.table import Table

from rgate_integrations import __version__
from rgate_integrations.cli.output import Terminal, print_json
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.catalog import CATALOGUE
from rgate_integrations.models.download import cache_dir, cached_path
from rgate_integrations.models.download import verify as verify_entry
from rgate_integrations.models.reader import READER, Reader

_WORKS = "gives the states that it should"

# module: (distributions that may supply it, the extra that brings the first)
_MODULES = {
    "torch": (("torch",), "local"),
    "transformers": (("transformers",), "local"),
    "peft": (("peft",), "local"),
    "sentence_transformers": (("sentence-transformers",), "local"),
    "faiss": (("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"), "faiss"),
    "langchain_core": (("langchain-core",), "langchain"),
    "langchain": (("langchain",), "langchain-agents"),
    "llama_index.core": (("llama-index-core",), "llama-index"),
    "sklearn": (("scikit-learn",), "train"),
}


def examine() -> dict[str, Any]:
    """Return versions, devices, the cache and what is missing, as JSON values."""
    packages: dict[str, str | None] = {}
    missing: dict[str, str] = {}
    for module, (distributions, extra) in _MODULES.items():
        name, version = _version(module, distributions)
        packages[name] = version
        if version is None:
            missing[name] = f'pip install "rgate-integrations[{extra}]"'
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


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the cached files, and compare their checksums.")
    ] = False,
) -> None:
    """Report versions, devices, the cache, and how to get what is missing.

    With --verify, exit code 1 if a file in the cache is not what was downloaded.
    """
    found = examine()
    if verify:
        found["verified"] = verified()
    if as_json:
        print_json(found)
    else:
        _print(found)
    if any(each["changed"] for each in found.get("verified", {}).values()):
        raise typer.Exit(1)


def verified() -> dict[str, Any]:
    """Return for each entry in the cache which of its files are not what was downloaded, as JSON values."""
    found: dict[str, Any] = {}
    for name in CATALOGUE:
        entry = verify_entry(name)
        if entry is not None:
            mend = f"remove {entry.folder}, then: rgate download {name}"
            found[name] = {
                "changed": list(entry.changed),
                "unchecked": list(entry.unchecked),
                "mend": mend if entry.changed else "",
            }
    return found


def _print(found: dict[str, Any]) -> None:
    console = Terminal()
    table = Table(show_header=False, box=None)
    table.add_row("rgate", found["rgate"])
    table.add_row("python", found["python"])
    for name, version in found["packages"].items():
        table.add_row(name, version or "[red]not installed[/]")
    table.add_row("devices", ", ".join(found["devices"]))
    cache = found["cache"]
    table.add_row("cache", f"{cache['folder']} ({cache['free_gb']} GB free)")
    for name, there in cache["entries"].items():
        told = f"downloaded, {found['reader']}" if name == READER else "downloaded"
        table.add_row(f"  {name}", told if there else "[yellow]not downloaded[/]")
    console.print(table)
    if found["reader"] not in ("", _WORKS):
        console.print(found["reader"], style="red", markup=False, soft_wrap=True)
    if not cache["writable"]:
        console.print(
            "The cache folder cannot be written to: set RGATE_CACHE to another folder.", style="red"
        )
    if found["missing"]:
        console.print("\nTo get what is missing (only what you use is needed):")
        for command in dict.fromkeys(found["missing"].values()):
            console.print(f"  {command}", markup=False, soft_wrap=True)
    for name, each in found.get("verified", {}).items():
        _print_verified(console, name, each)


def _print_verified(console: Terminal, name: str, entry: dict[str, Any]) -> None:
    if entry["changed"]:
        console.print(
            f"{name}: changed since the download: {', '.join(entry['changed'])}", style="red", markup=False
        )
        console.print(f"  {entry['mend']}", markup=False, soft_wrap=True)
    elif entry["unchecked"]:
        unchecked = ", ".join(entry["unchecked"])
        console.print(f"{name}: as downloaded; without a checksum: {unchecked}", markup=False, soft_wrap=True)
    else:
        console.print(f"{name}: as downloaded", markup=False)


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


def _version(module: str, distributions: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the distribution that supplies a module, and its version; None when it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return distributions[0], None
    except ModuleNotFoundError:  # the package around it
        return distributions[0], None
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0], "unknown version"


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
