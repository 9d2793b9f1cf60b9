"""Gates on recorded runs: how well P(known) predicts that the LLM answered rightly, and what it costs.

    python benchmarks/gates.py --data FILE.jsonl ... [--limit 200] [--gates ik slimplm ...]

The data files have one record a question with ``question`` and ``closed_book_correct``.
"""

import argparse
import json
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.engine.decision_engine import decide_together
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.tuning.metrics import auc

# Sampling gates share one set of samples, so that 5 answers are sampled once for all of them.
SAMPLES = {"samples": 5, "tokens": 12}
GATES = {
    "ik (question)": ("ik", {"tokens": 0}),
    "ik": ("ik", {}),
    "slimplm": ("slimplm", {"tokens": 32}),
    "adapt": ("adapt", {"tokens": 16}),
    "prompt": ("prompt", {}),
    "self_eval": ("self_eval", {}),
    "token_probability": ("token_probability", {}),
    "perplexity": ("perplexity", {}),
    "mean_token_entropy": ("mean_token_entropy", {}),
    "boundary": ("boundary", SAMPLES),
    "semantic_sets": ("semantic_sets", SAMPLES),
    "lexical_similarity": ("lexical_similarity", SAMPLES),
    "eigval_laplacian": ("eigval_laplacian", SAMPLES),
    "default": ("default", {}),
}
# The shipped gate was trained on these very questions: its honest numbers are the cross-validated ones that
# benchmarks/gate_quality.py prints. Ask for it with --gates on data that it has not seen.
UNTRAINED = [name for name in GATES if name != "default"]
OUT = Path(__file__).parent / "out"


def read(path: Path) -> list[dict]:
    return [record for _, record in read_jsonl(path)]


def set_name(path: Path) -> str:
    """The data set of a file such as llm.SET.dev.jsonl; the name of any other file."""
    parts = path.name.removesuffix(".gz").removesuffix(".jsonl").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def settings(name: str) -> str:
    """What was not left at its default, for the table."""
    return ", ".join(f"{k}={v}" for k, v in GATES[name][1].items())


def measure_set(path: Path, limit: int, names: list[str], proxy: str) -> dict:
    records = read(path)[:limit]
    gates = [load_gate(GATES[g][0], **GATES[g][1], on_error="raise").with_options(proxy=proxy) for g in names]
    decisions: list[list] = [[] for _ in gates]
    start = time.perf_counter()
    for at in range(0, len(records), 32):
        batch = [r["question"] for r in records[at : at + 32]]
        for kept, new in zip(decisions, decide_together(gates, batch), strict=True):
            kept += new
    print(f"{set_name(path)}: {len(records)} questions in {time.perf_counter() - start:.0f} s", flush=True)
    known = [r["closed_book_correct"] for r in records]
    both = len(set(known)) == 2  # a small --limit may leave one class
    return {
        name: {
            "auc": auc([d.p_known for d in each], known) if both else None,
            "calls": sum(d.cost.model_calls for d in each),
            "ms": sum(d.cost.milliseconds for d in each),
            "failed": sum(d.error is not None for d in each),
            "questions": len(records),
        }
        for name, each in zip(names, decisions, strict=True)
    }


def measure(paths: list[Path], limit: int, names: list[str], proxy: str, resume: bool) -> dict:
    """Measure each set and keep it in a file, so that an interrupted run can be resumed."""
    found = {}
    for path in paths:
        asked = {"limit": limit, "proxy": proxy, "gates": {name: settings(name) for name in names}}
        kept = OUT / f"gates.{set_name(path)}.{limit}.json"
        done = json.loads(kept.read_text()) if resume and kept.exists() else {}
        if done.get("asked") != asked:
            done = {"asked": asked, "gates": measure_set(path, limit, names, proxy)}
            kept.write_text(json.dumps(done, indent=1))
        found[set_name(path)] = done["gates"]
    total = sum(rows[names[0]]["questions"] for rows in found.values())
    gates = {
        name: {
            "settings": settings(name),
            "auc": {each: rows[name]["auc"] for each, rows in found.items()},
            "calls": sum(rows[name]["calls"] for rows in found.values()) / total,
            # the median of the sets: a machine that is busy for a while must not decide
            "ms": float(np.median([rows[name]["ms"] / rows[name]["questions"] for rows in found.values()])),
            "failed": sum(rows[name]["failed"] for rows in found.values()),
        }
        for name in names
    }
    return {"limit": limit, "proxy": proxy, "questions": total, "gates": gates}


def show(result: dict) -> None:
    sets = list(next(iter(result["gates"].values()))["auc"])
    console = Console(width=150)
    console.print(
        f"AUC of p_known for closed_book_correct; {result['questions']} questions, proxy {result['proxy']}, "
        f"{date.today()}, torch {version('torch')}, transformers {version('transformers')}. Model calls and "
        "milliseconds (of the median set) count everything a gate needs, as if it ran alone; batches of 32."
    )
    table = Table(box=None)
    left = ("gate", "settings")
    for column in (*left, *sets, "mean", "calls", "ms"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for name, row in result["gates"].items():
        measured = [v for v in row["auc"].values() if v is not None]
        values = ["-" if v is None else f"{v:.3f}" for v in row["auc"].values()]
        mean = f"{np.mean(measured):.3f}" if measured else "-"
        table.add_row(name, row["settings"], *values, mean, f"{row['calls']:.1f}", f"{row['ms']:.0f}")
    console.print(table)
    for name, row in result["gates"].items():
        if row["failed"]:
            console.print(f"{name}: failed for {row['failed']} questions, which count as p_known = 0.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=UNTRAINED)
    parser.add_argument("--proxy", default="smollm2-135m-instruct")
    parser.add_argument("--resume", action="store_true", help="keep the sets that were measured before")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    result = measure(arguments.data, arguments.limit, arguments.gates, arguments.proxy, arguments.resume)
    (OUT / "gates.json").write_text(json.dumps(result, indent=1))
    show(result)


if __name__ == "__main__":
    main()
