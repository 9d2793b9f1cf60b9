"""Does tuning help? Recorded answers of other LLMs: from nothing, shipped, and tuned, on a few questions of each.

    python benchmarks/tune.py --data ../shared/data --cache DIR

For 50, 100, 300 and 1,000 questions of an LLM, drawn anew for each seed, two tables, both measured on the rest:

- the question alone: the AUC of P(known) of a gate that is fitted to them alone, of the shipped one, and of the
  shipped one corrected by them; and how often the promise of `MaxLoss` is made, and how often it holds;
- answer first: the same with the log-probabilities of the answers, where these are recorded.

``--cache`` keeps hidden states and shipped scores between runs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rgate_integrations
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import load_gate
from rgate_integrations.gates.probability import logits
from rgate_integrations.gates.tuned import features_of
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.tuning.correction import Basis, Table, crossfit, fit_correction
from rgate_integrations.tuning.metrics import auc
from rgate_integrations.tuning.policies import MaxLoss

LAYERS = tuple(PooledLayer(layer, "question", "mean") for layer in (14, 16, 18))
SHIPPED = "default-heads"
WEIGHTS = Path(rgate_integrations.__file__).parent / "weights"
CHUNK = 256
EVOUNA, WACK, REALTIME = (
    f"more/{name}.jsonl.gz" for name in ("evouna_nq_triviaqa", "wack_base_models", "realtimeqa")
)
SOURCES = (
    (EVOUNA, "text-davinci-003"),
    (EVOUNA, "ChatGPT-3.5"),
    (EVOUNA, "GPT-4"),
    (WACK, "gemma-2-9b"),
    (REALTIME, "GPT-3 (text-davinci-002)"),
)
SONGS = "songs_six_llms.dev.jsonl.gz"


@dataclass(frozen=True)
class Recorded:
    """The recorded answers of one LLM; one row a question."""

    llm: str
    prior: Float64Array
    states: Float32Array
    known: BoolArray
    features: Float64Array
    rag: BoolArray | None = None

    def tables(self, fit: Any, seed: int) -> dict[str, Table]:
        """Return what is fitted from nothing, to the question, and to the begun answer."""
        components = Basis.of(self.states[fit], seed)(self.states)
        none = np.zeros((len(self.known), 0))
        tables = {
            "nothing": Table(np.zeros(len(self.known)), components, none, self.known),
            "tuned": Table(self.prior, components, none, self.known),
        }
        if self.features.shape[1]:
            tables["answer first"] = Table(self.prior, components, self.features, self.known)
        return tables


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        for line in opened:
            yield json.loads(line)


def read(file: Path, llm: str, most: int, seed: int) -> list[dict[str, Any]]:
    """Return labelled records of an LLM, a random part of them if there are many, each question once."""
    found: dict[str, dict[str, Any]] = {}
    for record in lines(file):
        # The NQ questions of one source are all answered rightly: nothing can be learned from them.
        usable = record["closed_book_correct"] is not None and not record["id"].startswith("wack.nq")
        if usable and record["llm"] == llm:
            found.setdefault(record["question"].strip(), record)
    records = list(found.values())
    order = np.random.default_rng(seed).permutation(len(records))
    return [records[place] for place in order[:most]]


def cached(
    questions: Sequence[str], folder: Path, compute: Callable[[list[str]], Any], dtype: str = "float32"
) -> Any:
    """Return an array with a row a question; rows that are not in the folder are computed and kept."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [hashlib.sha1(q.encode(), usedforsecurity=False).hexdigest()[:16] for q in questions]
    known: dict[str, Any] = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as kept:
            known.update(zip(kept["keys"].tolist(), kept["rows"].astype(dtype), strict=True))
    missing = list({name: q for name, q in zip(names, questions, strict=True) if name not in known}.items())
    for start in range(0, len(missing), CHUNK):
        some = missing[start : start + CHUNK]
        rows = compute([question for _, question in some])
        keys = [name for name, _ in some]
        np.savez(folder / f"{keys[0]}.npz", keys=np.array(keys), rows=rows)
        known.update(zip(keys, rows.astype(dtype), strict=True))
    return np.stack([known[name] for name in names])


def states_of(questions: Sequence[str], cache: Path) -> Float32Array:
    """Return hidden states, shape (n, layers, hidden size)."""

    def compute(some: list[str]) -> Any:
        proxy = load_gate(SHIPPED).get_proxy()
        found = proxy.hidden(ANSWER, [{"question": q} for q in some], None, LAYERS)
        return np.stack([each.states for each in found]).astype(np.float16)

    states: Float32Array = cached(questions, cache / "states", compute)
    return states


def shipped_logits(questions: Sequence[str], cache: Path, name: str = SHIPPED) -> Float64Array:
    """Return a shipped question gate's logits, shape (n,)."""
    gate = load_gate(name, on_error="raise")

    def compute(some: list[str]) -> Any:
        return logits(np.array([decision.p_known for decision in gate.decide_batch(some)]))

    files = sorted((WEIGHTS / name).iterdir())
    version = hashlib.sha1(b"".join(file.read_bytes() for file in files), usedforsecurity=False).hexdigest()
    found: Float64Array = cached(questions, cache / f"shipped-{name}-{version[:8]}", compute, "float64")
    return found


def recorded(arguments: argparse.Namespace, name: str, llm: str, prior: str = SHIPPED) -> Recorded:
    """Return what is known of an LLM; ``prior`` is the shipped gate that is corrected."""
    records = read(arguments.data / name, llm, arguments.most, arguments.seed)
    questions = [record["question"].strip() for record in records]
    right = [(record.get("other_rag") or {}).get("fid", record["rag_correct"]) for record in records]
    has_rag = all(isinstance(each, bool) for each in right)
    return Recorded(
        llm,
        shipped_logits(questions, arguments.cache, prior),
        states_of(questions, arguments.cache),
        np.array([record["closed_book_correct"] for record in records], dtype=bool),
        np.zeros((len(records), 0)),
        np.array(right, dtype=bool) if has_rag else None,
    )


def songs(arguments: argparse.Namespace) -> Iterator[Recorded]:
    """Yield six LLMs whose answers are recorded with the probabilities of their tokens."""
    records = list(lines(arguments.data / SONGS))
    questions = [record["question"].strip() for record in records]
    prior = shipped_logits(questions, arguments.cache)
    states = states_of(questions, arguments.cache)
    for llm in records[0]["answers"]:
        features, known = [], []
        for record in records:
            given = record["answers"][llm]
            logprobs = tuple(math.log(max(p, 1e-9)) for p in given["token_probs"])
            features.append(features_of(Draft(text=given["text"], logprobs=logprobs)))
            known.append(given["correct"])
        yield Recorded(llm, prior, states, np.array(known), np.stack(features))


def one(data: Recorded, n: int, seed: int, loss: float) -> dict[str, float] | None:
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
        held_out = 1 / (1 + np.exp(-crossfit(tables["tuned"].part(fit), 5, seed)))
        chosen = MaxLoss(loss).choose(held_out, data.known[fit], data.rag[fit], seed)
        skipped = 1 / (1 + np.exp(-scores["tuned"])) >= chosen.threshold
        lost = float(np.where(skipped, data.rag[rest].astype(float) - known, 0.0).mean())
        found |= {"guaranteed": float(chosen.guaranteed), "skipped": float(skipped.mean())}
        if chosen.guaranteed:
            found["held"] = float(lost <= loss)
    return found


def table(arguments: argparse.Namespace, data: Sequence[Recorded], columns: Sequence[str]) -> None:
    """Print a row for each LLM and number of questions: means over the seeds."""
    print(f"| LLM | n | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
    for each in data:
        for n in arguments.sizes:
            if 2 * n > len(each.known):
                continue
            made = [one(each, n, seed, arguments.loss) for seed in range(arguments.seeds)]
            runs = [run for run in made if run is not None]
            cells = [_mean([run[column] for run in runs if column in run]) for column in columns]
            print(f"| {each.llm} | {n} | {' | '.join(cells)} |", flush=True)


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "-"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=3_000, help="Questions of an LLM.")
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--sizes", type=int, nargs="*", default=(50, 100, 300, 1_000))
    arguments = parser.parse_args()
    data = [recorded(arguments, name, llm) for name, llm in SOURCES]
    table(arguments, data, ("nothing", "shipped", "tuned", "guaranteed", "held", "skipped"))
    print()
    table(arguments, list(songs(arguments)), ("nothing", "shipped", "tuned", "answer first"))


if __name__ == "__main__":
    main()
