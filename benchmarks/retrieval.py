"""What to retrieve: recall of supporting passages for the question, the claims of an answer, and both.

    python benchmarks/retrieval.py [--data DIR] [--limit 200] [--filter]

DIR holds hotpot_2wiki.train.jsonl (questions with supporting_ids), corpus.hotpot_2wiki.jsonl.gz, the recorded
answers adaptive_llama31_8b.{hotpotqa,2wikimultihopqa}.dev.jsonl, and claims_gpt4.jsonl (annotated claims).
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rgate_integrations import Decision, Draft, load_gate
from rgate_integrations.claims import plan_queries
from rgate_integrations.index import HybridIndex, PassageIndex, read_passages
from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.hybrid import slimplm_search
from rgate_integrations.index.retriever import Hit, passage_id
from rgate_integrations.runtime.files import read_jsonl

OUT = Path(__file__).parent / "out"
CONSOLE = Console(width=120)
Search = Callable[[list[str], int], list[list[Hit]]]


def read(path: Path) -> list[dict]:
    return [record for _, record in read_jsonl(path)]


def index_of(data: Path) -> PassageIndex:
    """The corpus's index, built once and kept."""
    home = OUT / "index-hotpot-2wiki"
    if not (home / "index.json").is_file():
        passages = list(read_passages(data / "corpus.hotpot_2wiki.jsonl.gz"))
        PassageIndex.build(passages, report=lambda n: print(f"{n} of {len(passages)} passages")).save(home)
    return PassageIndex.load(home)


def queries_for(questions: list[dict], answers: dict[str, str], filtered: bool) -> dict[str, list[list[str]]]:
    """The queries of each way to search, one list a question."""
    drafts = [Draft(text=answers.get(q["id"], ""), source="recorded") for q in questions]
    decisions = [
        Decision(question=q["question"], retrieve=True, p_known=0.0, draft=d)
        for q, d in zip(questions, drafts, strict=True)
    ]
    with_question = plan_queries(decisions)
    ways = {
        "question": [[q["question"]] for q in questions],
        "claims": [
            [q.text for q in p.queries] for p in plan_queries(decisions, always_include_question=False)
        ],
        "claims + question": [[q.text for q in p.queries] for p in with_question],
    }
    if filtered:
        kept = plan_queries(decisions, gate=load_gate("default-answer", on_error="raise"))
        ways["unknown claims + question"] = [[q.text for q in p.queries] for p in kept]
    return ways


def recall(questions: list[dict], queries: list[list[str]], search: Search, k: int) -> float:
    """Mean share of a question's supporting passages among the first k, its queries fused by rank."""
    flat = [query for own in queries for query in own]
    found = iter(search(flat, max(k, 10)))
    shares = []
    for question, own in zip(questions, queries, strict=True):
        rankings = list(islice(found, len(own)))
        shares.append(share_found(question, fuse(rankings, key=passage_id, k=k)))
    return float(np.mean(shares))


def share_found(question: dict, hits: list[Hit]) -> float:
    """Share of a question's supporting passages that are among the hits."""
    supporting = set(question["supporting_ids"])
    return len(supporting & {passage_id(hit) for hit in hits}) / len(supporting)


def load(data: Path, limit: int | None) -> tuple[list[dict], dict[str, str]]:
    """Questions with known supporting passages, and the recorded answer of each by id."""
    questions = [q for q in read(data / "hotpot_2wiki.train.jsonl") if q["supporting_ids"]]
    if limit:  # both sets lie one after the other
        questions = questions[:: max(1, len(questions) // limit)][:limit]
    answers = {
        r["id"]: r["closed_book_text"]
        for name in ("hotpotqa", "2wikimultihopqa")
        for r in read(data / f"adaptive_llama31_8b.{name}.dev.jsonl")
    }
    return questions, answers


def measure_recall(data: Path, limit: int | None, filtered: bool) -> dict:
    questions, answers = load(data, limit)
    dense = index_of(data)
    hybrid = HybridIndex(dense)
    sides: dict[str, Search] = {
        "BM25": BM25Index(dense).search,
        "dense": dense.search,
        "hybrid": hybrid.search,
    }
    rows: dict[str, dict[str, float]] = {}
    for way, queries in queries_for(questions, answers, filtered).items():
        mean_queries = float(np.mean([len(own) for own in queries]))
        for side, search in sides.items():
            row = {f"recall@{k}": recall(questions, queries, search, k) for k in (5, 10)}
            rows[f"{way}: {side}"] = row | {"queries": mean_queries}
        shares: dict[str, list[float]] = {"recall@5": [], "recall@10": []}
        for question, own in zip(questions, queries, strict=True):
            hits = slimplm_search(hybrid, question["question"], own, token_budget=10_000)
            shares["recall@5"].append(share_found(question, hits[:5]))
            shares["recall@10"].append(share_found(question, hits[:10]))
        row = {name: float(np.mean(values)) for name, values in shares.items()}
        rows[f"{way}: SlimPLM's chain"] = row | {"queries": mean_queries}
    table = Table(title=f"{len(questions)} questions, {len(dense)} passages", title_justify="left", box=None)
    for column in ("queries: search", "recall@5", "recall@10", "queries a question"):
        table.add_column(column, justify="left" if column.startswith("queries:") else "right")
    for name, row in rows.items():
        values = (f"{row['recall@5']:.3f}", f"{row['recall@10']:.3f}", f"{row['queries']:.1f}")
        table.add_row(name, *values)
    CONSOLE.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--filter", action="store_true", help="also judge the claims with the gate")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    found = {
        "recall": measure_recall(arguments.data, arguments.limit, arguments.filter),
        "date": date.today().isoformat(),
        "versions": {n: version(n) for n in ("faiss-cpu", "bm25s", "sentence-transformers")},
    }
    (OUT / "retrieval.json").write_text(json.dumps(found, indent=1) + "\n")
    CONSOLE.print(f"{found['date']}, {found['versions']}")


if __name__ == "__main__":
    main()
