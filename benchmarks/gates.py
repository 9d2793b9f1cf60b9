"""Gates on recorded runs: how well P(known) predicts that the LLM answered rightly, and what it costs.

    python benchmarks/gates.py --data FILE.jsonl ... [--limit 200] [--gates ik slimplm ...]

The data files have one record a question with ``question`` and ``closed_book_correct``.
"""

from pathlib import Path
from typing import Any

import numpy as np
from base import argument_parser, print_table, read_records

from rgate_integrations import load_gate
from rgate_integrations.tuning.evaluation import auc

# The shipped gates were trained on the questions of the page: their honest numbers are those of gate_quality.py.
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


def measure(path: Path, limit: int, names: list[str]) -> list[tuple[float, float, float]]:
    """Return AUC, model calls and milliseconds a question of each gate."""
    records = read_records(path)[:limit]
    gates = []
    for name in names:
        kind, options = GATES[name]
        gates.append(load_gate(kind, **options, on_error="raise").with_options(proxy=PROXY))
    decisions: list[list[Any]] = [[] for _ in gates]
    for start in range(0, len(records), BATCH):
        batch = [record["question"] for record in records[start : start + BATCH]]
        for own, gate in zip(decisions, gates, strict=True):
            own += gate.decide_batch(batch)
    known = [record["closed_book_correct"] for record in records]
    found = []
    for own in decisions:
        calls = np.mean([decision.cost.model_calls for decision in own])
        milliseconds = np.mean([decision.cost.milliseconds for decision in own])
        found.append((auc([decision.p_known for decision in own], known), float(calls), float(milliseconds)))
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    arguments = parser.parse_args()
    names = arguments.gates
    # Shape (sets, gates, figures).
    found = np.array([measure(path, arguments.limit, names) for path in arguments.data])
    rows = []
    for number, name in enumerate(names):
        aucs, calls, milliseconds = found[:, number].T
        settings = ", ".join(f"{option}={value}" for option, value in GATES[name][1].items())
        each = [f"{value:.3f}" for value in (*aucs, aucs.mean())]
        # The median of the sets: a machine that is busy for a while must not decide.
        rows.append([name, settings, *each, f"{calls.mean():.1f}", f"{np.median(milliseconds):.0f}"])
    sets = [path.name.removeprefix("adaptive_llama31_8b.").partition(".")[0] for path in arguments.data]
    print_table(["gate", "settings", *sets, "mean", "model calls", "ms"], rows)


if __name__ == "__main__":
    main()
