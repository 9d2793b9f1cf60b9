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

# module: (distribution, extra that brings it)
_MODULES = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "peft": ("peft", "local"),
    "sentence_transformers": ("sentence-transformers", "local"),
    "gguf": ("gguf", "local"),
    "faiss": ("faiss-cpu", "faiss"),
    "bm25s": ("bm25s", "faiss"),
    "langchain_core": ("langchain-core", "langchain"),
    "langchain": ("langchain", "langchain-agents"),
    "llama_index.core": ("llama-index-core", "llama-index"),
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
    cached = {name: cached_path(name) is not None for name in CATALOGUE}
    missing |= {name: f"rgate download {name}" for name, there in cached.items() if not there}
    root = cache_dir()
    existing = next(p for p in (root, *root.parents) if p.exists())
    return {
        "rgate": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "devices": _devices(),
        "cache": {
            "folder": str(root),
            "writable": os.access(existing, os.W_OK),
            "free_gb": round(shutil.disk_usage(existing).free / 1e9, 1),
            "entries": cached,
        },
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
            console.print(f"  {command}", markup=False)


def _version(module: str, distribution: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return importlib.metadata.version(distribution)
    except ModuleNotFoundError:
        return None
    except importlib.metadata.PackageNotFoundError:
        return "installed"  # another distribution supplies the module, such as faiss-gpu


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return [f"cpu ({os.cpu_count()} cores)"]
    import torch

    found = [f"cpu ({torch.get_num_threads()} threads)"]
    return found + [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
