"""``rgate playground``: a page on this machine that shows what a gate does."""

from __future__ import annotations

from typing import Annotated

import typer

from rgate_integrations.cli.opening import open_pipeline
from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AnswerFirstFlag,
    GateName,
    IndexFolder,
    LLMName,
    PassageCount,
)
from rgate_integrations.cli.output import Terminal


def playground(
    gate: GateName = DEFAULT_GATE,
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
    answer_first: AnswerFirstFlag = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback let others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Try a gate in the browser: the begun answer, the decision, claims, passages, and both answers."""
    from rgate_integrations.playground import launch  # first: without gradio nothing else is worth loading

    notices = Terminal(stderr=True)
    pipeline = open_pipeline(gate, notices, llm=llm, index=index, k=k, answer_first=answer_first)
    notices.print(f"The playground is at http://{host}:{port} (Ctrl-C ends it).")
    launch(pipeline, host, port, open_browser=browser)
