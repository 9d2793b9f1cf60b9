"""``rgate train``: a gate for your own LLM, from its recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rgate_integrations.errors import ConfigurationError


def train(
    data: Annotated[list[Path], typer.Option(help="JSONL of labelled questions; several may follow.")],
    out: Annotated[Path, typer.Option(help="Folder for the trained gate.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files of --data.")
    ] = None,
    gate: Annotated[str, typer.Option(help="What to train: probe.")] = "probe",
    model: Annotated[
        str, typer.Option(help="Proxy model: catalogue name, folder or Hub id.")
    ] = "smollm2-135m-instruct",
    draft: Annotated[
        str, typer.Option(help="proxy: its own drafts; recorded: what the LLM wrote; none.")
    ] = "proxy",
    tokens: Annotated[int, typer.Option(min=1, max=128, help="Draft tokens to read.")] = 32,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0,
    llm: Annotated[
        str, typer.Option(help="Name of the LLM whose answers were labelled.")
    ] = "the LLM of the data",
    licence: Annotated[str, typer.Option(help="Licence of the weights.")] = "that of the training data",
) -> None:
    """Train a gate on labelled questions and save it; prints the cross-validated AUC of each set."""
    from rgate_integrations.proxy.local import shared_proxy
    from rgate_integrations.training.artifact import save_artifact
    from rgate_integrations.training.examples import read_examples
    from rgate_integrations.training.probe import train_probe

    if gate != "probe":
        raise ConfigurationError(f"{gate!r} cannot be trained yet.", hint="--gate probe")
    if draft not in ("proxy", "recorded", "none"):
        raise ConfigurationError(f"--draft must be proxy, recorded or none, not {draft!r}.")
    files = read_examples([*data, *(more or [])])
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("reading questions", total=sum(len(f.examples) for f in files))
        artifact = train_probe(
            files,
            shared_proxy(model),
            draft=draft,  # type: ignore[arg-type]
            tokens=tokens,
            folds=folds,
            seed=seed,
            llm=llm,
            licence=licence,
            report=lambda what, done, total: progress.update(task, description=what, completed=done),
        )
    save_artifact(artifact, out)
    metrics = artifact.provenance["metrics"]
    table = Table(title=f"{folds}-fold cross-validated AUC", title_justify="left")
    table.add_column("set")
    table.add_column("AUC", justify="right")
    for name, value in metrics["auc"].items():
        table.add_row(name, f"{value:.3f}")
    table.add_row("mean of the sets", f"{metrics['auc_mean']:.3f}", style="bold")
    table.add_row("pooled", f"{metrics['auc_pooled']:.3f}")
    console = Console()
    console.print(table)
    console.print(f'Saved. Use it as load_gate("{out}") or --gate {out}.', soft_wrap=True, highlight=False)
