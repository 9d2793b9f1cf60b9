"""``rgate ask``: decision, draft, queries, passages and answer, with the time of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rgate_integrations.cli.decide import typed_questions
from rgate_integrations.cli.opening import open_pipeline
from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AsJson,
    GateName,
    IndexFolder,
    LLMName,
    PassageCount,
    ProxyName,
    QuestionArguments,
    ThresholdOption,
)
from rgate_integrations.cli.output import Terminal, hit_as_json, print_json

if TYPE_CHECKING:
    from rgate_integrations.decision import Decision
    from rgate_integrations.pipeline import Answered


def ask(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
    as_json: AsJson = False,
) -> None:
    """Ask questions: retrieve only for those that the LLM does not know."""
    notices = Terminal(stderr=True)
    pipeline = open_pipeline(gate, notices, proxy=proxy, llm=llm, index=index, k=k)
    console = Terminal()
    failed = False
    for question in typed_questions(questions):
        answered = pipeline.ask(question, threshold=threshold)
        failed = failed or answered.decision.error is not None
        if as_json:
            print_json(answered_as_json(answered))
        else:
            console.print(panel(answered))
    if failed:
        raise typer.Exit(1)


def answered_as_json(answered: Answered) -> dict[str, Any]:
    """Return one answered question as JSON values."""
    decision = answered.decision
    found = {
        "question": decision.question,
        "retrieve": decision.retrieve,
        "p_known": decision.p_known,
        "threshold": decision.threshold,
        "reason": decision.reason,
        "draft": decision.draft.text if decision.draft else None,
        "queries": [query.text for query in answered.plan.queries],
        "passages": [hit_as_json(hit) for hit in answered.hits],
        "answer": answered.answer,
        "timings": {stage: round(ms, 1) for stage, ms in answered.timings.items()},
    }
    if decision.error is not None:
        found["error"] = decision.error.model_dump()
    return found


def panel(answered: Answered) -> Panel:
    """Show one answered question."""
    decision = answered.decision
    if decision.error is not None and not answered.answer:
        text = Text(f"{decision.error.message} {decision.error.hint}")
        return Panel(text, title="error", border_style="red", title_align="left")
    colour = "yellow" if decision.retrieve else "green"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", min_width=7)
    grid.add_column()
    grid.add_row("", _verdict(decision, colour))
    grid.add_row("because", _one_line(decision.reason))
    if decision.draft is not None:
        grid.add_row("draft", _one_line(decision.draft.text))
    elif not decision.retrieve and decision.error is None:
        grid.add_row("draft", _one_line("not needed", "dim"))
    for query in answered.plan.queries:
        grid.add_row("query", _one_line(query.text))
    for hit in answered.hits:
        grid.add_row(f"{hit.score:.2f}", _one_line(f"{hit.passage.title}: {hit.passage.text[:110]}…"))
    grid.add_row("answer", _one_line(answered.answer, "bold"))
    stages = "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in answered.timings.items())
    total = sum(answered.timings.values())
    grid.add_row("time", _one_line(f"{stages}  (total {total:.0f} ms)", "dim"))
    for warning in decision.warnings:
        grid.add_row("note", _one_line(warning, "dim"))
    return Panel(grid, title=Text(decision.question[:90]), title_align="left", border_style=colour)


def _verdict(decision: Decision, colour: str) -> Text:
    if decision.retrieve:
        word, sign = "retrieve", "<"
    else:
        word, sign = "skip retrieval", ">="
    numbers = f"   p_known {decision.p_known:.2f} {sign} threshold {decision.threshold:.2f}"
    return Text.assemble((word, f"bold {colour}"), numbers)


def _one_line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style)
