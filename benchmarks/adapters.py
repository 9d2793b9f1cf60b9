"""LoRA beside activated LoRA, which judges on the keys and values of the draft: quality of the same IK gate.

    python benchmarks/adapters.py --data FILE.jsonl ... [--train 600] [--test 300]

Both are trained on the same questions with the LLM's recorded first tokens, and tested on others, in equal parts
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

from rgate_integrations.gates.ik import IKGate
from rgate_integrations.proxy.local import shared_proxy
from rgate_integrations.training.adapters import train_adapter
from rgate_integrations.training.drafts import recorded_draft
from rgate_integrations.training.examples import DataFile, Example, read_examples
from rgate_integrations.training.probe import auc_by_set

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    learn, asked = parts(read_examples(arguments.data), arguments.train, arguments.test, arguments.seed)
    proxy = shared_proxy(arguments.model)
    drafts = [recorded_draft(proxy, e.text, arguments.tokens) for e in asked]
    known, sets = np.array([e.known for e in asked]), [e.dataset for e in asked]
    found = {}
    for name, activated, trained in (
        ("asked without training, the draft quoted", False, False),
        ("asked without training, after the draft", True, False),
        ("LoRA, the draft quoted", False, True),
        ("activated LoRA, after the draft", True, True),
    ):
        adapter, seconds = None, 0.0
        if trained:
            adapter = OUT / f"{'activated' if activated else 'plain'}-{arguments.train}-{arguments.seed}"
            if not (adapter / "gate.json").is_file():
                start = time.perf_counter()
                train_adapter(
                    "ik",
                    learn,
                    arguments.model,
                    adapter,
                    draft="recorded",
                    tokens=arguments.tokens,
                    seed=arguments.seed,
                    resume=True,
                    activated=activated,
                )
                seconds = time.perf_counter() - start
        gate = IKGate(
            tokens=arguments.tokens,
            source="recorded",
            follow_up=activated,
            adapter=str(adapter) if adapter else None,
            proxy=arguments.model,
        )
        p = np.array(
            [
                d.p_known
                for at in range(0, len(asked), 64)
                for d in gate.decide_batch(
                    [e.question for e in asked[at : at + 64]], drafts=drafts[at : at + 64]
                )
            ]
        )
        each = auc_by_set(p, known, sets)
        found[name] = {"auc": each, "mean": float(np.mean(list(each.values()))), "training_s": round(seconds)}
        CONSOLE.print(f"{name}: {found[name]['mean']:.3f}")

    table = Table(box=None)
    for column in ("", *next(iter(found.values()))["auc"], "mean"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in found.items():
        table.add_row(name, *(f"{v:.3f}" for v in row["auc"].values()), f"{row['mean']:.3f}")
    CONSOLE.print(table)
    OUT.with_suffix(".json").write_text(json.dumps({**vars(arguments), "data": [], "found": found}, indent=1))


if __name__ == "__main__":
    main()
