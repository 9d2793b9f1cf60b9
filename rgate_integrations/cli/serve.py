"""``rgate serve`` and ``rgate mcp``: one gate for many clients, and advice for agents."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rgate_integrations
from rgate_integrations.cli.index import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    KEY,
    TOKEN,
    CorpusFolders,
    GateName,
    JudgedName,
    PassageCount,
    ThresholdOption,
    load_object,
    print_log,
)
from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.models.first_use import forbid_downloads

if TYPE_CHECKING:
    from rgate_integrations.corpus.profile import CorpusProfile
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.engine.loading import Corpus
    from rgate_integrations.index.retriever import Retriever
    from rgate_integrations.serving.gateway import Gateway
    from rgate_integrations.serving.service import DecisionService

ShadowLog = Annotated[
    Path | None, typer.Option(help="Change nothing; log decisions to this file, for rgate tune.")
]
Indexes = Annotated[
    list[str] | None,
    typer.Option("--index", help="Folder of an index; or NAME=FOLDER, repeated, to choose among them."),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(help="Origin whose web pages may ask, such as http://localhost:3000; may be repeated."),
]


def serve(
    host: Annotated[
        str, typer.Option(help="Address; others than this machine's need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 8377,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    llm_name: JudgedName = "",
    timeout: Annotated[
        float, typer.Option(help="Seconds for a decision; without one by then it retrieves.")
    ] = 5.0,
    queue: Annotated[int, typer.Option(min=1, help="Questions that may wait; then status 529.")] = 512,
    upstream: Annotated[
        str | None, typer.Option(help=f"OpenAI-compatible server to be a gateway for (its key in {KEY}).")
    ] = None,
    index: Indexes = None,
    corpus: CorpusFolders = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="What searches, as MODULE:OBJECT: a retriever, a vector store, a function."),
    ] = None,
    condense: Annotated[
        bool, typer.Option("--condense", help="Let the upstream write what is searched for of a follow-up.")
    ] = False,
    k: PassageCount = 3,
    answer_first: Annotated[
        bool, typer.Option("--answer-first", help="Judge how the upstream begins to answer, too.")
    ] = False,
    look_first: Annotated[
        bool, typer.Option("--look-first", help="Search first, and judge what is found, too.")
    ] = False,
    shadow: ShadowLog = None,
    allow_origin: AllowedOrigins = None,
) -> None:
    """Serve decisions over HTTP, and with --upstream be a gateway that retrieves where the LLM needs it.

    POST /v1/systemone, /v1/decide, /v1/queries; GET /health, /ready, /metrics; with --upstream all of its routes. The
    bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.app import make_app
        from rgate_integrations.serving.server import make_server
        from rgate_integrations.serving.service import DecisionService
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "fastapi", "serve") from error
    forbid_downloads()
    searched = _retriever(index or [], retriever)
    profiles = _profiles(searched) if isinstance(searched, dict) else corpus
    service = DecisionService(_load_served(gate, llm_name, threshold, profiles), timeout=timeout, queue=queue)
    looks = {"answer_first": answer_first, "look_first": look_first}
    gateway = _make_gateway(upstream, service, searched, k=k, shadow=shadow, condense=condense, **looks)
    print_log(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    app = make_app(service, gateway)
    token = os.environ.get(TOKEN, "")
    make_server(app, host, port, token=token, allow_origins=allow_origin or ()).run()


def _make_gateway(
    upstream: str | None,
    service: DecisionService,
    searched: Retriever | dict[str, Retriever] | None,
    *,
    k: int,
    **options: Any,
) -> Gateway | None:
    """Return the gateway to a server, if one is named.

    Raises:
        ConfigurationError: None is named, but something that only a gateway needs.
    """
    from rgate_integrations.serving.gateway import Gateway
    from rgate_integrations.serving.upstream import Upstream

    if upstream is not None:
        # Clients keep their own key where ours asks for none.
        keeps_key = not os.environ.get(TOKEN, "").strip()
        server = Upstream(upstream, key=os.environ.get(KEY), keeps_key=keeps_key)
        return Gateway(service, server, searched, k=k, **options)
    if searched is not None or any(options.values()):
        raise ConfigurationError("These options are for a gateway.", hint="--upstream URL")
    return None


def _load_served(
    name: str, llm_name: str, threshold: float | None = None, corpus: Corpus | None = None
) -> DecisionEngine:
    """Return the gate of a server, which from here on fetches no model: not for the gate, and not for an index."""
    forbid_downloads()
    gate = rgate_integrations.load_gate(name, llm_name=llm_name, corpus=corpus or None)
    return gate if threshold is None else gate.with_options(threshold=threshold)


def _profiles(indexes: Mapping[str, Retriever]) -> dict[str, CorpusProfile]:
    """Return what each index is about; made now, or kept beside it."""
    from rgate_integrations.corpus.indexed import profile_index

    return {name: profile_index(index, name) for name, index in indexes.items()}


def _retriever(indexes: Sequence[str], name: str | None) -> Retriever | dict[str, Retriever] | None:
    """Return what searches, if there is something: indexes, by name, or an object that is named as MODULE:OBJECT.

    Raises:
        ConfigurationError: Of several indexes one has no name, or it cannot be imported.
    """
    folders = {}
    for each in indexes:
        named, equals, folder = each.partition("=")
        folders[named if equals else ""] = folder if equals else each
    if len(folders) < len(indexes) or (len(folders) > 1 and "" in folders):
        raise ConfigurationError(
            "Each of several indexes needs a name of its own.", hint="--index NAME=FOLDER"
        )
    opened: dict[str, Retriever] = {named: open_index(Path(folder)) for named, folder in folders.items()}
    if opened:
        return opened.get("", opened)
    if name is None:
        return None
    from rgate_integrations.serving.retrievers import as_retriever

    return as_retriever(load_object(name))


def mcp(
    gate: GateName = DEFAULT_GATE,
    llm_name: JudgedName = "",
    corpus: CorpusFolders = None,
    http: Annotated[
        bool, typer.Option("--http", help="Listen at /mcp instead of standard input and output.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine, with --http.")] = 8378,
) -> None:
    """Serve the tools should_retrieve and search_queries to agents of any framework.

    With --http, the bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.agents import make_mcp_app, make_mcp_server, serve_stdio
        from rgate_integrations.serving.server import make_server
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "mcp", "mcp") from error
    server = make_mcp_server(_load_served(gate, llm_name, corpus=corpus))
    if http:
        make_server(make_mcp_app(server), "127.0.0.1", port, token=os.environ.get(TOKEN, "")).run()
    else:
        # At once: a thread that waits for a line of standard input cannot be interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serve_stdio(server)
