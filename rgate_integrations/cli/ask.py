"""``rgate ask``: the begun answer, the decision, queries, passages and the answer, with the time of each stage."""

from __future__ import annotations

import math
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
    AnswerFirstFlag,
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
    from rgate_integrations.answering.pipeline import Answered
    from rgate_integrations.decision import Decision, Draft, PartialAnswerInfo


LIKELY, UNSURE = 0.8, 0.4
"""Probabilities of a token from which on it is shown as likely, and as unsure; below, as unlikely."""

_STYLES = {"likely": "green", "unsure": "yellow", "unlikely": "red"}


def ask(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
    answer_first: AnswerFirstFlag = None,
    as_json: AsJson = False,
) -> None:
    """Ask questions: retrieve only for those that the LLM does not know."""
    notices = Terminal(stderr=True)
    pipeline = open_pipeline(
        gate, notices, proxy=proxy, llm=llm, index=index, k=k, answer_first=answer_first, search_later=True
    )
    console = Terminal()
    failed = False
    for question in typed_questions(questions):
        answered = pipeline.ask(question, threshold=threshold)
        failed = failed or answered.decision.error is not None
        if as_json:
            print_json(answered_as_json(answered))
        else:
            console.print(panel(answered, coloured=console.is_terminal))
    if failed:
        raise typer.Exit(1)


def answered_as_json(answered: Answered) -> dict[str, Any]:
    """Return one answered question as JSON values."""
    decision = answered.decision
    found: dict[str, Any] = {
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
    if decision.signals:
        found["signals"] = decision.signals
    if decision.partial_answer is not None:
        found["partial_answer"] = decision.partial_answer.model_dump()
    if decision.error is not None:
        found["error"] = decision.error.model_dump()
    return found


def panel(answered: Answered, *, coloured: bool = False) -> Panel:
    """Show one answered question.

    Args:
        answered: It.
        coloured: Whether colours are seen, so that a legend is of use.
    """
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
    if decision.partial_answer is not None:
        _add_beginning(grid, decision, decision.partial_answer, coloured)
    elif decision.draft is not None:
        grid.add_row("draft", _one_line(decision.draft.text))
    for query in answered.plan.queries:
        grid.add_row("query", _one_line(query.text))
    for hit in answered.hits:
        grid.add_row(f"{hit.score:.2f}", _one_line(f"{hit.passage.title}: {hit.passage.text[:110]}…"))
    grid.add_row("answer", _one_line(answered.answer, "bold"))
    if saved := _saved(decision):
        grid.add_row("saved", _one_line(saved))
    stages = "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in answered.timings.items())
    total = sum(answered.timings.values())
    grid.add_row("time", _one_line(f"{stages}  (total {total:.0f} ms)", "dim"))
    for warning in decision.warnings:
        grid.add_row("note", _one_line(warning, "dim"))
    return Panel(grid, title=Text(decision.question[:90]), title_align="left", border_style=colour)


def _add_beginning(
    grid: Table, decision: Decision, partial_answer: PartialAnswerInfo, coloured: bool
) -> None:
    """Show the first look, what the LLM began to answer, and where it was judged."""
    from rgate_integrations.answering.answer_first_gate import FIRST_LOOK

    p = decision.signals.get(FIRST_LOOK)
    if p is not None:
        grid.add_row(
            "first look", f"P(known) {p:.2f} by the question alone, in {partial_answer.first_look:.0f} ms"
        )
    if decision.draft is None:
        why = "nothing: the question alone is clearly unknown"
        if not decision.retrieve:
            why = "not judged: the question alone is clearly known"
        grid.add_row("begun", _one_line(why, "dim"))
        return
    grid.add_row("begun", _begun(decision.draft, _fate(partial_answer)))
    if coloured and decision.draft.logprobs:
        legend = Text("tokens by their probability: ", "dim")
        for name, style in _STYLES.items():
            legend.append(f"{name} ", style)
        grid.add_row("", legend)


def _begun(draft: Draft, fate: str) -> Text:
    """Show a begun answer, a mark where it was judged, and what became of it."""
    shown = Text()
    if draft.tokens and draft.logprobs is not None:
        for token, logprob in zip(draft.tokens, draft.logprobs, strict=True):
            shown.append(token.replace("\n", " "), _STYLES[likelihood(logprob)])
    else:
        shown.append(" ".join(draft.text.split()))
    return shown.append(f" ▌ {fate}", "dim")


def likelihood(logprob: float) -> str:
    """Return whether a token was likely, unsure or unlikely."""
    p = math.exp(logprob)
    if p >= LIKELY:
        return "likely"
    return "unsure" if p >= UNSURE else "unlikely"


def _fate(partial_answer: PartialAnswerInfo) -> str:
    if partial_answer.tokens_dropped:
        return f"stopped here: {partial_answer.tokens_dropped} tokens dropped"
    return f"judged after {partial_answer.tokens_held} tokens: it goes on"


def _saved(decision: Decision) -> str:
    """Say what the decision saved, or cost; nothing where it is neither."""
    if not decision.retrieve:
        return "the search, and reading what it finds"
    if decision.partial_answer is not None and decision.partial_answer.tokens_dropped:
        return f"nothing; it cost {decision.partial_answer.tokens_dropped} tokens that were dropped"
    return ""


def _verdict(decision: Decision, colour: str) -> Text:
    if decision.retrieve:
        word, sign = "retrieve", "<"
    else:
        word, sign = "skip retrieval", ">="
    numbers = f"   p_known {decision.p_known:.2f} {sign} threshold {decision.threshold:.2f}"
    return Text.assemble((word, f"bold {colour}"), numbers)


def _one_line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style)
