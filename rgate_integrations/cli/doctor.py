"""``rgate doctor``: what is installed, what is cached, and the command that mends what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rgate_integrations import __version__
from rgate_integrations.proxy.catalog import CATALOGUE
from rgate_integrations.proxy.download import cache_dir, cached_path

# module: (distributions that may supply it, the extra that brings the first)
_MODULES = {
    "torch": (("torch",), "local"),
    "transformers": (("transformers",), "local"),
    "peft": (("peft",), "local"),
    "sentence_transformers": (("sentence-transformers",), "local"),
    "gguf": (("gguf",), "local"),
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
        "missing": missing,
    }


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Report versions, devices, the cache, and how to mend what is missing."""
    found = examine()
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console(highlight=False)
    table = Table(show_header=False, box=None)
    table.add_row("rgate", found["rgate"])
    table.add_row("python", found["python"])
    for name, version in found["packages"].items():
        table.add_row(name, version or "[red]not installed[/]")
    table.add_row("devices", ", ".join(found["devices"]))
    cache = found["cache"]
    table.add_row("cache", f"{cache['folder']} ({cache['free_gb']} GB free)")
    for name, there in cache["entries"].items():
        table.add_row(f"  {name}", "downloaded" if there else "[yellow]not downloaded[/]")
    console.print(table)
    if not cache["writable"]:
        console.print(
            "The cache folder cannot be written to: set RGATE_CACHE to another folder.", style="red"
        )
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
