"""``rgate serve`` and ``rgate mcp``: one gate for many clients, and advice for agents."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    KEY,
    GateName,
    IndexFolder,
    PassageCount,
    ThresholdOption,
    open_index,
)
from rgate_integrations.errors import ConfigurationError, missing_dependency

if TYPE_CHECKING:
    from rgate_integrations.serving.gateway import Gateway, GatewayOptions
    from rgate_integrations.serving.gateway_call import PassageSearch
    from rgate_integrations.serving.service import DecisionService


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 8377,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    llm_name: Annotated[
        str, typer.Option(help="The LLM whose knowledge is judged, where requests name none.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(help="Seconds for a decision; without one by then it retrieves.")
    ] = 5.0,
    queue: Annotated[
        int, typer.Option(min=1, help="Questions that may wait; what comes then gets status 529.")
    ] = 512,
    log_questions: Annotated[
        bool, typer.Option("--log-questions", help="Log the texts of questions.")
    ] = False,
    upstream: Annotated[
        str | None, typer.Option(help=f"OpenAI-compatible server to be a gateway for (its key in {KEY}).")
    ] = None,
    index: IndexFolder = None,
    retriever: Annotated[
        str | None,
        typer.Option(help="What searches, as MODULE:OBJECT with search(queries, k), not an index."),
    ] = None,
    k: PassageCount = 3,
    answer_first: Annotated[
        bool, typer.Option("--answer-first", help="Judge how the upstream begins to answer, too.")
    ] = False,
    look_first: Annotated[
        bool, typer.Option("--look-first", help="Search first, and judge what is found, too.")
    ] = False,
    shadow: Annotated[
        Path | None, typer.Option(help="Change nothing; log decisions to this file, for rgate tune.")
    ] = None,
) -> None:
    """Serve decisions over HTTP, and with --upstream be a gateway that retrieves where the LLM needs it.

    POST /v1/systemone, /v1/decide, /v1/queries; GET /health, /ready, /metrics; with --upstream all of its routes. The
    bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.app import make_app
        from rgate_integrations.serving.server import make_server
        from rgate_integrations.serving.service import DecisionService, Metrics
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "fastapi", "serve") from error
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.models.decision_server import TOKEN

    loaded = load_gate(gate, llm_name=llm_name)
    if threshold is not None:
        loaded = loaded.with_options(threshold=threshold)
    metrics = Metrics(gate if Path(gate).is_dir() else "")
    service = DecisionService(loaded, metrics, timeout=timeout, queue=queue, log_questions=log_questions)
    token = os.environ.get(TOKEN, "")
    between = None
    if upstream is not None:
        options = _options(answer_first, look_first, shadow)
        between = _gateway(service, upstream, _search(index, retriever, k), options, keeps_key=not token)
    elif index or retriever or answer_first or look_first or shadow:
        raise ConfigurationError("These options are for a gateway.", hint="--upstream URL")
    # Plain lines: what is logged of a question is escaped, and rich would take longer than many a decision.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for library in ("httpx", "httpcore"):  # they log a line a request, with its URL
        logging.getLogger(library).setLevel(logging.WARNING)
    make_server(make_app(service, between), host, port, token=token).run()


def _options(answer_first: bool, look_first: bool, shadow: Path | None) -> GatewayOptions:
    from rgate_integrations.answering.answer_first import AnswerFirst
    from rgate_integrations.answering.look_first import LookFirst
    from rgate_integrations.runtime.files import JsonlLog
    from rgate_integrations.serving.gateway import GatewayOptions

    log = None if shadow is None else JsonlLog(shadow)
    return GatewayOptions(AnswerFirst.of(answer_first), LookFirst.of(look_first), log)


def _gateway(
    service: DecisionService,
    upstream: str,
    search: PassageSearch | None,
    options: GatewayOptions,
    *,
    keeps_key: bool,
) -> Gateway:
    """Return what stands before an LLM's server; clients keep their own key where ours asks for none."""
    from rgate_integrations.serving.gateway import Gateway
    from rgate_integrations.serving.upstream import Upstream

    return Gateway(service, Upstream(upstream, key=os.environ.get(KEY), keeps_key=keeps_key), search, options)


def _search(index: Path | None, retriever: str | None, k: int) -> PassageSearch | None:
    """Return what searches, if there is something."""
    from rgate_integrations.serving.gateway_call import PassageSearch

    if index is not None:
        return PassageSearch(open_index(index), k)
    if retriever is None:
        return None
    module, _, name = retriever.partition(":")
    sys.path.insert(0, os.getcwd())  # as for other commands that take a module, such as uvicorn
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{retriever!r} cannot be imported: {error}", hint="MODULE:OBJECT"
        ) from error
    if not callable(getattr(found, "search", None)):
        raise ConfigurationError(f"{retriever!r} has no method search(queries, k).")
    return PassageSearch(found, k)


def mcp(
    gate: GateName = DEFAULT_GATE,
    llm_name: Annotated[str, typer.Option(help="The LLM whose knowledge is judged.")] = "",
    http: Annotated[
        bool, typer.Option("--http", help="Listen at /mcp, in place of standard input and output.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine, with --http.")] = 8378,
) -> None:
    """Serve the tools should_retrieve and search_queries to agents of any framework.

    With --http, the bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.agents import make_mcp_server
        from rgate_integrations.serving.server import make_server
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "mcp", "mcp") from error
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.models.decision_server import TOKEN

    server = make_mcp_server(load_gate(gate, llm_name=llm_name))
    if not http:
        server.run()
        return
    app = server.streamable_http_app()
    make_server(app, "127.0.0.1", port, token=os.environ.get(TOKEN, "")).run()
