"""``rgate doctor``: what is installed, what is cached, and the command that mends what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from typing import Any

from rich.table import Table

from rgate_integrations import __version__
from rgate_integrations.cli.options import AsJson
from rgate_integrations.cli.output import Terminal, print_json
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.catalog import CATALOGUE
from rgate_integrations.models.download import cache_dir, cached_path
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
