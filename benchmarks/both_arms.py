"""Accuracy of the default gate, for LLMs whose answers with and without passages are recorded.

    python benchmarks/both_arms.py --data FOLDER

FOLDER has the recorded answers of four published data sets: SAGE-KG (``sagekg_multihop_paired``), When-to-Retrieve
(``when_to_retrieve_nq``), SKR (``skr_temporal``) and RealTimeQA (``realtimeqa``). The gate gets each LLM's name. It
has learned from none of these answers, and questions near its six training sets are left out. Where the gate
retrieves, the recorded answer with passages counts; elsewhere the one without. Intervals are paired, by bootstrap
over questions.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from base import argument_parser, mean_interval, print_table, read_records

from rgate_integrations import load_gate

FILES = (
    "strong/sagekg_multihop_paired.jsonl.gz",
    "more/when_to_retrieve_nq.jsonl.gz",
    "more/skr_temporal.jsonl.gz",
    "more/realtimeqa.jsonl.gz",
)
MIN_QUESTIONS = 90  # questions of an LLM and a set
TABLE_NAMES = {"ChatGPT-3.5": "gpt-3.5-turbo", "GPT-3 (text-davinci-002)": "text-davinci-002"}
"""LLMs that the records spell differently from the table of abilities."""


def read_arms(data: Path) -> pd.DataFrame:
    """Return a row for each question and LLM: set, llm, question, alone, passages (whether each arm is right)."""
    rows = []
    for file in FILES:
        for record in read_records(data / file):
            arms = record["closed_book_correct"], record["rag_correct"]
            if None not in arms and record["overlap"] is None:
                rows.append((record["dataset"], record["llm"], record["question"], *map(float, arms)))
    return pd.DataFrame(rows, columns=["set", "llm", "question", "alone", "passages"])


def gate_answers(rows: pd.DataFrame, llm: str) -> pd.DataFrame:
    """Return the rows of one LLM, with the gate's decision and whether the answer that it picks is right."""
    gate = load_gate(llm_name=TABLE_NAMES.get(llm, llm.rpartition("/")[2]), on_error="raise")
    retrieve = np.array([decision.retrieve for decision in gate.decide_batch(list(rows.question))])
    return rows.assign(retrieve=retrieve, gated=np.where(retrieve, rows.passages, rows.alone))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    rows = read_arms(parser.parse_args().data)
    table = []
    for (name, llm), answers in rows.groupby(["set", "llm"], sort=False):
        if len(answers) < MIN_QUESTIONS:
            continue
        gated = gate_answers(answers, str(llm))
        low, high = mean_interval((gated.gated - gated.passages).to_numpy())
        right = [f"{100 * gated[way].mean():.1f}" for way in ("alone", "passages", "gated")]
        skipped = gated[~gated.retrieve]
        right_of_skipped = f"{100 * skipped.alone.mean():.0f}" if len(skipped) else ""
        difference = (
            f"{100 * (gated.gated - gated.passages).mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        )
        share = f"{100 * (~gated.retrieve).mean():.0f}"
        table.append([f"{llm}, {name}", str(len(gated)), *right, difference, share, right_of_skipped])
    columns = [
        "LLM, questions",
        "n",
        "never",
        "always",
        "gate",
        "gate against always",
        "skipped, %",
        "right of these, %",
    ]
    print_table(columns, table, "right, %")


if __name__ == "__main__":
    main()
