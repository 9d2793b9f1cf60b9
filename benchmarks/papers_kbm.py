"""KBM: a knowledge boundary model, from sampled answers; see `papers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from begun import CUTS
from paper_data import (
    ARMS,
    Arms,
    Options,
    SixSets,
    held_out_question,
    judgments,
    mixed,
    on_six_sets,
    question_probe,
    question_states,
    random_folds,
    read_rows,
    read_six_sets,
)
from paper_tables import (
    UNTESTED,
    Claim,
    PaperTable,
    Part,
    difference,
    estimated,
    gap_of,
    mean_auc,
    share,
)
from papers_kbm_labels import PAPER, TAU, labels_part, soft_part

from rgate_integrations import load_gate

EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
RATE = 0.675
"""Share of questions for which the paper's gate retrieves, taught by accuracy labels."""
ASKED = 500
"""Questions of each kind that the shipped gate is asked about."""

# --- what retrieval does -------------------------------------------------------------------------------------


def effects_part(six: SixSets) -> Part:
    """Count beneficial, neutral and harmful retrieval by P(known) (section 2.2, figure 2)."""
    return effects(six.calibrated(six.answer(CUTS.index(32))), six.arms)


def effects(p: np.ndarray, arms: Arms) -> Part:
    """Return what retrieval does, by P(known), always and with the gate."""
    helps, hurts = arms.rag & ~arms.closed, arms.closed & ~arms.rag
    retrieve = p < 0.5
    rows = []
    places = [("all", np.ones(len(p), bool))]
    for low, high in pairwise(EDGES):
        places.append((f"{low:.1f} to {high:.1f}", (p >= low) & ((p < high) | (high == 1))))
    for name, inside in places:
        if inside.any():
            rows.append(
                [
                    name,
                    f"{int(inside.sum()):,}",
                    f"{100 * helps[inside].mean():.1f}",
                    f"{100 * (~helps & ~hurts)[inside].mean():.1f}",
                    f"{100 * hurts[inside].mean():.1f}",
                    f"{100 * (helps & retrieve)[inside].mean():.1f}",
                    f"{100 * (hurts & retrieve)[inside].mean():.1f}",
                ]
            )
    columns = [
        "P(known)",
        "questions",
        "beneficial, %",
        "neutral, %",
        "harmful, %",
        "beneficial with the gate, %",
        "harmful with the gate, %",
    ]
    caption = (
        "What retrieval does to the 8B LLM's answers, by P(known) of a held-out probe on its first 32 "
        "tokens; always, and when the gate retrieves below 0.5. One answer without and one with "
        "retrieval is recorded, so an answer turns from wrong to right (beneficial) or from right to "
        "wrong (harmful)."
    )
    harm = difference(hurts, (hurts & retrieve).astype(float))
    benefit = difference((helps & retrieve).astype(float), helps)
    where = gap_of(hurts, p >= 0.5)
    return PaperTable("effects", caption, columns, rows), [
        Claim(
            PAPER,
            "harmful retrieval gathers where the LLM is sure",
            "figure only: most in the interval 0.8 to 1",
            f"{where.points} points more harm where P(known) ≥ 0.5",
            where.verdict(),
        ),
        Claim(
            PAPER,
            "the gate spares harmful retrieval",
            "figure only",
            f"{harm.points} points of all questions",
            harm.verdict(),
        ),
        Claim(
            PAPER,
            "the gate adds beneficial questions",
            "figure only",
            f"{benefit.points} points of all questions",
            benefit.verdict(),
        ),
    ]


def gated_part(six: SixSets) -> Part:
    """Answer by the gate on the question alone, beside random decisions (table 1)."""
    p, arms, n = six.calibrated(six.question()), six.arms, len(six.sets)
    half, sure, best = p < 0.5, p < TAU, six.best(p)
    spares = p <= np.quantile(p, RATE)
    rows = [
        arms.row("LLM only", np.zeros(n, bool)),
        arms.row("RAG for all", np.ones(n, bool)),
        arms.row("gate, retrieves below 0.5", half),
        arms.row(f"gate, retrieves below {TAU}", sure),
        arms.row("gate, best threshold", best),
        arms.row(f"gate, at the paper's {100 * RATE:.1f} %", spares),
    ]
    caption = (
        f"Recorded answers of an 8B LLM to {n:,} questions of six sets; the gate is a probe on the "
        "question alone, held out by question cluster, as KBM reads the question alone. The best "
        f"threshold is chosen on the other folds. The paper's τ = {TAU} is a threshold on labels; as a "
        "threshold on P(known) it retrieves for nearly all here."
    )
    against_random = difference(arms.right(half), arms.at_random(float(half.mean())))
    against_always = difference(arms.right(best), arms.rag)
    spared = difference(arms.right(spares), arms.rag)
    return PaperTable("gated", caption, ARMS, rows), [
        Claim(
            PAPER,
            "the gate beats random decisions at the same rate",
            "78.8 against 74.7 (accuracy labels, mean of 11 sets)",
            f"{against_random.points} points at {100 * half.mean():.0f} % retrieval",
            against_random.verdict(),
        ),
        Claim(
            PAPER,
            "sparing a third of the retrieval costs no more than half a point",
            "−0.4 points at 67.5 % retrieval",
            f"{spared.points} points at {100 * spares.mean():.1f} % retrieval",
            spared.verdict(-0.005),
        ),
        Claim(
            PAPER,
            "the best gate is a little more right than retrieving for all",
            "+0.1 points at 86.6 % retrieval (certainty labels)",
            f"{against_always.points} points at {100 * best.mean():.0f} % retrieval",
            against_always.verdict(),
        ),
    ]


# --- other LLMs ----------------------------------------------------------------------------------------------


def plug_in_part(options: Options) -> Part:
    """Judge each LLM by a gate that was taught by another one's answers (table 4)."""
    rows = read_rows(options.data / "more" / "evouna_nq_triviaqa.jsonl.gz")
    by_llm: dict[str, dict[str, bool]] = {}
    sets: dict[str, str] = {}
    for row in rows:
        question = row["question"].strip()
        by_llm.setdefault(row["llm"], {})[question] = bool(row["closed_book_correct"])
        sets[question] = row["dataset"]
    shared = sorted(set.intersection(*(set(own) for own in by_llm.values())))
    keep = np.random.default_rng(0).permutation(len(shared))[: options.limit or len(shared)]
    questions = [shared[place] for place in sorted(keep)]
    states = question_states(questions, options.cache)
    known = {llm: np.array([own[q] for q in questions]) for llm, own in by_llm.items()}
    six = read_six_sets(options)
    whole = question_probe(six.states, six.arms.closed, six.sets)
    foreign = {"Llama-3.1-8B (the six sets)": whole(states[:, None])[:, 0]}
    return plug_in(states, known, np.array([sets[q] for q in questions]), foreign)


def plug_in(
    states: np.ndarray, known: dict[str, np.ndarray], sets: np.ndarray, foreign: dict[str, np.ndarray]
) -> Part:
    """Return the AUC of each LLM's gate for each LLM.

    Args:
        states: smollm2's states of the questions.
        known: Whether each LLM is right.
        sets: Data set of each question.
        foreign: Logits of gates that were trained on other questions.
    """
    fold = random_folds(len(sets))
    scores = {llm: held_out_question(states, labels, sets, fold) for llm, labels in known.items()}
    rows = []
    for name, logits in (scores | foreign).items():
        rows.append([name, *(f"{mean_auc(logits, labels, sets):.3f}" for labels in known.values())])
    pairs = [(a, b) for a in known for b in known if a != b]

    def loss(drawn: np.ndarray) -> float:
        gaps = []
        for taught, judged in pairs:
            labels = known[judged][drawn]
            own = mean_auc(scores[judged][drawn], labels, sets[drawn])
            gaps.append(own - mean_auc(scores[taught][drawn], labels, sets[drawn]))
        return float(np.mean(gaps))

    lost = estimated(loss, sets)
    others = np.mean([mean_auc(scores[a], known[b], sets) for a, b in pairs])
    level = estimated(
        lambda d: float(np.mean([mean_auc(scores[a][d], known[b][d], sets[d]) for a, b in pairs])), sets
    )
    caption = (
        "Gates on the question alone, taught by one LLM (row), judged by what people say of another "
        f"LLM's answers (column); {len(sets):,} questions of NQ and TriviaQA, held out; AUC, mean of the "
        "two sets. The last row was trained on other questions as well."
    )
    return PaperTable("plug-in", caption, ["taught by", *known], rows), [
        Claim(
            PAPER,
            "the gate of one LLM serves another",
            "GPT-4o, NQ: 60.6, random 60.4; Llama3-70B 59.6, random 58.6",
            f"AUC {others:.3f} [{level.low:.3f}, {level.high:.3f}] for other LLMs, mean of {len(pairs)} pairs",
            level.verdict(0.5),
        ),
        Claim(
            PAPER,
            "a gate of the LLM's own labels is better",
            "(each LLM has a boundary of its own)",
            f"AUC {lost.change}",
            lost.verdict(),
        ),
    ]


def other_llm_part(options: Options) -> Part:
    """Let the 8B LLM's gate decide for ChatGPT, whose answers in both arms are recorded."""
    rows = read_rows(options.data / "more" / "when_to_retrieve_nq.jsonl.gz")
    rows = [row for row in rows if row["overlap"] is None][: options.limit]
    states = question_states([row["question"].strip() for row in rows], options.cache)
    arms = Arms(
        np.array([row["closed_book_correct"] for row in rows]),
        np.array([row["rag_correct"] for row in rows]),
    )
    six = read_six_sets(options)
    whole = question_probe(six.states, six.arms.closed, six.sets)
    logits = whole(states[:, None])[:, 0]
    gave_up = np.array([bool(row["giveup"]) for row in rows])
    return other_llm(logits, arms, gave_up)


def other_llm(logits: np.ndarray, arms: Arms, gave_up: np.ndarray) -> Part:
    """Return what a foreign gate brings at three rates, beside the LLM that is asked whether it is sure."""
    n = len(logits)
    rows = [arms.row("LLM only", np.zeros(n, bool)), arms.row("RAG for all", np.ones(n, bool))]
    rows.append(arms.row("retrieves where the LLM says it is unsure", gave_up))
    asked = float(gave_up.mean())
    for rate in (asked, 0.5, 0.75):
        retrieve = logits <= np.quantile(logits, rate)
        rows.append(arms.row(f"gate of the 8B LLM, at {100 * rate:.0f} %", retrieve))
    half = logits <= np.quantile(logits, 0.5)
    gain = difference(arms.right(half), arms.at_random(float(half.mean())))
    caption = (
        f"ChatGPT on {n} questions of NQ, recorded without and with retrieval: the gate that the 8B LLM's "
        "answers taught decides for it, at rates that are set."
    )
    claim = Claim(
        PAPER,
        "as a plug-in, the gate beats random decisions",
        "Qwen2-72B, NQ: 58.5 against 56.5 at 86 % retrieval",
        f"{gain.points} points at 50 % retrieval",
        gain.verdict(),
    )
    return PaperTable("other-llm", caption, ARMS, rows), [claim]


# --- kinds of questions --------------------------------------------------------------------------------------


def kinds_part(options: Options) -> Part:
    """Count how often the shipped default gate retrieves, by kind of question (table 2)."""
    limit = min(ASKED, options.limit or ASKED)
    fresh = {
        row["question"]: row for row in read_rows(options.data / "more" / "realtimeqa.jsonl.gz")
    }.values()
    kinds = {
        "news of a week (RealTimeQA)": mixed(list(fresh), limit),
        "trivia (OpenTriviaQA)": mixed(read_rows(options.data / "open_trivia.questions.jsonl.gz"), limit),
    }
    p = {}
    for name, rows in kinds.items():
        path = options.out / f"kbm.kinds.{name.split()[0]}.jsonl"
        p[name] = judgments(path, [str(row["id"]) for row in rows], partial(_default, rows))
    return kinds_table(p, load_gate().threshold)


def _default(rows: list[dict], places: list[int]) -> list[float]:
    decisions = load_gate(on_error="raise").decide_batch([rows[place]["question"] for place in places])
    return [decision.p_known for decision in decisions]


def kinds_table(p: dict[str, np.ndarray], threshold: float) -> Part:
    """Return how often a gate retrieves, by kind; the first kind changes with time, the second does not."""
    rows = []
    for name, values in p.items():
        rows.append([name, str(len(values)), share(values < threshold).per_cent])
    first, second = (values < threshold for values in list(p.values())[:2])
    gap = gap_of(np.concatenate([first, second]), np.arange(first.size + second.size) < first.size)
    claim = Claim(
        PAPER,
        "the gate retrieves more for what changes with time",
        "94.6 % (fast), 92.3 % (slow), 75.9 % (never changing)",
        f"{gap.points} points more than for trivia",
        gap.verdict(),
    )
    caption = "How often the shipped default gate retrieves; it was trained on neither source."
    return PaperTable("kinds", caption, ["questions", "number", "retrieved [95 %]"], rows), [claim]


PARTS: dict[str, Callable[[Options], Part]] = {
    "gated": on_six_sets(gated_part),
    "effects": on_six_sets(effects_part),
    "labels": labels_part,
    "plug-in": plug_in_part,
    "other-llm": other_llm_part,
    "kinds": kinds_part,
    "soft": soft_part,
}

UNTESTABLE = [
    Claim(
        PAPER,
        "fine-tuning a 7B model on the LLM's own labels judges knowledge better than a prompt",
        "NQ, EM 61.3 at 97.5 % against 59.9 at 86 % retrieval",
        "no 7B model here; see the gates without training for a prompt on smollm2",
        UNTESTED,
    ),
]
