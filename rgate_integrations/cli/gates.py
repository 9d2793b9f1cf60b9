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
) -> None:
    """List the gates: name, paper, what they look at, whether they need training, what they cost."""
    if as_json:
        for info in list_gates():
            typer.echo(json.dumps(asdict(info)))
        return
    table = Table(title=f"{len(list_gates())} gates", title_justify="left")
    for column in ("name", "paper", "evidence", "training", "cost"):
        table.add_column(column, overflow="fold")
    for info in list_gates():
        table.add_row(info.name, info.paper, info.evidence, info.training, info.cost)
    Console().print(table)
