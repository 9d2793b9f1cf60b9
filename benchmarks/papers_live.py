"""The papers' training pipelines, end to end and small, on the 135M proxy as gate and as LLM.

    python benchmarks/papers_live.py slimplm --data judgment_llama2_7b.jsonl
    python benchmarks/papers_live.py adapt boundary --data hotpot_2wiki.train.jsonl --corpus corpus.hotpot_2wiki.jsonl

slimplm: trained on one half of the published judgments, measured on the other. adapt, boundary: the LLM answers 300
questions without and with passages (BM25); a gate is trained on half of them and decides for the other half.
Answers and trained gates are kept under benchmarks/out/, and a run that is started again goes on from them. What can
be measured on recorded answers of larger LLMs is in `papers`.
"""

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.answering.requests import answer_all
from rgate_integrations.decision import Decision
from rgate_integrations.index import Passage
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.files import JsonlLog, json_line, read_jsonl, write_atomically
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.training.adapters import AdapterOptions, train_adapter
from rgate_integrations.training.labels import sampled_accuracy, sampled_certainty
from rgate_integrations.training.trainer import RECIPES
from rgate_integrations.tuning.metrics import auc

OUT = Path(__file__).parent / "out" / "papers_live"
MODEL = "smollm2-135m-instruct"
CONSOLE = Console(width=140, highlight=False)
SEED = 0


def halves(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Split at random, by id and seed, whatever the order of the file."""
    mixed = sorted(rows, key=lambda r: r["id"])
    random.Random(SEED).shuffle(mixed)  # noqa: S311
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def written(rows: list[dict], name: str) -> Path:
    return write_atomically(OUT / name, "".join(json_line(row) for row in rows))


def trained(gate: str, name: str, train: list[dict], label: str, **options: Any) -> Path:
    """Train a gate, unless it is there already."""
    from rgate_integrations.training.examples import read_examples

    folder = OUT / name
    if not (folder / "gate.json").is_file():
        start = time.perf_counter()
        files = read_examples([written(train, f"{name}.jsonl")], label)
        recipe = RECIPES[gate].with_options(**options.pop("recipe", {}))
        made = AdapterOptions(recipe=recipe, resume=True, label=label, **options)
        train_adapter(gate, files, MODEL, folder, made)
        CONSOLE.print(f"{name}: trained on {len(train)} questions in {time.perf_counter() - start:.0f} s")
    return folder


def slimplm(data: Path) -> None:
    """SlimPLM, section 3.2 and table 5: the judgment model, with the settings of section 4.4."""
    keys = ("id", "question", "closed_book_text", "known", "dataset")
    train, test = halves([{k: r[k] for k in keys} for _, r in read_jsonl(data)])
    folder = trained("slimplm", "slimplm", train, "known", draft="recorded", tokens=64)
    known = np.array([r["known"] for r in test])
    table = Table(title=f"SlimPLM judgments: {len(train)} to train on, {len(test)} to test", box=None)
    for column in ("gate", "accuracy", "AUC"):
        table.add_column(column, justify="left" if column == "gate" else "right")
    proxy = shared_proxy(MODEL)
    texts = [proxy.cut(r["closed_book_text"], 64) or r["closed_book_text"] for r in test]
    for name, gate in (
        (
            "slimplm, zero-shot",
            load_gate("slimplm", proxy=proxy, source="recorded", tokens=64, on_error="raise"),
        ),
        ("slimplm, trained", load_gate(str(folder), on_error="raise")),
        ("default-answer, shipped", load_gate("default-answer", on_error="raise")),
    ):
        p = np.array([d.p_known for d in gate.decide_batch([r["question"] for r in test], drafts=texts)])
        table.add_row(name, f"{np.mean((p >= 0.5) == known):.3f}", f"{auc(p, known):.3f}")
    table.add_row("all of one class", f"{max(known.mean(), 1 - known.mean()):.3f}", "0.500")
    CONSOLE.print(table)


def answered(data: Path, corpus: Path, n: int, samples: int) -> list[dict]:
    """The LLM's answers to ``n`` questions: without and with passages, and sampled."""
    path = OUT / f"answers.{n}.jsonl"
    log = JsonlLog(path)
    done = log.values()
    rows = sorted((r for _, r in read_jsonl(data)), key=lambda r: r["id"])
    random.Random(SEED).shuffle(rows)  # noqa: S311
    missing = rows[len(done) : n]
    if not missing:
        return done
    passages = [Passage(r["id"], r["text"], title=r["title"]) for _, r in read_jsonl(corpus)]
    index, llm = BM25Index(passages), shared_proxy(MODEL)
    for at in range(0, len(missing), 20):
        some = missing[at : at + 20]
        asked = [r["question"] for r in some]
        values = [{"question": q} for q in asked]
        closed = llm.generate(ANSWER, values, tokens=24)
        found = [[hit.passage for hit in hits] for hits in index.search(asked, 2)]
        decisions = [Decision(question=q, retrieve=True, p_known=0.0) for q in asked]
        opened = answer_all(llm, decisions, found, tokens=24)
        many = llm.sample(ANSWER, values, n=samples, tokens=16, temperature=1.0, seed=SEED)
        new = []
        for row, c, o, each, context in zip(some, closed, opened, many, found, strict=True):
            gold, texts = row["gold_answers"], [s.text for s in each]
            record = {
                "id": row["id"],
                "question": row["question"],
                "gold_answers": gold,
                "context": context[0].text if context else "",
                "closed_book_text": c.text,
                "closed_book_correct": is_correct(c.text, gold),
                "rag_correct": is_correct(o, gold),
                "accuracy": float(sampled_accuracy(texts, gold)),
                "certainty": float(sampled_certainty(texts)),
                "dataset": row["dataset"],
            }
            new.append(record)
        log.append(new)
        done += new
        CONSOLE.print(f"answered {len(done)} of {n}")
    return done


def arms(table: Table, name: str, retrieve: np.ndarray, test: list[dict], score: float | None) -> None:
    """One line: how often a gate retrieves and what comes out, beside random decisions at the same rate."""
    closed = np.array([r["closed_book_correct"] for r in test])
    opened = np.array([r["rag_correct"] for r in test])
    rate = float(retrieve.mean())
    at_random = (1 - rate) * closed.mean() + rate * opened.mean()
    got = np.where(retrieve, opened, closed).mean()
    shown = "" if score is None else f"{score:.3f}"
    table.add_row(name, f"{rate:.2f}", f"{got:.3f}", f"{at_random:.3f}", shown)


def decided(table: Table, name: str, gate: Any, test: list[dict], rate: float | None = None) -> None:
    decisions = gate.decide_batch([r["question"] for r in test])
    p = np.array([d.p_known for d in decisions])
    retrieve = np.array([d.retrieve for d in decisions])
    if (
        rate is not None
    ):  # at the rate of the labels: the threshold of a large model says nothing of a small one
        retrieve = p < np.quantile(p, rate)
    arms(table, name, retrieve, test, auc(p, [r["closed_book_correct"] for r in test]))


def adapt_and_boundary(names: list[str], data: Path, corpus: Path, n: int) -> None:
    rows = answered(data, corpus, n, samples=10)
    train, test = halves(rows)
    table = Table(title=f"{len(train)} questions to train on, {len(test)} to decide", box=None)
    for column in ("gate", "retrieves", "accuracy", "random at its rate", "AUC"):
        table.add_column(column, justify="left" if column == "gate" else "right")
    always = np.ones(len(test), bool)
    arms(table, "never", ~always, test, None)
    arms(table, "always", always, test, None)
    unknown = 1 - float(np.mean([r["closed_book_correct"] for r in train]))
    if "adapt" in names:
        folder = trained("adapt", "adapt", train, "closed_book_correct", recipe={"batch_size": 16})
        gate = load_gate(str(folder), on_error="raise")
        decided(table, "adapt, answers <RET>", gate, test)
        decided(table, "adapt, at the rate of unknown questions", gate, test, unknown)
    if "boundary" in names:
        for label in ("accuracy", "certainty"):
            some = [{**r, label: r[label]} for r in train]
            folder = trained(
                "boundary", f"boundary-{label}", some, label, recipe={"learning_rate": 1e-4, "batch_size": 8}
            )
            decided(table, f"KBM-{label}", load_gate(str(folder), on_error="raise"), test, unknown)
        sampled = np.array([r["certainty"] for r in test])
        known = [r["closed_book_correct"] for r in test]
        arms(
            table,
            "certainty of 10 samples",
            sampled < np.quantile(sampled, unknown),
            test,
            auc(sampled, known),
        )
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=["slimplm", "adapt", "boundary"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs kept")
    arguments = parser.parse_args()
    if arguments.fresh:
        shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    if "slimplm" in arguments.what:
        slimplm(arguments.data)
    both = [name for name in arguments.what if name in ("adapt", "boundary")]
    if both:
        if arguments.corpus is None:
            parser.error("adapt and boundary need --corpus")
        adapt_and_boundary(both, arguments.data, arguments.corpus, arguments.questions)


if __name__ == "__main__":
    main()
