"""``rgate serve`` serves one gate to many clients; ``rgate mcp`` offers it to agents as tools."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rgate_integrations
from rgate_integrations.cli.corpus import open_index
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
from rgate_integrations.errors import ConfigurationError, needs_extra

if TYPE_CHECKING:
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.engine.loading import Corpus
    from rgate_integrations.index.retriever import Retriever
    from rgate_integrations.serving.gateway import Gateway
    from rgate_integrations.serving.service import DecisionService

_LOG_FORM = "%(asctime)s %(levelname)s %(message)s"

Indexes = Annotated[
    list[str] | None,
    typer.Option("--index", help="Folder of an index; or NAME=FOLDER, repeated, to choose among several."),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        help="Origin whose web pages may send requests, such as http://localhost:3000; may be repeated."
    ),
]


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8377,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    llm_name: JudgedName = "",
    timeout: Annotated[float, typer.Option(help="Seconds for a decision; a late decision retrieves.")] = 5.0,
    queue: Annotated[
        int, typer.Option(min=1, help="Number of questions that may wait; further ones get status 529.")
    ] = 512,
    upstream: Annotated[
        str | None, typer.Option(help=f"OpenAI-compatible server behind the gateway (key: {KEY}).")
    ] = None,
    index: Indexes = None,
    corpus: CorpusFolders = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="MODULE:OBJECT that searches: a retriever, a vector store, a function."),
    ] = None,
    condense: Annotated[
        bool, typer.Option("--condense", help="Let the upstream rewrite follow-ups as search queries.")
    ] = False,
    k: PassageCount = 3,
    answer_first: Annotated[
        bool, typer.Option("--answer-first", help="Also judge the beginning of the upstream's answer.")
    ] = False,
    look_first: Annotated[
        bool, typer.Option("--look-first", help="Search first, and also judge the passages.")
    ] = False,
    shadow: Annotated[
        Path | None, typer.Option(help="Only log decisions to this file, for rgate tune; do not act on them.")
    ] = None,
    allow_origin: AllowedOrigins = None,
) -> None:
    """Serve decisions over HTTP; with --upstream, also as a gateway that retrieves if the LLM needs it.

    POST /v1/systemone, /v1/decide, /v1/queries; GET /health, /ready, /metrics; with --upstream, also all routes of
    that server. If the environment variable RGATE_TOKEN is set, clients must send it as the bearer token, except to
    /health and /ready.
    """
    from rgate_integrations.models.download import forbid_downloads

    with needs_extra("serve"):
        from rgate_integrations.serving.app import make_app
        from rgate_integrations.serving.server import make_server
        from rgate_integrations.serving.service import DecisionService
    forbid_downloads()
    search = _open_retriever(index or [], retriever)
    profiles = _choose_profiles(search, corpus)
    service = DecisionService(_load_served(gate, llm_name, threshold, profiles), timeout=timeout, queue=queue)
    options = {"shadow": shadow, "condense": condense, "answer_first": answer_first, "look_first": look_first}
    gateway = _make_gateway(upstream, service, search, k=k, **options)
    print_log(logging.INFO, _LOG_FORM)
    app = make_app(service, gateway)
    make_server(app, host, port, token=os.environ.get(TOKEN, ""), allow_origins=allow_origin or ()).run()


def _choose_profiles(search: Retriever | dict[str, Retriever] | None, corpus: CorpusFolders) -> Corpus | None:
    """Return the profiles of named indexes or, without those, the folders of ``--corpus``.

    Raises:
        ConfigurationError: Both are given.
    """
    from rgate_integrations.corpus.profile import profile_index

    if not isinstance(search, dict):
        return corpus
    if corpus:
        raise ConfigurationError(
            "--corpus cannot be combined with named indexes (--index NAME=FOLDER): the gate makes their profiles "
            "itself.",
            hint="Leave out --corpus.",
        )
    # A profile is stored in its index's folder, and made now if it is missing.
    return {name: profile_index(passages, name) for name, passages in search.items()}


def _make_gateway(
    upstream: str | None,
    service: DecisionService,
    search: Retriever | dict[str, Retriever] | None,
    *,
    k: int,
    **options: Any,
) -> Gateway | None:
    """Return the gateway to an upstream, which is the LLM's server; None without one.

    Raises:
        ConfigurationError: An option of the gateway is set without an upstream, the upstream's URL is
            invalid, or `Gateway` rejects the options.
    """
    from rgate_integrations.serving.gateway import Gateway
    from rgate_integrations.serving.upstream import Upstream

    if upstream is not None:
        # A client's key may be forwarded to the upstream, unless it is this server's token.
        keeps_key = not os.environ.get(TOKEN, "").strip()
        server = Upstream(upstream, key=os.environ.get(KEY), keeps_key=keeps_key)
        return Gateway(service, server, search, k=k, **options)
    if search is not None or any(options.values()):
        raise ConfigurationError(
            "--index, --retriever, --shadow, --condense, --answer-first and --look-first need --upstream.",
            hint="Add --upstream with the base URL of the LLM's server, or leave these options out.",
        )
    return None


def _load_served(
    name: str, llm_name: str, threshold: float | None = None, corpus: Corpus | None = None
) -> DecisionEngine:
    """Return the gate for a server."""
    gate = rgate_integrations.load_gate(name, llm_name=llm_name, corpus=corpus or None)
    return gate if threshold is None else gate.with_options(threshold=threshold)


def _open_retriever(indexes: Sequence[str], name: str | None) -> Retriever | dict[str, Retriever] | None:
    """Return what searches: an unnamed index, a dict of named ones, or the object called ``name``; None without any.

    Raises:
        ConfigurationError: There are several indexes, and two share a name or one has none; both indexes and an
            object were given; or the object cannot be imported or cannot search.
        RGateError: An index cannot be loaded, see `open_index`.
    """
    if name is not None:
        if indexes:
            raise ConfigurationError(
                "--index and --retriever cannot be combined.", hint="Leave one of them out."
            )
        from rgate_integrations.index.retriever import as_retriever

        return as_retriever(load_object(name))
    folders = {}
    for option in indexes:
        corpus, equals, folder = option.partition("=")
        folders[corpus if equals else ""] = folder if equals else option
    if len(folders) < len(indexes) or (len(folders) > 1 and "" in folders):
        raise ConfigurationError(
            f"With more than one --index, each needs its own name; got {', '.join(map(repr, indexes))}.",
            hint="Name each: --index NAME=FOLDER.",
        )
    opened: dict[str, Retriever] = {corpus: open_index(Path(folder)) for corpus, folder in folders.items()}
    return opened.get("", opened or None)


def mcp(
    gate: GateName = DEFAULT_GATE,
    llm_name: JudgedName = "",
    corpus: CorpusFolders = None,
    http: Annotated[
        bool, typer.Option("--http", help="Serve /mcp over HTTP instead of standard input and output.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port, with --http.")] = 8378,
) -> None:
    """Serve the tools should_retrieve and search_queries to agents of any framework.

    With --http, if the environment variable RGATE_TOKEN is set, clients must send it as the bearer token.
    """
    with needs_extra("mcp"):
        from rgate_integrations.serving.agents import make_mcp_app, make_mcp_server
        from rgate_integrations.serving.server import make_server
    server = make_mcp_server(_load_served(gate, llm_name, corpus=corpus))
    if http:
        print_log(logging.INFO, _LOG_FORM)
        make_server(make_mcp_app(server), "127.0.0.1", port, token=os.environ.get(TOKEN, "")).run()
    else:
        # Ctrl-C must kill the process, because a thread that waits for standard input cannot be interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        server.run()
