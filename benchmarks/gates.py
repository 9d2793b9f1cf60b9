"""Gates on recorded runs: how well P(known) predicts whether the LLM's own answer is right, and what that costs.

    python benchmarks/gates.py --data FILE.jsonl ... [--limit 200] [--gates ik slimplm ...]

Each line of a data file is a record with ``question`` and ``closed_book_correct``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from base import argument_parser, print_table, read_records

from rgate_integrations import Decision, load_gate
from rgate_integrations.tuning.evaluation import auc

# The shipped gates are missing: they were trained on these questions. See gate_quality.py.
GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "ik (question)": ("ik", {"tokens": 0}),
    "ik": ("ik", {}),
    "slimplm": ("slimplm", {"tokens": 32}),
    "adapt": ("adapt", {"tokens": 16}),
    "prompt": ("prompt", {}),
    "self_eval": ("self_eval", {}),
    "token_probability": ("token_probability", {}),
    "token_probability, mean": ("token_probability", {"statistic": "mean"}),
    "boundary": ("boundary", {"samples": 5, "tokens": 12}),
}
PROXY, BATCH = "smollm2-135m-instruct", 32


def measure(path: Path, limit: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield each gate's AUC on one set, and its model calls and milliseconds a question."""
    records = read_records(path)[:limit]
    labels = [record["closed_book_correct"] for record in records]
    dataset = path.name.removeprefix("adaptive_llama31_8b.").partition(".")[0]
    for name in names:
        kind, options = GATES[name]
        gate = load_gate(kind, **options, on_error="raise").with_options(proxy=PROXY)
        decisions: list[Decision] = []
        for start in range(0, len(records), BATCH):
            decisions += gate.decide_batch([record["question"] for record in records[start : start + BATCH]])
        costs = pd.DataFrame([vars(decision.cost) for decision in decisions])
        yield {
            "gate": name,
            "set": dataset,
            "AUC": auc([decision.p_known for decision in decisions], labels),
            "calls": costs.model_calls.mean(),
            "ms": costs.milliseconds.mean(),
        }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    arguments = parser.parse_args()
    figures = []
    for path in arguments.data:
        figures += measure(path, arguments.limit, arguments.gates)
    rows = []
    for name, set_figures in pd.DataFrame(figures).groupby("gate", sort=False):
        settings = ", ".join(f"{option}={value}" for option, value in GATES[name][1].items())
        aucs = [f"{value:.3f}" for value in (*set_figures.AUC, set_figures.AUC.mean())]
        # The median over the sets: robust if the machine is busy for a while.
        rows.append(
            [name, settings, *aucs, f"{set_figures.calls.mean():.1f}", f"{set_figures.ms.median():.0f}"]
        )
    print_table(["gate", "settings", *set_figures.set, "mean", "model calls", "ms"], rows)


if __name__ == "__main__":
    main()
