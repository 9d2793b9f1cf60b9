"""``rgate report`` and ``rgate monitor``: what was measured as a page, and what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rgate_integrations.errors import DataFormatError
from rgate_integrations.files import read_jsonl, write_atomically


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
    from rgate_integrations.saved.folder import read_config

    config = read_config(str(gate))
    if config["method"] != "calibrated":
        raise DataFormatError(f"{str(gate)!r} is not a calibrated gate.", hint="rgate calibrate … --out DIR")
    logged = []
    for _, record in read_jsonl(log):
        p_known = _p_known(record)
        if p_known is not None:
            logged.append(p_known)
    found = drift(config["provenance"]["scores"], logged, float(config["threshold"]))
    console = Console(highlight=False)
    console.print(
        f"{found.n} decisions: retrieval rate {found.threshold_rate:.1%}, {found.expected_rate:.1%} at calibration; "
        f"population stability index {found.psi:.3f}",
        soft_wrap=True,
    )
    console.print(found.advice, style="bold")


def _p_known(record: Any) -> float | None:
    """Return the score of a logged decision; decisions that failed have none."""
    if not isinstance(record, dict) or record.get("error"):
        return None
    p_known = record.get("p_known")
    return float(p_known) if isinstance(p_known, int | float) else None
