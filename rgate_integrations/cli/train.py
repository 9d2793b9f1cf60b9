"""``rgate train``: a gate for your own LLM, from its recorded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    gate: Annotated[str, typer.Option(help="probe, ik, slimplm, adapt, boundary or rewriter.")] = "probe",
    model: Annotated[
        str, typer.Option(help="Proxy model: catalogue name, folder or Hub id.")
    ] = "smollm2-135m-instruct",
    draft: Annotated[
        str, typer.Option(help="proxy: its own drafts; recorded: what the LLM wrote; none.")
    ] = "proxy",
    label: Annotated[
        str, typer.Option(help="Key of the label (a boolean, or a number in [0, 1]), or match_ratio.")
    ] = "closed_book_correct",
    tokens: Annotated[int, typer.Option(min=1, max=128, help="Draft tokens to read.")] = 32,
    folds: Annotated[
        int | None, typer.Option(min=0, help="Folds of the cross-validation; 5 for a probe, else none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of folds, weights and order.")] = 0,
    epochs: Annotated[float | None, typer.Option(help="Instead of the paper's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of the paper's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the paper's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was killed.")] = False,
    activated: Annotated[
        bool,
        typer.Option("--activated", help="LoRA that acts after the draft, which is then read once (ik)."),
    ] = False,
    llm: Annotated[
        str, typer.Option(help="Name of the LLM whose answers were labelled.")
    ] = "the LLM of the data",
    licence: Annotated[str, typer.Option(help="Licence of the weights.")] = "that of the training data",
) -> None:
    """Train a gate on labelled questions and save it; prints the cross-validated AUC of each set.

    A probe is fitted to hidden states in minutes, on a CPU. The others fine-tune the proxy with LoRA.
    """
    from rgate_integrations.training.examples import read_examples

    if draft not in ("proxy", "recorded", "none"):
        raise ConfigurationError(f"--draft must be proxy, recorded or none, not {draft!r}.")
    known = ("probe", "ik", "slimplm", "adapt", "boundary", "rewriter")
    if gate not in known:
        raise ConfigurationError(f"There is no way to train {gate!r}.", hint=f"--gate {', '.join(known)}")
    if activated and gate != "ik":
        raise ConfigurationError("An activated adapter acts after a draft.", hint="--gate ik")
    paths = [*data, *(more or [])]
    console = Console()
    options = {"epochs": epochs, "learning_rate": learning_rate, "batch_size": batch_size}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("reading questions", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        if gate == "rewriter":
            _rewriter(paths, model, out, options, seed, resume, report)
            console.print(f"Saved. Use it as ModelRewriter(proxy, adapter={str(out)!r}).", soft_wrap=True)
            return
        files = read_examples(paths, label)
        n, share = _balance(files)
        progress.console.print(f"{n} questions, {share:.0%} known", highlight=False)
        common: dict[str, Any] = {
            "draft": draft,
            "tokens": tokens,
            "seed": seed,
            "llm": llm,
            "licence": licence,
            "label": label,
            "report": report,
        }
        if gate == "probe":
            from rgate_integrations.proxy.local import shared_proxy
            from rgate_integrations.saved import save_probe
            from rgate_integrations.training.probe import train_probe

            folds = 5 if folds is None else folds
            artifact = train_probe(files, shared_proxy(model), folds=folds, **common)
            save_probe(artifact, out)
            metrics = artifact.provenance["metrics"]
        else:
            from rgate_integrations.training.adapters import train_adapter
            from rgate_integrations.training.trainer import RECIPES

            metrics = train_adapter(
                gate,
                files,
                model,
                out,
                folds=folds or 0,
                recipe=RECIPES[gate].with_options(**options),
                resume=resume,
                activated=activated,
                show=lambda line: progress.console.print(line, highlight=False),
                **common,
            )
    if metrics:
        console.print(_table(metrics, folds or 0))
    console.print(f'Saved. Use it as load_gate("{out}") or --gate {out}.', soft_wrap=True, highlight=False)


def _balance(files: list[Any]) -> tuple[int, float]:
    known = [e.known for f in files for e in f.examples]
    return len(known), sum(known) / len(known)


def _rewriter(
    paths: list[Path], model: str, out: Path, options: dict[str, Any], seed: int, resume: bool, report: Any
) -> None:
    from rgate_integrations.training.adapters import rewriter_pairs
    from rgate_integrations.training.trainer import RECIPES, fine_tune

    recipe = RECIPES["rewriter"].with_options(**options)
    fine_tune(rewriter_pairs(paths), model, out, recipe, seed=seed, resume=resume, report=report)


def _table(metrics: dict[str, Any], folds: int) -> Table:
    table = Table(title=f"{folds}-fold cross-validated AUC", title_justify="left")
    table.add_column("set")
    table.add_column("AUC", justify="right")
    for name, value in metrics["auc"].items():
        table.add_row(name, f"{value:.3f}")
    table.add_row("mean of the sets", f"{metrics['auc_mean']:.3f}", style="bold")
    table.add_row("pooled", f"{metrics['auc_pooled']:.3f}")
    return table
