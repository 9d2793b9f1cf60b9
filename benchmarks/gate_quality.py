"""Quality of the shipped gates, and which hidden layers a probe should read.

    python benchmarks/gate_quality.py                                   the shipped gates' stored cross-validation
    python benchmarks/gate_quality.py --sweep --data FILE.jsonl ...      one probe a layer, on recorded answers
    python benchmarks/gate_quality.py --heads FOLDER [--everything]      the default gate, cross-validated anew

The gate for begun answers is measured by `begun.py`.

AUC of P(known) for closed_book_correct, cross-validated by question; the mean is over the sets.
"""

import argparse
from pathlib import Path

import numpy as np
from heads import cross_validate_heads, show_metrics
from labels import SETS
from rich.console import Console
from rich.table import Table

from rgate_integrations.artifacts.folder import read_gate, shipped
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.training.drafts import recorded_draft
from rgate_integrations.training.examples import read_examples
from rgate_integrations.training.folds import auc_by_set
from rgate_integrations.training.linear import cross_validate

CONSOLE = Console(width=140)


def show_shipped() -> None:
    table = Table(box=None)
    for column in ("gate", "proxy", "reads", *SETS, "mean", "pooled"):
        table.add_column(column, justify="left" if column in ("gate", "proxy", "reads") else "right")
    for name in shipped():
        saved = read_gate(name)
        metrics = saved.provenance["metrics"]
        values = [f"{metrics['auc'].get(s, float('nan')):.3f}" for s in SETS]
        means = (f"{metrics['auc_mean']:.3f}", f"{metrics['auc_pooled']:.3f}")
        table.add_row(name, saved.base_model, saved.reads, *values, *means)
    CONSOLE.print(table)
    for name in shipped():
        saved = read_gate(name)
        facts = saved.provenance
        CONSOLE.print(f"{name}: {facts['recipe']}; seed {facts['seed']}.", highlight=False)
        show_lengths(name, facts["metrics"])
        if "auc_requests" in facts["metrics"]:
            show_metrics(facts["metrics"], f"{name}, held out, threshold {saved.threshold:.2f}")


def show_lengths(name: str, metrics: dict) -> None:
    """Print the mean AUC of the sets by how many tokens were read, where a gate was measured so."""
    lengths = {"alone": "auc_mean_by_tokens", "with default-heads": "auc_mean_with_default_heads"}
    for what, stored in lengths.items():
        if stored in metrics:
            values = ", ".join(f"{tokens} tokens {value:.3f}" for tokens, value in metrics[stored].items())
            CONSOLE.print(f"{name} {what}, mean of the sets by question cluster: {values}", highlight=False)


def sweep(paths: list[Path], model: str, tokens: int, seed: int) -> None:
    proxy = shared_proxy(model)
    examples = [e for f in read_examples(paths) for e in f.examples]
    known, sets = np.array([e.known for e in examples]), [e.dataset for e in examples]
    drafts = [recorded_draft(proxy, e.text, tokens) for e in examples]
    layers = range(2, proxy.num_layers + 1, 2)
    spans = (("draft", "mean"), ("question", "mean"), ("all", "last"))
    pooled = [PooledLayer(layer, span, pooling) for span, pooling in spans for layer in layers]
    found = []
    for at in range(0, len(examples), 256):
        values = [{"question": e.question} for e in examples[at : at + 256]]
        found += [h.states for h in proxy.hidden(ANSWER, values, drafts[at : at + 256], pooled)]
    states = np.stack(found)
    table = Table(box=None)
    for column in ("layer", *(f"{pooling} of {span}" for span, pooling in spans)):
        table.add_column(column, justify="right")
    for i, layer in enumerate(layers):
        row = []
        for s in range(len(spans)):
            block = states[:, [s * len(layers) + i]]
            each = auc_by_set(cross_validate(block, known, 5, seed), known, sets)
            row.append(f"{np.mean(list(each.values())):.3f}")
        table.add_row(str(layer), *row)
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--data", type=Path, nargs="+")
    parser.add_argument("--proxy", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=Path, help="folder with practical.dev.jsonl and the recorded answers")
    parser.add_argument("--everything", action="store_true", help="train with what may not ship, too")
    arguments = parser.parse_args()
    if arguments.heads:
        cross_validate_heads(arguments.heads, arguments.everything)
    elif arguments.sweep:
        sweep(arguments.data, arguments.proxy, arguments.tokens, arguments.seed)
    else:
        show_shipped()


if __name__ == "__main__":
    main()
