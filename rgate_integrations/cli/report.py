"""``rgate collect``, ``rgate report`` and ``rgate monitor``: from answers to a page, and to what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from rgate_integrations.errors import DataFormatError
from rgate_integrations.files import read_jsonl, write_atomically


def collect(
    questions: Annotated[
        str, typer.Option(help="JSONL with question and gold_answers, or a data set such as nq_open.")
    ],
    out: Annotated[Path, typer.Option(help="Paired JSONL to write; an existing one is continued.")],
    llm: Annotated[
        str, typer.Option(help="Answering LLM: catalogue name, folder or Hub id.")
    ] = "qwen2.5-coder-0.5b-instruct",
    index: Annotated[
        Path | None, typer.Option(help="Folder of an index; the demo's corpus when none.")
    ] = None,
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Ask without retrieval only, as training needs.")
    ] = False,
    k: Annotated[int, typer.Option("-k", min=1, help="Passages a question.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 64,
    judge: Annotated[
        str | None,
        typer.Option(help="A model that judges the answers; when none, a gold answer must be contained."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions only.")] = None,
) -> None:
    """Make paired data: your LLM's answers with and without retrieval. Started again it continues."""
    from rgate_integrations.cli.ask import open_index
    from rgate_integrations.evaluation.collect import collect as run
    from rgate_integrations.evaluation.collect import read_questions
    from rgate_integrations.proxy.local import shared_proxy

    notices = Console(stderr=True, highlight=False)
    asked = read_questions(questions, limit)
    searched = None if closed_book else open_index(index, notices)
    with Progress(console=notices, transient=True) as progress:
        task = progress.add_task(f"asking {llm}", total=len(asked))
        run(
            asked,
            shared_proxy(llm),
            out,
            index=searched,
            k=k,
            tokens=tokens,
            judge=shared_proxy(judge) if judge else None,
            report=lambda n: progress.update(task, completed=n),
        )
    found = [record for _, record in read_jsonl(out)]
    closed = sum(r["closed_book_correct"] for r in found) / len(found)
    text = f"{len(found)} questions in {out}: right without retrieval {closed:.1%}"
    if not closed_book:
        text += f", with retrieval {sum(r.get('rag_correct', False) for r in found) / len(found):.1%}"
    Console(highlight=False).print(f"{text}.", soft_wrap=True)


def report(
    results: Annotated[list[Path], typer.Argument(help="What rgate evaluate --json wrote.")],
    html: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    texts: Annotated[
        bool, typer.Option(help="Whether questions and drafts are in the page, as examples.")
    ] = True,
) -> None:
    """Write a self-contained page: curves, reliability, examples, and a threshold that can be moved."""
    from rgate_integrations.evaluation.report import read_results, report_page

    page = report_page(read_results(results), texts=texts)
    write_atomically(html, page)
    Console(highlight=False).print(f"Written to {html}: open it in a browser.", soft_wrap=True)


def monitor(
    log: Annotated[Path, typer.Argument(help="Logged decisions, JSONL, as rgate decide --json prints them.")],
    gate: Annotated[Path, typer.Option(help="Folder of the calibrated gate.")],
) -> None:
    """Compare logged decisions with the calibration, and say when to calibrate again."""
    from rgate_integrations.evaluation.drift import drift
    from rgate_integrations.saved import read_config

    config = read_config(str(gate))
    if config["method"] != "calibrated":
        raise DataFormatError(f"{str(gate)!r} is not a calibrated gate.", hint="rgate calibrate … --out DIR")
    logged = [_p_known(record) for _, record in read_jsonl(log)]
    found = drift(
        config["provenance"]["scores"], [p for p in logged if p is not None], float(config["threshold"])
    )
    console = Console(highlight=False)
    console.print(
        f"{found.n} decisions: retrieval rate {found.threshold_rate:.1%}, {found.expected_rate:.1%} at calibration; "
        f"population stability index {found.psi:.3f}",
        soft_wrap=True,
    )
    console.print(found.advice, style="bold")


def _p_known(record: Any) -> float | None:
    """Return the score of a logged decision; decisions that failed have none."""
    if (
        not isinstance(record, dict)
        or record.get("error")
        or not isinstance(record.get("p_known"), int | float)
    ):
        return None
    return float(record["p_known"])
