"""``rgate playground``: a page on this machine that shows what a gate does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rgate_integrations.cli.ask import DEFAULT_LLM


def playground(
    gate: Annotated[str, typer.Option(help="Gate: a name (see rgate gates) or a folder.")] = "default",
    llm: Annotated[str, typer.Option(help="Answering LLM: catalogue name, folder or Hub id.")] = DEFAULT_LLM,
    index: Annotated[
        Path | None, typer.Option(help="Folder of an index; the demo's corpus when none.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Passages a question.")] = 3,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback let others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Try a gate in the browser: the decision, the draft, claims, passages, and both answers."""
    from rgate_integrations.cli.ask import Pipeline, open_index, open_llm
    from rgate_integrations.loading import load_gate
    from rgate_integrations.playground import launch

    console = Console(stderr=True, highlight=False)
    chosen = load_gate(gate)
    pipeline = Pipeline(chosen, open_index(index, console), open_llm(llm, chosen.proxy, console), k=k)
    with console.status("loading models"):
        pipeline.warm_up()
    console.print(f"The playground is at http://{host}:{port} (Ctrl-C ends it).")
    launch(pipeline, host, port, open_browser=browser)
