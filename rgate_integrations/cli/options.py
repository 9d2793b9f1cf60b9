"""Options that several commands have in common, and what these open: gates, LLMs and indexes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.output import Bar, Terminal
from rgate_integrations.errors import (
    ConfigurationError,
    IndexMismatchError,
    IndexNotFoundError,
    ModelLoadError,
)
from rgate_integrations.runtime.files import locked

if TYPE_CHECKING:
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.models.base import Proxy

DEFAULT_LLM = "qwen2.5-coder-0.5b-instruct"
DEFAULT_GATE = "default"  # as in loading.py, which imports too much for a quick --help

QuestionArguments = Annotated[list[str] | None, typer.Argument(help="Questions; standard input if none.")]
GateName = Annotated[str, typer.Option("--gate", help="Gate: a name (see rgate gates) or a folder.")]
ThresholdOption = Annotated[
    float | None, typer.Option("--threshold", min=0.0, help="Retrieve if p_known is below it.")
]
ProxyName = Annotated[
    str | None, typer.Option("--proxy", help="Proxy model: catalogue name, folder or Hub id.")
]
LLMName = Annotated[str, typer.Option("--llm", help="Answering LLM: catalogue name, folder or Hub id.")]
IndexFolder = Annotated[
    Path | None, typer.Option("--index", help="Folder of an index; the demo's corpus by default.")
]
PassageCount = Annotated[int, typer.Option("-k", min=1, help="Passages a question.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
AnswerFirstFlag = Annotated[
    bool | None,
    typer.Option(
        "--answer-first/--no-answer-first",
        help="Judge the beginning of the LLM's answer, or the question alone. The default gate answers first.",
    ),
]


Data = Annotated[list[Path], typer.Option("--data", help="Paired JSONL; several may follow.")]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files of --data.")]
DraftOf = Annotated[
    str,
    typer.Option(
        "--draft",
        help="proxy: its own; recorded: closed_book_text, the LLM's own words; none: question only.",
    ),
]


def gate_for(name: str, draft: str, proxy: str | None) -> DecisionEngine:
    """Load a gate to be evaluated; the shipped default is the one for the kind of draft.

    Raises:
        ConfigurationError: The gate reads a draft, and there is to be none.
    """
    from rgate_integrations.engine.loading import DEFAULT_GATE, DEFAULT_GATES, load_gate
    from rgate_integrations.gates.evidence.base import expand_specs
    from rgate_integrations.gates.evidence.draft import DraftSpec
    from rgate_integrations.tuning.questions import valid_draft_kind

    valid_draft_kind(draft)
    if name == DEFAULT_GATE:
        name = DEFAULT_GATES[draft]
    gate = load_gate(name, proxy=proxy)
    if draft != "none":
        return gate
    if name == "ik":
        return gate.with_options(tokens=0)
    if any(isinstance(spec, DraftSpec) for spec in expand_specs(gate.gate.specs)):
        raise ConfigurationError(
            f"The gate {name!r} reads a draft.",
            hint=f"--draft proxy or recorded; or --gate {DEFAULT_GATE} or ik.",
        )
    return gate


def numbers(text: str, names: tuple[str, ...], *, needed: tuple[str, ...] = ()) -> dict[str, float]:
    """Read ``name=number,...``; a number may end in ``ms``.

    Raises:
        ConfigurationError: A part is something else, a name is not known, or a needed one is missing.
    """
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value.strip().removesuffix("ms"))
        except ValueError as error:
            raise ConfigurationError(f"{part!r} is not name=number.") from error
    hint = f"Names: {', '.join(names)}."
    for name in sorted(found):
        if name not in names:
            raise ConfigurationError(f"{name!r} is not known.", hint=hint)
    for name in needed:
        if name not in found:
            raise ConfigurationError(f"{name}=… is missing.", hint=hint)
    return found


CORPUS = "encyclopedia-leads"
KEY = "RGATE_API_KEY"
"""The environment variable that has the key of the LLM's server."""


def open_llm(name: str, proxy: Proxy, notices: Terminal) -> Proxy:
    """Return the answering LLM; the default one, when it is not downloaded, gives way to the proxy with a notice."""
    from rgate_integrations.models.download import resolve_model
    from rgate_integrations.models.local import shared_proxy

    try:
        resolve_model(name)
    except ModelLoadError as error:
        if name != DEFAULT_LLM:
            raise
        notices.print(
            f"note: answering with the proxy, {proxy.name}; for a better LLM: {error.hint}", style="dim"
        )
        return proxy
    return shared_proxy(name)


def answering_llm(llm: str, model: str | None, concurrency: int) -> Proxy:
    """Return the LLM of an application: one on a server, whose key comes from the environment, or a local one.

    Args:
        llm: URL of the server, or the local model.
        model: Name of the model on the server.
        concurrency: Calls at a time.

    Raises:
        ConfigurationError: There is no name of the model on the server.
    """
    from rgate_integrations.models.local import shared_proxy

    if not llm.startswith(("http://", "https://")):
        return shared_proxy(llm)
    if model is None:
        raise ConfigurationError("Which model on the server?", hint="--model NAME")
    return served_model(llm, model, KEY, concurrency)


def served_model(url: str, model: str, key: str, concurrency: int) -> Proxy:
    """Return a model on a server; ``key`` is the name of the environment variable that holds its key."""
    from rgate_integrations.models.served import ServedProxy

    return ServedProxy(url, model, api_key=os.environ.get(key) or None, max_concurrency=concurrency)


def open_index(folder: Path | None) -> PassageIndex:
    """Load an index; without a folder that of the demo's corpus, which is built on first use."""
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.models.download import cache_dir

    if folder is not None:
        return PassageIndex.load(folder)
    home = cache_dir() / f"index-{CORPUS}"
    try:
        return PassageIndex.load(home)
    except (IndexNotFoundError, IndexMismatchError):  # it is of an earlier version or of another embedder
        _build_index(home)
        return PassageIndex.load(home)


def _build_index(home: Path) -> None:
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.models.download import PASSAGES, cached_path

    corpus = cached_path(CORPUS)
    if corpus is None:
        raise ModelLoadError(
            "There is no index to search.",
            hint=f"rgate download {CORPUS} all-minilm-l6-v2, or give --index DIR.",
        )
    passages = list(read_passages(corpus / PASSAGES))
    with locked(home), Bar(what="building the index, once", total=len(passages)) as bar:
        PassageIndex.build(passages, report=bar.count).save(home)
