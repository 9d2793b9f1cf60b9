"""What int8 costs the shipped gates: their decisions by the reader, and by the same model in float32 on torch.

    python benchmarks/reader.py --data FOLDER [--every 3]

The folder holds ``practical.dev.jsonl`` and ``adaptive_llama31_8b.*.dev.jsonl``. The gates were trained on the latter
(and on the former in part), so only the differences say something.
"""

from pathlib import Path

import numpy as np
from base import SETS, argument_parser, read_answers, read_records
from sklearn.metrics import roc_auc_score

from rgate_integrations import load_gate
from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy

BEGUN = "answer:default,default-answer"
WORDS = (6, 24, 48)  # about 8, 32 and 64 tokens


def scores(
    gate: str | None, records: list[dict], proxy: LocalProxy | None, words: int
) -> tuple[np.ndarray, ...]:
    """Return P(known) and whether it retrieves, of each record."""
    engine = load_gate(gate, proxy=proxy, on_error="raise")
    drafts = [" ".join(each["closed_book_text"].split()[:words]) for each in records] if words else None
    found = engine.decide_batch([each["question"] for each in records], drafts=drafts)
    return np.array([d.p_known for d in found]), np.array([d.retrieve for d in found])


def compare(what: str, gate: str | None, sets: list[list[dict]], label: str, words: int = 0) -> None:
    """Print how often decisions differ, and the mean AUC of the sets both ways."""
    exact = LocalProxy(DEFAULT_MODEL, dtype="float32", max_batch_size=32)
    differ, aucs = [], []
    for records in sets:
        truth = [each[label] for each in records]
        small, retrieves = scores(gate, records, None, words)
        full, retrieves_full = scores(gate, records, exact, words)
        differ += (retrieves != retrieves_full).tolist()
        aucs.append((roc_auc_score(truth, small), roc_auc_score(truth, full)))
    int8, float32 = np.mean(aucs, axis=0)
    print(
        f"{what:28} {len(differ):5} differ {np.mean(differ):.1%}, AUC int8 {int8:.3f}, float32 {float32:.3f}"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take every n-th record")
    arguments = parser.parse_args()
    data, every = arguments.data, arguments.every
    practical = read_records(data / "practical.dev.jsonl")[::every]
    for record in practical:
        record["skip"] = not record["retrieve"]
    sets = [read_answers(data, name)[::every] for name in SETS]
    compare("practical requests", None, [practical], "skip")
    compare("six sets", None, sets, "closed_book_correct")
    for words in WORDS:
        compare(f"six sets, {words} words begun", BEGUN, sets, "closed_book_correct", words)


if __name__ == "__main__":
    main()
