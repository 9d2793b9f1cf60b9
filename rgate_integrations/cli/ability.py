"""``rgate ability``: how much your LLM knows, measured in a minute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.bars import TrainingBar
from rgate_integrations.cli.opening import KEY, answering_llm
from rgate_integrations.cli.output import Terminal

if TYPE_CHECKING:
    from rgate_integrations.tuning.ability import Measured


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
    with TrainingBar() as bar:
        measured = measure_ability(
            ModelArm(answering, tokens=ANSWER_TOKENS),
            out or Path(f"ability-{plain}"),
            concurrency=concurrency,
            progress=bar,
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
