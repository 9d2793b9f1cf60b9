"""``rgate gates`` and ``rgate ability``: the gates there are, and how much your LLM knows."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rgate_integrations.cli.options import KEY, AsJson, answering_llm
from rgate_integrations.cli.output import Terminal, print_json, training_bar
from rgate_integrations.gates.registry import list_gates

if TYPE_CHECKING:
    from rgate_integrations.tuning.ability import Measured


def gates(
    as_json: AsJson = False,
    llm: Annotated[
        str | None,
        typer.Option(
            help="Say instead what is assumed of this LLM: its name, or a folder of `rgate ability`."
        ),
    ] = None,
) -> None:
    """List the gates: name, paper, what they look at, whether they need training, what they cost."""
    if llm is not None:
        _assumed(llm, as_json)
        return
    infos = list_gates()
    if as_json:
        for info in infos:
            print_json(asdict(info))
        return
    table = Table(title=f"{len(infos)} gates", title_justify="left")
    table.add_column("name", min_width=max(len(info.name) for info in infos))
    for column in ("paper", "evidence", "training", "cost"):
        table.add_column(column)
    for info in infos:
        table.add_row(info.name, info.paper, info.evidence, info.training, info.cost)
    Terminal().print(table)


def _assumed(llm: str, as_json: bool) -> None:
    """Say how much an LLM is assumed to know, and why."""
    from rgate_integrations.gates.abilities.resolve import resolve_ability

    ability, warning = resolve_ability(llm)
    if as_json:
        print_json({"name": llm, **asdict(ability), "warning": warning})
        return
    console = Terminal()
    console.print(f"{llm}: judged as {ability.llm}.", style="bold", soft_wrap=True)
    console.print(
        f"Ability {ability.theta:+.2f} ± {ability.sd:.2f} (Llama-3.1-8B-Instruct has 0, in logits). "
        f"Why: {ability.source}.",
        soft_wrap=True,
    )
    if warning:
        console.print(warning, style="bold yellow", soft_wrap=True)


def ability(
    llm: Annotated[
        str, typer.Option(help=f"URL of an OpenAI-compatible server (its key in {KEY}), or a local model.")
    ],
    model: Annotated[str | None, typer.Option(help="Name of the model on the server.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the ability; ability-MODEL by default.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="LLM calls at a time.")] = 4,
) -> None:
    """Ask your LLM 100 short questions, and measure how much it knows. Run again, it goes on where it stopped."""
    from rgate_integrations.tuning.ability import ANSWER_TOKENS, measure_ability
    from rgate_integrations.tuning.arms import ModelArm

    answering = answering_llm(llm, model, concurrency)
    plain = re.sub(r"[^\w.]+", "-", answering.name).strip("-.")
    with training_bar() as bar:
        measured = measure_ability(
            ModelArm(answering, tokens=ANSWER_TOKENS),
            out or Path(f"ability-{plain}"),
            concurrency=concurrency,
            progress=bar.tell,
        )
    _print(measured, Terminal())


def _print(measured: Measured, console: Terminal) -> None:
    if measured.failed:
        console.print(
            f"{measured.failed} calls failed; the same command asks them again.", style="bold yellow"
        )
    found, prior = measured.ability, measured.prior
    low, high = measured.interval
    kinds = [f"{kind} {right} of {asked}" for kind, (right, asked) in measured.right.items()]
    console.print(f"{found.llm}: {found.source} ({', '.join(kinds)}).", soft_wrap=True)
    console.print(
        f"Ability {found.theta:+.2f} (95 %: {low:+.2f} to {high:+.2f}); Llama-3.1-8B-Instruct has 0. "
        f"Before: {prior.theta:+.2f} ± {prior.sd:.2f}, {prior.source}.",
        style="bold",
        soft_wrap=True,
    )
    console.print(f'Saved. Use it as load_gate(llm_name="{measured.folder}").', soft_wrap=True)
