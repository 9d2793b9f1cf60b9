"""Does tuning help? Compares fits from scratch, the shipped gate and the tuned one, on recorded answers of LLMs.

    python benchmarks/tune.py --data FOLDER

Each seed draws 100, 300 or 1,000 questions of an LLM and measures on the rest. The table has the AUC of P(known) for
a gate that is fitted to the drawn questions alone, for the shipped one, and for the shipped one corrected by them.
It also has how often `MaxLoss` gives its guarantee, and how often the guarantee holds. The shipped gate was trained
on none of these answers. FOLDER contains ``more/faclens_nq_eq.jsonl.gz``, ``strong/hotpotqa_qwen25_7b.jsonl.gz`` and
``strong/sagekg_multihop_paired.jsonl.gz``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import argument_parser, print_table, read_records

from rgate_integrations.engine.loading import load_gate
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.tuning import MaxLoss
from rgate_integrations.tuning.evaluation import auc
from rgate_integrations.tuning.fitting import Basis, Table, crossfit, fit_correction, make_readings

SIZES, DRAWS, MAX_RECORDS, LOSS = (100, 300, 1_000), 20, 3_000, 0.02
FACLENS = "more/faclens_nq_eq.jsonl.gz"
SOURCES = (
    (FACLENS, "Llama-3-8B-Instruct"),
    (FACLENS, "Mistral-7B-Instruct-v0.2"),
    ("strong/hotpotqa_qwen25_7b.jsonl.gz", "Qwen2.5-7B-Instruct"),
    ("strong/sagekg_multihop_paired.jsonl.gz", "gpt-4o-mini"),
)


@dataclass(frozen=True)
class Recording:
    """The recorded answers of one LLM; one row a question."""

    llm: str
    prior: Float64Array
    states: Float32Array
    known: BoolArray
    rag: BoolArray | None = None

    def build_tables(self, fit: Any, seed: int) -> dict[str, Table]:
        """Return the tables to fit: without a prior (``scratch``), and with the shipped gate's (``tuned``)."""
        components = Basis.fit(self.states[fit], seed)(self.states)
        tables = {}
        for name, prior in (("scratch", np.zeros_like(self.prior)), ("tuned", self.prior)):
            no_features = np.zeros((len(prior), 0))
            tables[name] = Table(prior, components, no_features, self.known, self.known.astype(float))
        return tables


def read_answers(file: Path, llm: str) -> pd.DataFrame:
    """Return labelled records of an LLM, each question once; at most `MAX_RECORDS`, drawn at random."""
    records = pd.DataFrame(read_records(file))
    records = records[records.closed_book_correct.notna() & (records.llm == llm)]
    records = records.assign(question=records.question.str.strip()).drop_duplicates("question")
    order = np.random.default_rng(0).permutation(len(records))
    return records.iloc[order[:MAX_RECORDS]]


def read_recorded(data: Path, name: str, llm: str) -> Recording:
    """Return an LLM's recorded answers, with what the shipped gate reads in the questions."""
    records = read_answers(data / name, llm)
    readings = make_readings(load_gate(on_error="raise"), records.question.tolist(), lambda *_: None)
    rag = records.rag_correct.to_numpy(bool) if records.rag_correct.notna().all() else None
    return Recording(llm, readings.prior, readings.states, records.closed_book_correct.to_numpy(bool), rag)


def tune_once(data: Recording, n: int, seed: int) -> dict[str, float] | None:
    """Tune on ``n`` questions and measure on the rest; None if all ``n`` have one label."""
    order = np.random.default_rng(seed).permutation(len(data.known))
    fit, rest = order[:n], order[n:]
    if data.known[fit].all() or not data.known[fit].any():
        return None
    tables, known = data.build_tables(fit, seed), data.known[rest]
    scores = {name: fit_correction(t.part(fit), seed)(t.part(rest)) for name, t in tables.items()}
    figures = {name: auc(values, known) for name, values in scores.items()}
    figures["shipped"] = auc(data.prior[rest], known)
    if data.rag is not None:
        held_out = 1 / (1 + np.exp(-crossfit(tables["tuned"].part(fit), seed)))
        chosen = MaxLoss(LOSS).choose(held_out, data.known[fit], data.rag[fit])
        skipped = 1 / (1 + np.exp(-scores["tuned"])) >= chosen.threshold
        lost = float(np.where(skipped, data.rag[rest].astype(float) - known, 0.0).mean())
        figures |= {"guaranteed": float(chosen.guaranteed), "skipped": float(skipped.mean())}
        if chosen.guaranteed:
            figures["held"] = float(lost <= LOSS)
    return figures


def show(data: Sequence[Recording], columns: Sequence[str]) -> None:
    """Print a row for each LLM and number of questions: means over the draws."""
    rows = []
    for recording in data:
        for n in SIZES:
            if 2 * n > len(recording.known):
                continue
            runs = [tune_once(recording, n, seed) for seed in range(DRAWS)]
            means = pd.DataFrame(filter(None, runs)).mean()
            cells = means.reindex(columns).map("{:.3f}".format).replace("nan", "-")
            rows.append([recording.llm, str(n), *cells])
    print_table(["LLM", "n", *columns], rows)


def main() -> None:
    """Print the table of all sources."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    recordings = [read_recorded(data, name, llm) for name, llm in SOURCES]
    show(recordings, ("scratch", "shipped", "tuned", "guaranteed", "held", "skipped"))


if __name__ == "__main__":
    main()
