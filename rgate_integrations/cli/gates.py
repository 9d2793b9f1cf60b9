"""``rgate gates``: the gates there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rgate_integrations.gates import list_gates


def gates(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="List the trained gates of the package instead.")
    ] = False,
) -> None:
    """List the gates: name, paper, what they look at, whether they need training, what they cost."""
    if shipped:
        _shipped(as_json)
        return
    if as_json:
        for info in list_gates():
            typer.echo(json.dumps(asdict(info)))
        return
    table = Table(title=f"{len(list_gates())} gates", title_justify="left")
    table.add_column("name", min_width=max(len(info.name) for info in list_gates()))
    for column in ("paper", "evidence", "training", "cost"):
        table.add_column(column)
    for info in list_gates():
        table.add_row(info.name, info.paper, info.evidence, info.training, info.cost)
    Console().print(table)


def _shipped(as_json: bool) -> None:
    from rgate_integrations.saved import read_probe
    from rgate_integrations.saved import shipped as names

    table = Table(title="trained gates of the package", title_justify="left")
    for column in ("name", "proxy", "reads", "trained for", "AUC, mean of sets", "licence"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name in names():
        trained = read_probe(name)
        reads = f"question, {trained.tokens} tokens ({trained.source})" if trained.tokens else "question"
        facts = trained.provenance
        auc, licence = round(facts["metrics"]["auc_mean"], 3), facts["licence"]
        if as_json:
            row = {"name": name, "proxy": trained.base_model, "reads": reads, "llm": trained.llm}
            typer.echo(json.dumps(row | {"auc_mean": auc, "licence": licence}))
        else:
            table.add_row(name, trained.base_model, reads, trained.llm, f"{auc:.3f}", licence)
    if not as_json:
        Console().print(table)
