"""SlimPLM: a small model's answer says whether the LLM knows, and what to search for; see `papers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from begun import CUTS, Answers, read_states
from paper_data import (
    ARMS,
    Options,
    SixSets,
    calibrated,
    embeddings,
    held_out_begun,
    held_out_question,
    judgments,
    mixed,
    nearest_vote,
    on_six_sets,
    question_states,
    random_folds,
    read_rows,
)
from paper_tables import UNTESTED, Claim, PaperTable, Part, auc_estimate, difference, gap_of
from retrieval import share_found
from served import open_index

from rgate_integrations import Decision, Draft, load_gate
from rgate_integrations.claims.plan import plan_queries
from rgate_integrations.index import HybridIndex
from rgate_integrations.index.hybrid import slimplm_search
from rgate_integrations.index.retriever import Hit
from rgate_integrations.runtime.text import contains_answer

PAPER = "SlimPLM"
TOKENS = 64
K = 5
"""Passages that count as found."""
ASKED = 500
"""Questions whose answers, or whose claims, gates judge."""
BUDGET = 10_000
"""Words of all passages together: more than K passages have."""
PROXIES = (
    ("Qwen2-7B-Instruct", "Llama-3-8B-Instruct"),
    ("Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct"),
    ("Qwen2.5-7B-Instruct", "Qwen2.5-32B-Instruct"),
    ("Llama-3-8B-Instruct", "Qwen2.5-32B-Instruct"),
    ("Qwen2.5-7B-Instruct", "ChatGPT"),
)
"""Proxy and LLM, of those that answered the same questions."""

# --- the judgment --------------------------------------------------------------------------------------------


def judgment_part(options: Options) -> Part:
    """Judge the published answers of Llama-2-7B-chat by its authors' labels (section 3.2)."""
    rows = mixed(read_rows(options.data / "judgment_llama2_7b.jsonl"), min(ASKED, options.limit or ASKED))
    known = np.array([row["known"] for row in rows])
    sets = np.array([row["dataset"] for row in rows])
    questions = [row["question"].strip() for row in rows]
    fold = random_folds(len(rows))
    pairs = [(q, row["closed_book_text"].strip()) for q, row in zip(questions, rows, strict=True)]
    answers = Answers(read_states(options.cache, pairs), known.astype(float), sets, questions)
    states = question_states(questions, options.cache)
    nearest = nearest_vote(embeddings(questions, options.cache), known, fold)
    reading = calibrated(held_out_begun(answers, fold, CUTS.index(TOKENS)), known, fold)
    judged = {
        "SKR-kNN": nearest,
        "probe on the question": calibrated(held_out_question(states, known, sets, fold), known, fold),
        "probe on question and answer": reading,
    }
    return judgment_table(judged, known, sets), judgment_claims(reading, nearest, known)


def judgment_table(judged: dict[str, np.ndarray], known: np.ndarray, sets: np.ndarray) -> PaperTable:
    """Return accuracy and AUC of judges."""
    share = max(known.mean(), 1 - known.mean())
    rows = [["the same for all", f"{share:.3f}", "0.500"]]
    for name, p in judged.items():
        right = difference((p >= 0.5) == known)
        rows.append([name, str(right), str(auc_estimate(p, known, sets))])
    caption = (
        f"{len(known)} published judgments of Llama-2-7B-chat's answers, {100 * known.mean():.0f} % "
        f"known. The first {TOKENS} tokens of the answer are read. All judges are held out in five folds."
    )
    return PaperTable("judgment", caption, ["judge", "accuracy [95 %]", "AUC, mean of the sets [95 %]"], rows)


def judgment_claims(reading: np.ndarray, nearest: np.ndarray, known: np.ndarray) -> list[Claim]:
    """Return the claims about the judgment."""
    share = max(known.mean(), 1 - known.mean())
    right, voted = (reading >= 0.5) == known, (nearest >= 0.5) == known
    learned = difference(right, share)
    better = difference(right, voted.astype(float))
    return [
        Claim(
            PAPER,
            "whether the LLM knows can be learned from question and heuristic answer",
            "no accuracy given",
            f"accuracy {learned.points} points above the same for all",
            learned.verdict(),
        ),
        Claim(
            PAPER,
            "a judge that reads the heuristic answer is better than the question alone (SKR-kNN)",
            "Llama2-70B, answers on NQ: 47.4 against 41.9 EM",
            f"accuracy of the judgment {better.points} points",
            better.verdict(),
        ),
    ]


# --- the gate ------------------------------------------------------------------------------------------------


def gated_part(six: SixSets) -> Part:
    """Answer without, always with, and with gated retrieval (tables 1 and 2, without rewriting)."""
    arms, n = six.arms, len(six.sets)
    judge = six.calibrated(six.answer(CUTS.index(TOKENS)))
    question = six.calibrated(six.question())
    neighbours = nearest_vote(six.vectors, arms.closed, six.fold)
    oracle = arms.rag & ~arms.closed
    ways = {
        "never (vanilla chat)": np.zeros(n, bool),
        "always (direct RAG)": np.ones(n, bool),
        "SKR-kNN": neighbours < 0.5,
        "gate on the question": question < 0.5,
        "gate on question and answer": judge < 0.5,
        "the same, best threshold": six.best(judge),
        "oracle": oracle,
    }
    rows = [arms.row(name, retrieve) for name, retrieve in ways.items()]
    caption = (
        f"Recorded answers of an 8B LLM to {n:,} questions of six sets, without and with one retrieval. "
        "Gates are probes on smollm2's states, held out by question cluster; they retrieve below 0.5. "
        "The answer that they read is the LLM's own beginning, as no larger proxy has answered these "
        "questions."
    )
    against_always = difference(arms.right(judge < 0.5), arms.rag)
    against_never = difference(arms.right(judge < 0.5), arms.closed)
    against_nearest = difference(arms.right(judge < 0.5), arms.right(neighbours < 0.5))
    claims = [
        Claim(
            PAPER,
            "gated retrieval answers better than none",
            "Llama2-70B, NQ: 47.4 against 40.5 EM",
            f"{against_never.points} points",
            against_never.verdict(),
        ),
        Claim(
            PAPER,
            "gated retrieval answers better than always retrieving",
            "without the judgment 43.0 instead of 47.4 EM on NQ",
            f"{against_always.points} points at {100 * (judge < 0.5).mean():.0f} % retrieval",
            against_always.verdict(),
        ),
        Claim(
            PAPER,
            "the judge on the answer beats SKR-kNN in the answers, too",
            "Qwen-72B, NQ: 44.1 against 43.1 EM",
            f"{against_nearest.points} points, at {100 * (judge < 0.5).mean():.0f} % and "
            f"{100 * (neighbours < 0.5).mean():.0f} % retrieval",
            against_nearest.verdict(),
        ),
    ]
    return PaperTable("gated", caption, ARMS, rows), claims


# --- the queries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a way to search found for each question.

    Attributes:
        queries: Number of queries.
        supporting: Share of the supporting passages among the first `K`.
        gold: Whether a gold answer is in them; NaN where it is yes or no.
    """

    queries: np.ndarray
    supporting: np.ndarray
    gold: np.ndarray


def queries_part(options: Options) -> Part:
    """Search for questions, and for claims of recorded answers (section 3.3)."""
    rows, texts = answered_questions(options)
    claims = claims_of(rows, texts)
    questions = [row["question"] for row in rows]
    ways = {
        "question": [[question] for question in questions],
        "claims": [[query for _, query in own] for own in claims],
        "claims and question": [
            [q, *(query for _, query in own)] for q, own in zip(questions, claims, strict=True)
        ],
    }
    index = corpus_of(options)
    found = {name: search_all(index, rows, queries) for name, queries in ways.items()}
    more = difference(found["claims"].supporting, found["question"].supporting)
    claim = Claim(
        PAPER,
        "claim queries find more than the question",
        "NQ, Hit@1: 62.3 against 59.8 without rewriting",
        f"supporting passages {more.points} points",
        more.verdict(),
    )
    return queries_table(found, len(index.dense)), [claim]


def filter_part(options: Options) -> Part:
    """Leave out the queries of claims that the shipped gate finds known (section 3.3)."""
    rows, texts = answered_questions(options)
    claims = claims_of(rows, texts)
    unknown = unknown_queries(rows, claims, options.out / "slimplm.claims.jsonl")
    ways = {
        "question": [[row["question"]] for row in rows],
        "claims": [[query for _, query in own] for own in claims],
        "unknown claims": unknown,
    }
    index = corpus_of(options)
    found = {name: search_all(index, rows, queries) for name, queries in ways.items()}
    table = queries_table(found, len(index.dense), "filter")
    return table, [filter_claim(found["unknown claims"], found["claims"], "the shipped gate")]


def answered_questions(options: Options) -> tuple[list[dict], list[str]]:
    """Return multi-hop questions with known passages, and the 8B LLM's recorded answer to each."""
    rows = mixed(read_rows(options.data / "hotpot_2wiki.train.jsonl"), min(ASKED, options.limit or ASKED))
    texts = {}
    for name in ("hotpotqa", "2wikimultihopqa"):
        for row in read_rows(options.data / f"adaptive_llama31_8b.{name}.dev.jsonl"):
            texts[row["id"]] = row["closed_book_text"]
    rows = [row for row in rows if row["supporting_ids"] and row["id"] in texts]
    return rows, [texts[row["id"]] for row in rows]


def corpus_of(options: Options) -> HybridIndex:
    """Return the index to search in."""
    if options.index is None:
        raise ValueError("--index is needed: the folder of an index of the corpus, made where there is none.")
    return open_index(options.index, options.data)


def claims_of(rows: list[dict], texts: list[str]) -> list[list[tuple[str, str]]]:
    """Return claim and query of each sentence of each answer; the question where there is none."""
    decisions = [
        Decision(
            question=row["question"], retrieve=True, p_known=0.0, draft=Draft(text=text, source="recorded")
        )
        for row, text in zip(rows, texts, strict=True)
    ]
    plans = plan_queries(decisions, always_include_question=False)
    return [[(query.claim or "", query.text) for query in plan.queries] for plan in plans]


def unknown_queries(rows: list[dict], claims: list[list[tuple[str, str]]], kept: Path) -> list[list[str]]:
    """Return the queries of unknown claims, or the question where all are known; judgments are kept."""
    flat = [(row["id"], *pair) for row, own in zip(rows, claims, strict=True) for pair in own]
    p = judgments(kept, [" ".join(each) for each in flat], partial(_claims_judged, flat))
    known = iter(p >= 0.5)
    unknown = [[query for _, query in own if not next(known)] for own in claims]
    return [own or [row["question"]] for row, own in zip(rows, unknown, strict=True)]


def filter_claim(kept: Found, every: Found, judge: str) -> Claim:
    """Return the claim about the filter."""
    filtered = difference(kept.supporting, every.supporting)
    return Claim(
        PAPER,
        "leaving out the queries of known claims finds more than all claims",
        "NQ, Hit@1: 62.3 against 61.3 without the filter",
        f"supporting passages {filtered.points} points with {kept.queries.mean():.1f} instead of "
        f"{every.queries.mean():.1f} queries, by {judge}; {len(kept.queries)} questions",
        filtered.verdict(),
    )


def _claims_judged(flat: list[tuple[str, str, str]], places: list[int]) -> list[float]:
    """Judge claims with the gate, query and claim in the places of question and answer."""
    gate = load_gate("default-answer", on_error="raise")
    some = [flat[place] for place in places]
    drafts = [Draft(text=claim, source="recorded") for _, claim, _ in some]
    return [d.p_known for d in gate.decide_batch([query for *_, query in some], drafts=drafts)]


def search_all(index: HybridIndex, rows: list[dict], queries: list[list[str]]) -> Found:
    """Search as SlimPLM does: BM25 a query, reranked against the question, round-robin."""
    hits = []
    for row, own in zip(rows, queries, strict=True):
        hits.append(slimplm_search(index, row["question"], own, token_budget=BUDGET)[:K])
    return Found(
        np.array([len(own) for own in queries], float),
        np.array([share_found(row, own) for row, own in zip(rows, hits, strict=True)]),
        np.array([gold_found(row["gold_answers"], own) for row, own in zip(rows, hits, strict=True)]),
    )


def gold_found(gold: Sequence[str], hits: Sequence[Hit]) -> float:
    """Return whether a gold answer is in one of the passages; NaN for yes and no."""
    if {answer.strip().lower() for answer in gold} & {"yes", "no"}:
        return float("nan")
    return float(any(contains_answer(hit.passage.searchable, answer) for hit in hits for answer in gold))


def queries_table(found: dict[str, Found], passages: int, name: str = "queries") -> PaperTable:
    """Return what each way found, and by how much more than the question."""
    first = found["question"]
    told = ~np.isnan(first.gold)
    rows = []
    for way, each in found.items():
        more_passages = difference(each.supporting, first.supporting).points
        more_gold = difference(each.gold[told], first.gold[told]).points
        rows.append(
            [
                way,
                f"{each.queries.mean():.1f}",
                f"{100 * each.supporting.mean():.1f}",
                "" if way == "question" else more_passages,
                f"{100 * each.gold[told].mean():.1f}",
                "" if way == "question" else more_gold,
            ]
        )
    caption = (
        f"{len(first.gold):,} multi-hop questions (HotpotQA, 2WikiMultihopQA) among {passages:,} "
        f"passages; the first {K} passages of the paper's search: BM25 for each query, reranked against "
        "the question, in turns. The claims are those of the 8B LLM's answer, sentence by sentence. Gold "
        f"answers are counted for {int(told.sum()):,} questions whose answer is not yes or no."
    )
    columns = [
        "queries",
        "queries a question",
        f"supporting passages in {K}, %",
        "points against the question [95 %]",
        f"gold answer in {K}, %",
        "points against the question [95 %]",
    ]
    return PaperTable(name, caption, columns, rows)


def annotated_part(options: Options) -> Part:
    """Search for the claims that GPT-4 wrote, and for those that it says need a search."""
    rows = [row for row in read_rows(options.data / "claims_gpt4.jsonl") if row.get("supporting_ids")]
    rows = rows[: options.limit]
    index = corpus_of(options)
    parts: dict[str, Callable[[dict], list[str]]] = {
        "question": lambda row: [row["question"]],
        "sub-questions": lambda row: [_query(each, "question") for each in row["sub_questions"]],
        "claims": lambda row: [_query(each, "claim") for each in row["claims"]],
        "claims to search for": lambda row: [_query(e, "claim") for e in row["claims"] if e["needs_search"]],
    }
    found = {}
    for name, queries_of in parts.items():
        found[name] = search_all(index, rows, [queries_of(row) or [row["question"]] for row in rows])
    table = queries_table(found, len(index.dense), "annotated")
    caption = (
        "The same with the claims and queries that GPT-4 wrote for Llama-2-13B-chat's answers: all "
        f"{len(rows)} questions of MuSiQue and 2WikiMultihopQA that have both annotations and supporting "
        "passages."
    )
    more = difference(found["claims"].supporting, found["question"].supporting)
    claim = Claim(
        PAPER,
        "the same with GPT-4's claims and queries",
        "(these trained the paper's rewriter)",
        f"supporting passages {more.points} points, {len(rows)} questions",
        more.verdict(),
    )
    filtered = filter_claim(found["claims to search for"], found["claims"], "GPT-4's judgment")
    return PaperTable(table.name, caption, table.columns, table.rows), [claim, filtered]


def _query(annotated: dict, name: str) -> str:
    return annotated["query"] or annotated[name]


# --- what proxy and LLM have in common -----------------------------------------------------------------------


def consensus_part(options: Options) -> Part:
    """Count how often the LLM is right where a smaller model is (section 4.6)."""
    rows = read_rows(options.data / "songs_six_llms.dev.jsonl.gz")[: options.limit]
    right = {
        llm: np.array([row["answers"][llm]["correct"] for row in rows])
        for llm in dict.fromkeys(name for pair in PROXIES for name in pair)
    }
    return consensus([(small, large, right[small], right[large]) for small, large in PROXIES])


def consensus(pairs: Sequence[tuple[str, str, np.ndarray, np.ndarray]]) -> Part:
    """Return how often an LLM is right where its proxy is right, and where it is wrong.

    Args:
        pairs: Name of proxy and LLM, and whether each is right.
    """
    rows, gaps, shares = [], [], []
    for small, large, proxy_right, llm_right in pairs:
        where_right, where_wrong = llm_right[proxy_right], llm_right[~proxy_right]
        shares.append(where_right.mean())
        gaps.append(gap_of(llm_right, proxy_right))
        rows.append(
            [
                small,
                large,
                f"{100 * proxy_right.mean():.1f}",
                f"{100 * llm_right.mean():.1f}",
                f"{100 * shares[-1]:.1f}",
                f"{100 * where_wrong.mean():.1f}",
            ]
        )
    columns = [
        "proxy",
        "LLM",
        "proxy right, %",
        "LLM right, %",
        "LLM right where the proxy is, %",
        "where it is not, %",
    ]
    gap = min(gaps, key=lambda each: each.low)
    caption = f"Recorded answers of LLMs to the same {len(pairs[0][2]):,} questions about songs."
    claim = Claim(
        PAPER,
        "what the proxy knows, the LLM knows",
        "82 % of the questions of ASQA that the 7B model answers well, the 70B model does, too",
        f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of {len(pairs)} pairs; in the weakest "
        f"{gap.points} points more than where the proxy is wrong",
        gap.verdict(),
    )
    return PaperTable("consensus", caption, columns, rows), [claim]


PARTS: dict[str, Callable[[Options], Part]] = {
    "gated": on_six_sets(gated_part),
    "consensus": consensus_part,
    "judgment": judgment_part,
    "annotated": annotated_part,
    "queries": queries_part,
    "filter": filter_part,
}

UNTESTABLE = [
    Claim(
        PAPER,
        "claim queries and the filter make the LLM's answers better",
        "NQ, Hit@1: 62.3; without rewriting 59.8, without filter 61.3",
        "no recorded answers from claims' passages; see the end-to-end benchmark for small LLMs",
        UNTESTED,
    ),
]
