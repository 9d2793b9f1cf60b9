"""``rgate serve``: one gate for many clients."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from rgate_integrations.cli.options import DEFAULT_GATE, GateName, ThresholdOption
from rgate_integrations.errors import missing_dependency


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
    ] = 10.0,
    queue: Annotated[
        int, typer.Option(min=1, help="Questions that may wait; what comes then gets status 529.")
    ] = 512,
    log_questions: Annotated[
        bool, typer.Option("--log-questions", help="Log the texts of questions.")
    ] = False,
) -> None:
    """Serve decisions over HTTP: POST /v1/systemone, /v1/decide, /v1/queries; GET /health, /ready, /metrics.

    The bearer token that clients must send is in the environment, RGATE_TOKEN.
    """
    try:
        from rgate_integrations.serving.app import make_app
        from rgate_integrations.serving.server import make_server
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or "fastapi", "serve") from error
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.models.decision_server import TOKEN
    from rgate_integrations.serving.metrics import Metrics
    from rgate_integrations.serving.service import DecisionService

    loaded = load_gate(gate, llm_name=llm_name)
    if threshold is not None:
        loaded = loaded.with_options(threshold=threshold)
    metrics = Metrics(gate if Path(gate).is_dir() else "")
    service = DecisionService(loaded, metrics, timeout=timeout, queue=queue, log_questions=log_questions)
    server = make_server(make_app(service), host, port, token=os.environ.get(TOKEN, ""))
    # Plain lines: what is logged of a question is escaped, and rich would take longer than many a decision.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    server.run()
