"""``rgate collect``: paired data, your LLM's answers without and with retrieval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from rgate_integrations.cli.options import DEFAULT_LLM, IndexFolder, LLMName, PassageCount, open_index
from rgate_integrations.cli.output import Terminal
from rgate_integrations.runtime.files import read_jsonl


def collect(
    questions: Annotated[Path, typer.Option(help="JSONL with question and gold_answers (or answer) a line.")],
    out: Annotated[Path, typer.Option(help="Paired JSONL to write; an existing one is continued.")],
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Ask without retrieval only, as training needs.")
    ] = False,
    k: PassageCount = 3,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 64,
    judge: Annotated[
        str | None,
        typer.Option(help="A model that judges the answers; without one, gold answers are looked for."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions only.")] = None,
) -> None:
    """Make paired data: your LLM's answers with and without retrieval. Run again, it goes on where it stopped."""
    from rgate_integrations.models.local import shared_proxy
    from rgate_integrations.tuning import collect as run
    from rgate_integrations.tuning.questions import read_questions

    notices = Terminal(stderr=True)
    asked = read_questions(questions, limit, gold=True)
    searched = None if closed_book else open_index(index, notices)
    with Progress(console=notices, transient=True) as progress:
        task = progress.add_task(f"asking {llm}")
        run(
            asked,
            shared_proxy(llm),
            out,
            index=searched,
            k=k,
            tokens=answer_tokens,
            judge=shared_proxy(judge) if judge else None,
            report=lambda done, total: progress.update(task, completed=done, total=total),
        )
    Terminal().print(_summary(out, both_arms=not closed_book), soft_wrap=True)


def _summary(out: Path, *, both_arms: bool) -> str:
    """Say how many of the answers in a file are right."""
    records = [record for _, record in read_jsonl(out)]
    if not records:
        return "There are no questions."
    closed = sum(record["closed_book_correct"] for record in records) / len(records)
    text = f"{len(records)} questions in {out}: right without retrieval {closed:.1%}"
    if both_arms:
        opened = sum(record.get("rag_correct", False) for record in records) / len(records)
        text += f", with retrieval {opened:.1%}"
    return f"{text}."
