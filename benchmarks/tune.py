"""Does tuning help? Recorded answers of other LLMs: from nothing, shipped, and tuned, on a few questions of each.

    python benchmarks/tune.py --data ../shared/data --cache DIR

For 100, 300 and 1,000 questions of an LLM, drawn anew for each seed, and measured on the rest: the AUC of P(known) of
a gate that is fitted to them alone, of the shipped one, and of the shipped one corrected by them; and how often the
guarantee of `MaxLoss` is given, and how often it holds.

``--cache`` keeps hidden states between runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from base import argument_parser, print_table, read_records
from heads import Kept, key

from rgate_integrations.engine.loading import load_gate
from rgate_integrations.gates.probability import logits
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.tuning import MaxLoss
from rgate_integrations.tuning.evaluation import auc
from rgate_integrations.tuning.fitting import Basis, Table, crossfit, fit_correction

LAYERS = tuple(PooledLayer(layer, "question", "mean") for layer in (14, 16, 18))
SHIPPED = "default"
SIZES, DRAWS, MOST, LOSS = (100, 300, 1_000), 20, 3_000, 0.02
EVOUNA, WACK = "more/evouna_nq_triviaqa.jsonl.gz", "more/wack_base_models.jsonl.gz"
SOURCES = (
    (EVOUNA, "text-davinci-003"),
    (EVOUNA, "ChatGPT-3.5"),
    (EVOUNA, "GPT-4"),
    (WACK, "gemma-2-9b"),
)


@dataclass(frozen=True)
class Recorded:
    """The recorded answers of one LLM; one row a question."""

    llm: str
    prior: Float64Array
    states: Float32Array
    known: BoolArray
    rag: BoolArray | None = None

    def tables(self, fit: Any, seed: int) -> dict[str, Table]:
        """Return what is fitted from nothing, and to the shipped gate."""
        components = Basis.of(self.states[fit], seed)(self.states)
        none = np.zeros((len(self.known), 0))
        return {
            "nothing": Table(
                np.zeros(len(self.known)), components, none, self.known, self.known.astype(float)
            ),
            "tuned": Table(self.prior, components, none, self.known, self.known.astype(float)),
        }


def read(file: Path, llm: str) -> list[dict[str, Any]]:
    """Return labelled records of an LLM, a random part of them if there are many, each question once."""
    found: dict[str, dict[str, Any]] = {}
    for record in read_records(file):
        # The NQ questions of one source are all answered rightly: nothing can be learned from them.
        usable = record["closed_book_correct"] is not None and not record["id"].startswith("wack.nq")
        if usable and record["llm"] == llm:
            found.setdefault(record["question"].strip(), record)
    records = list(found.values())
    order = np.random.default_rng(0).permutation(len(records))
    return [records[place] for place in order[:MOST]]


def read_questions(questions: list[str], cache: Path) -> tuple[Float64Array, Float32Array]:
    """Return the shipped gate's logits, shape (n,), and hidden states, shape (n, layers, hidden size)."""
    gate = load_gate(SHIPPED, on_error="raise")

    def compute(some: list[str]) -> Any:
        found = gate.get_proxy().hidden(ANSWER, [{"question": q} for q in some], None, LAYERS)
        return np.stack([each.states for each in found])

    kept = Kept(cache / "states").fill(questions, compute)
    states = np.stack([kept[key(question)] for question in questions]).astype(np.float32)
    decisions = gate.decide_batch(questions)
    return logits(np.array([decision.p_known for decision in decisions])), states


def recorded(data: Path, cache: Path, name: str, llm: str) -> Recorded:
    """Return what is known of an LLM."""
    records = read(data / name, llm)
    prior, states = read_questions([record["question"].strip() for record in records], cache)
    right = [(record.get("other_rag") or {}).get("fid", record["rag_correct"]) for record in records]
    known = np.array([record["closed_book_correct"] for record in records], dtype=bool)
    has_rag = all(isinstance(each, bool) for each in right)
    return Recorded(llm, prior, states, known, np.array(right, dtype=bool) if has_rag else None)


def tune_once(data: Recorded, n: int, seed: int) -> dict[str, float] | None:
    """Tune on ``n`` questions and measure on the rest; None if all ``n`` have one label."""
    order = np.random.default_rng(seed).permutation(len(data.known))
    fit, rest = order[:n], order[n:]
    if data.known[fit].all() or not data.known[fit].any():
        return None
    tables, known = data.tables(fit, seed), data.known[rest]
    scores = {name: fit_correction(t.part(fit), seed)(t.part(rest)) for name, t in tables.items()}
    found = {name: auc(each, known) for name, each in scores.items()}
    found["shipped"] = auc(data.prior[rest], known)
    if data.rag is not None:
        held_out = 1 / (1 + np.exp(-crossfit(tables["tuned"].part(fit), seed)))
        chosen = MaxLoss(LOSS).choose(held_out, data.known[fit], data.rag[fit])
        skipped = 1 / (1 + np.exp(-scores["tuned"])) >= chosen.threshold
        lost = float(np.where(skipped, data.rag[rest].astype(float) - known, 0.0).mean())
        found |= {"guaranteed": float(chosen.guaranteed), "skipped": float(skipped.mean())}
        if chosen.guaranteed:
            found["held"] = float(lost <= LOSS)
    return found


def show(data: Sequence[Recorded], columns: Sequence[str]) -> None:
    """Print a row for each LLM and number of questions: means over the draws."""
    rows = []
    for each in data:
        for n in SIZES:
            if 2 * n > len(each.known):
                continue
            runs = [tune_once(each, n, seed) for seed in range(DRAWS)]
            cells = [each.llm, str(n)]
            for column in columns:
                values = [run[column] for run in runs if run is not None and column in run]
                cells.append(f"{np.mean(values):.3f}" if values else "-")
            rows.append(cells)
    print_table(["LLM", "n", *columns], rows)


def main() -> None:
    """Print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    arguments = parser.parse_args()
    data, cache = arguments.data, arguments.cache
    found = [recorded(data, cache, name, llm) for name, llm in SOURCES]
    show(found, ("nothing", "shipped", "tuned", "guaranteed", "held", "skipped"))


if __name__ == "__main__":
    main()
