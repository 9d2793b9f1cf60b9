"""Does tuning help? Recorded answers of other LLMs: from nothing, shipped, and tuned, on a few questions of each.

    python benchmarks/tune.py --data ../shared/data --cache DIR

For 50, 100, 300 and 1,000 questions of an LLM, drawn anew for each seed: the AUC of P(known) on the rest of a gate
that is fitted to them alone, of the shipped one, and of the shipped one corrected by them; and, where answers with
retrieval are recorded, how often the promise of `MaxLoss` is made, and how often it holds on the rest. ``--cache``
keeps hidden states between runs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.calibration.policies import MaxLoss
from rgate_integrations.evaluation.metrics import auc
from rgate_integrations.gates.calibrated import logits
from rgate_integrations.loading import DEFAULT_GATES, load_gate
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.tuning.fit import Basis, Table, crossfit, fit_correction

LAYERS = tuple(PooledLayer(layer, "question", "mean") for layer in (14, 16, 18))
SIZES = (50, 100, 300, 1_000)
CHUNK = 256
_NO_PRIOR = 0.0


@dataclass(frozen=True)
class Recorded:
    """The recorded answers of one LLM; one row a question."""

    llm: str
    prior: Float64Array
    states: Float32Array
    known: BoolArray
    rag: BoolArray | None


def read(file: Path, llm: str, most: int, seed: int) -> list[dict[str, Any]]:
    """Return labelled records of an LLM, a random part of them if there are many, each question once."""
    found: dict[str, dict[str, Any]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            # The NQ questions of one source are all answered rightly: nothing can be learned from them.
            usable = record["closed_book_correct"] is not None and not record["id"].startswith("wack.nq")
            if usable and record["llm"] == llm:
                found.setdefault(record["question"].strip(), record)
    records = list(found.values())
    order = np.random.default_rng(seed).permutation(len(records))
    return [records[place] for place in order[:most]]


def states_of(questions: Sequence[str], cache: Path) -> Float32Array:
    """Return hidden states, shape (n, layers, hidden size); those that are not in the cache are read and kept."""
    names = [
        hashlib.sha1(question.encode(), usedforsecurity=False).hexdigest()[:16] for question in questions
    ]
    known: dict[str, Float32Array] = {}
    for file in sorted(cache.glob("*.npz")):
        with np.load(file) as kept:
            known.update(zip(kept["keys"].tolist(), kept["states"].astype(np.float32), strict=True))
    missing = {name: q for name, q in zip(names, questions, strict=True) if name not in known}
    if missing:
        proxy = load_gate(DEFAULT_GATES["none"]).get_proxy()
        texts = list(missing.items())
        for start in range(0, len(texts), CHUNK):
            some = texts[start : start + CHUNK]
            read_now = proxy.hidden(ANSWER, [{"question": q} for _, q in some], None, LAYERS)
            states = np.stack([each.states for each in read_now]).astype(np.float16)
            keys = np.array([name for name, _ in some])
            np.savez(cache / f"{some[0][0]}.npz", keys=keys, states=states)
            known.update(zip(keys.tolist(), states.astype(np.float32), strict=True))
    return np.stack([known[name] for name in names])


def shipped_logits(questions: Sequence[str], cache: Path) -> Float64Array:
    """Return the shipped question gate's logits, shape (n,); kept by the gate and the questions."""
    gate = load_gate(DEFAULT_GATES["none"], on_error="raise")
    text = gate.to_json() + "\n".join(questions)
    file = cache / f"prior-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"
    if not file.exists():
        found: list[float] = []
        for start in range(0, len(questions), CHUNK):
            found += [d.p_known for d in gate.decide_batch(questions[start : start + CHUNK])]
        np.save(file, logits(np.array(found)))
    kept: Float64Array = np.load(file)
    return kept


def recorded(file: Path, llm: str, arguments: argparse.Namespace) -> Recorded:
    """Return what is known of an LLM."""
    records = read(file, llm, arguments.most, arguments.seed)
    questions = [record["question"].strip() for record in records]
    right = [(record.get("other_rag") or {}).get("fid", record["rag_correct"]) for record in records]
    has_rag = all(isinstance(each, bool) for each in right)
    return Recorded(
        llm,
        shipped_logits(questions, arguments.cache),
        states_of(questions, arguments.cache),
        np.array([record["closed_book_correct"] for record in records], dtype=bool),
        np.array(right, dtype=bool) if has_rag else None,
    )


def one(data: Recorded, n: int, seed: int, loss: float) -> dict[str, float]:
    """Tune on ``n`` questions and measure on the rest."""
    order = np.random.default_rng(seed).permutation(len(data.known))
    fit, rest = order[:n], order[n:]
    basis = Basis.of(data.states[fit], seed)
    nothing = np.zeros((len(order), 0))
    table = Table(data.prior, basis(data.states), nothing, data.known)
    without = Table(np.full(len(order), _NO_PRIOR), table.states, nothing, data.known)
    tuned = fit_correction(table.part(fit), seed)(table.part(rest))
    alone = fit_correction(without.part(fit), seed)(without.part(rest))
    known = data.known[rest]
    found = {
        "nothing": auc(alone, known),
        "shipped": auc(data.prior[rest], known),
        "tuned": auc(tuned, known),
    }
    if data.rag is not None:
        held_out = 1 / (1 + np.exp(-crossfit(table.part(fit), 5, seed)))
        chosen = MaxLoss(loss).choose(held_out, data.known[fit], data.rag[fit], seed)
        skipped = 1 / (1 + np.exp(-tuned)) >= chosen.threshold
        lost = float(np.where(skipped, data.rag[rest].astype(float) - known, 0.0).mean())
        found |= {"made": float(chosen.kept), "held": float(lost <= loss), "skipped": float(skipped.mean())}
    return found


def main() -> None:
    """Print a row for each LLM and number of questions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=4_000, help="Questions of an LLM.")
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    evouna, wack = "evouna_nq_triviaqa.jsonl.gz", "wack_base_models.jsonl.gz"
    sources = [(evouna, "text-davinci-003"), (evouna, "ChatGPT-3.5"), (evouna, "GPT-4"), (wack, "gemma-2-9b")]
    print("| LLM | n | from nothing | shipped | tuned | tuned - shipped | promised | held | skipped |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, llm in sources:
        data = recorded(arguments.data / "more" / name, llm, arguments)
        for n in arguments.sizes:
            runs = [one(data, n, seed, arguments.loss) for seed in range(arguments.seeds)]
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            cells = [llm, str(n), *(f"{mean[key]:.3f}" for key in ("nothing", "shipped", "tuned"))]
            cells.append(f"{mean['tuned'] - mean['shipped']:+.3f}")
            if "made" in mean:
                cells += [f"{mean[key]:.0%}" for key in ("made", "held", "skipped")]
            else:
                cells += ["-"] * 3
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
