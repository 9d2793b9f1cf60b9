"""``rgate train``: a gate for your own LLM, from its recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rgate_integrations.cli.output import Bar, Terminal, training_bar
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.files import locked

if TYPE_CHECKING:
    from rgate_integrations.tuning.own import TrainingOptions

GATES = ("probe", "ik", "slimplm", "adapt", "boundary", "rewriter")
_LLM = "the LLM of the data"


def train(
    data: Annotated[list[Path], typer.Option(help="JSONL of labelled questions; several may follow.")],
    out: Annotated[Path, typer.Option(help="Folder for the trained gate.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More of --data.")] = None,
    gate: Annotated[str, typer.Option(help=", ".join(GATES))] = "probe",
    model: Annotated[
        str, typer.Option("--proxy", help="Proxy model: catalogue name, folder or Hub id.")
    ] = "smollm2-135m-instruct",
    draft: Annotated[str, typer.Option(help="proxy: its own; recorded: the LLM's words; none.")] = "proxy",
    label: Annotated[
        str,
        typer.Option(
            help="Key of the label (a boolean, or a number in [0, 1]); match_ratio; or accuracy or certainty, which "
            "are sampled from --proxy (30 answers a question) where the data do not hold them."
        ),
    ] = "closed_book_correct",
    tokens: Annotated[int, typer.Option(min=1, max=128, help="Draft tokens to read.")] = 32,
    folds: Annotated[
        int | None, typer.Option(min=0, help="Cross-validation; 5 for a probe, else none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of folds, weights and order.")] = 0,
    epochs: Annotated[float | None, typer.Option(help="Instead of the paper's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of the paper's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was killed.")] = False,
    own: Annotated[
        bool, typer.Option("--self-label", help="Label --proxy's own answers by gold_answers.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System prompt of your direct arm (probe).")] = None,
    llm: Annotated[str, typer.Option(help="Name of the LLM whose answers were labelled.")] = _LLM,
) -> None:
    """Train a gate on labelled questions and save it; prints the cross-validated AUC of each set.

    A probe is fitted to hidden states in minutes, on a CPU. The others fine-tune the proxy with LoRA.
    """
    from rgate_integrations.tuning.own import TrainingOptions
    from rgate_integrations.tuning.pairs import RECIPES

    _check(gate, draft, own=own, system=system)
    recipe = RECIPES.get(gate)  # a probe has none
    options = TrainingOptions(
        draft=draft,  # type: ignore[arg-type]  # `_check` has
        tokens=tokens,
        folds=folds,
        seed=seed,
        label=label,
        llm=llm,
        system=system,
        recipe=recipe and recipe.with_options(epochs=epochs, learning_rate=learning_rate),
        resume=resume,
    )
    with locked(out), training_bar() as bar:
        metrics = _train(gate, [*data, *(more or [])], model, out, options, bar, own=own)
    _print(gate, out, metrics, 5 if folds is None else folds)


def _check(gate: str, draft: str, *, own: bool, system: str | None) -> None:
    from rgate_integrations.tuning.questions import valid_draft_kind

    valid_draft_kind(draft)
    if gate not in GATES:
        raise ConfigurationError(f"There is no way to train {gate!r}.", hint=f"--gate {', '.join(GATES)}")
    if system is not None and gate != "probe":
        raise ConfigurationError("Only a probe is trained under your own system prompt.", hint="--gate probe")
    if own and (gate == "rewriter" or draft == "recorded"):
        raise ConfigurationError("--self-label labels and reads what the model writes.", hint="--draft proxy")


def _train(
    gate: str,
    paths: Sequence[Path],
    model: str,
    out: Path,
    options: TrainingOptions,
    bar: Bar,
    *,
    own: bool,
) -> dict[str, Any]:
    """Read or sample the labels, train and save; return the metrics of the cross-validation."""
    from rgate_integrations.gates.artifacts.folder import save_gate
    from rgate_integrations.models.local import shared_proxy
    from rgate_integrations.tuning.own import OWN_LABEL, SAMPLES, read_own, to_be_sampled
    from rgate_integrations.tuning.probe import train_probe
    from rgate_integrations.tuning.questions import read_examples

    if gate == "rewriter":
        from rgate_integrations.tuning.fine_tuning import train_rewriter

        train_rewriter(paths, model, out, options, progress=bar.tell)
        return {}
    if own:
        files = read_own(paths, shared_proxy(model), prompt=options.prompt, progress=bar.tell)
        options = replace(options, label=OWN_LABEL, labelled_by=model, llm=model)
    elif to_be_sampled(paths, options.label):
        files = read_own(paths, shared_proxy(model), options.label, seed=options.seed, progress=bar.tell)
        llm = model if options.llm == _LLM else options.llm
        options = replace(options, labelled_by=f"{SAMPLES} answers of {model}", llm=llm)
    else:
        files = read_examples(paths, options.label)
    known = [example.known for file in files for example in file.examples]
    bar.print(f"{len(known)} questions, {sum(known) / len(known):.0%} known")
    if gate != "probe":
        from rgate_integrations.tuning.fine_tuning import train_adapter

        return train_adapter(gate, files, model, out, options, progress=bar.tell)
    artifact = train_probe(files, shared_proxy(model), options, progress=bar.tell)
    save_gate(artifact, out)
    metrics: dict[str, Any] = artifact.provenance["metrics"]
    return metrics


def _print(gate: str, out: Path, metrics: dict[str, Any], folds: int) -> None:
    from rgate_integrations.gates.registry import loadable

    console = Terminal()
    if metrics:
        console.print(_table(metrics, folds))
    name = loadable(out)
    use = f'load_gate("{name}") or --gate {name}'
    if gate == "rewriter":
        use = f"ModelRewriter(proxy, adapter={str(out)!r})"
    console.print(f"Saved. Use it as {use}.", soft_wrap=True)


def _table(metrics: dict[str, Any], folds: int) -> Table:
    table = Table(title=f"{folds}-fold cross-validated AUC", title_justify="left")
    table.add_column("set")
    table.add_column("AUC", justify="right")
    for name, value in metrics["auc"].items():
        table.add_row(name, f"{value:.3f}")
    table.add_row("mean of the sets", f"{metrics['auc_mean']:.3f}", style="bold")
    table.add_row("pooled", f"{metrics['auc_pooled']:.3f}")
    return table
