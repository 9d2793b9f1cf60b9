"""Options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_LLM = "qwen2.5-coder-0.5b-instruct"
DEFAULT_GATE = "default-heads"  # as in loading.py, which imports too much for a quick --help

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
