"""``rgate report`` and ``rgate monitor``: what was measured as a page, and what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rgate_integrations.cli.output import Terminal
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import write_atomically
from rgate_integrations.runtime.records import Record, read_records


def report(
    results: Annotated[list[Path], typer.Argument(help="What rgate evaluate --out wrote.")],
    html: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    texts: Annotated[
        bool, typer.Option(help="Whether questions and drafts are in the page, as examples.")
    ] = True,
) -> None:
    """Write a self-contained page: curves, reliability, examples, and a threshold that can be moved."""
    from rgate_integrations.tuning.report import read_results, report_page

    page = report_page(read_results(results), texts=texts)
    write_atomically(html, page)
    Terminal().print(f"Written to {html}: open it in a browser.", soft_wrap=True)


def monitor(
    log: Annotated[Path, typer.Argument(help="Logged decisions, JSONL, as rgate decide --json prints them.")],
    gate: Annotated[Path, typer.Option(help="Folder of the calibrated gate.")],
) -> None:
    """Compare logged decisions with the calibration, and say when to calibrate again."""
    from rgate_integrations.artifacts.folder import read_gate
    from rgate_integrations.tuning.evaluation import measure_drift

    saved = read_gate(str(gate))
    if saved.method not in ("calibrated", "tuned"):
        raise DataFormatError(
            f"{str(gate)!r} is not a calibrated gate.", hint="rgate tune … or rgate calibrate … --out DIR"
        )
    logged = []
    for record in read_records(log):
        p_known = record.optional_number("p_known")
        if p_known is not None and not record.fields.get("error"):  # decisions that failed have none
            logged.append(p_known)
    calibration = Record(f"the calibration of {str(gate)!r}", 1, saved.provenance, hint="Calibrate it again.")
    found = measure_drift(calibration.numbers("scores"), logged, saved.threshold)
    console = Terminal()
    console.print(
        f"{found.n} decisions: retrieval rate {found.retrieval_rate:.1%}, {found.expected_rate:.1%} at calibration; "
        f"population stability index {found.psi:.3f}",
        soft_wrap=True,
    )
    console.print(found.advice, style="bold")
