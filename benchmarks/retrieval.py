"""Recall of supporting passages when searching for the question, for the claims of an answer, and for both.

    python benchmarks/retrieval.py --data DIR [--limit 200] [--embedder multilingual-e5-small]

DIR contains hotpot_2wiki.train.jsonl (questions with supporting_ids), corpus.hotpot_2wiki.jsonl.gz, the recorded
answers adaptive_llama31_8b.{hotpotqa,2wikimultihopqa}.dev.jsonl, and claims_gpt4.jsonl (annotated claims).
"""

from collections.abc import Callable
from itertools import chain, islice, zip_longest
from operator import itemgetter
from pathlib import Path

import numpy as np
from base import OUT, argument_parser, print_table, read_answers, read_records

from rgate_integrations import Decision, Draft, plan_queries
from rgate_integrations.index import BM25Index, HybridIndex, PassageIndex, fuse, read_passages
from rgate_integrations.index.embedder import DEFAULT_EMBEDDER, SentenceEmbedder
from rgate_integrations.index.passage_index import FILE
from rgate_integrations.index.retriever import Hit, passage_id

Search = Callable[[list[str], int], list[list[Hit]]]


def open_index(data: Path, embedder: str) -> PassageIndex:
    """Return the corpus's index; builds it once and saves it."""
    home = OUT / f"index-hotpot-2wiki-{embedder}"
    if not (home / FILE).is_file():
        passages = list(read_passages(data / "corpus.hotpot_2wiki.jsonl.gz"))
        PassageIndex.build(passages, SentenceEmbedder(embedder)).save(home)
    return PassageIndex.load(home)


def plan_searches(questions: list[dict], answers: dict[str, str]) -> dict[str, list[list[str]]]:
    """Return the queries of each way to search, one list a question."""
    decisions, alone = [], []
    for question in questions:
        draft = Draft(text=answers.get(question["id"], ""), source="recorded")
        decisions.append(Decision(question=question["question"], retrieve=True, p_known=0.0, draft=draft))
        alone.append([question["question"]])
    ways = {"question": alone, "claims": [], "claims + question": []}
    for name, with_question in (("claims", False), ("claims + question", True)):
        for plan in plan_queries(decisions, always_include_question=with_question):
            ways[name].append([query.text for query in plan.queries])
    return ways


def measure_recall(questions: list[dict], queries: list[list[str]], search: Search, k: int) -> float:
    """Return the mean share of supporting passages among the first k, with a question's queries fused by rank."""
    results = iter(search(list(chain.from_iterable(queries)), max(k, 10)))
    shares = []
    for question, question_queries in zip(questions, queries, strict=True):
        rankings = list(islice(results, len(question_queries)))
        shares.append(measure_share(question, fuse(rankings, key=passage_id, k=k)))
    return float(np.mean(shares))


def search_slimplm(index: HybridIndex, question: str, queries: list[str], k: int = 10) -> list[Hit]:
    """Search as SlimPLM does (section 4.1): BM25 for each query, dense reranking by the question, round-robin."""
    query_vector = index.dense.embed_queries([question])[0]
    rankings = []
    for hits in index.bm25.search(queries, k):
        similarities = index.dense.vectors([hit.passage.id for hit in hits]) @ query_vector
        rankings.append([hits[row] for row in np.argsort(-similarities, kind="stable")])
    chosen: dict[str, Hit] = {}
    for hit in chain.from_iterable(zip_longest(*rankings)):
        if hit is not None:
            chosen.setdefault(hit.passage.id, hit)
    return list(chosen.values())


def measure_share(question: dict, hits: list[Hit]) -> float:
    """Return the share of a question's supporting passages among the hits."""
    supporting = set(question["supporting_ids"])
    return len(supporting & {passage_id(hit) for hit in hits}) / len(supporting)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=1_000)
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER)
    arguments = parser.parse_args()
    data, limit = arguments.data, arguments.limit
    questions = list(filter(itemgetter("supporting_ids"), read_records(data / "hotpot_2wiki.train.jsonl")))
    # The file has one set after the other: take every n-th question.
    questions = questions[:: max(1, len(questions) // limit)][:limit]
    answers = {}
    for name in ("hotpotqa", "2wikimultihopqa"):
        answers.update({record["id"]: record["closed_book_text"] for record in read_answers(data, name)})
    dense = open_index(data, arguments.embedder)
    hybrid = HybridIndex(dense)
    sides: dict[str, Search] = {
        "BM25": BM25Index(dense).search,
        "dense": dense.search,
        "hybrid": hybrid.search,
    }
    rows = []
    for way, queries in plan_searches(questions, answers).items():
        number = f"{np.mean([len(question_queries) for question_queries in queries]):.1f}"
        for side, search in sides.items():
            recalls = [f"{measure_recall(questions, queries, search, k):.3f}" for k in (5, 10)]
            rows.append([way, side, *recalls, number])
        shares = []
        for question, question_queries in zip(questions, queries, strict=True):
            hits = search_slimplm(hybrid, question["question"], question_queries)
            shares.append((measure_share(question, hits[:5]), measure_share(question, hits[:10])))
        recalls = [f"{share:.3f}" for share in np.mean(shares, axis=0)]
        rows.append([way, "SlimPLM's chain", *recalls, number])
    title = f"{len(questions)} questions, {len(dense)} passages, {arguments.embedder}"
    print_table(["queries", "search", "recall@5", "recall@10", "queries per question"], rows, title)


if __name__ == "__main__":
    main()
