"""LoRA, activated LoRA and a probe, trained on the same questions: is what reads the draft once as good?

    python benchmarks/adapters.py --data FILE.jsonl ... [--train 400] [--test 300]

All are trained on the same questions with the LLM's recorded first tokens, and tested on others, in equal parts
from each file. AUC of P(known) for closed_book_correct; the mean is over the files. Resumable: what is trained
lies in benchmarks/out/adapters.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rgate_integrations import Gate, load_gate
from rgate_integrations.artifacts.probe import save_probe
from rgate_integrations.gates.papers.ik import IKGate
from rgate_integrations.gates.probe import ProbeGate
from rgate_integrations.models.local import LocalProxy, shared_proxy
from rgate_integrations.training.adapters import AdapterOptions, train_adapter
from rgate_integrations.training.drafts import recorded_draft
from rgate_integrations.training.examples import DataFile, Example, read_examples
from rgate_integrations.training.folds import auc_by_set
from rgate_integrations.training.options import TrainingOptions
from rgate_integrations.training.probe import train_probe
from rgate_integrations.training.trainer import RECIPES

CONSOLE = Console(width=110, highlight=False)
OUT = Path(__file__).parent / "out" / "adapters"


def parts(files: list[DataFile], train: int, test: int, seed: int) -> tuple[list[DataFile], list[Example]]:
    """Draw questions to train on and others to test on, as many from each file."""
    learn, asked = [], []
    for file in files:
        order = np.random.default_rng(seed).permutation(len(file.examples))
        a, b = train // len(files), test // len(files)
        learn.append(DataFile(file.name, file.sha256, tuple(file.examples[i] for i in order[:a])))
        asked += [file.examples[i] for i in order[a : a + b]]
    return learn, asked


def probe(files: list[DataFile], proxy: LocalProxy, tokens: int, seed: int) -> Path:
    """Train a probe on the same questions."""
    out = OUT / f"probe-{sum(len(f.examples) for f in files)}-{seed}"
    options = TrainingOptions(draft="recorded", tokens=tokens, seed=seed)
    save_probe(train_probe(files, proxy, options), out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the paper's, for 7B models: 1e-4")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    learn, asked = parts(read_examples(arguments.data), arguments.train, arguments.test, arguments.seed)
    proxy = shared_proxy(arguments.model)
    drafts = [recorded_draft(proxy, e.text, arguments.tokens) for e in asked]
    known, sets = np.array([e.known for e in asked]), [e.dataset for e in asked]
    found = {}

    def measure(scorer: Gate) -> dict:
        gate, p = load_gate(scorer, on_error="raise"), []
        for at in range(0, len(asked), 64):
            questions = [e.question for e in asked[at : at + 64]]
            p += [d.p_known for d in gate.decide_batch(questions, drafts=drafts[at : at + 64])]
        each = auc_by_set(np.array(p), known, sets)
        return {"auc": each, "mean": float(np.mean(list(each.values())))}

    for name, activated, trained in (
        ("asked without training, the draft quoted", False, False),
        ("asked without training, after the draft", True, False),
        ("LoRA, the draft quoted", False, True),
        ("activated LoRA, after the draft", True, True),
    ):
        adapter, seconds = None, 0.0
        if trained:
            settings = (arguments.train, arguments.learning_rate, arguments.epochs, arguments.seed)
            adapter = OUT / "-".join(map(str, ("activated" if activated else "plain", *settings)))
            if not (adapter / "gate.json").is_file():
                start = time.perf_counter()
                recipe = RECIPES["ik"].with_options(
                    learning_rate=arguments.learning_rate, epochs=arguments.epochs
                )
                options = AdapterOptions(
                    draft="recorded",
                    tokens=arguments.tokens,
                    seed=arguments.seed,
                    recipe=recipe,
                    resume=True,
                    activated=activated,
                )
                train_adapter("ik", learn, arguments.model, adapter, options)
                seconds = time.perf_counter() - start
        gate = IKGate(
            tokens=arguments.tokens,
            source="recorded",
            follow_up=activated,
            adapter=str(adapter) if adapter else None,
            proxy=arguments.model,
        )
        found[name] = measure(gate)
        CONSOLE.print(f"{name}: {found[name]['mean']:.3f} (trained in {seconds:.0f} s)")
    found["probe, on the states of the draft"] = measure(
        ProbeGate(artifact=str(probe(learn, proxy, arguments.tokens, arguments.seed)))
    )

    table = Table(box=None)
    for column in ("", *next(iter(found.values()))["auc"], "mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in found.items():
        table.add_row(name, *(f"{v:.3f}" for v in row["auc"].values()), f"{row['mean']:.3f}")
    CONSOLE.print(table)
    OUT.with_suffix(".json").write_text(json.dumps({**vars(arguments), "data": [], "found": found}, indent=1))


if __name__ == "__main__":
    main()
